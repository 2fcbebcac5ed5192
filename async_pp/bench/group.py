"""The end of a process group of which nothing may be left, whatever state its processes are in."""

import contextlib
import os
import select
from pathlib import Path

import psutil

from async_pp.bench.server import shared_memory

KILL_LIMIT_S = 1.0
"""For a process that was killed to have ended."""


def end_group(group: int) -> None:
    """Kill every process of a group and remove the shared memory that they had open. The caller itself is spared.

    They are stopped first, and looked for again until no new one appears: none is made and none maps memory meanwhile.

    Args:
        group: its id; the processes stay in the group that the first of them began.
    """
    found: dict[int, psutil.Process] = {}
    while new := [process for process in _members(group) if process.pid not in found]:
        for process in new:
            found[process.pid] = process
            with contextlib.suppress(psutil.NoSuchProcess):
                process.suspend()
    files = shared_memory([*found.values(), psutil.Process()] if os.getpgid(0) == group else found.values())
    for process in found.values():
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    for pid in found:
        _await_end(pid)
    for path in files:
        path.unlink(missing_ok=True)


def _await_end(pid: int) -> None:
    """Wait until a killed process, anybody's child, has ended: soon, unless the kernel holds it."""
    with contextlib.suppress(ProcessLookupError):
        sentinel = os.pidfd_open(pid)
        try:
            select.select([sentinel], [], [], KILL_LIMIT_S)
        finally:
            os.close(sentinel)


def _members(group: int) -> list[psutil.Process]:
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            if entry.name.isdecimal() and int(entry.name) != os.getpid() and os.getpgid(int(entry.name)) == group:
                found.append(psutil.Process(int(entry.name)))
    return found
