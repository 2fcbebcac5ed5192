"""Watching rank processes: their death is an event of the loop, their end is bounded.

A pidfd becomes readable the moment its process ends, so nothing polls. The supervisor only reports; what a death means
is decided elsewhere.
"""

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

from async_pp.ranks.spawn import RankProcess, in_words

STATUS_DEADLINE_S = 0.05
"""How long a death waits to be told with its exit status, which the zygote reports a moment later."""

TERM_SHARE_S = 0.5
"""What a rank gets between SIGTERM and SIGKILL."""


class Supervisor:
    """Watches the ranks of one epoch.

    Args:
        on_death: called once per rank that ends while it is watched, with the rank and how it ended.
    """

    def __init__(self, on_death: Callable[[int, str], None]) -> None:
        self._on_death = on_death
        self._alive: dict[int, RankProcess] = {}
        self._dead: list[RankProcess] = []
        self._ended = asyncio.Event()
        self._telling: set[asyncio.Task[None]] = set()
        self._stopping = False

    @property
    def alive(self) -> tuple[int, ...]:
        """Ranks that have not ended."""
        return tuple(self._alive)

    def stopped(self, rank: int) -> bool:
        """Whether a signal holds the process of a rank."""
        process = self._alive.get(rank)
        return process is not None and _state(process.pid)[0] == "T"

    def watch(self, process: RankProcess) -> None:
        """Watch a rank until it ends. One that comes when `stop` or `kill` was called is ended at once."""
        if self._stopping:
            process.kill()
            process.release()
            return
        self._alive[process.rank] = process
        asyncio.get_running_loop().add_reader(process.sentinel, self._died, process)

    async def stop(self, deadline_s: float) -> None:
        """Wait until every rank has ended: by itself within `deadline_s`, else by SIGTERM, else by SIGKILL."""
        self._stopping = True
        try:
            loop = asyncio.get_running_loop()
            grace = loop.time() + max(0.0, deadline_s - TERM_SHARE_S)
            if not await self._all_ended(grace):
                self._signal(signal.SIGTERM)
                if not await self._all_ended(grace + TERM_SHARE_S):
                    self._signal(signal.SIGKILL)
                    await self._all_ended(None)
        finally:
            self.kill()

    def kill(self) -> None:
        """End every rank now and let go of it."""
        self._stopping = True
        for task in self._telling:
            task.cancel()
        for process in list(self._alive.values()):
            process.kill()
            self._forget(process)
        for process in self._dead:
            process.release()
        self._dead.clear()

    async def _all_ended(self, until_s: float | None) -> bool:
        try:
            async with asyncio.timeout_at(until_s):
                while self._alive:
                    self._ended.clear()
                    await self._ended.wait()
        except TimeoutError:
            return False
        return True

    def _signal(self, number: int) -> None:
        for process in self._alive.values():
            process.kill(number)

    def _forget(self, process: RankProcess) -> None:
        process.exit_status.get_loop().remove_reader(process.sentinel)
        del self._alive[process.rank]
        self._dead.append(process)
        self._ended.set()

    def _died(self, process: RankProcess) -> None:
        self._forget(process)
        if self._stopping:
            return
        if process.exit_status.done():
            self._on_death(process.rank, process.exit_status.result())
        elif (ended := _state(process.pid))[0] == "Z":  # not reaped yet: the kernel knows more than the zygote
            self._on_death(process.rank, in_words(os.waitstatus_to_exitcode(ended[1])))
        else:
            task = asyncio.get_running_loop().create_task(
                self._tell(process), name=f"async_pp end of rank {process.rank}"
            )
            self._telling.add(task)
            task.add_done_callback(self._telling.discard)

    async def _tell(self, process: RankProcess) -> None:
        done, _ = await asyncio.wait([process.exit_status], timeout=STATUS_DEADLINE_S)
        status = process.exit_status.result() if done else "unknown"
        if not self._stopping:
            self._on_death(process.rank, status)


def _state(pid: int) -> tuple[str, int]:
    """State of a process ("T": stopped, "Z": ended and not reaped, "": unknown) and its wait status, see proc(5)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", 0
    return fields[0], int(fields[-1])
