"""The fold of what connectors report: equal to vLLM's for well-formed reports, right where vLLM's is not."""

from collections import Counter
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass, field, fields
from itertools import permutations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("vllm")

from vllm.distributed.ec_transfer.ec_connector.utils import ECOutputAggregator
from vllm.distributed.kv_events import KVConnectorKVEvents
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.v1.outputs import ECConnectorOutput, KVConnectorOutput, ModelRunnerOutput

from async_pp.engine.vllm_seam.connectors import ConnectorFold


@dataclass
class Some:
    """Requests as a test wants them: `s…` send, `r…` receive."""

    gone: set[str] = field(default_factory=set)
    running: set[str] = field(default_factory=set)
    receives: set[str] | None = None  # None: all that are called so
    holds: dict[str, set[int]] = field(default_factory=dict)

    def known(self, request_id: str) -> bool:
        return request_id not in self.gone

    def ended(self, request_id: str) -> bool:
        return self.known(request_id) and request_id not in self.running

    def receiving(self) -> Iterable[str]:
        return {f"r{n}" for n in range(9)} - self.gone if self.receives is None else self.receives

    def blocks(self, request_id: str) -> set[int]:
        return self.holds.get(request_id, set())


class Stats(KVConnectorStats):
    """Counts that add up."""

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        return Stats(dict(Counter(self.data) + Counter(other.data)))

    def is_empty(self) -> bool:
        return not self.data


@dataclass
class Meta(KVConnectorWorkerMetadata):
    """A number for each worker that adds up."""

    number: int

    def aggregate(self, other: Any) -> "Meta":
        return Meta(self.number + other.number)


class Events(KVConnectorKVEvents):
    """Events of some workers."""

    def __init__(self, events: list[Any]) -> None:
        self.events, self.workers = list(events), 1

    def add_events(self, events: Any) -> None:
        self.events += events

    def aggregate(self) -> "Events":
        return self

    def increment_workers(self, count: int = 1) -> None:
        self.workers += count

    def get_all_events(self) -> Any:
        return self.events

    def get_number_of_workers(self) -> int:
        return self.workers

    def clear_events(self) -> None:
        self.events = []


def report(**told: Any) -> KVConnectorOutput:
    return KVConnectorOutput(**told)


def fold_of(ranks: int, requests: Some | None = None, expected: int | None = None) -> ConnectorFold:
    return ConnectorFold(ranks, expected or ranks, requests or Some())


def values(output: KVConnectorOutput) -> dict[str, Any]:
    """What can be compared of an output, whatever the order of ranks."""
    found: dict[str, Any] = {}
    for each in fields(output):
        value = getattr(output, each.name)
        if isinstance(value, Events):
            value = sorted(value.events), value.workers
        elif isinstance(value, Stats):
            value = value.data
        found[each.name] = value or None
    return found


def vllms(aggregator: KVOutputAggregator, step: list[KVConnectorOutput | None]) -> dict[str, Any]:
    outputs = [ModelRunnerOutput([], {}, kv_connector_output=deepcopy(kv)) for kv in step]
    folded = aggregator.aggregate(outputs, output_rank=len(step) - 1)
    assert folded is not None
    return values(folded.kv_connector_output)


def ours(fold: ConnectorFold, step: list[KVConnectorOutput | None], order: Iterable[int]) -> dict[str, Any]:
    for rank in order:
        fold.add(rank, deepcopy(step[rank]), None)
    return values(fold.take()[0])


@pytest.mark.parametrize("ranks", range(1, 6))
def test_equal_to_vllms_fold_in_every_order_of_arrival(ranks: int) -> None:
    step: list[KVConnectorOutput | None] = [
        report(
            finished_sending={"s0", f"s{rank + 1}"},
            finished_recving={"r0"},
            failed_recving={"r0"} if rank == 1 else set(),
            invalid_block_ids={rank, 7},
            kv_connector_stats=Stats({"bytes": rank + 1}),
            kv_connector_worker_meta=Meta(rank),
            kv_cache_events=Events([rank]),
        )
        for rank in range(ranks)
    ]
    theirs = vllms(KVOutputAggregator(ranks), step)
    for order in permutations(range(ranks)):
        assert ours(fold_of(ranks), step, order) == theirs


@st.composite
def stories(draw: st.DrawFn) -> tuple[int, list[list[KVConnectorOutput | None]], list[list[int]]]:
    """Ranks, what each reports in each step, and the orders of arrival. Each rank reports each transfer once."""
    ranks, steps = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    moments = st.lists(st.integers(0, steps - 1), min_size=ranks, max_size=ranks)
    sends = draw(st.lists(moments, max_size=3))
    receives = draw(st.lists(moments, max_size=3))
    fails = draw(st.lists(st.lists(st.booleans(), min_size=ranks, max_size=ranks), min_size=3, max_size=3))
    story: list[list[KVConnectorOutput | None]] = []
    for step in range(steps):
        row: list[KVConnectorOutput | None] = []
        for rank in range(ranks):
            received = {f"r{n}" for n, at in enumerate(receives) if at[rank] == step}
            row.append(
                report(
                    finished_sending={f"s{n}" for n, at in enumerate(sends) if at[rank] == step} or None,
                    finished_recving=received or None,
                    failed_recving={name for name in received if fails[int(name[1:])][rank]},
                    invalid_block_ids=draw(st.sets(st.integers(1, 9), max_size=2)),
                    kv_connector_stats=draw(st.sampled_from([None, Stats({"loads": 1}), Stats({"bytes": 3})])),
                    kv_connector_worker_meta=draw(st.sampled_from([None, Meta(2)])),
                    kv_cache_events=draw(st.sampled_from([None, Events([rank])])),
                    expected_finished_count=draw(st.sampled_from([0, 0, 0, ranks])),
                )
                if draw(st.integers(0, 3)) or received or any(at[rank] == step for at in sends)
                else None
            )
        story.append(row)
    return ranks, story, [draw(st.permutations(range(ranks))) for _ in range(steps)]


@settings(max_examples=100, deadline=None)
@given(stories())
def test_equal_to_vllms_fold_over_any_steps(case: tuple[int, list[list[KVConnectorOutput | None]], list[Any]]) -> None:
    ranks, story, orders = case
    aggregator, fold = KVOutputAggregator(ranks), fold_of(ranks)
    for step, order in zip(story, orders, strict=True):
        assert ours(fold, step, order) == vllms(aggregator, step)
    assert not fold.dropped and not fold.repeated and not fold.unfolded
    assert fold.open == () and not aggregator._send_remaining_count and not aggregator._recv_remaining_count


def test_fewer_ranks_may_be_expected_and_a_connector_may_change_that() -> None:
    aggregator, fold = KVOutputAggregator(1), fold_of(3, expected=1)
    for step in (
        [report(finished_sending={"s0"}), None, None],
        [report(finished_sending={"s1"}), report(expected_finished_count=2), report(finished_sending={"s2"})],
        [None, report(finished_sending={"s2"}), None],
    ):
        assert ours(fold, step, range(3)) == vllms(aggregator, step)
    with pytest.raises(ValueError, match="4 ranks are to report each transfer, and there are 3"):
        fold.add(0, report(expected_finished_count=4), None)


def test_a_report_that_comes_with_a_later_step_counts() -> None:
    fold = fold_of(2)
    fold.add(1, report(finished_sending={"s0"}), None)
    assert fold.take()[0].finished_sending is None and fold.open == ("s0",)
    fold.add(0, report(finished_sending={"s0"}, kv_connector_stats=Stats({"late": 1})), None)
    kv, _ = fold.take()
    assert kv.finished_sending == {"s0"} and kv.kv_connector_stats.data == {"late": 1}
    assert fold.take()[0].is_empty() and fold.open == ()


def test_a_rank_that_reports_twice_counts_once_where_vllm_ends_the_transfer() -> None:
    twice = [report(finished_sending={"s0"}), report()]
    aggregator, fold = KVOutputAggregator(2), fold_of(2)
    assert vllms(aggregator, twice)["finished_sending"] is None
    assert vllms(aggregator, twice)["finished_sending"] == {"s0"}, "without a word of rank 1"
    assert ours(fold, twice, range(2))["finished_sending"] is None
    assert ours(fold, twice, range(2))["finished_sending"] is None and fold.repeated == 1
    second = [report(), report(finished_sending={"s0"})]
    assert vllms(aggregator, second)["finished_sending"] is None and aggregator._send_remaining_count, "left for ever"
    assert ours(fold, second, range(2))["finished_sending"] == {"s0"} and fold.open == ()


def test_a_rank_without_an_output_loses_nothing_of_the_others_where_vllm_drops_or_fails() -> None:
    said = ModelRunnerOutput([], {}, kv_connector_output=report(finished_sending={"s0"}))
    assert KVOutputAggregator(1).aggregate([said, None], output_rank=1) is None
    with pytest.raises(AssertionError):
        KVOutputAggregator(1).aggregate([said, None], output_rank=0)
    fold = fold_of(2, expected=1)
    fold.add(0, report(finished_sending={"s0"}), None)
    fold.add(1, None, None)
    assert fold.take()[0].finished_sending == {"s0"}


def test_reports_about_requests_that_are_gone_are_counted_dropped_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fold = fold_of(1, Some(gone={"s0", "r0"}))
    fold.add(0, report(finished_sending={"s0"}, finished_recving={"r0", "s1"}, failed_recving={"r0"}), None)
    assert fold.take()[0].is_empty() and fold.open == ()
    assert fold.dropped == {
        "sending, of an unknown request": 1,
        "receiving, of a request that does not receive": 2,
        "failure, of a request that does not receive": 1,
    }
    assert len(caplog.records) == 3


def test_what_some_ranks_said_of_a_request_that_then_went_is_forgotten() -> None:
    requests = Some()
    fold = fold_of(2, requests)
    fold.add(0, report(finished_sending={"s0"}, finished_recving={"r0"}, failed_recving={"r0"}), None)
    requests.gone |= {"s0", "r0"}
    assert fold.take()[0].is_empty() and fold.open == ()
    requests.gone.clear()
    fold.add(1, report(finished_sending={"s0"}, finished_recving={"r0"}), None)
    assert fold.take()[0].is_empty(), "a request of the same name begins anew"


def test_a_send_is_told_when_its_request_has_ended_and_no_longer_receives() -> None:
    requests = Some(running={"a"}, receives={"b"})
    fold = fold_of(1, requests)
    fold.add(0, report(finished_sending={"a", "b"}), None)
    assert fold.take()[0].finished_sending is None
    requests.running.clear()
    assert fold.take()[0].finished_sending == {"a"}
    fold.add(0, report(finished_recving={"b"}), None)
    kv, _ = fold.take()
    assert kv.finished_recving == {"b"} and kv.finished_sending is None, "one end frees the blocks"
    assert fold.open == (), "and the other is forgotten with it"


def test_sends_of_a_request_that_the_end_of_its_load_frees_are_forgotten_with_it() -> None:
    fold = fold_of(2, Some(receives={"r0"}))
    fold.add(0, report(finished_sending={"r0"}, finished_recving={"r0"}), None)
    fold.add(1, report(finished_recving={"r0"}), None)
    kv, _ = fold.take()
    assert kv.finished_recving == {"r0"} and kv.finished_sending is None
    assert fold.open == (), "another request of that name would begin with a report that is not its own"


def test_blocks_that_one_rank_failed_to_load_are_told_when_every_rank_has_ended() -> None:
    fold = fold_of(2, Some(receives={"r0", "r1"}, holds={"r0": {1, 2}, "r1": {3}}))
    fold.add(0, report(finished_recving={"r0"}, invalid_block_ids={2, 5}), None)
    kv, _ = fold.take()
    assert kv.invalid_block_ids == {5}, "of a load within the step"
    fold.add(1, report(finished_recving={"r0"}, invalid_block_ids={3}), None)
    kv, _ = fold.take()
    assert kv.invalid_block_ids == {2} and kv.finished_recving == {"r0"}


@dataclass
class Newer(KVConnectorOutput):
    """What a newer vLLM may report."""

    names: set[str] = field(default_factory=set)
    more: Any = None


def test_fields_of_a_newer_vllm_are_folded_or_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("async_pp.engine.vllm_seam.connectors.KVConnectorOutput", Newer)
    fold = fold_of(3)
    fold.add(0, Newer(names={"a"}, more=Meta(1)), None)
    fold.add(1, Newer(), None)
    fold.add(2, Newer(names={"b"}, more=Meta(2)), None)
    kv: Any = fold.take()[0]
    assert (kv.names, kv.more) == ({"a", "b"}, Meta(3)) and not fold.unfolded
    fold.add(0, Newer(more="left"), None)
    fold.add(1, Newer(more="right"), None)
    last: Any = fold.take()[0]
    assert last.more == "right" and fold.unfolded == {"more": 1} and "a field more that" in caplog.text


def test_encoder_cache_output_of_any_rank_is_folded_as_vllm_does() -> None:
    step = [
        ECConnectorOutput(finished_sending={"x"}, ec_connector_worker_meta=Meta(1)),
        ECConnectorOutput(),
        ECConnectorOutput(finished_sending={"y"}, finished_recving={"z"}, ec_connector_worker_meta=Meta(4)),
    ]
    theirs = ECOutputAggregator().aggregate(
        [ModelRunnerOutput([], {}, ec_connector_output=deepcopy(ec)) for ec in step], output_rank=2
    )
    assert theirs is not None
    for order in permutations(range(3)):
        fold = fold_of(3)
        for rank in order:
            fold.add(rank, None, deepcopy(step[rank]))
        assert fold.take()[1] == theirs.ec_connector_output
        assert fold.take()[1] is None
