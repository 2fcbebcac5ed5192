"""The two watches on virtual time: one timer, set to what could be late, and a finding that is sure."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest

from async_pp.bench import virtual
from async_pp.core.deadlines import LEAST_S, MOST_S, Deadline, Overdue, Row
from async_pp.engine.watch import LATE_S, SURE_S, StartWatch, StepWatch


class Ranks:
    """Two ranks of a pipeline, as their rows and answers show them."""

    def __init__(self, fixed_s: float | None = None) -> None:
        self.rows = [Row(0, 0.0, 0, 0.0)] * 2
        self.unanswered: list[int] = []
        self.looks: list[float] = []
        self.hung: list[tuple[float, Overdue, float]] = []
        self.behind_s = 0.0  # of the clock
        self.watch = StepWatch(
            rows=self._read,
            missing=lambda work: self.unanswered,
            stopped=lambda rank: False,
            ranks_per_stage=1,
            deadline=Deadline(fixed_s),
            on_hung=lambda overdue, deadline_s: self.hung.append((self.now(), overdue, deadline_s)),
            clock=self.now,
        )

    def now(self) -> float:
        return asyncio.get_running_loop().time() + self.behind_s

    def _read(self) -> Sequence[Row]:
        self.looks.append(self.now())
        return self.rows

    def leave(self, rank: int) -> None:
        number = self.rows[rank].left + 1
        self.rows[rank] = Row(number, self.now(), number, self.now())


def on_virtual_time(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def run() -> None:
        virtual.run(test())

    run.__name__ = test.__name__
    run.__doc__ = test.__doc__
    return run


@on_virtual_time
async def test_a_rank_that_never_leaves_its_step_is_told_once_at_the_deadline() -> None:
    ranks = Ranks(fixed_s=3.0)
    await asyncio.sleep(1.0)
    ranks.watch.step(4, deferred=False)
    await asyncio.sleep(0.5)
    ranks.leave(0)
    await asyncio.sleep(600.0)
    ((at, overdue, deadline_s),) = ranks.hung
    assert (overdue, deadline_s) == (Overdue((1,), 4, 4, False, 1.5), 3.0)
    assert at == pytest.approx(1.5 + 3.0 + SURE_S)


@on_virtual_time
async def test_while_steps_go_well_there_is_one_look_now_and_then_and_none_afterwards() -> None:
    ranks = Ranks()
    for step in range(1000):
        ranks.watch.step(step, deferred=False)
        await asyncio.sleep(0.02)
        ranks.leave(0)
        ranks.leave(1)
    assert len(ranks.looks) <= 20.0 / LEAST_S
    await asyncio.sleep(3600.0)
    assert not ranks.hung
    assert ranks.looks[-1] <= 20.0 + LEAST_S
    ranks.watch.step(1000, deferred=False)
    await asyncio.sleep(MOST_S + 2 * SURE_S)
    assert ranks.hung


@on_virtual_time
async def test_a_deadline_that_becomes_shorter_meanwhile_holds() -> None:
    ranks = Ranks()
    ranks.watch.step(0, deferred=False)
    await asyncio.sleep(0.1)
    for step in range(200):
        ranks.watch.took(step, 0.01)
    await asyncio.sleep(3 * LEAST_S)
    ((at, _, deadline_s),) = ranks.hung
    assert (at, deadline_s) == (pytest.approx(LEAST_S + SURE_S), LEAST_S)


@on_virtual_time
async def test_what_was_on_its_way_when_a_look_found_it_missing_is_not_late() -> None:
    ranks = Ranks(fixed_s=3.0)
    ranks.unanswered = [1]
    ranks.watch.step(0, deferred=False)
    ranks.leave(0)
    ranks.leave(1)
    await asyncio.sleep(3.0 + SURE_S / 2)
    ranks.unanswered = []
    await asyncio.sleep(60.0)
    assert not ranks.hung


@on_virtual_time
async def test_time_in_which_this_process_stood_still_does_not_count() -> None:
    ranks = Ranks(fixed_s=3.0)
    ranks.watch.step(0, deferred=False)
    await asyncio.sleep(1.0)
    ranks.behind_s = 2.0 + 2 * LATE_S  # the loop was blocked for so long
    await asyncio.sleep(2.5)
    assert not ranks.hung
    await asyncio.sleep(3.0)
    assert ranks.hung


@on_virtual_time
async def test_connectors_count_calls_do_not_and_a_deferred_step_does_from_its_word_on() -> None:
    ranks = Ranks(fixed_s=3.0)
    ranks.watch.step(0, deferred=True)
    await asyncio.sleep(100.0)
    assert not ranks.hung
    ranks.watch.released(0)
    await asyncio.sleep(1.0)
    ranks.leave(0)
    ranks.leave(1)
    ranks.watch.call(7, patient=True)
    await asyncio.sleep(100.0)
    assert not ranks.hung
    ranks.leave(0)
    ranks.watch.given_up(7)
    await asyncio.sleep(1.0)
    ranks.leave(1)
    ranks.watch.call(8, patient=False)
    await asyncio.sleep(2.0)
    ranks.leave(1)
    await asyncio.sleep(4.0)
    ((_, overdue, _),) = ranks.hung
    assert (overdue.ranks, overdue.step) == ((0,), None)


@on_virtual_time
async def test_a_watch_that_was_stopped_looks_no_more() -> None:
    ranks = Ranks(fixed_s=3.0)
    ranks.watch.stop()
    ranks.watch.step(0, deferred=False)
    ranks.watch.stop()
    ranks.watch.step(1, deferred=False)
    await asyncio.sleep(60.0)
    assert not ranks.looks


@on_virtual_time
async def test_a_start_may_take_long_as_long_as_something_moves() -> None:
    loop = asyncio.get_running_loop()
    stalled: list[tuple[float, int, float]] = []
    waiting: list[int] = []
    watch = StartWatch(lambda: waiting, lambda rank, deadline_s: stalled.append((loop.time(), rank, deadline_s)))
    watch.begin(10.0)
    await asyncio.sleep(100.0)  # nothing was asked of the ranks
    watch.moved()
    waiting = [2, 3]
    for _ in range(10):
        await asyncio.sleep(9.0)
        watch.moved()
    watch.begin(20.0)
    await asyncio.sleep(19.0)
    assert not stalled
    await asyncio.sleep(100.0)
    assert stalled == [(pytest.approx(210.0), 2, 20.0)]
    watch.begin(1.0)
    watch.stop()
    await asyncio.sleep(100.0)
    assert len(stalled) == 1
