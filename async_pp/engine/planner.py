"""The planner: waits until there is work *and* a slot, then asks the scheduler once.

The slots queue holds tokens, as many as there are slots; one is taken before the scheduler is asked and comes back
after the step has settled. A plan that turns out empty gives its token back at once and nothing is dispatched.
"""

import asyncio
from collections.abc import Callable

from async_pp.engine.ports import Plan, SchedulerPort


class Planner:
    """The planning coroutine.

    Args:
        scheduler: asked for one plan per slot.
        depth: number of slots.
        dispatch: takes a plan, and when the scheduler was asked for it; from then on the slot is the step's.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        scheduler: SchedulerPort,
        depth: int,
        dispatch: Callable[[Plan, float], None],
        clock: Callable[[], float],
    ) -> None:
        self._scheduler = scheduler
        self._dispatch = dispatch
        self._clock = clock
        self._work = asyncio.Event()
        self._slots: asyncio.Queue[None] = asyncio.Queue(maxsize=depth)
        for _ in range(depth):
            self._slots.put_nowait(None)

    def wake(self) -> None:
        """Something changed that could make a plan possible: a request, an abort, a settle, a compiled grammar."""
        self._work.set()

    def free_slot(self) -> None:
        """A step has settled: its slot is free again."""
        self._slots.put_nowait(None)
        self._work.set()

    async def run(self) -> None:
        """Plan for ever. Cancelled at either await it leaves every token in the queue or with a step."""
        while True:
            await self._work.wait()
            await self._slots.get()
            # Cleared before the scheduler is asked: whatever wakes the planner from here on is not lost.
            self._work.clear()
            asked_s = self._clock()
            plan = self._scheduler.plan()
            if plan is None:
                self._slots.put_nowait(None)
                continue
            self._work.set()  # where one step came from there may be another
            self._dispatch(plan, asked_s)
