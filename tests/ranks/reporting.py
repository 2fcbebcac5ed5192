"""A sleeping rank whose connector reports when it is told to."""

from typing import Any

from async_pp.ranks.sleeping_runner import Load, SleepingRunner


class ReportingRunner(SleepingRunner):
    """Reports with every step of more than one sequence, and returns what its connectors are sent."""

    def execute(self, payload: Load) -> None:
        super().execute(payload)
        self._says = payload.sequences > 1

    def connector_output(self, answer: Any) -> Any:
        return ("of", answer) if self._says else None

    def attend(self, work: Any) -> Any:
        if work == f"raise on {self._rank}":
            raise RuntimeError("the connector is broken")
        return None if work == f"silence on {self._rank}" else (self._rank, work)
