"""Stepping: steps overlap, settle in order, defer their sampling when they must, and end together."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from async_pp.bench import virtual
from async_pp.core.gather import Scope
from async_pp.core.transfers import LEAST_PAUSE_S, MOST_PAUSE_S
from async_pp.engine.ports import Attend, Plan, StepTimes
from async_pp.engine.stepping import Stepping
from async_pp.errors import RankLost
from async_pp.wire.messages import SPANS
from tests.engine.fakes import FakeExecutor, FakeScheduler, a_plan, turns


@asynccontextmanager
async def stepping(
    scheduler: FakeScheduler, executor: FakeExecutor, depth: int = 2, clock: Callable[[], float] = time.monotonic
) -> AsyncIterator[tuple[Stepping, list[Any], "asyncio.Task[None]"]]:
    told: list[Any] = []
    steps = Stepping(scheduler, executor, depth=depth, emit=told.extend, clock=clock)  # type: ignore[arg-type]
    task = asyncio.create_task(steps.run())
    steps.wake()
    await turns()
    try:
        yield steps, told, task
    finally:
        task.cancel()
        await asyncio.wait([task])


async def test_steps_overlap_and_settle_in_dispatch_order() -> None:
    scheduler, executor = FakeScheduler([a_plan("a"), a_plan("b"), a_plan("c")]), FakeExecutor()
    async with stepping(scheduler, executor) as (steps, told, _):
        assert [step for _, step, _ in executor.sent] == [0, 1], "two in flight, the third waits for a slot"
        executor.futures[1, 1].set_result("B")
        await turns()
        assert not told, "b is ready but a is older"
        executor.futures[0, 1].set_result("A")
        await turns()
        assert told == ["output of a", "output of b"]
        assert [step for _, step, _ in executor.sent] == [0, 1, 2]
        assert steps.oldest_step == 2


async def test_all_rank_steps_fold_each_answer_as_it_comes_and_settle_on_the_last() -> None:
    scheduler, executor = FakeScheduler([a_plan("a", scope=Scope.ALL)]), FakeExecutor(ranks=3)
    async with stepping(scheduler, executor) as (steps, told, _):
        for rank in (2, 0):
            executor.futures[0, rank].set_result(rank)
        await turns()
        assert not told
        step = steps._pipeline.window.oldest
        assert step is not None
        assert step.gather.answers() == {0: 0, 2: 2}
        executor.futures[0, 1].set_result(1)
        await turns()
        assert scheduler.settled == [("a", {0: 0, 1: 1, 2: 2})]


async def test_a_grammar_that_waits_for_a_token_in_flight_is_released_right_after_its_settle() -> None:
    scheduler = FakeScheduler([a_plan("a", "r"), a_plan("b", "r", pending=True)])
    executor = FakeExecutor()
    async with stepping(scheduler, executor) as (_, told, _task):
        assert [(sample, step) for sample, step, _ in executor.sent] == [("now", 0), ("later", 1)]
        assert scheduler.masks == ["a"], "no bitmask is computed before its token is known"
        executor.futures[0, 1].set_result("A")
        await turns()
        assert executor.sent[-1] == ("release", 1, "mask of b")
        assert told == ["output of a"]


async def test_pooling_steps_send_no_sampling() -> None:
    scheduler, executor = FakeScheduler([a_plan("a", samples=False)]), FakeExecutor()
    async with stepping(scheduler, executor):
        assert executor.sent == [("none", 0, None)]
        assert not scheduler.masks


async def test_a_lost_rank_ends_every_step_and_the_run_with_one_error() -> None:
    scheduler, executor = FakeScheduler([a_plan("a"), a_plan("b")]), FakeExecutor()
    async with stepping(scheduler, executor) as (steps, told, task):
        lost = RankLost("gone", rank=0)
        for future in executor.futures.values():
            future.set_exception(lost)
        await asyncio.wait([task])
        assert task.exception() is lost
        assert [step.plan.work for step in steps.lose(lost)] == ["a", "b"]
        assert not steps.lose(RuntimeError("later causes change nothing"))
        await steps.idle()
        assert not told


async def test_a_settle_that_raises_ends_the_run_with_its_own_error() -> None:
    scheduler, executor = FakeScheduler([a_plan("a")], error=KeyError("unknown request")), FakeExecutor()
    async with stepping(scheduler, executor) as (_, _told, task):
        executor.futures[0, 1].set_result("A")
        await asyncio.wait([task])
        assert task.exception() is scheduler.error


async def test_idle_and_settled_are_events_not_polls() -> None:
    scheduler, executor = FakeScheduler([a_plan("a")]), FakeExecutor()
    async with stepping(scheduler, executor) as (steps, _, _task):
        waiters = [asyncio.create_task(steps.idle()), asyncio.create_task(steps.settled())]
        await turns()
        assert not any(waiter.done() for waiter in waiters)
        executor.futures[0, 1].set_result("A")
        await asyncio.wait(waiters)


@pytest.mark.parametrize("depth", [1, 3])
async def test_never_more_steps_in_flight_than_slots(depth: int) -> None:
    scheduler, executor = FakeScheduler([a_plan(str(n)) for n in range(20)]), FakeExecutor()
    async with stepping(scheduler, executor, depth) as (steps, told, _):
        for number in range(20):
            assert len(steps._pipeline.window) <= depth
            executor.futures[number, 1].set_result(number)
            await turns()
        assert len(told) == 20


class Clock:
    """A clock that stands still unless it is moved."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class BusyScheduler(FakeScheduler):
    """Takes 1 s to plan and 2 s to settle, by a clock of the test's."""

    clock = Clock()

    def plan(self, ask: bool = False) -> Plan | Attend | None:
        plan = super().plan(ask)
        self.clock.now_s += 1.0 if plan else 0.0
        return plan

    def settle(self, *how: Any) -> Any:
        self.clock.now_s += 2.0
        return super().settle(*how)


async def test_times_of_a_settled_step_reach_the_scheduler_once_every_stage_has_told_its_own() -> None:
    scheduler, executor, clock = BusyScheduler([a_plan("a"), a_plan("b")]), FakeExecutor(), Clock()
    scheduler.clock = clock
    async with stepping(scheduler, executor, depth=1, clock=clock) as (steps, _, _task):
        for step in range(2):  # dispatched at 1 and 9: two seconds in each stage, half a second to and fro
            begin = clock.now_s
            steps.span(1, step, begin + 2.5, begin + 4.5)
            clock.now_s += 5
            executor.futures[step, 1].set_result(step)
            await turns()
            if not step:
                steps.span(0, step, begin + 0.5, begin + 2.5)
                assert not scheduler.times, "not in the callback of the socket"
        assert scheduler.times == [("a", StepTimes(stages=(2, 2), round_trip_s=1, host_s=3))]
        assert steps.bubbles().stages[0].busy == 2
        steps.span(0, 1, 9.5, 11.5)
        shares = steps.bubbles().shares()
    assert clock.now_s == 16
    seconds = {cause: share * 16 for cause, share in shares.items()}
    assert seconds == pytest.approx(
        {
            "busy": 4,
            "no_work": 2,
            "fill_drain": 2,
            "host": 6,
            "round_trip": 2,
            "stage_imbalance": 0,
            "cohort_imbalance": 0,
        }
    )


async def test_ranks_wait_for_the_next_step_and_not_for_what_is_learned_from_the_last() -> None:
    class Learning(FakeScheduler):
        def timed(self, plan: Plan, times: StepTimes) -> None:
            super().timed(plan, times)
            sent.append(len(executor.sent))

    sent: list[int] = []
    scheduler, executor = Learning([a_plan("a"), a_plan("b")]), FakeExecutor()
    async with stepping(scheduler, executor, depth=1) as (steps, _, _task):
        for stage in range(2):
            steps.span(stage, 0, time.monotonic(), time.monotonic())
        executor.futures[0, 1].set_result("A")
        await turns()
        assert sent == [2], "b was on its way when the times of a were told"


async def test_a_scheduler_that_raises_at_the_times_of_a_step_ends_the_run_with_its_error() -> None:
    class Refusing(FakeScheduler):
        def timed(self, plan: Plan, times: StepTimes) -> None:
            raise refused

    refused = ValueError("no such policy")
    scheduler, executor = Refusing([a_plan("a")]), FakeExecutor()
    async with stepping(scheduler, executor) as (steps, _, task):
        for stage in range(2):
            steps.span(stage, 0, time.monotonic(), time.monotonic())
        executor.futures[0, 1].set_result("A")
        await asyncio.wait([task])
        assert task.exception() is refused


async def test_ranks_that_tell_no_times_leave_nothing_behind() -> None:
    scheduler, executor = FakeScheduler([a_plan(str(n)) for n in range(100)]), FakeExecutor()
    async with stepping(scheduler, executor) as (steps, told, _):
        for number in range(100):
            executor.futures[number, 1].set_result(number)
            await turns()
            assert steps._bubbles.open <= 2 + 2 * SPANS + 2, "and those that are in flight"
        assert len(told) == 100
        assert not steps._hosted
        assert not scheduler.times


async def test_what_connectors_report_is_folded_as_it_comes_while_steps_are_in_flight() -> None:
    scheduler, executor = FakeScheduler([a_plan("a"), a_plan("b")]), FakeExecutor(ranks=3)
    async with stepping(scheduler, executor) as (steps, told, _):
        steps.connector_output(0, "first")
        steps.connector_output(1, "second")
        await turns()
        assert scheduler.outputs == [(0, "first"), (1, "second")] and not told
        executor.futures[0, 2].set_result("A")
        await turns()
        assert told == ["output of a"], "of the output rank alone"


async def test_what_is_for_the_connectors_is_sent_beside_steps_and_every_answer_is_folded() -> None:
    scheduler = FakeScheduler([a_plan("a"), Attend("load", again=True), a_plan("b")])
    executor = FakeExecutor()
    async with stepping(scheduler, executor) as (steps, _, _task):
        assert [sent[::2] for sent in executor.sent] == [("now", "mask of a"), ("attend", "load"), ("now", "mask of b")]
        executor.futures[-1, 1].set_result("loaded")
        await turns()
        executor.futures[-1, 0].set_result(None)
        await turns()
        assert scheduler.outputs == [(1, "loaded")]
        assert steps.oldest_step == 0, "no step has been settled for it"


async def test_what_a_rank_says_is_taken_in_its_order_though_all_comes_in_one_turn_of_the_loop() -> None:
    class Telling(FakeScheduler):
        def connector_output(self, rank: int, output: Any) -> Any:
            return [output]

    executor = FakeExecutor()
    todo = [a_plan("a", scope=Scope.ALL), Attend("load", again=True), a_plan("b")]
    async with stepping(Telling(todo), executor) as (steps, told, _):
        executor.futures[1, 1].set_result("B")
        steps.connector_output(0, "before its answer")
        executor.futures[0, 0].set_result("A")
        steps.connector_output(0, "behind it")
        executor.futures[-1, 0].set_result("loaded")
        steps.connector_output(0, "at last")
        executor.futures[-1, 1].set_result("of another rank, behind b")
        await turns()
        assert told == ["before its answer"]
        executor.futures[0, 1].set_result("A")
        await turns()
        behind = ["behind it", "loaded", "at last"]
        assert told[1:] == ["output of a", *behind, "output of b", "of another rank, behind b"]


async def test_a_report_that_cannot_be_folded_ends_the_epoch() -> None:
    class Refusing(FakeScheduler):
        def connector_output(self, rank: int, output: Any) -> Any:
            raise ValueError("3 ranks are to report")

    async with stepping(Refusing(), FakeExecutor()) as (steps, _, task):
        steps.connector_output(0, "news")
        await asyncio.wait([task])
        with pytest.raises(ValueError, match="3 ranks"):
            task.result()


def test_idle_ranks_are_asked_for_transfers_after_growing_pauses_and_not_while_a_step_does_it() -> None:
    asked_s: list[float] = []

    class Answering(FakeExecutor):
        says: Any = None

        def attend(self, work: Any) -> Any:
            asked_s.append(asyncio.get_running_loop().time())
            made = super().attend(work)
            for _, future in made:
                future.set_result(self.says)
            return made

    async def main() -> None:
        loop = asyncio.get_running_loop()
        scheduler, executor = FakeScheduler(transferring=True), Answering()
        async with stepping(scheduler, executor, clock=loop.time) as (steps, _, _task):
            await asyncio.sleep(2.0)
            pauses = [after - before for before, after in itertools.pairwise(asked_s)]
            assert asked_s[0] == pytest.approx(LEAST_PAUSE_S)
            assert pauses == sorted(pauses) and pauses[-1] == pytest.approx(MOST_PAUSE_S)
            assert len(asked_s) < 80, "asking for two seconds is not spinning"

            executor.says = "news"
            await asyncio.sleep(MOST_PAUSE_S)
            assert scheduler.outputs and asked_s[-1] - asked_s[-2] < 2 * LEAST_PAUSE_S, "something moves: ask soon"

            executor.says = "statistics"
            await asyncio.sleep(1.0)
            before = len(asked_s)
            await asyncio.sleep(1.0)
            assert len(asked_s) < before + 30, "what moves nothing is not asked for sooner"

            executor.says = None
            scheduler.todo.append(a_plan("a"))
            steps.wake()
            await turns()
            before = len(asked_s)
            await asyncio.sleep(1.0)
            assert len(asked_s) == before, "the step asks"
            executor.futures[steps.oldest_step, 1].set_result("A")  # type: ignore[index]
            await asyncio.sleep(1.0)
            assert len(asked_s) > before

            scheduler.transferring = False
            await asyncio.sleep(MOST_PAUSE_S)
            before = len(asked_s)
            await asyncio.sleep(1.0)
            assert len(asked_s) == before, "nothing to ask for"

    virtual.run(main())
