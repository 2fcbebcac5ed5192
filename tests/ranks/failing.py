"""A sleeping rank that fails on one rank, in a place and a way of the test's choice."""

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from async_pp.ranks.sleeping_runner import Load, SleepingRunner


class Unspeakable(Exception):
    """Neither its text nor its pickle can be made."""

    def __str__(self) -> str:
        raise RuntimeError("no text")

    def __reduce__(self) -> Any:
        raise RuntimeError("no pickle")


def raises() -> None:
    raise ValueError("no luck")


def raises_unspeakably() -> None:
    raise Unspeakable


def raises_at_length() -> None:
    raise ValueError("x" * 100_000_000 + " the end")


def raises_what_cannot_be_encoded() -> None:
    raise OSError("no file \udc80.txt")


def runs_out_of_memory() -> None:
    raise MemoryError


def raises_system_exit() -> None:
    raise SystemExit(3)


def exits() -> None:
    os._exit(7)


def reads_at_zero() -> None:
    ctypes.string_at(0)


def stops() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def hangs() -> None:
    threading.Event().wait()


def sleeps() -> None:
    time.sleep(1.5)


def prints_garbage() -> None:
    os.write(1, os.urandom(1 << 16))
    print("\0\x1b[31m", end="")
    sys.stdout.flush()


@dataclass(frozen=True)
class Fault(Load):
    """Work of a step that fails.

    Attributes:
        rank: where.
        place: "execute", "sample", "report" (of the connectors) or "answer" (cannot be sent).
        fails: how.
    """

    rank: int = 0
    place: str = "execute"
    fails: Callable[[], None] = raises


class FailingRunner(SleepingRunner):
    """Fails as its work, or what its connectors are sent, says."""

    def execute(self, payload: Load) -> None:
        self._fault = payload
        self._fail("execute")
        super().execute(payload)

    def sample(self, payload: Any) -> Any:
        self._fail("sample")
        if isinstance(self._fault, Fault) and (self._fault.rank, self._fault.place) == (self._rank, "answer"):
            return threading.Lock()
        return super().sample(payload)

    def connector_output(self, answer: Any) -> Any:
        self._fail("report")

    def attend(self, work: Any) -> Any:
        self._fault = work
        self._fail("attend")

    def _fail(self, place: str) -> None:
        fault = self._fault
        if isinstance(fault, Fault) and (fault.rank, fault.place) == (self._rank, place):
            fault.fails()


@dataclass(frozen=True)
class On:
    """A call that does something on one rank and nothing on the others."""

    rank: int
    does: Callable[[], None]

    def __call__(self, runner: SleepingRunner) -> None:
        if runner._rank == self.rank:
            self.does()
