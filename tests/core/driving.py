"""Short verbs for driving a pipeline machine, and effects as comparable values."""

from collections.abc import Sequence

from async_pp.core.gather import Scope
from async_pp.core.pipeline import Dispatch, Effect, EndEpoch, Fold, FreeSlot, Pipeline, Release, Settle, Step

RANKS = 2
OUTPUT = 1


class Driver:
    """A pipeline machine with a clock that advances by one second per event and requests named by letters."""

    def __init__(self, *, depth: int = 4, ranks: int = RANKS, output_rank: int = OUTPUT) -> None:
        self.machine = Pipeline(epoch=7, depth=depth, ranks=ranks, output_rank=output_rank)
        self.now_s = 0.0

    def plan(self, requests: str = "a", *, pending: bool = False, scope: Scope = Scope.OUTPUT) -> list[Effect]:
        """Plan a step that carries the requests named by the letters."""
        return self.machine.plan(requests, f"plan {requests}", pending_tokens=pending, scope=scope, now_s=self._tick())

    def answer(self, number: int, rank: int = OUTPUT) -> list[Effect]:
        """One rank answers."""
        return self.machine.answer(number, rank, (number, rank), self._tick())

    def report(self, rank: int, report: object) -> list[Effect]:
        """One rank reports something beside its answers."""
        return self.machine.report(rank, report)

    def settled(self, number: int) -> list[Effect]:
        """The shell reports a settle."""
        return self.machine.settled(number, self._tick())

    def lose(self, cause: BaseException) -> list[Effect]:
        """The rank set is lost."""
        return self.machine.lose(cause, self._tick())

    def step(self, number: int) -> Step:
        """A step in flight."""
        step = self.machine.window.get(number)
        assert step is not None
        return step

    def snapshot(self) -> object:
        """All that a refused event must leave as it was."""
        machine = self.machine
        steps = [
            (step.number, step.state, step.gather.answers(), list(step.story), list(step.behind))
            for step in machine.window
        ]
        return steps, machine.window.free, machine.cause, machine.idle

    def _tick(self) -> float:
        self.now_s += 1.0
        return self.now_s


def told(effects: Sequence[Effect]) -> list[tuple[object, ...]]:
    """Effects as values: what, and of which step."""
    return [_told(effect) for effect in effects]


def _told(effect: Effect) -> tuple[object, ...]:
    match effect:
        case Dispatch(step=step, deferred=deferred):
            return ("dispatch", step.number, "deferred" if deferred else "whole")
        case Release(step=step):
            return ("release", step.number)
        case Settle(step=step):
            return ("settle", step.number)
        case Fold(rank=rank, report=report):
            return ("fold", rank, report)
        case FreeSlot():
            return ("free slot",)
        case EndEpoch(cause=cause, steps=steps):
            return ("end", repr(cause), tuple(step.number for step in steps))
