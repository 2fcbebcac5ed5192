"""SIGTERM and SIGINT: the first asks for a clean end, the second ends at once.

Three stretches of a server's life need three handlers. Before the event loop exists (importing vLLM) there is nothing
to end but this process and what dies with it, so the first signal leaves directly. On the loop the first sets `asked`,
and a deadline makes sure that asking is enough. After the loop any signal leaves.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def leave(code: int) -> NoReturn:
    """End this process now, without unwinding; what is printed so far still gets out."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # a closed pipe or stream must not keep us
            continue
    os._exit(code)


def before_the_loop(tell: Callable[[str], None], at_once: Callable[[], None]) -> None:
    """Until the loop runs: the first signal ends the process with exit code 0.

    Args:
        tell: called with a line for the user.
        at_once: called before leaving; must not block.
    """

    def handle(number: int, _frame: object) -> None:
        tell(f"{signal.Signals(number).name}: ended during start-up")
        at_once()
        leave(0)

    for number in STOP_SIGNALS:
        signal.signal(number, handle)


def after_the_loop() -> None:
    """Once the loop is gone the process is about to end by itself; a signal only makes it quicker."""
    for number in STOP_SIGNALS:
        signal.signal(number, lambda number, _frame: leave(128 + number))


class StopRequest:
    """The wish to stop. `asked` is set by the first signal; `name` is that signal's."""

    def __init__(self, *, deadline_s: float, at_once: Callable[[], None], tell: Callable[[str], None]) -> None:
        """Assigns only.

        Args:
            deadline_s: seconds from the first signal until the process is ended in any case, with exit code 1.
            at_once: called before leaving early; must not block.
            tell: called with a line for the user.
        """
        self.asked = asyncio.Event()
        self.name = ""
        self._deadline_s = deadline_s
        self._at_once = at_once
        self._tell = tell
        self._timer: asyncio.TimerHandle | None = None

    @contextmanager
    def installed(self) -> Iterator["StopRequest"]:
        """Handle the signals on the running loop while the block runs."""
        loop = asyncio.get_running_loop()
        for number in STOP_SIGNALS:
            loop.add_signal_handler(number, self.receive, number)
        try:
            yield self
        finally:
            if self._timer is not None:
                self._timer.cancel()
            for number in STOP_SIGNALS:
                loop.remove_signal_handler(number)
            after_the_loop()

    def receive(self, number: int) -> None:
        """A signal arrived."""
        if self.asked.is_set():
            self._tell(f"{signal.Signals(number).name} again: ending at once")
            self._leave(128 + number)
        self.name = signal.Signals(number).name
        self._tell(f"{self.name}: ending (again to end at once)")
        self._timer = asyncio.get_running_loop().call_later(self._deadline_s, self._too_late)
        self.asked.set()

    def _too_late(self) -> None:
        self._tell(f"not ended {self._deadline_s:.0f} s after {self.name}: ending at once")
        self._leave(1)

    def _leave(self, code: int) -> None:
        try:
            self._at_once()
        finally:
            leave(code)
