"""The zygote: a small process that has imported what ranks need and forks them on request.

Importing vLLM costs 8 to 18 s of CPU per process; a fork costs milliseconds. The zygote is exec'ed with the environment
a rank needs (see `environment`), stays single-threaded, starts no OpenMP region, and does nothing but fork and reap.

It speaks over one socket (SOCK_SEQPACKET). A request is a `Fork` with two descriptors: the pipe that holds the rank's
bootstrap, and its lifeline. The answers are `Forked`, with the rank's pidfd, and later `Exited`.
"""

import contextlib
import ctypes
import gc
import importlib
import os
import pkgutil
import select
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from types import FrameType

import msgspec

from async_pp.ranks.lifeline import hold

MAX_REQUEST_BYTES = 1 << 16


class Fork(msgspec.Struct, frozen=True):
    """Request: fork a rank. Descriptors: bootstrap pipe, lifeline."""

    number: int
    name: str
    target: str
    cpus: tuple[int, ...] | None
    env: dict[str, str]


class Forked(msgspec.Struct, frozen=True, tag="forked"):
    """Answer: the rank runs. Descriptor: its pidfd."""

    number: int
    pid: int


class Exited(msgspec.Struct, frozen=True, tag="exited"):
    """Answer: the rank has ended. `status` is a negative signal number or the exit code."""

    number: int
    status: int


Answer = Forked | Exited


def main(argv: Sequence[str]) -> None:
    """Entry: `zygote CONTROL_FD LIFELINE_FD MODULE...`."""
    control = socket.socket(fileno=int(argv[0]))
    hold(int(argv[1]))
    for module in argv[2:]:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # the collector of a rank then leaves the shared pages alone
    _Zygote(control).run()


class _Zygote:
    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._numbers: dict[int, int] = {}  # pid -> request number
        self._woken, self._waker = os.pipe()
        os.set_blocking(self._waker, False)
        os.set_blocking(self._woken, False)

    def run(self) -> None:
        signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, _ignore)
        while True:
            control = self._control.fileno()
            ready, _, _ = select.select([control, self._woken], [], [])
            if self._woken in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._woken, 4096)
                self._reap()
            if control in ready and not self._serve():
                return

    def _serve(self) -> bool:
        try:
            request, fds, _, _ = socket.recv_fds(self._control, MAX_REQUEST_BYTES, 2)
        except ConnectionResetError:  # closed with an answer of ours unread
            return False
        if not request:
            return False
        bootstrap, lifeline = fds
        fork = msgspec.msgpack.decode(request, type=Fork)
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            self._child(fork, bootstrap, lifeline)
        os.close(bootstrap)
        os.close(lifeline)
        self._numbers[pid] = fork.number
        pidfd = os.pidfd_open(pid)
        self._answer(Forked(fork.number, pid), [pidfd])
        os.close(pidfd)
        return True

    def _reap(self) -> None:
        while self._numbers:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            self._answer(Exited(self._numbers.pop(pid), os.waitstatus_to_exitcode(status)), [])

    def _answer(self, answer: Answer, fds: list[int]) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # nobody is left to tell: EOF comes next
            socket.send_fds(self._control, [msgspec.msgpack.encode(answer)], fds)

    def _child(self, fork: Fork, bootstrap: int, lifeline: int) -> None:
        """The rank. Never returns."""
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            hold(lifeline)
            for fd in (self._control.detach(), self._woken, self._waker):
                os.close(fd)
            os.environ.update(fork.env)
            _bind(fork.cpus)
            with contextlib.suppress(ImportError):
                importlib.import_module("setproctitle").setproctitle(fork.name)
            with os.fdopen(bootstrap, "rb") as pipe:
                handed_over = pipe.read()
            gc.unfreeze()
            gc.freeze()
            pkgutil.resolve_name(fork.target)(handed_over)
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:  # noqa: BLE001 - nothing of the zygote may run on in the rank
            traceback.print_exc()
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)


def _bind(cpus: tuple[int, ...] | None) -> None:
    """Give the rank its cores, and OpenMP as many threads, before its first parallel region."""
    if cpus is None:
        return
    os.sched_setaffinity(0, cpus)
    os.environ["OMP_NUM_THREADS"] = str(len(cpus))
    set_threads = getattr(ctypes.CDLL(None), "omp_set_num_threads", None)  # the preloaded runtime, when there is one
    if set_threads is not None:
        set_threads(len(cpus))


def _ignore(number: int, frame: FrameType | None) -> None:
    """SIGCHLD needs a handler for its wake-up byte to be written."""


if __name__ == "__main__":
    main(sys.argv[1:])
