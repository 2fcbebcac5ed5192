"""An event loop on virtual time: where asyncio would sleep until its next timer, the clock is put forward instead.

It is the standard library's selector loop with another clock and another selector, so tasks, timeouts, queues and task
groups behave as they always do, in the same order every time. Two conditions: nothing inside may wait for the world
outside (sockets, threads, processes), because virtual time does not wait for it, and nothing inside may look at a clock
other than `loop.time()`. Computing takes no virtual time.

A loop that has no timer left and nothing ready can never go on: it raises `Deadlock` where asyncio would hang.
"""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, TypeVar, TypeVarTuple, Unpack

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class Deadlock(RuntimeError):
    """Every task waits and no timer is left. The message names the tasks."""


class _Selector(selectors.DefaultSelector):
    """Waits by putting its clock forward. What is ready at once is reported as ever: so the loop wakes itself."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """What is ready now; if nothing is, `timeout` virtual seconds pass."""
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        if timeout is None:
            names = sorted(task.get_name() for task in asyncio.all_tasks(asyncio.get_running_loop()))
            raise Deadlock(f"nothing is left to wait for, yet these tasks wait: {', '.join(names)}")
        self.now_s += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """The loop. Its time begins at 0 s."""

    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._virtual.now_s

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[Unpack[Ts]], T], *args: *Ts
    ) -> asyncio.Future[T]:
        """Refused: virtual time would pass while the thread works.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError("a virtual loop waits for no thread: call the function itself")


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on a virtual loop of its own, as `asyncio.run` does on a real one.

    Raises:
        Deadlock: it can never end.
    """
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
