"""The planner: waits until there is work *and* a slot, then asks the scheduler once.

The slots queue holds tokens, as many as there are slots; one is taken before the scheduler is asked and comes back
after the step has settled. A plan that turns out to be no step gives its token back at once.
"""

import asyncio
from collections.abc import Callable

from async_pp.engine.ports import Attend, Plan, SchedulerPort


class Planner:
    """The planning coroutine.

    Args:
        scheduler: asked for one plan per slot.
        depth: number of slots.
        dispatch: takes a plan, and when the scheduler was asked for it; from then on the slot is the step's.
        attend: takes what is for the connectors alone.
        rest: called when nothing could run.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        scheduler: SchedulerPort,
        depth: int,
        dispatch: Callable[[Plan, float], None],
        attend: Callable[[Attend], None],
        rest: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        self._scheduler = scheduler
        self._dispatch = dispatch
        self._attend = attend
        self._rest = rest
        self._ask = False
        self._clock = clock
        self._work = asyncio.Event()
        self._slots: asyncio.Queue[None] = asyncio.Queue(maxsize=depth)
        for _ in range(depth):
            self._slots.put_nowait(None)

    def wake(self) -> None:
        """Something changed that could make a plan possible: a request, an abort, a settle, a compiled grammar."""
        self._work.set()

    def ask(self) -> None:
        """Ask the ranks how far transfers are, if no step does it."""
        self._ask = True
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
            ask, self._ask = self._ask, False
            plan = self._scheduler.plan(ask)
            if isinstance(plan, Plan):
                self._work.set()  # where one step came from there may be another
                self._dispatch(plan, asked_s)
                continue
            self._slots.put_nowait(None)
            if plan is None:
                self._rest()
                continue
            if plan.again:
                self._work.set()
            self._attend(plan)
