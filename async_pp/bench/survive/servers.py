"""The servers of this bench, as `bench serve` starts them; ours with what makes it survive so many losses."""

import os
from pathlib import Path

from async_pp.bench import systems
from async_pp.bench.server import Server, free_port
from async_pp.bench.systems import System

SURVIVING = (
    "--on-rank-loss",
    "replay",
    "--max-restarts",
    "1000000-in-60",  # losses are the point here; by default three in five minutes are the end
)

FAULTY = ("--worker-cls", "async_pp.bench.survive.worker.FaultyWorker")


def server(system: System, pp: int, model: Path, *, log: Path | None = None, faulty: bool = False) -> Server:
    """A server that is not started yet.

    Args:
        system, pp, model: which.
        log: file for what it prints, or None.
        faulty: its ranks do the faults that need their help.
    """
    port = free_port()
    command = systems.command(system, pp, model, port)
    if system == "async_pp":
        command += [*SURVIVING, *(FAULTY if faulty else ())]
    environment = systems.environment(system, pp, os.environ, sorted(os.sched_getaffinity(0)))
    return Server(command, environment, port, log)
