"""What happened in a simulation, in order, and how it says that something must not have happened."""

from collections.abc import Callable


class Broken(AssertionError):
    """An invariant does not hold."""


class Story:
    """Lines of virtual time and text.

    Attributes:
        broken: the first thing that must not have happened, or None.
        harmed: whether anything has been done to a rank that may cost the rank set.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.broken: str | None = None
        self.harmed = False
        self.now: Callable[[], float] = lambda: 0.0

    def tell(self, text: str) -> None:
        self.lines.append(f"{self.now():.6f} {text}")

    def require(self, holds: object, what: str) -> None:
        """Break the run unless it holds. Said once: what follows from it is of no interest."""
        if not holds:
            if self.broken is None:
                self.broken = what
                self.tell(f"BROKEN: {what}")
            raise Broken(what)
