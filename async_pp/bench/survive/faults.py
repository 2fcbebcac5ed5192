"""Faults: which rank, which kind and when, and how they are done to a process from outside."""

import asyncio
import contextlib
import os
import random
import re
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from async_pp.bench.survive.settings import Fault

RAISE, GARBAGE = signal.SIGUSR1, signal.SIGUSR2
"""What `worker` listens to."""

SIGNALS: Mapping[Fault, signal.Signals] = {
    "die": signal.SIGKILL,
    "freeze": signal.SIGSTOP,
    "garbage": GARBAGE,
    "raise": RAISE,
}

_TITLE = re.compile(r"async_pp rank (\d+)")


@dataclass(frozen=True)
class Done:
    """A fault that was due.

    Attributes:
        at_s: seconds since the first one could come.
        fault, rank: what was to happen to whom.
        sent: false when that rank did not run, or could not be told to do it: the ranks were being restarted.
    """

    at_s: float
    fault: Fault
    rank: int
    sent: bool


def ranks(family: Iterable[psutil.Process]) -> dict[int, int]:
    """Process ids of the ranks among a server's processes, by rank, as the titles say that they gave themselves."""
    found: dict[int, int] = {}
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            if title := _TITLE.search(" ".join(process.cmdline())):
                found[int(title[1])] = process.pid
    return found


def do(fault: Fault, pid: int) -> bool:
    """Do it. Returns whether it could be done: a process that does not listen yet would end, which is another fault."""
    number = SIGNALS[fault]
    if fault in ("garbage", "raise") and not _listens(pid, number):
        return False
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def _listens(pid: int, number: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/status").read_text("ascii")
    except OSError:
        return False
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


class Faults:
    """Faults at random moments, until it is cancelled.

    Args:
        kinds: each as likely.
        pp: number of ranks, each as likely.
        every_s: mean of the exponential times between two faults.
        seed: of kinds, ranks and times.
        find: process ids of the ranks that run, by rank; called in a thread.

    Attributes:
        done: what was due so far.
    """

    def __init__(
        self, kinds: Sequence[Fault], pp: int, every_s: float, seed: int, find: Callable[[], Mapping[int, int]]
    ) -> None:
        self._kinds = kinds
        self._pp = pp
        self._every_s = every_s
        self._random = random.Random(f"faults {seed}")
        self._find = find
        self.done: list[Done] = []

    async def run(self) -> None:
        """Do them."""
        began = time.monotonic()
        while True:
            await asyncio.sleep(self._random.expovariate(1 / self._every_s))
            fault, rank = self._random.choice(self._kinds), self._random.randrange(self._pp)
            pid = (await asyncio.to_thread(self._find)).get(rank)
            sent = pid is not None and do(fault, pid)
            self.done.append(Done(round(time.monotonic() - began, 3), fault, rank, sent))


async def ended(pid: int) -> float:
    """Wait for the end of a process. Returns when, monotonic seconds."""
    try:
        sentinel = os.pidfd_open(pid)
    except ProcessLookupError:
        return time.monotonic()
    loop = asyncio.get_running_loop()
    gone: asyncio.Future[float] = loop.create_future()
    loop.add_reader(sentinel, _note, gone)
    try:
        return await gone
    finally:
        loop.remove_reader(sentinel)
        os.close(sentinel)


def _note(gone: asyncio.Future[float]) -> None:
    if not gone.done():
        gone.set_result(time.monotonic())
