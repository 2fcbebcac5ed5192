"""Bubble accounting on pipelines whose idle time is known, and that its sums hold whatever is told."""

import heapq
import weakref
from collections import deque
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_pp.core.bubble import Bubbles, StageTime, _Gap


class Pipe:
    """A pipeline that is computed: cohorts go round, each for so many steps, as many in flight as there are stages.

    Stage s begins step i at max(e(i-1, s), e(i, s-1) + hop); the host takes `host` seconds from an answer, or the
    arrival, to a dispatch, one after the other; dispatches and answers travel for `trip` seconds each.
    """

    def __init__(self, stages: int, *, hop: float = 0.0, trip: float = 0.0, host: float = 0.0) -> None:
        self.bubbles = Bubbles(stages, start_s=0.0, most_open=stages + 1)
        self.stages, self.hop, self.trip, self.host = stages, hop, trip, host
        self.number = 0
        self.ends = [0.0] * stages
        self.round_trips: list[float] = []

    def run(self, arrival: float, *cohorts: tuple[int, int, Sequence[float]]) -> float:
        """Let cohorts of (requests, steps, time per stage) arrive together. Returns when the last step settled."""
        bubbles, now = self.bubbles, arrival
        waiting = deque([requests, left, times] for requests, left, times in cohorts)
        answers: list[tuple[float, int, list[tuple[float, float]], list[object]]] = []
        bubbles.enabled(now)
        while waiting or answers:
            while waiting and len(answers) < self.stages:
                now += self.host
                cohort = waiting.popleft()
                spans = self._spans(now + self.trip, cohort[2])
                bubbles.dispatched(self.number, cohort[0], now, tag=self.number)
                heapq.heappush(answers, (spans[-1][1] + self.trip, self.number, spans, cohort))
                self.number += 1
            at, number, spans, cohort = heapq.heappop(answers)
            now = max(now, at)
            for stage, (began, ended) in enumerate(spans):
                bubbles.span(stage, number, began, ended)
            bubbles.answered(number, now)
            bubbles.settled(number, now)
            self.round_trips += [timed.round_trip_s for timed in bubbles.take()]
            cohort[1] -= 1
            if cohort[1]:
                waiting.append(cohort)
        return now

    def _spans(self, came: float, times: Sequence[float]) -> list[tuple[float, float]]:
        spans = []
        for stage, time in enumerate(times):
            began = max(came, self.ends[stage])
            self.ends[stage] = began + time
            spans.append((began, began + time))
            came = began + time + self.hop
        return spans


def seconds(state: StageTime, wall: float) -> dict[str, float]:
    """Seconds by cause, mean over the stages; those that are not zero."""
    return {cause: pytest.approx(share * wall) for cause, share in state.shares().items() if share * wall > 1e-9}


def test_even_and_full_is_busy_but_for_fill_and_drain() -> None:
    pipe = Pipe(4)
    end = pipe.run(0.0, *[(4, 10, [1.0] * 4)] * 4)
    assert end == 43
    assert seconds(pipe.bubbles.snapshot(end), end) == {"busy": 40, "fill_drain": 3}


@pytest.mark.parametrize("slow", [0, 1, 2])
def test_one_slow_stage_is_stage_imbalance_of_the_others(slow: int) -> None:
    times = [2.0 if stage == slow else 1.0 for stage in range(3)]
    pipe = Pipe(3)
    end = pipe.run(0.0, *[(1, 20, times)] * 3)
    state = pipe.bubbles.snapshot(end)
    told = seconds(state, end)
    assert set(told) == {"busy", "fill_drain", "stage_imbalance"}
    assert told["busy"] == 80
    assert told["fill_drain"].expected < 5
    assert state.stages[slow].imbalance == 0


@pytest.mark.parametrize("stages", [2, 4])
def test_cohorts_of_1_and_7_are_cohort_imbalance(stages: int) -> None:
    """With four stages there are also too few cohorts, though the requests would do for four."""
    pipe = Pipe(stages)
    end = pipe.run(0.0, (1, 10, [1.0] * stages), (7, 10, [7.0] * stages))
    told = seconds(pipe.bubbles.snapshot(end), end)
    assert set(told) == {"busy", "fill_drain", "cohort_imbalance"}
    assert told["busy"] == 80


def test_one_request_leaves_the_other_stages_without_work() -> None:
    pipe = Pipe(4, hop=0.3, trip=0.1, host=0.2)
    end = pipe.run(0.0, (1, 10, [1.0] * 4))
    assert pipe.round_trips == pytest.approx([3 * 0.3 + 2 * 0.1] * 10)
    told = seconds(pipe.bubbles.snapshot(end), end)
    assert told == {
        "busy": 10,
        "no_work": 27,
        "fill_drain": told["fill_drain"],
        "host": 2,
        "round_trip": told["round_trip"],
    }
    assert 3 <= told["fill_drain"].expected <= 3.9, "the last step's transits are part of the drain"


def test_two_requests_in_one_cohort_could_have_kept_two_of_three_stages_busy() -> None:
    pipe = Pipe(3)
    end = pipe.run(0.0, (2, 11, [1.0] * 3))
    assert seconds(pipe.bubbles.snapshot(end), end) == {
        "busy": 11,
        "no_work": 10,
        "cohort_imbalance": 10,
        "fill_drain": 2,
    }


@pytest.mark.parametrize("cause", ["host", "round_trip", "hop"])
def test_a_delay_outside_the_stages_is_found_on_every_stage(cause: str) -> None:
    """Two even cohorts in two stages: each round of both costs every stage the delay once."""
    pipe = Pipe(2, **{"host": {"host": 0.5}, "round_trip": {"trip": 0.25}, "hop": {"hop": 0.5}}[cause])
    end = pipe.run(0.0, *[(4, 50, [1.0, 1.0])] * 2)
    state = pipe.bubbles.snapshot(end)
    told = seconds(state, end)
    assert set(told) == {"busy", "fill_drain", "host" if cause == "host" else "round_trip"}
    assert end == pytest.approx(50 * 2.5, abs=2)
    for stage in state.stages:
        assert stage.busy == pytest.approx(100)
        assert stage.host + stage.round_trip == pytest.approx(25, abs=1)


def test_without_any_step_in_flight_there_is_no_work() -> None:
    pipe = Pipe(2)
    assert seconds(pipe.bubbles.snapshot(5.0), 5.0) == {"no_work": 5}
    end = pipe.run(7.0, *[(1, 3, [1.0, 3.0])] * 2)
    before = pipe.bubbles.snapshot(end)
    assert [stage.no_work for stage in before.stages] == [7, 7]
    end = pipe.run(end + 100, *[(1, 3, [2.0, 1.0])] * 2)
    end += 10
    told = pipe.bubbles.snapshot(end).since(before)
    assert [stage.no_work for stage in told.stages] == [110, 110], "exactly, though the stages are uneven"
    assert sum(told.shares().values()) == pytest.approx(1)


def test_nothing_is_told_before_anything_has_been_accounted_for() -> None:
    assert set(Bubbles(2, start_s=3.0, most_open=1).snapshot(3.0).shares().values()) == {0.0}


def test_a_step_is_accounted_for_when_it_and_all_older_ones_are_complete_in_whatever_order() -> None:
    bubbles = Bubbles(2, start_s=0.0, most_open=8)
    bubbles.enabled(0.0)
    for number in range(2):
        bubbles.dispatched(number, 1, 0.0, tag=f"plan {number}")
    bubbles.span(1, 1, 2.0, 3.0)
    bubbles.span(0, 1, 1.0, 2.0)
    bubbles.span(1, 0, 1.0, 2.0)
    bubbles.span(1, 0, 5.0, 6.0)  # told twice: the first counts
    bubbles.span(1, 9, 5.0, 6.0)  # not awaited
    for number in range(2):
        bubbles.answered(number, 2.0 + number)
        bubbles.settled(number, 2.0 + number)
    assert not bubbles.take()
    assert bubbles.snapshot(9.0).stages[0].busy == 0, "open steps are left out"
    bubbles.span(0, 0, 0.0, 1.0)
    assert [(timed.tag, timed.stages) for timed in bubbles.take()] == [("plan 0", (1, 1)), ("plan 1", (1, 1))]
    assert not bubbles.open
    assert [tuple(stage) for stage in bubbles.snapshot(3.0).stages] == [(2, 0, 0, 0, 1, 0)] * 2


class Tag:
    """Something that a step holds."""


def test_steps_without_spans_are_forgotten_and_their_time_with_them() -> None:
    bubbles = Bubbles(2, start_s=0.0, most_open=3)
    bubbles.enabled(0.0)
    tags: weakref.WeakSet[Tag] = weakref.WeakSet()
    for number in range(50):
        tags.add(tag := Tag())
        bubbles.dispatched(number, 1, number, tag)
        bubbles.answered(number, number + 1)
        bubbles.settled(number, number + 1)
        assert not bubbles.take()
        assert bubbles.open <= 3
    del tag
    assert len(tags) <= 4, "those that are open, and the one that the next would wait for"
    for number in range(47, 50):
        for stage in range(2):
            bubbles.span(stage, number, number, number + 1)
    assert [tuple(stage) for stage in bubbles.snapshot(50.0).stages] == [(3, 0, 0, 0, 0, 0)] * 2


@pytest.mark.parametrize(
    ("most", "kept", "left"), [(0, (0, 0, 0, 0, 0), 0), (4, (1, 2, 1, 0, 0), 0), (99, (1, 2, 3, 4, 5), 84)]
)
def test_what_one_stage_hands_on_explains_no_more_than_the_next_one_waited(
    most: float, kept: tuple[float, ...], left: float
) -> None:
    gap = _Gap(no_work=1, host=2, round_trip=3, fill_drain=4, imbalance=5)
    assert gap.cut(most) == left
    assert (gap.no_work, gap.host, gap.round_trip, gap.fill_drain, gap.imbalance) == kept


delays = st.floats(0, 10)
anything = st.floats(allow_nan=False) | delays


@given(stages=st.integers(1, 4), data=st.data())
def test_every_second_is_counted_once_and_none_is_negative_whatever_is_told(stages: int, data: st.DataObject) -> None:
    bubbles = Bubbles(stages, start_s=0.0, most_open=100)
    now, number, flying, owed = 0.0, 0, deque[int](), list[tuple[int, int]]()
    for act in [*data.draw(st.lists(st.sampled_from(["enable", "plan", "settle", "span"]), max_size=40))]:
        now += data.draw(delays)
        if act == "enable":
            bubbles.enabled(now)
        elif act == "plan":
            bubbles.dispatched(number, data.draw(st.integers(1, 5)), now)
            flying.append(number)
            owed += [(stage, number) for stage in range(stages)]
            number += 1
        elif act == "settle" and flying:
            bubbles.answered(flying[0], now)
            bubbles.settled(flying.popleft(), now + data.draw(delays))
            now += 10
        elif act == "span" and owed:
            stage, step = owed.pop(data.draw(st.integers(0, len(owed) - 1)))
            bubbles.span(stage, step, data.draw(anything), data.draw(anything))
    early = bubbles.snapshot(now)
    for step in flying:
        bubbles.answered(step, now)
        bubbles.settled(step, now)
    for stage, step in owed:
        bubbles.span(stage, step, data.draw(anything), data.draw(anything))
    now += 1
    state = bubbles.snapshot(now)
    assert len(bubbles.take()) == number
    for told in (state, state.since(early)):
        assert min(told.shares().values()) >= 0
        assert sum(told.shares().values()) == pytest.approx(1)
    for stage_seconds in state.stages:
        assert min(stage_seconds) >= 0
        assert sum(stage_seconds) == pytest.approx(now)
