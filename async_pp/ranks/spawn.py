"""Making rank processes from the loop: the zygote's client.

Imports nothing heavy, so that a server can launch the zygote as its first action and import vLLM beside it.
"""

import asyncio
import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from async_pp.errors import EngineClosed, StartupError
from async_pp.ranks.zygote import Answer, Exited, Fork, Forked, Keep, Kept, Request

CLOSE_DEADLINE_S = 1.0


@dataclass(frozen=True)
class RankSpec:
    """One rank to be made.

    Attributes:
        rank: its number.
        cpus: cores it is bound to, or None.
        env: variables on top of the zygote's.
        target: "package.module:function", called with the bootstrap.
        bootstrap: bytes for it, handed over in memory because it holds keys.
        name: title of the process.
    """

    rank: int
    cpus: tuple[int, ...] | None
    env: Mapping[str, str]
    target: str
    bootstrap: bytes
    name: str


@dataclass
class RankProcess:
    """A rank that was made.

    Attributes:
        rank, pid: who it is.
        sentinel: its pidfd, readable from its end on.
        exit_status: how it ended, in words.
    """

    rank: int
    pid: int
    sentinel: int
    exit_status: asyncio.Future[str]
    lifeline: int = field(repr=False)

    def kill(self, signal_number: int = signal.SIGKILL) -> None:
        """Send a signal; a rank that has ended is left alone (its pid may be somebody else's by now)."""
        if self.sentinel >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.sentinel, signal_number)

    def release(self) -> None:
        """Close its descriptors: its lifeline goes, so it ends if it has not."""
        for fd in (self.sentinel, self.lifeline):
            if fd >= 0:
                os.close(fd)
        self.sentinel = self.lifeline = -1


class Zygote:
    """The zygote process, from its launch to its end."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._lifeline = -1
        self._loop: asyncio.AbstractEventLoop | None = None
        self._numbers = itertools.count()
        self._forking: dict[int, asyncio.Future[tuple[int, int]]] = {}
        self._running: dict[int, asyncio.Future[str]] = {}
        self._keeping: dict[int, asyncio.Future[None]] = {}
        self._gone = False

    @property
    def ended(self) -> bool:
        """Whether the process was started and has ended."""
        return self._gone or (self._process is not None and self._process.poll() is not None)

    def launch(self, env: Mapping[str, str], preload: Sequence[str] = ()) -> None:
        """Start the process; needs no event loop. It imports `preload` meanwhile; `spawn` waits for it.

        Args:
            env: its whole environment, as `environment.rank_environment` makes it.
            preload: modules to import before the first fork.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        held, lifeline = os.pipe()
        try:
            command = [sys.executable, "-m", "async_pp.ranks.zygote", str(theirs.fileno()), str(held), *preload]
            self._process = subprocess.Popen(
                command,
                env=dict(env),
                pass_fds=(theirs.fileno(), held),
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # a Ctrl-C in the terminal is for the main process to act on
            )
        except BaseException:
            ours.close()
            os.close(lifeline)
            raise
        finally:
            theirs.close()
            os.close(held)
        ours.setblocking(False)
        self._control, self._lifeline = ours, lifeline

    async def start(self, env: Mapping[str, str], preload: Sequence[str] = ()) -> None:
        """Launch, unless `launch` was called before."""
        if self._process is None:
            self.launch(env, preload)

    async def keep(self, folder: Path) -> None:
        """Have a folder and the shared memory of its name removed when this process ends without doing so.

        Returns when the process that does it is there and knows: what is made from then on is not left behind.

        Raises:
            StartupError: the zygote has ended.
        """
        self._attach()
        number = next(self._numbers)
        self._keeping[number] = kept = asyncio.get_running_loop().create_future()
        try:
            assert self._control is not None
            self._control.send(_encoded(Keep(number, str(folder))))
        except OSError as error:
            self._keeping.pop(number)
            raise self._ended(None) from error
        try:
            await kept
        except EngineClosed:
            raise self._ended(None) from None

    async def spawn(self, spec: RankSpec) -> RankProcess:
        """Fork a rank. Cancelled, it leaves none behind.

        Raises:
            StartupError: the zygote has ended.
        """
        self._attach()
        number = next(self._numbers)
        request = _encoded(Fork(number, spec.name, spec.target, spec.cpus, dict(spec.env)))
        loop = asyncio.get_running_loop()
        self._forking[number] = forked = loop.create_future()
        self._running[number] = ended = loop.create_future()
        bootstrap = _memory_file(spec.bootstrap)
        held, lifeline = os.pipe()
        try:
            assert self._control is not None
            socket.send_fds(self._control, [request], [bootstrap, held])
        except OSError as error:
            os.close(lifeline)
            self._forking.pop(number)
            self._running.pop(number)
            raise self._ended(spec.rank) from error
        finally:
            for fd in (bootstrap, held):
                os.close(fd)
        try:
            pid, pidfd = await forked
        except BaseException as error:
            os.close(lifeline)  # whatever was or will be forked for it ends at once
            if forked.done() and not forked.cancelled() and forked.exception() is None:
                os.close(forked.result()[1])  # cancelled in the very moment it came
            if isinstance(error, EngineClosed):
                raise self._ended(spec.rank) from None
            raise
        return RankProcess(spec.rank, pid, pidfd, ended, lifeline)

    async def close(self) -> None:
        """End the process. Its ranks are the supervisor's; may be called again."""
        control, self._control = self._control, None
        if control is not None:
            if self._loop is not None:
                self._loop.remove_reader(control.fileno())
            control.close()
        self._fail()
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1
        if self._process is not None:
            process, self._process = self._process, None
            await _reaped(process)

    def kill(self) -> None:
        """End the process now, without a loop: for a program that goes down. Its ranks lose it, not their lifelines."""
        if self._process is not None:
            process, self._process = self._process, None
            process.kill()
            process.wait()
        if self._control is not None and self._loop is None:
            self._control.close()
            self._control = None
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1

    def _attach(self) -> None:
        if self._control is None or self._gone:
            raise self._ended(None)
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._control.fileno(), self._read)

    def _read(self) -> None:
        assert self._control is not None and self._loop is not None
        while True:
            try:
                answer, fds, _, _ = socket.recv_fds(self._control, 4096, 1)
            except BlockingIOError:
                return
            except OSError:
                answer, fds = b"", []
            if not answer:
                self._loop.remove_reader(self._control.fileno())
                self._gone = True
                self._fail()
                return
            self._take(msgspec.msgpack.decode(answer, type=Answer), fds)

    def _take(self, answer: Answer, fds: list[int]) -> None:
        match answer:
            case Forked(number=number, pid=pid):
                forked = self._forking.pop(number, None)
                if forked is None or forked.done():
                    os.close(fds[0])  # whoever asked has given up; the closed lifeline ends the rank
                else:
                    forked.set_result((pid, fds[0]))
            case Exited(number=number, status=status):
                ended = self._running.pop(number, None)
                if ended is not None and not ended.done():
                    ended.set_result(in_words(status))

            case Kept(number=number):
                kept = self._keeping.pop(number)
                if not kept.done():
                    kept.set_result(None)

    def _fail(self) -> None:
        waiting: list[asyncio.Future[Any]] = [*self._forking.values(), *self._keeping.values()]
        for answer in waiting:
            if not answer.done():
                answer.set_exception(EngineClosed("the zygote has ended"))
                answer.exception()
        for ended in self._running.values():
            if not ended.done():
                ended.set_result("unknown: the process that forked it has ended")
        self._forking.clear()
        self._keeping.clear()
        self._running.clear()

    def _ended(self, rank: int | None) -> StartupError:
        return StartupError("the zygote that forks the ranks has ended", phase="spawn", rank=rank)


def _encoded(request: Request) -> bytes:
    return msgspec.msgpack.encode(request)


def _memory_file(content: bytes) -> int:
    """A descriptor of an anonymous file in memory with this content."""
    descriptor = os.memfd_create("async_pp bootstrap")
    with open(descriptor, "wb", closefd=False) as memory:
        memory.write(content)
    return descriptor


def in_words(status: int) -> str:
    """An exit status as people read it."""
    if status >= 0:
        return f"exit code {status}"
    try:
        return f"signal {signal.Signals(-status).name}"
    except ValueError:
        return f"signal {-status}"


async def _reaped(process: subprocess.Popen[bytes]) -> None:
    """Wait until a process has ended, kill it at the deadline, and reap it."""
    if process.poll() is not None:
        return
    pidfd = os.pidfd_open(process.pid)
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(pidfd, ended.set)
    try:
        async with asyncio.timeout(CLOSE_DEADLINE_S):
            await ended.wait()
    except TimeoutError:
        process.kill()
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)
        if not ended.is_set():
            process.kill()
        process.wait()  # it has ended or was killed: this takes no time
