"""Every error that leaves this package.

    AsyncPPError
    ├── ConfigError              theirs: bad input, found before anything expensive starts
    │   └── UnsupportedVersion   a vLLM this package was not tested with
    ├── CallbackFailed           theirs: a callback of the host program raised; told to the loop's exception handler
    ├── EngineFailed             ours: the rank set of one epoch is gone; carries rank, epoch, step, request ids
    │   ├── RankLost             a rank process ended (signal, exit, out of memory)
    │   ├── RankHung             a rank did not finish in time what it could have finished; carries the deadline
    │   ├── RankError            a rank raised; carries its traceback as text
    │   ├── StartupError         a rank did not become ready; carries the phase it was in
    │   └── RequestLost          one request was given up with a rank set; the engine goes on
    ├── EngineClosed             clean end: the engine was closed, nothing failed
    └── WireError                a frame that was refused; nothing in it was decoded
        ├── BadFrame             its shape, order or content is wrong
        ├── BadSeal              its seal does not match
        ├── StaleEpoch           it belongs to another life of the rank set
        └── LimitExceeded        it is larger than the limits allow

*Theirs*, *ours* and *clean end* are different types on purpose: a server answers 400, 503 and nothing at all to them.
"""

from collections.abc import Sequence
from typing import TypedDict, Unpack


class AsyncPPError(Exception):
    """Root of all errors of this package."""


def first_of(error: Exception) -> Exception:
    """The first leaf of an exception group, or the error itself.

    A task group ends with the group of what its tasks raised. Here the first is the cause: the others are the same
    loss, seen by other tasks.
    """
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error


class ConfigError(AsyncPPError):
    """The input cannot work. The message is one line and says what to change."""


class UnsupportedVersion(ConfigError):
    """The vLLM that was found is not one this package was tested with."""


class CallbackFailed(AsyncPPError):
    """A callback of the host program raised, and `__cause__` is what. Nothing has ended by it."""


class Where(TypedDict, total=False):
    """Where and when a rank set was lost: see `EngineFailed`."""

    rank: int | None
    epoch: int
    step: int | None
    request_ids: Sequence[str]


class EngineFailed(AsyncPPError):
    """The rank set of one epoch ended while it was needed.

    Attributes:
        message: what happened, without the place.
        rank: the rank that failed first, or None when the failure has no single rank.
        epoch: the life of the rank set it happened in.
        step: the number of the step that this rank was in; of the oldest step in flight at that moment when it was in
            none; None when there was none.
        request_ids: the requests that were open and were failed by it.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        epoch: int = 0,
        step: int | None = None,
        request_ids: Sequence[str] = (),
    ) -> None:
        super().__init__(message)
        self.message = message
        self.rank = rank
        self.epoch = epoch
        self.step = step
        self.request_ids = tuple(request_ids)

    def __str__(self) -> str:
        where = [f"rank {self.rank}"] if self.rank is not None else []
        where.append(f"epoch {self.epoch}")
        where.append(f"step {self.step}" if self.step is not None else "in no step")
        return f"{self.message} ({', '.join(where)})"


class RankLost(EngineFailed):
    """A rank process ended. `exit_status` says how, in words ("signal SIGKILL", "exit code 1")."""

    def __init__(self, message: str, *, exit_status: str = "unknown", **where: Unpack[Where]) -> None:
        super().__init__(message, **where)
        self.exit_status = exit_status


class RankHung(EngineFailed):
    """A rank was not done with a step, or a turn of its connectors, `deadline_s` seconds after it could begin."""

    def __init__(self, message: str, *, deadline_s: float, **where: Unpack[Where]) -> None:
        super().__init__(message, **where)
        self.deadline_s = deadline_s


class RankError(EngineFailed):
    """A rank raised. `traceback` is the rank's own, as text of bounded length."""

    def __init__(self, message: str, *, traceback: str = "", **where: Unpack[Where]) -> None:
        super().__init__(message, **where)
        self.traceback = traceback


class StartupError(EngineFailed):
    """A rank did not become ready. `phase` is what it was doing ("spawn", "load", "kv_cache")."""

    def __init__(self, message: str, *, phase: str = "spawn", **where: Unpack[Where]) -> None:
        super().__init__(message, **where)
        self.phase = phase


class RequestLost(EngineFailed):
    """A request ended with the rank set that computed it, and the engine goes on: `__cause__` is that loss.

    Either none were to go on, or this one was computed in too many losses to be tried again (`poison`).
    """

    poison = False


class EngineClosed(AsyncPPError):
    """The engine was closed while this call waited, or before it was made."""


class WireError(AsyncPPError):
    """A frame was refused before anything in it was decoded."""


class BadFrame(WireError):
    """Shape, order or content of a frame is wrong."""


class BadSeal(WireError):
    """The seal does not match the frame: damaged, forged, or meant for someone else."""


class StaleEpoch(WireError):
    """The frame belongs to another life of the rank set."""


class LimitExceeded(WireError):
    """The frame is larger than the limits allow."""
