"""vLLM's engine in a process of its own: unmodified, with its engine process and its multiprocess executor.

JSON lines through a socket: in comes one `Job`, out come `Heard` lines. The end of the socket ends it, at any time:
every process of its group is killed, their shared memory and the folder are removed. So it makes no difference whether
the bench has what it wanted, is stopped or is killed.
"""

import asyncio
import os
import shutil
import signal
import socket
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import IO

import msgspec
import uvloop

from async_pp.bench import BenchFailed
from async_pp.bench.group import end_group
from async_pp.bench.pipeline.connectors import Connector
from async_pp.bench.pipeline.loads import WARM_UP, Load
from async_pp.bench.pipeline.measured import Measured
from async_pp.ranks.sleeping_runner import StageTime


class Job(msgspec.Struct, frozen=True):
    """What to measure.

    Attributes:
        folder: for the ranks' sockets and all else that is made, with the model in it; removed at the end.
        stages: time of each stage.
        loads: in order.
        connector: of every rank.
    """

    folder: str
    stages: tuple[StageTime, ...]
    loads: tuple[Load, ...]
    connector: Connector


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The engine has started and is warm."""


class Result(msgspec.Struct, frozen=True, tag=True):
    """The next load was measured."""

    measured: Measured


class Failed(msgspec.Struct, frozen=True, tag=True):
    """There is no figure: why."""

    text: str


Heard = Ready | Result | Failed


def main(fd: int) -> None:
    """Do the job that comes through the socket, then wait for its end."""
    if os.getpgid(0) != os.getpid():
        raise SystemExit("this process ends its whole group: start it in a session of its own")
    os.dup2(2, 1)  # whatever vLLM prints goes where its warnings go
    pipe = socket.socket(fileno=fd)
    lines = pipe.makefile("rb")
    job = msgspec.json.decode(lines.readline(), type=Job)
    watcher = threading.Thread(target=_end_with, args=(lines, Path(job.folder)), daemon=True)
    watcher.start()
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_measure(job, pipe))
    except Exception as error:  # noqa: BLE001 - whatever it is, the bench tells it and ends
        _tell(pipe, Failed(str(error) if isinstance(error, BenchFailed) else f"{type(error).__name__}: {error}"))
    watcher.join()


async def _measure(job: Job, pipe: socket.socket) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    from async_pp.bench.pipeline.engines import Client, arguments
    from async_pp.bench.pipeline.host import Written, timed

    values = arguments(Path(job.folder), job.stages, job.connector)
    args = AsyncEngineArgs(**values, distributed_executor_backend="mp")
    config = args.create_engine_config()
    # The configuration asks for spawned workers on CPUs. These have no threads to lose, and forked ones start faster.
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
    path = Path(job.folder) / "host"
    config.scheduler_config.scheduler_cls = timed(config.scheduler_config.get_scheduler_cls(), path)
    client = Client(AsyncLLM.from_vllm_config(config))
    await client.run(WARM_UP)
    written = Written(path)
    _tell(pipe, Ready())
    for load in job.loads:
        written.take()
        measured = await client.run(load)
        _tell(pipe, Result(replace(measured, hosted=written.take())))


def _tell(pipe: socket.socket, message: Heard) -> None:
    pipe.sendall(msgspec.json.encode(message) + b"\n")


def _end_with(lines: IO[bytes], folder: Path) -> None:
    """Wait for the end of the socket, then end."""
    lines.read()
    end_group(os.getpid())
    shutil.rmtree(folder, ignore_errors=True)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(int(sys.argv[1]))
