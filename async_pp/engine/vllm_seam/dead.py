"""Our failures as vLLM's own type for a dead engine, so that its clients and routes know what to do with them."""

from vllm.v1.engine.exceptions import EngineDeadError

from async_pp.errors import EngineFailed, RankError, RankHung, RankLost, StartupError


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


def as_dead(error: BaseException, *, epoch: int, step: int | None, request_ids: tuple[str, ...]) -> DeadEngine:
    """The same failure, with the step that was oldest in flight and the requests that it failed."""
    dead: DeadEngine
    match error:
        case RankLost():
            dead = DeadRankLost(error.message, exit_status=error.exit_status)
        case RankHung():
            dead = DeadRankHung(error.message, deadline_s=error.deadline_s)
        case RankError():
            dead = DeadRankError(error.message, traceback=error.traceback)
        case StartupError():
            dead = DeadStart(error.message, phase=error.phase)
        case EngineFailed():
            dead = DeadEngine(error.message)
        case _:
            dead = DeadEngine(f"the engine failed: {type(error).__name__}: {error}")
    if isinstance(error, EngineFailed):
        dead.rank = error.rank
        step = error.step if error.step is not None else step
    dead.epoch, dead.step, dead.request_ids = epoch, step, request_ids
    dead.__cause__ = error
    return dead
