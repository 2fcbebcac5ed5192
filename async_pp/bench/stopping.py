"""SIGINT and SIGTERM as one exception that never comes between the making of a process and the note that it is ours.

A coroutine is cancelled by them instead, and the exception comes when it has ended.
"""

import asyncio
import signal
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

import uvloop

T = TypeVar("T")


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


def run_coroutine(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` on a loop of its own, which ends it on the first SIGINT or SIGTERM.

    Raises:
        Stopped: a signal came, and `work` has ended.
    """
    caught: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_until_signal(work, caught))
    except asyncio.CancelledError:
        if not caught:
            raise
        raise Stopped(caught[0]) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


async def _until_signal(work: Coroutine[Any, Any, T], caught: list[int]) -> T:
    task = asyncio.create_task(work, name="bench")

    def stop(number: int) -> None:
        if not caught:  # only the first counts: stopping takes bounded time
            caught.append(number)
            task.cancel()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number)
    return await task
