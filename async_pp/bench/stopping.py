"""SIGINT and SIGTERM as one exception that never comes between the making of a process and the note that it is ours."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


class Stopped(BaseException):
    """SIGINT or SIGTERM, with its number. Not an `Exception`: nothing on the way may take it for a failure."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class _State:
    held = 0
    caught: int | None = None
    instead: Callable[[], object] | None = None


def install() -> None:
    """Raise `Stopped` on SIGINT and SIGTERM from now on. Only the first counts: stopping takes bounded time."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _catch)


@contextmanager
def uninterrupted(instead: Callable[[], object] | None = None) -> Iterator[None]:
    """Hold `Stopped` back until the end of the block: for what is made and noted in two steps.

    Args:
        instead: called when a signal comes, from its handler, also when it came in a block around this one: for an
            event loop, which would swallow an exception out of nowhere, and can cancel its task.

    Raises:
        Stopped: at the end of the block, of the outermost one, when a signal came within it.
    """
    before = _State.instead
    _State.held += 1
    _State.instead = instead
    try:
        if instead is not None and _State.caught is not None:
            instead()
        yield
    finally:
        _State.held -= 1
        _State.instead = before
        if not _State.held and _State.caught is not None:
            number, _State.caught = _State.caught, None
            raise Stopped(number)


def _catch(number: int, _frame: FrameType | None) -> None:
    for other in (signal.SIGINT, signal.SIGTERM):
        signal.signal(other, signal.SIG_IGN)
    if _State.held:
        _State.caught = number
        if _State.instead is not None:
            _State.instead()
    else:
        raise Stopped(number)
