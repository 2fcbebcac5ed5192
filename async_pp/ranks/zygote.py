"""The zygote: a small process that has imported what ranks need and forks them on request.

Importing vLLM costs 8 to 18 s of CPU per process; a fork costs milliseconds. The zygote is exec'ed with the environment
a rank needs (see `environment`), stays single-threaded, starts no OpenMP region, and does nothing but fork and reap.

It speaks over one socket (SOCK_SEQPACKET). A request is a `Fork` with two descriptors: the memory file that holds the
rank's bootstrap, and its lifeline. The answers are `Forked`, with the rank's pidfd, and later `Exited`. The other
request is `Keep`, answered by `Kept`: a folder that must not outlive the main process.

Lifelines hang up when the main process ends, unless a child that it forked still holds their other ends. So the zygote
also watches the main process itself, and the kernel kills the ranks when the zygote ends. Before it ends it removes the
folders that it was given: a main process that was killed could not. For that it must run: should it be stopped, the
kernel lets it go on when the main process ends. (Or the thread of it that launched the zygote: one that runs is not
changed by that.)
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
from pathlib import Path
from types import FrameType

import msgspec

from async_pp.ranks.folder import remove
from async_pp.ranks.lifeline import hold

MAX_REQUEST_BYTES = 1 << 16
LAST_REAP_S = 0.5
"""How long the end of a killed rank is waited for before its folder is removed."""
PR_SET_PDEATHSIG = 1


class Fork(msgspec.Struct, frozen=True, tag="fork"):
    """Request: fork a rank. Descriptors: bootstrap, lifeline."""

    number: int
    name: str
    target: str
    cpus: tuple[int, ...] | None
    env: dict[str, str]


class Keep(msgspec.Struct, frozen=True, tag="keep"):
    """Request: remove this folder, and the shared memory of its name, when the main process has ended."""

    number: int
    folder: str


class Forked(msgspec.Struct, frozen=True, tag="forked"):
    """Answer: the rank runs. Descriptor: its pidfd."""

    number: int
    pid: int


class Exited(msgspec.Struct, frozen=True, tag="exited"):
    """Answer: the rank has ended. `status` is a negative signal number or the exit code."""

    number: int
    status: int


class Kept(msgspec.Struct, frozen=True, tag="kept"):
    """Answer: it will be removed."""

    number: int


Request = Fork | Keep
Answer = Forked | Exited | Kept


def main(argv: Sequence[str]) -> None:
    """Entry: `zygote CONTROL_FD LIFELINE_FD MODULE...`."""
    parent = os.pidfd_open(os.getppid())
    control, lifeline = socket.socket(fileno=int(argv[0])), int(argv[1])
    for fd in (control.fileno(), lifeline):
        os.set_inheritable(fd, False)
    _at_end_of_parent(signal.SIGCONT)
    hold(lifeline)  # had the parent ended before its pidfd was opened, this would end us
    for module in argv[2:]:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # the collector of a rank then leaves the shared pages alone
    _Zygote(control, parent, lifeline).run()


class _Zygote:
    def __init__(self, control: socket.socket, parent: int, lifeline: int) -> None:
        self._control = control
        self._parent = parent
        self._lifeline = lifeline
        self._pid = os.getpid()
        self._numbers: dict[int, int] = {}  # pid -> request number
        self._folders: list[Path] = []
        self._woken, self._waker = os.pipe()
        os.set_blocking(self._waker, False)
        os.set_blocking(self._woken, False)

    def run(self) -> None:
        signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, _ignore)
        signal.signal(signal.SIGIO, _ignore)  # the main process's end is no longer this one's: there is work to do
        control, ends = self._control.fileno(), {self._parent, self._lifeline}
        while True:
            ready, _, _ = select.select([control, self._woken, *ends], [], [])
            if self._woken in ready:
                self._reap()
            if ends & set(ready) or (control in ready and not self._serve()):
                self._end()
                return

    def _end(self) -> None:
        """End the ranks, reap them where nobody adopts zombies, and remove what the main process may have left."""
        for pid in self._numbers:
            os.kill(pid, signal.SIGKILL)
        self._reap()
        while self._numbers and select.select([self._woken], [], [], LAST_REAP_S)[0]:
            self._reap()
        for folder in self._folders:
            remove(folder)

    def _serve(self) -> bool:
        try:
            packet, fds, _, _ = socket.recv_fds(self._control, MAX_REQUEST_BYTES, 2)
        except ConnectionResetError:  # closed with an answer of ours unread
            return False
        if not packet:
            return False
        match msgspec.msgpack.decode(packet, type=Request):
            case Keep(number=number, folder=folder):
                self._folders.append(Path(folder))
                self._answer(Kept(number), [])
            case Fork() as fork:
                self._fork(fork, *fds)
        return True

    def _fork(self, fork: Fork, bootstrap: int, lifeline: int) -> None:
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

    def _reap(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._woken, 4096)
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
            _reset_signals()
            hold(lifeline)
            _at_end_of_parent(signal.SIGKILL)
            if os.getppid() != self._pid:  # it ended before the kernel was asked to tell
                os._exit(1)
            for fd in (self._control.detach(), self._woken, self._waker, self._parent, self._lifeline):
                os.close(fd)
            os.environ.update(fork.env)
            _bind(fork.cpus)
            with contextlib.suppress(ImportError):
                importlib.import_module("setproctitle").setproctitle(fork.name)
            with os.fdopen(bootstrap, "rb") as memory:
                memory.seek(0)
                handed_over = memory.read()
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


def _at_end_of_parent(number: signal.Signals) -> None:
    """Have the kernel send this process a signal when the thread that made it ends. A fork does not inherit that."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)


def _reset_signals() -> None:
    """Leave nothing of what the zygote or its imports installed. An interrupt is for the main process to act on."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


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
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # taking down what was imported, object by object, would take seconds
