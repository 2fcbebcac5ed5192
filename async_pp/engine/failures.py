"""What is told when a rank fails: one typed error for each way, with rank, epoch, step and what to do.

The same event is a `StartupError` while the ranks start, whatever they do then, and an error of its own kind later.
"""

from async_pp import __version__
from async_pp.core.deadlines import Overdue
from async_pp.errors import EngineFailed, RankError, RankHung, RankLost, StartupError
from async_pp.wire.messages import Hello

RUNNING = "running"
"""The phase after the start."""


class Failures:
    """Makes the errors of one epoch.

    Args:
        epoch: life of the rank set.

    Attributes:
        phase: what the ranks are doing: "spawn", "load", "kv_cache", or `RUNNING`.
    """

    def __init__(self, epoch: int) -> None:
        self.phase = "spawn"
        self._epoch = epoch

    @property
    def starting(self) -> bool:
        """Whether the start is not over."""
        return self.phase != RUNNING

    def start(self, rank: int | None, what: str) -> StartupError:
        """A start that cannot go on. `what` has a subject when `rank` is None."""
        who = "" if rank is None else f"rank {rank} "
        message = f"{who}{what} during start-up ({self.phase})"
        return StartupError(message, phase=self.phase, rank=rank, epoch=self._epoch)

    def ended(self, rank: int, status: str, step: int | None) -> EngineFailed:
        """The process of a rank has ended."""
        if self.starting:
            return self.start(rank, f"ended ({status})")
        return RankLost(f"rank {rank} ended: {status}", exit_status=status, rank=rank, epoch=self._epoch, step=step)

    def raised(self, rank: int, kind: str, text: str, step: int | None) -> RankError:
        """A rank raised, in a step or a call. `text`: its traceback."""
        message = f"rank {rank} raised {_last_line(text, kind)}"
        return RankError(message, traceback=text, rank=rank, epoch=self._epoch, step=step)

    def raised_at_start(self, rank: int, kind: str, text: str) -> StartupError:
        """A rank raised in a call that belongs to the start."""
        failure = self.start(rank, f"raised {_last_line(text, kind)}")
        failure.__cause__ = self.raised(rank, kind, text, None)
        return failure

    def broke_off(self, rank: int, what: str, step: int | None) -> EngineFailed:
        """A rank did what no rank of this engine does."""
        if self.starting:
            return self.start(rank, what)
        return RankError(f"rank {rank} {what}", rank=rank, epoch=self._epoch, step=step)

    def hung(self, overdue: Overdue, deadline_s: float, *, waited_s: float, stopped: bool) -> EngineFailed:
        """A rank was not done in time."""
        rank, step = overdue.ranks[0], overdue.step
        work = "a call" if step is None else f"step {step}"
        what = f"has not finished {work} {waited_s:.1f} s after it could begin"
        if overdue.answered:
            what = f"finished {work} {waited_s:.1f} s ago, but its answer has not come"
        if stopped:
            what += "; its process is stopped"
        if self.starting:
            return self.start(rank, what)
        message = (
            f"rank {rank} {what}; the deadline is {deadline_s:g} s, to be set with --step-deadline (step_deadline_s)"
        )
        return RankHung(message, deadline_s=deadline_s, rank=rank, epoch=self._epoch, step=overdue.computing)


def wrong_hello(hello: Hello, ranks: int) -> str | None:
    """What is wrong with a hello in an engine of so many ranks."""
    if hello.version != __version__:
        return f"runs async_pp {hello.version or 'of an unknown version'}, but the engine {__version__}: start it anew"
    if hello.ranks != ranks:
        return f"was told that there are {hello.ranks} ranks, not {ranks}"
    return None


def _last_line(text: str, kind: str) -> str:
    """What a traceback says in its last line: class and message of the error."""
    return text.strip().rpartition("\n")[2] or kind
