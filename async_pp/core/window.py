"""The window: the steps in flight, oldest first, never more than the slots there are.

A slot is the right to have one step in flight. The shell hands out slots as tokens from a bounded queue and takes one
*before* it plans (a queue of futures would let depth + 2 steps in flight, and workers size their recycled buffers by
the depth). The window is the other half: it holds the order of dispatch, in which steps must settle, and it refuses a
step for which no slot can be free.
"""

from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar


class Numbered(Protocol):
    """What the window needs of a step."""

    @property
    def number(self) -> int: ...


S = TypeVar("S", bound=Numbered)


class WindowFull(Exception):
    """A step was opened although every slot is taken: the caller planned without a slot."""


class Window(Generic[S]):
    """Steps in dispatch order.

    Args:
        depth: the number of slots, at least 1.
    """

    def __init__(self, depth: int) -> None:
        if depth < 1:
            raise ValueError(f"depth must be at least 1, not {depth}")
        self.depth = depth
        self._steps: dict[int, S] = {}  # insertion order is dispatch order

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[S]:
        return iter(tuple(self._steps.values()))

    def __contains__(self, number: int) -> bool:
        return number in self._steps

    @property
    def free(self) -> int:
        """Slots that no step holds."""
        return self.depth - len(self._steps)

    @property
    def oldest(self) -> S | None:
        """The step that must settle next, or None when nothing is in flight."""
        return next(iter(self._steps.values()), None)

    def open(self, step: S) -> None:
        """Add `step` as the youngest. Raises WindowFull without a free slot, ValueError on a number out of order."""
        if not self.free:
            raise WindowFull(f"all {self.depth} slots are taken")
        youngest = next(reversed(self._steps), None)
        if youngest is not None and step.number <= youngest:
            raise ValueError(f"step {step.number} is not younger than step {youngest}")
        self._steps[step.number] = step

    def get(self, number: int) -> S | None:
        """The step in flight with this number, or None."""
        return self._steps.get(number)

    def close(self, number: int) -> S:
        """Take out the oldest step, which must be `number` (ValueError otherwise): steps settle in dispatch order."""
        oldest = self.oldest
        if oldest is None or oldest.number != number:
            raise ValueError(f"step {number} is not the oldest in flight")
        return self._steps.pop(number)

    def clear(self) -> list[S]:
        """Take out every step, oldest first."""
        steps = list(self._steps.values())
        self._steps.clear()
        return steps

    def last_sharing(self, request_ids: frozenset[str], requests_of: dict[int, frozenset[str]]) -> int | None:
        """The youngest step in flight that carries one of `request_ids`, or None."""
        for number in reversed(self._steps):
            if requests_of[number] & request_ids:
                return number
        return None
