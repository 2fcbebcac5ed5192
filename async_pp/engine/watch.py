"""Two watches over a rank set: nobody hangs in a step, nobody hangs while it starts.

Each has one timer on the loop, set to the moment at which something could be late. What has moved meanwhile is seen
then, and not told every time: per step nothing happens here but a note of its time.
"""

import asyncio
from collections.abc import Callable, Sequence

from async_pp.core.deadlines import LEAST_S, Backlog, Deadline, Overdue, Row, Work

SURE_S = 0.02
"""A finding is looked at again after this time: what has come meanwhile must have been read."""

LATE_S = 1.0
"""When a look comes so much later than planned, this process or its loop stood still, and the ranks may have too."""


class StepWatch:
    """Sees to it that a rank that does not finish its step is found.

    Args:
        rows: reads what the ranks say of themselves.
        missing: the ranks whose answer to a step or call has not come.
        stopped: whether the process of a rank is held by a signal.
        ranks_per_stage: neighbours in rank order that share a stage.
        deadline: how long a step may take.
        on_hung: told once, with the finding and the deadline.
        clock: that of the ranks, in seconds.
    """

    def __init__(
        self,
        *,
        rows: Callable[[], Sequence[Row]],
        missing: Callable[[Work], Sequence[int]],
        stopped: Callable[[int], bool],
        ranks_per_stage: int,
        deadline: Deadline,
        on_hung: Callable[[Overdue, float], None],
        clock: Callable[[], float],
    ) -> None:
        self._rows = rows
        self._deadline = deadline
        self._on_hung = on_hung
        self._clock = clock
        self._backlog = Backlog(ranks_per_stage=ranks_per_stage, missing=missing, stopped=stopped)
        self._timer: asyncio.TimerHandle | None = None
        self._planned_s = 0.0
        self._not_before_s = 0.0
        self._found: Overdue | None = None
        self.step_in = self._backlog.step_in
        self.took = deadline.took

    def step(self, step: int, *, deferred: bool) -> int:
        """A step was sent to the ranks; its sampling is `deferred` until `released`. Returns which work it is."""
        work = self._backlog.step(step, self._clock(), deferred=deferred)
        self._see()
        return work

    def released(self, step: int) -> None:
        """The word to sample a step was sent."""
        self._backlog.released(step, self._clock())

    def call(self, call: int, *, patient: bool) -> None:
        """A call was sent to the ranks; `patient`: somebody sees to its end, until it is `given_up`."""
        self._backlog.call(call, self._clock(), patient=patient)
        self._see()

    def given_up(self, call: int) -> None:
        """Nobody waits any more for a call that the ranks may still be in."""
        self._backlog.given_up(call, self._clock())

    def stop(self) -> None:
        """Look no more. May be called again."""
        if self._timer is not None:
            self._timer.cancel()

    def _see(self) -> None:
        if self._timer is None:
            self._look_in(min(self._deadline.seconds, LEAST_S))

    def _look_in(self, seconds: float) -> None:
        self._planned_s = self._clock() + seconds
        self._timer = asyncio.get_running_loop().call_later(seconds, self._look)

    def _look(self) -> None:
        self._timer = None
        now_s = self._clock()
        if now_s - self._planned_s > LATE_S:
            self._not_before_s = now_s
        deadline_s = self._deadline.seconds
        found, again_s = self._backlog.look(now_s, self._rows(), deadline_s=deadline_s, not_before_s=self._not_before_s)
        if found is not None:
            if found == self._found:
                self._on_hung(found, deadline_s)
                return
            again_s = now_s + SURE_S
        self._found = found
        if again_s is not None:
            self._look_in(max(0.0, again_s - now_s))


class StartWatch:
    """Sees to it that a rank that makes no progress while it starts is found.

    Progress is anything that any rank says. While no rank has been asked for anything there is nothing to wait for.

    Args:
        waiting: the ranks that have not answered the oldest call that is open.
        on_stall: told once: the rank, and for how long nothing moved.
    """

    def __init__(self, waiting: Callable[[], Sequence[int]], on_stall: Callable[[int, float], None]) -> None:
        self._waiting = waiting
        self._on_stall = on_stall
        self._deadline_s = 0.0
        self._moved_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, deadline_s: float) -> None:
        """A part of the start begins in which something must move at least every `deadline_s` seconds."""
        self.stop()
        self._deadline_s = deadline_s
        self.moved()
        self._look()

    def moved(self) -> None:
        """A rank has said something, or was asked for something."""
        self._moved_s = asyncio.get_running_loop().time()

    def stop(self) -> None:
        """Look no more. May be called again."""
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        waiting = self._waiting()
        if not waiting:
            self.moved()
        due_s = self._moved_s + self._deadline_s
        if loop.time() >= due_s:
            self._on_stall(waiting[0], self._deadline_s)
        else:
            self._timer = loop.call_at(due_s, self._look)
