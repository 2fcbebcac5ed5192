"""The settler: hands gathered steps and reports of connectors to the scheduler, and what comes of them to the streams.

It is called in dispatch order, on the loop's thread. Aborts need no queue here: they reach the scheduler the moment
they are made, so that they are in force before any later settle.
"""

from collections.abc import Callable, Sequence
from typing import Any

from async_pp.core.pipeline import Step
from async_pp.engine.ports import SchedulerPort


class Settler:
    """Settles steps. The streams are told apart from that: the next step shall be planned before outputs are processed.

    Args:
        scheduler: takes the answers.
        emit: takes what the scheduler has for the streams.
    """

    def __init__(self, scheduler: SchedulerPort, emit: Callable[[Sequence[Any]], None]) -> None:
        self._scheduler = scheduler
        self._emit = emit
        self._untold: list[Any] = []

    def settle(self, step: Step) -> None:
        """Settle one gathered step."""
        self._untold += self._scheduler.settle(step.plan, step.gather.answers(), step.gather.output_rank)

    def fold(self, rank: int, report: Any) -> bool:
        """Hand over what a rank's connectors have reported. Returns whether anything that waits can go on by it."""
        told = self._scheduler.connector_output(rank, report)
        self._untold += told or ()
        return told is not None

    def tell(self) -> None:
        """Tell the streams what has been settled and folded since the last call."""
        if self._untold:
            untold, self._untold = self._untold, []
            self._emit(untold)
