"""The planner: one plan per slot, none without work, no wake-up lost, no token lost."""

import asyncio
import time
from collections.abc import Callable

import pytest

from async_pp.engine.planner import Planner
from async_pp.engine.ports import Plan
from tests.engine.fakes import FakeScheduler, a_plan, turns


def noted(plans: list[Plan]) -> Callable[[Plan, float], None]:
    return lambda plan, asked_s: plans.append(plan)


async def _stop(task: "asyncio.Task[None]") -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_plans_until_the_slots_are_taken_and_again_when_one_is_free() -> None:
    scheduler = FakeScheduler([a_plan(name) for name in "abcde"])
    dispatched: list[Plan] = []
    planner = Planner(scheduler, 2, noted(dispatched), time.monotonic)
    task = asyncio.create_task(planner.run())
    await turns()
    assert not dispatched, "nothing woke it"
    planner.wake()
    await turns()
    assert [plan.work for plan in dispatched] == ["a", "b"]
    planner.free_slot()
    await turns()
    assert [plan.work for plan in dispatched] == ["a", "b", "c"]
    await _stop(task)


async def test_an_empty_plan_gives_its_slot_back_and_is_not_asked_for_again_without_a_reason() -> None:
    scheduler = FakeScheduler()
    planner = Planner(scheduler, 1, noted([]), time.monotonic)
    task = asyncio.create_task(planner.run())
    planner.wake()
    await turns(50)
    assert scheduler.asked == 1
    dispatched: list[Plan] = []
    planner._dispatch = noted(dispatched)
    scheduler.todo = [a_plan("late")]
    planner.wake()
    await turns()
    assert [plan.work for plan in dispatched] == ["late"], "the slot of the empty plan came back"
    await _stop(task)


async def test_a_wake_during_the_plan_is_not_lost() -> None:
    scheduler = FakeScheduler()
    planner = Planner(scheduler, 1, noted([]), time.monotonic)
    asked = scheduler.plan

    def plan() -> Plan | None:
        if scheduler.asked == 0:
            planner.wake()
        return asked()

    scheduler.plan = plan  # type: ignore[method-assign]
    task = asyncio.create_task(planner.run())
    planner.wake()
    await turns(20)
    assert scheduler.asked == 2
    await _stop(task)


@pytest.mark.parametrize("where", ["work", "slot"])
async def test_cancelled_at_either_await_every_token_is_accounted_for(where: str) -> None:
    scheduler = FakeScheduler([a_plan("a"), a_plan("b"), a_plan("c")])
    dispatched: list[Plan] = []
    planner = Planner(scheduler, 2, noted(dispatched), time.monotonic)
    task = asyncio.create_task(planner.run())
    if where == "slot":
        planner.wake()
    await turns()
    await _stop(task)
    assert planner._slots.qsize() + len(dispatched) == 2
