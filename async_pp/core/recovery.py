"""What follows when the rank set of an epoch is lost: another one, or the end. Pure.

Restarts are limited in number per time, as supervisors of processes do it: what keeps failing is not helped by more of
the same. A request that was being computed in a loss is a suspect; one that was in two is poison and is given up, the
others go on.

A loss is not held against a request for ever: one that is open for hours may be computed in two that it has nothing to
do with. It is forgotten when the request is well past the place at which it was lost, so that what always dies at the
same token has its two losses there, and when the loss is too old to count as a restart, so that what dies again and
again in another place is given up before it has used up the restarts of everybody.
"""

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

OnLoss = Literal["replay", "fail", "exit"]
"""What a loss means for the open requests: they go on from the tokens they have, they end with an error and the engine
goes on, or the engine ends with them."""

ON_LOSS: tuple[OnLoss, ...] = get_args(OnLoss)

POISON_LOSSES = 2
"""Losses that a request may be computed in; with the last of them it is given up."""

PAST_TOKENS = 256
"""Tokens by which a request is well past the place of a loss. The same cause may show itself some tokens later than
before: tokens of steps in flight are not settled, the first step of a replay computes many tokens where there was a
step for each, and some things happen once per block of the KV cache."""


@dataclass(frozen=True)
class Intensity:
    """How many restarts are tried: with `most` of them within the last `within_s` seconds the next loss is the end."""

    most: int = 3
    within_s: float = 300.0

    def __post_init__(self) -> None:
        """ValueError for a negative number or a time that is not positive."""
        if self.most < 0 or not self.within_s > 0:
            raise ValueError(f"at most {self.most} restarts in {self.within_s} s cannot be meant")


@dataclass(frozen=True)
class GiveUp:
    """No further rank set. `why` completes "the engine ends: "."""

    why: str


@dataclass(frozen=True)
class Restart:
    """Make another rank set.

    Attributes:
        failed: open requests that end with an error.
        poisoned: those of them that are given up for having been computed in too many losses.
        suspects: the other open ones that were computed in a loss: no two of them share a step until each has come
            through one.
    """

    failed: frozenset[str]
    poisoned: frozenset[str]
    suspects: frozenset[str]


@dataclass(frozen=True)
class _Suspicion:
    """Losses in which a request was computed, and when and with how many tokens of its own it was in the last one."""

    losses: int
    at_s: float
    tokens: int


class Recovery:
    """The losses of one engine.

    Args:
        on_loss: see `OnLoss`.
        intensity: how many restarts are tried.
    """

    def __init__(self, on_loss: OnLoss = "replay", intensity: Intensity = Intensity()) -> None:
        self._on_loss = on_loss
        self._intensity = intensity
        self._restarts_s: deque[float] = deque()
        self._suspicions: dict[str, _Suspicion] = {}  # of open requests
        self.count = 0

    def lost(self, computed: Collection[str], open_requests: Mapping[str, int], now_s: float) -> GiveUp | Restart:
        """The rank set was lost, or one that was being started did not come up.

        Args:
            computed: requests that the rank which was lost was computing.
            open_requests: all that have not ended, and how many tokens each has generated.
            now_s: monotonic seconds.
        """
        self.count += 1
        if self._on_loss == "exit":
            return GiveUp("no restart is wanted")
        while self._restarts_s and self._restarts_s[0] <= now_s - self._intensity.within_s:
            self._restarts_s.popleft()
        if len(self._restarts_s) >= self._intensity.most:
            return GiveUp(f"{len(self._restarts_s)} restarts within {self._intensity.within_s:g} s were not enough")
        self._restarts_s.append(now_s)
        everyone = frozenset(open_requests)
        if self._on_loss == "fail":
            self._suspicions.clear()
            return Restart(failed=everyone, poisoned=frozenset(), suspects=frozenset())
        former = {
            request: suspicion
            for request, suspicion in self._suspicions.items()
            if request in everyone and not self._forgotten(suspicion, open_requests[request], now_s)
        }
        present = {
            request: _Suspicion(former[request].losses + 1 if request in former else 1, now_s, open_requests[request])
            for request in everyone.intersection(computed)
        }
        poisoned = frozenset(name for name, suspicion in present.items() if suspicion.losses >= POISON_LOSSES)
        self._suspicions = {name: one for name, one in (former | present).items() if name not in poisoned}
        return Restart(failed=poisoned, poisoned=poisoned, suspects=frozenset(self._suspicions))

    def _forgotten(self, suspicion: _Suspicion, tokens: int, now_s: float) -> bool:
        past = tokens - suspicion.tokens >= PAST_TOKENS
        return past and suspicion.at_s <= now_s - self._intensity.within_s
