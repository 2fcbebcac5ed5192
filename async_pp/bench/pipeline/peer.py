"""The bench's side of vLLM's process: start, results, end in bounded time. See `peer_process`."""

import asyncio
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import IO

import msgspec

from async_pp.bench import BenchFailed
from async_pp.bench.group import end_group
from async_pp.bench.pipeline.connectors import Connector
from async_pp.bench.pipeline.engines import LOAD_LIMIT_S
from async_pp.bench.pipeline.measured import Measured
from async_pp.bench.pipeline.peer_process import Failed, Heard, Job, Result
from async_pp.bench.pipeline.settings import Settings, Tell
from async_pp.bench.server import last_lines

START_LIMIT_S = 300
"""From its start until it is warm."""

ANSWER_LIMIT_S = LOAD_LIMIT_S + 30
"""For a load, whose own limit should come first."""

STOP_LIMIT_S = 5
"""For it to end its group, and itself, once its socket has ended."""

MOST_LINE_BYTES = 1 << 28
"""Of a result: a hundred bytes per step, stage and token would fill it in hours."""


async def measure(settings: Settings, connector: Connector, folder: Path, tell: Tell) -> list[Measured]:
    """Measure every load. Nothing of vLLM is left afterwards.

    Args:
        settings: what to measure.
        connector: of every rank.
        folder: for the ranks' sockets and temporary files; the model is in it. Its process removes it.
        tell: told what is done now.

    Raises:
        BenchFailed: vLLM or a request failed; with its last words.
    """
    job = Job(str(folder), settings.stages, settings.loads, connector)
    tell("starting")
    with tempfile.TemporaryFile() as log:
        async with _running(job, log) as answers:
            await _next(answers, START_LIMIT_S, log)
            found = []
            for load in settings.loads:
                tell(load.name)
                answer = await _next(answers, ANSWER_LIMIT_S, log)
                assert isinstance(answer, Result)
                found.append(answer.measured)
            return found


async def _next(answers: asyncio.StreamReader, limit_s: float, log: IO[bytes]) -> Heard:
    try:
        async with asyncio.timeout(limit_s):
            line = await answers.readline()
    except TimeoutError as error:
        raise BenchFailed(f"vLLM did not answer in {limit_s:.0f} s\n{last_lines(log)}") from error
    if not line:
        raise BenchFailed(f"vLLM's process ended\n{last_lines(log)}")
    message: Heard = msgspec.json.decode(line, type=Heard)
    if isinstance(message, Failed):
        raise BenchFailed(f"vLLM: {message.text}\n{last_lines(log)}")
    return message


@asynccontextmanager
async def _running(job: Job, log: IO[bytes]) -> AsyncIterator[asyncio.StreamReader]:
    """The process with its job; its answers. It has ended, and all that it made is gone, afterwards."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = _start(theirs, job, log)
        theirs.close()
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        sentinel = os.pidfd_open(process.pid)

        def over() -> None:
            loop.remove_reader(sentinel)
            ended.set()
            ours.shutdown(socket.SHUT_RDWR)  # workers it forked may still hold the other end

        loop.add_reader(sentinel, over)
        try:
            reader, writer = await asyncio.open_connection(sock=ours.dup(), limit=MOST_LINE_BYTES)
            try:
                writer.write(msgspec.json.encode(job) + b"\n")
                yield reader
            finally:
                writer.close()
        finally:
            if not ended.is_set():
                ours.shutdown(socket.SHUT_RDWR)
            try:
                async with asyncio.timeout(STOP_LIMIT_S):
                    await ended.wait()
            except TimeoutError:
                pass  # it is killed now
            finally:
                loop.remove_reader(sentinel)
                os.close(sentinel)
                _end(process)


def _start(pipe: socket.socket, job: Job, log: IO[bytes]) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, "-m", "async_pp.bench.pipeline.peer_process", str(pipe.fileno())],
        env={**os.environ, "TMPDIR": job.folder, "VLLM_PLUGINS": ""},
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        pass_fds=(pipe.fileno(),),
        start_new_session=True,  # a group of its own, which can be ended; and an interrupt is for the bench
    )


def _end(process: "subprocess.Popen[bytes]") -> None:
    end_group(process.pid)
    process.kill()
    process.wait()
