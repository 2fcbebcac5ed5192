"""The planner: one plan per slot, none without work, no wake-up lost, no token lost."""

import asyncio
import time
from collections.abc import Callable

import pytest

from async_pp.engine.planner import Planner
from async_pp.engine.ports import Attend, Plan
from tests.engine.fakes import FakeScheduler, a_plan, turns


def noted(plans: list[Plan]) -> Callable[[Plan, float], None]:
    return lambda plan, asked_s: plans.append(plan)


def a_planner(
    scheduler: FakeScheduler,
    depth: int,
    dispatch: Callable[[Plan, float], None],
    attend: Callable[[Attend], None] = lambda _: None,
    rest: Callable[[], None] = lambda: None,
) -> Planner:
    return Planner(scheduler, depth, dispatch, attend, rest, time.monotonic)


async def _stop(task: "asyncio.Task[None]") -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_plans_until_the_slots_are_taken_and_again_when_one_is_free() -> None:
    scheduler = FakeScheduler([a_plan(name) for name in "abcde"])
    dispatched: list[Plan] = []
    planner = a_planner(scheduler, 2, noted(dispatched))
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
    planner = a_planner(scheduler, 1, noted([]))
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
    planner = a_planner(scheduler, 1, noted([]))
    asked = scheduler.plan

    def plan(ask: bool = False) -> Plan | Attend | None:
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
    planner = a_planner(scheduler, 2, noted(dispatched))
    task = asyncio.create_task(planner.run())
    if where == "slot":
        planner.wake()
    await turns()
    await _stop(task)
    assert planner._slots.qsize() + len(dispatched) == 2


async def test_what_is_for_the_connectors_takes_no_slot_and_is_tried_again_only_if_it_says_so() -> None:
    scheduler = FakeScheduler([Attend("one"), Attend("two", again=True), a_plan("a"), Attend("three")])
    dispatched: list[Plan] = []
    attended: list[Attend] = []
    rests: list[int] = []
    planner = a_planner(scheduler, 1, noted(dispatched), attended.append, lambda: rests.append(scheduler.asked))
    task = asyncio.create_task(planner.run())
    planner.wake()
    await turns()
    assert [attend.work for attend in attended] == ["one"] and not dispatched
    planner.wake()
    await turns()
    assert [attend.work for attend in attended] == ["one", "two"]
    assert [plan.work for plan in dispatched] == ["a"] and not rests
    planner.free_slot()
    await turns()
    assert attended[-1].work == "three" and scheduler.asked == 4 and not rests
    planner.ask()
    await turns()
    assert scheduler.asks == 1 and rests == [5]
    planner.wake()
    await turns()
    assert scheduler.asks == 1, "asking is for one plan"
    await _stop(task)
