"""Telling a person what a slow job is doing: one line a stage, and how far a long stage has come."""

import sys
import time
from typing import Protocol, TextIO

_BAR_CELLS = 30
_REDRAW_S = 0.1


class Progress(Protocol):
    """What a recipe reports to."""

    def stage(self, text: str) -> None:
        """A new stage has begun; `text` says what is done now, as a short phrase."""

    def update(self, done: int, total: int) -> None:
        """The stage has come to `done` of `total` (same unit; `total` > 0)."""

    def terminal(self) -> TextIO | None:
        """A terminal that a child process may draw on, or None."""


class Silent:
    """Reports nothing."""

    def stage(self, text: str) -> None:
        """Nothing."""

    def update(self, done: int, total: int) -> None:
        """Nothing."""

    def terminal(self) -> TextIO | None:
        """None."""
        return None


class StderrProgress:
    """Lines on stderr with the seconds since the start; on a terminal also a bar for stages that report their part."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._is_terminal = self._stream.isatty()
        self._begin_s = time.monotonic()
        self._drawn_s = 0.0
        self._bar_open = False

    def stage(self, text: str) -> None:
        """One line: the seconds since the start, and `text`."""
        if self._bar_open:
            self._stream.write("\r\033[K")
            self._bar_open = False
        self._stream.write(f"[{time.monotonic() - self._begin_s:5.1f} s] {text}\n")
        self._stream.flush()

    def update(self, done: int, total: int) -> None:
        """Redraw the bar, at most ten times a second. Not on a file or pipe, where a bar is only noise."""
        now_s = time.monotonic()
        if not self._is_terminal or now_s - self._drawn_s < _REDRAW_S:
            return
        self._drawn_s = now_s
        self._bar_open = True
        part = min(done / total, 1.0)
        bar = ("#" * round(part * _BAR_CELLS)).ljust(_BAR_CELLS, ".")
        self._stream.write(f"\r          [{bar}] {part:4.0%}")
        self._stream.flush()

    def terminal(self) -> TextIO | None:
        """The stream, when it is a terminal."""
        return self._stream if self._is_terminal else None
