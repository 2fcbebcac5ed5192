"""Transfers of KV cache that every rank does its part of: who has reported the end, and when to ask again.

A transfer has ended when as many ranks as the connector expects have reported it. Sets of ranks are kept, not counts: a
rank that reports twice counts once. They live across steps, since ranks end their parts at different times.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

LEAST_PAUSE_S = 0.001
MOST_PAUSE_S = 0.05
"""Bounds of the pause before idle ranks are asked for finished transfers."""

PAUSE_SHARE = 1 / 8
"""That pause, as a share of the time already waited: what is late by it is late by no more than this share."""


@dataclass
class _Open:
    """A transfer that some ranks have reported."""

    expected: int
    ranks: set[int] = field(default_factory=set)


class Transfers:
    """Transfers of one direction.

    Args:
        ranks: number of ranks.
        expected: how many of them report each transfer.

    Attributes:
        repeated: reports of a rank that had reported the same transfer before; they changed nothing.
    """

    def __init__(self, ranks: int, expected: int) -> None:
        self._ranks = ranks
        self._open: dict[str, _Open] = {}
        self.repeated = 0
        self.expect(expected)

    def expect(self, expected: int) -> None:
        """From now on so many ranks report a transfer. One that was reported before keeps its number, as with vLLM.

        Raises:
            ValueError: there are not so many ranks, so that no transfer would ever end.
        """
        if not 1 <= expected <= self._ranks:
            raise ValueError(f"{expected} ranks are to report each transfer, and there are {self._ranks}")
        self.expected = expected

    def report(self, request: str, rank: int) -> None:
        """A rank has done its part."""
        transfer = self._open.setdefault(request, _Open(self.expected))
        self.repeated += rank in transfer.ranks
        transfer.ranks.add(rank)

    def take(self, ready: Callable[[str], bool]) -> set[str]:
        """Requests whose transfer every expected rank has reported, once each; those not `ready` are kept for later."""
        done = {
            request
            for request, transfer in self._open.items()
            if len(transfer.ranks) >= transfer.expected and ready(request)
        }
        for request in done:
            del self._open[request]
        return done

    def forget(self, requests: Iterable[str]) -> None:
        """These requests are gone."""
        for request in requests:
            self._open.pop(request, None)

    @property
    def open(self) -> tuple[str, ...]:
        """Requests whose transfer some rank has reported and that was not taken."""
        return tuple(self._open)


def pause_s(waited_s: float) -> float:
    """Seconds until idle ranks are asked again, when they have been asked for `waited_s` seconds."""
    return min(MOST_PAUSE_S, max(LEAST_PAUSE_S, PAUSE_SHARE * waited_s))
