"""Stepping: steps overlap, settle in order, defer their sampling when they must, and end together."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from async_pp.core.gather import Scope
from async_pp.engine.stepping import Stepping
from async_pp.errors import RankLost
from tests.engine.fakes import FakeExecutor, FakeScheduler, a_plan, turns


@asynccontextmanager
async def stepping(
    scheduler: FakeScheduler, executor: FakeExecutor, depth: int = 2
) -> AsyncIterator[tuple[Stepping, list[Any], "asyncio.Task[None]"]]:
    told: list[Any] = []
    steps = Stepping(scheduler, executor, depth=depth, emit=told.extend)  # type: ignore[arg-type]
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
