"""From epoch to epoch: what is done when a rank set is lost, in the order in which it must be done.

    run ──lost──> suspend ──> verdict ──give up──> die
     ^                           │
     └── resume <── start <── close the lost one, fail who does not go on
                      └──lost──> verdict

What a loss means is decided by `core.recovery`; this carries it out. Cancelled at any await it leaves the epoch that it
was about as `epoch`, for its owner to close.
"""

import logging
from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol

from async_pp.core.recovery import GiveUp, Recovery, Restart
from async_pp.errors import EngineFailed

log = logging.getLogger(__name__)


class Loss:
    """The end of an epoch.

    Attributes:
        error: why.
        step: number of the oldest step in flight, or None.
        computed: ids of the requests in the step that the lost rank was computing, as far as that is known.
    """

    def __init__(self, error: BaseException, step: int | None, computed: Collection[str] = ()) -> None:
        self.error = error
        self.step = step
        self.computed = computed


class CarriedPort(Protocol):
    """What outlives an epoch."""

    @property
    def requests(self) -> Mapping[str, Any]:
        """The open requests, by id."""

    @property
    def tokens(self) -> Mapping[str, int]:
        """How many tokens each of them has generated."""


class EpochPort(Protocol):
    """One life of the rank set."""

    @property
    def number(self) -> int: ...

    async def start(self) -> None:
        """Start the ranks and all that lives over them. EngineFailed: the rank set was lost in between."""

    async def run(self) -> Loss:
        """Step until the rank set is lost."""

    def leave(self) -> CarriedPort:
        """Nothing is planned or settled any more. Returns what outlives it."""

    async def close(self) -> None:
        """End the ranks, in bounded time."""


class OwnerPort(Protocol):
    """The engine that has one life after the other."""

    async def make(self, number: int) -> EpochPort:
        """An epoch that is not started."""

    def suspend(self, carried: Any) -> None:
        """Hold what comes from here on, beside what was carried over."""

    def fail(self, verdict: Restart, carried: Any, loss: Loss, epoch: int) -> None:
        """End the requests that do not go on, and take them out of what is carried over."""

    async def resume(self, epoch: Any, suspects: Collection[str]) -> None:
        """Go on with this epoch, what was carried over first, then what was held. EngineFailed: it was lost again."""

    def die(self, error: BaseException, step: int | None, why: str | None = None) -> None:
        """End every open request with this error, and admit no more. `why` no other rank set follows."""


class Lives:
    """The epochs of one engine.

    Args:
        owner: the engine.
        first: its first epoch, started.
        recovery: decides.
        clock: monotonic seconds.

    Attributes:
        epoch: the present one, or the last.
    """

    def __init__(self, owner: OwnerPort, first: EpochPort, recovery: Recovery, clock: Callable[[], float]) -> None:
        self.epoch = first
        self._owner = owner
        self._recovery = recovery
        self._clock = clock

    async def run(self) -> None:
        """Step; after a loss go on with another epoch. Returns when the engine has died of one."""
        try:
            while await self._restart(await self.epoch.run()):
                pass
        except Exception as error:
            log.exception("the engine ends")
            self._owner.die(error, None)

    async def _restart(self, lost: Loss) -> bool:
        """Whether there is another epoch."""
        carried = self.epoch.leave()
        self._owner.suspend(carried)
        loss: Loss | None = lost
        while loss is not None:
            verdict = self._recovery.lost(loss.computed, carried.tokens, self._clock())
            if isinstance(verdict, GiveUp):
                log.error("epoch %d is lost: %s; the engine ends: %s", self.epoch.number, loss.error, verdict.why)
                self._owner.die(loss.error, loss.step, verdict.why)
                return False
            self._owner.fail(verdict, carried, loss, self.epoch.number)
            log.warning(
                "epoch %d is lost: %s; restarting: %d requests go on, %d were given up",
                self.epoch.number,
                loss.error,
                len(carried.requests),
                len(verdict.failed),
            )
            loss = await self._next(verdict.suspects)
        return True

    async def _next(self, suspects: Collection[str]) -> Loss | None:
        """Begin the next epoch. Returns its loss if it did not come up."""
        await self.epoch.close()
        self.epoch = await self._owner.make(self.epoch.number + 1)
        try:
            await self.epoch.start()
            await self._owner.resume(self.epoch, suspects)
        except EngineFailed as error:
            return Loss(error, None)
        return None
