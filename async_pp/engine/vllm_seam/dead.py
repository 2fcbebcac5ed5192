"""Our failures as vLLM's own type for a dead engine, so that its clients and routes know what to do with them."""

from http import HTTPStatus

from vllm.exceptions import GracefulHTTPError
from vllm.v1.engine.exceptions import EngineDeadError

from async_pp.errors import EngineFailed, RankError, RankHung, RankLost, RequestLost, StartupError


class DeadEngine(EngineFailed, EngineDeadError):
    """The engine is dead: an `EngineFailed` that vLLM's code recognises."""


class DeadRankLost(RankLost, DeadEngine):
    """A `RankLost` that vLLM's code recognises."""


class DeadRankHung(RankHung, DeadEngine):
    """A `RankHung` that vLLM's code recognises."""


class DeadRankError(RankError, DeadEngine):
    """A `RankError` that vLLM's code recognises."""


class DeadStart(StartupError, DeadEngine):
    """A `StartupError` that vLLM's code recognises."""


def as_dead(
    error: BaseException, why: str | None, *, epoch: int, step: int | None, request_ids: tuple[str, ...]
) -> DeadEngine:
    """The same failure, with why it is the end, the step that was oldest in flight and the requests that it failed."""
    dead: DeadEngine
    message = (
        error.message if isinstance(error, EngineFailed) else f"the engine failed: {type(error).__name__}: {error}"
    )
    if why is not None:
        message = f"{message}; {why}"
    match error:
        case RankLost():
            dead = DeadRankLost(message, exit_status=error.exit_status)
        case RankHung():
            dead = DeadRankHung(message, deadline_s=error.deadline_s)
        case RankError():
            dead = DeadRankError(message, traceback=error.traceback)
        case StartupError():
            dead = DeadStart(message, phase=error.phase)
        case _:
            dead = DeadEngine(message)
    if isinstance(error, EngineFailed):
        dead.rank = error.rank
        step = error.step if error.step is not None else step
    dead.epoch, dead.step, dead.request_ids = epoch, step, request_ids
    dead.__cause__ = error
    return dead


class _Answered(GracefulHTTPError):
    """An error that vLLM's code passes on as it is, with the status that a server answers."""

    def __init__(self, message: str) -> None:
        super().__init__(message, HTTPStatus.SERVICE_UNAVAILABLE)


class LostRequest(RequestLost, _Answered):
    """A `RequestLost` that vLLM's code passes on as it is."""


def as_lost(error: BaseException, request_id: str, *, epoch: int, poison: bool) -> LostRequest:
    """What the stream of one request gets that does not go on after a loss.

    Poison answers 500: to send it again would do the same. Otherwise 503: another try may succeed.
    """
    why = "it is poison, computed in two losses of ranks" if poison else "its ranks were lost"
    lost = LostRequest(f"request {request_id} was given up: {why}: {error}", epoch=epoch, request_ids=(request_id,))
    lost.poison = poison
    if poison:
        lost.http_status = HTTPStatus.INTERNAL_SERVER_ERROR
    if isinstance(error, EngineFailed):
        lost.rank, lost.step = error.rank, error.step
    lost.__cause__ = error
    return lost
