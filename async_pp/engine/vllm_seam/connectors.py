"""What the ranks' KV and encoder-cache connectors report, folded into what vLLM's scheduler is told.

vLLM folds by `KVOutputAggregator`, one step at a time, with an answer of every rank in hand. Here each report is folded
when it comes, whichever step it came with, in the order in which its rank speaks, and the next settle takes what has
become complete. For well-formed reports that is the same; for others this fold differs where vLLM's would leak blocks,
free them too early, or end the engine:

- A rank that reports a transfer twice counts once.
- A report about a request that is gone, or that waits for nothing, is counted and dropped.
- Blocks that a rank failed to load, of a request whose KV is still on its way to other ranks, are told with the end of
  that transfer: before it the blocks, once reused, would be written by those ranks.
"""

import logging
from collections import Counter
from collections.abc import Container, Iterable
from dataclasses import MISSING, fields
from typing import Any, Protocol

from vllm.v1.outputs import ECConnectorOutput, KVConnectorOutput
from vllm.v1.request import RequestStatus

from async_pp.core.transfers import Transfers

_log = logging.getLogger(__name__)

APART = frozenset(
    {"finished_sending", "finished_recving", "failed_recving", "invalid_block_ids", "expected_finished_count"}
)
"""Fields of KV-connector output with rules of their own. The others, also those that a newer vLLM adds, are folded by
what their values offer: see `_fold`."""


class Requests(Protocol):
    """What the fold must know of requests."""

    def known(self, request_id: str) -> bool:
        """Whether the scheduler knows it: it is open, or holds blocks until a transfer ends."""

    def ended(self, request_id: str) -> bool:
        """Whether it has ended, and holds blocks until a transfer ends."""

    def receiving(self) -> Iterable[str]:
        """Requests whose KV is on its way, also ones that were aborted meanwhile."""

    def blocks(self, request_id: str) -> set[int]:
        """KV blocks that it holds."""


def receives(scheduler: Any, request: Any) -> bool:
    """Whether a request waits for its KV, which is on its way from elsewhere.

    Args:
        scheduler: vLLM's scheduler.
        request: one of its requests.
    """
    waits: bool = request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
    return waits and request.request_id not in scheduler.finished_recving_kv_req_ids


class SchedulerRequests:
    """`Requests` of vLLM's scheduler. It forgets what an aborted request waited for, so that is noted here.

    Args:
        scheduler: vLLM's scheduler.
    """

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._receiving: set[str] = set()

    def note(self) -> None:
        """After each `schedule()`: note whose KV is on its way."""
        waiting = self._scheduler.kv_holding_waiting
        self._receiving.update(request.request_id for request in waiting if receives(self._scheduler, request))

    def received(self, request_ids: set[str]) -> None:
        """The KV of these requests is there, on every rank."""
        self._receiving -= request_ids
        self._receiving &= self._scheduler.requests.keys()

    def known(self, request_id: str) -> bool:
        """See `Requests`."""
        return request_id in self._scheduler.requests

    def ended(self, request_id: str) -> bool:
        """See `Requests`."""
        request = self._scheduler.requests.get(request_id)
        return request is not None and bool(request.is_finished())

    def receiving(self) -> Iterable[str]:
        """See `Requests`."""
        return self._receiving

    def blocks(self, request_id: str) -> set[int]:
        """See `Requests`."""
        return {block for group in self._scheduler.kv_cache_manager.get_block_ids(request_id) for block in group}


class ConnectorFold:
    """The fold of one rank set. Lives as long as that.

    Args:
        ranks: number of ranks.
        expected: how many of them report each transfer.
        requests: looked at for each report and each `take`.

    Attributes:
        dropped: reports that changed nothing, by reason; the first of each is logged.
        unfolded: fields of a newer vLLM that could not be folded, by name: of several ranks' values the last is
            told, and the first such case is logged.
    """

    def __init__(self, ranks: int, expected: int, requests: Requests) -> None:
        self.dropped: Counter[str] = Counter()
        self.unfolded: Counter[str] = Counter()
        self._requests = requests
        self._sending = Transfers(ranks, expected)
        self._receiving = Transfers(ranks, expected)
        self._failed: set[str] = set()
        self._invalid: set[int] = set()
        self._kv: dict[str, Any] = {}  # of the other fields, what has come since the last `take`
        self._ec: dict[str, Any] = {}

    def add(self, rank: int, kv: KVConnectorOutput | None, ec: ECConnectorOutput | None) -> None:
        """Take what a rank has reported.

        Raises:
            ValueError: a connector expects reports of more ranks than there are.
        """
        if kv is not None:
            self._add_kv(rank, kv)
        if ec is not None:
            _fold(self._ec, ec, (), self.unfolded)

    def _add_kv(self, rank: int, kv: KVConnectorOutput) -> None:
        if kv.expected_finished_count > 0:
            self._sending.expect(kv.expected_finished_count)
            self._receiving.expect(kv.expected_finished_count)
        for request_id in kv.finished_sending or ():
            if self._requests.known(request_id):
                self._sending.report(request_id, rank)
            else:
                self._drop("sending, of an unknown request")
        receiving = set(self._requests.receiving()) if kv.finished_recving or kv.failed_recving else set()
        for request_id in kv.finished_recving or ():
            if request_id in receiving:
                self._receiving.report(request_id, rank)
            else:
                self._drop("receiving, of a request that does not receive")
        for _ in kv.failed_recving - receiving:
            self._drop("failure, of a request that does not receive")
        self._failed |= kv.failed_recving & receiving
        self._invalid |= kv.invalid_block_ids
        _fold(self._kv, kv, APART, self.unfolded)

    def _drop(self, reason: str) -> None:
        self.dropped[reason] += 1
        if self.dropped[reason] == 1:
            _log.warning("a report of a connector was dropped; further ones like it are counted only: %s", reason)

    def take(self) -> tuple[KVConnectorOutput, ECConnectorOutput | None]:
        """What the scheduler shall be told now. Told once."""
        requests = self._requests
        receiving = set(requests.receiving())
        received = self._receiving.take(receiving.__contains__)
        self._receiving.forget(set(self._receiving.open) - receiving)
        # An aborted request that still receives is freed by the end of that alone.
        sent = self._sending.take(lambda request_id: requests.ended(request_id) and request_id not in receiving)
        over = {request_id for request_id in received if requests.ended(request_id)}
        self._sending.forget([name for name in self._sending.open if name in over or not requests.known(name)])
        failed = self._failed & received
        self._failed = (self._failed - failed) & receiving
        kv = KVConnectorOutput(
            finished_sending=sent or None,
            finished_recving=received or None,
            failed_recving=failed,
            invalid_block_ids=self._take_invalid(receiving - received),
            expected_finished_count=self._sending.expected,
            **self._kv,
        )
        ec = ECConnectorOutput(**self._ec) if self._ec else None
        self._kv, self._ec = {}, {}
        return kv, None if ec is None or ec.is_empty() else ec

    @property
    def repeated(self) -> int:
        """Reports of a rank that had reported the same transfer before."""
        return self._sending.repeated + self._receiving.repeated

    @property
    def open(self) -> tuple[str, ...]:
        """Requests of which some, but not all ranks have reported the end of a transfer."""
        return self._sending.open + self._receiving.open

    def _take_invalid(self, unfinished: set[str]) -> set[int]:
        if not self._invalid:
            return set()
        kept = self._invalid & set().union(*map(self._requests.blocks, unfinished))
        told, self._invalid = self._invalid - kept, kept
        return told


def _fold(into: dict[str, Any], output: Any, apart: Container[str], unfolded: Counter[str]) -> None:
    """Fold the fields of a rank's output, but for those that are folded apart, into those of the others."""
    values = vars(output)
    for each in fields(output):
        name, value = each.name, values[each.name]
        default = each.default_factory() if each.default_factory is not MISSING else each.default
        if name in apart or value is None or value == default:
            continue
        before = into.get(name)
        if before is None:
            into[name] = value
        elif name == "kv_cache_events":
            before.add_events(value.get_all_events())
            before.increment_workers(1)
        elif isinstance(value, set):
            into[name] = before | value
        elif hasattr(before, "aggregate"):
            into[name] = before.aggregate(value)
        else:
            into[name] = value
            unfolded[name] += 1
            if unfolded[name] == 1:
                _log.warning("connector output has a field %s that cannot be folded: one rank's value is used", name)
