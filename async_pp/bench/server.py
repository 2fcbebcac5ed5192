"""One server under test: a child process in a session of its own, from its start to the end of all that it made.

vLLM's server leaves sockets in the folder for temporary files and shared memory behind, also when it is stopped as it
should be. So a server gets a folder of its own, and the shared memory that its processes had open is removed.
"""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Self

import psutil

from async_pp.bench import BenchFailed
from async_pp.bench.stopping import uninterrupted
from async_pp.bench.systems import HOST, SERVED_NAME

START_LIMIT_S = 300
"""From its start until it answers."""

POLL_S = 0.02
"""Between two looks at /health while it starts: nothing else says from outside that another's server is ready."""

STOP_LIMIT_S = 20
"""From SIGTERM to its end; then it is killed."""

CHILDREN_LIMIT_S = 3
"""For what is left of its processes after its own end; then they are killed."""

LAST_LINES = 15


@dataclass(frozen=True)
class Left:
    """How a server ended when it was asked to, and what it left then; nothing of that is there any more.

    Attributes:
        exit_code: negative when a signal ended it.
        processes: names of those that had to be killed.
        files: in its folder for temporary files, and shared memory.
    """

    exit_code: int
    processes: tuple[str, ...]
    files: tuple[str, ...]


class Server:
    """A server that is running inside `with`, and of which nothing is left afterwards.

    Args:
        command, environment: of the process; it must listen on `HOST` and `port`.
        port: see `free_port`.
        log: file for what it prints, or None.

    Attributes:
        left: after its end.
        start_to_first_token_s: from the start of the process to the first streamed token of a first request, which is
            sent as soon as /health answers 200.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], port: int, log: Path | None = None
    ) -> None:
        self._command = command
        self._environment = environment
        self._port = port
        self._log: IO[bytes] = tempfile.TemporaryFile() if log is None else log.open("w+b")  # noqa: SIM115 - closed in __exit__
        self._folder = tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True)
        self._process: subprocess.Popen[bytes] | None = None
        self.start_to_first_token_s = 0.0
        self.left: Left | None = None

    @property
    def url(self) -> str:
        """Where it answers."""
        return f"http://{HOST}:{self._port}"

    def __enter__(self) -> Self:
        """Start it and wait for its first token.

        Raises:
            BenchFailed: it ended, or did not answer in time. Nothing of it is left.
        """
        try:
            began = time.monotonic()
            with uninterrupted():
                self._process = subprocess.Popen(
                    self._command,
                    env={**self._environment, "TMPDIR": self._folder.name},
                    stdin=subprocess.DEVNULL,
                    stdout=self._log,
                    stderr=self._log,
                    start_new_session=True,  # the terminal's interrupt is for the bench, which then stops the server
                )
            self._wait_until_healthy(began + START_LIMIT_S)
            self._first_token(began + START_LIMIT_S)
            self.start_to_first_token_s = time.monotonic() - began
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Stop it: SIGTERM, then, after bounded time, SIGKILL to all of its processes."""
        if self._process is not None:
            family = self.processes()
            sessions = {self._process.pid, *filter(None, map(_session, family))}
            mapped = shared_memory(family)
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_LIMIT_S)
            psutil.wait_procs(family, CHILDREN_LIMIT_S)
            late = {process for process in [*family, *_members(sessions)] if _runs(process)}
            killed = tuple(sorted(_title(process) for process in late))
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            for process in late:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            files = tuple(str(path) for path in [*Path(self._folder.name).iterdir(), *filter(Path.exists, mapped)])
            self.left = Left(self._process.wait(), killed, files)
            for path in mapped:
                path.unlink(missing_ok=True)
        self._folder.cleanup()
        self._log.close()

    def processes(self) -> list[psutil.Process]:
        """The server's process and all below it; parents first."""
        assert self._process is not None
        try:
            leader = psutil.Process(self._process.pid)
            return [leader, *leader.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def last_words(self) -> str:
        """The end of what it has printed."""
        return last_lines(self._log)

    def _wait_until_healthy(self, deadline: float) -> None:
        while True:
            self._check(deadline, "answered /health")
            with contextlib.suppress(OSError, http.client.HTTPException), self._ask("GET", "/health", None) as answer:
                if answer.status == 200:
                    return
            time.sleep(POLL_S)

    def _first_token(self, deadline: float) -> None:
        body = {"model": SERVED_NAME, "prompt": "Hello", "max_tokens": 2, "temperature": 0, "stream": True}
        try:
            with self._ask("POST", "/v1/completions", {**body, "ignore_eos": True}) as answer:
                while line := answer.readline():
                    if line.startswith(b"data: {") and json.loads(line.removeprefix(b"data: ")).get("choices"):
                        return
                    self._check(deadline, "answered its first request")
        except OSError as error:
            raise BenchFailed(f"the first request failed: {error}\n{self.last_words()}") from error
        raise BenchFailed(f"the first request was answered without a token ({answer.status})\n{self.last_words()}")

    @contextlib.contextmanager
    def _ask(self, method: str, path: str, body: object) -> Iterator[http.client.HTTPResponse]:
        with contextlib.closing(http.client.HTTPConnection(HOST, self._port, timeout=60)) as connection:
            text = None if body is None else json.dumps(body)
            connection.request(method, path, text, {"Content-Type": "application/json"})
            yield connection.getresponse()

    def _check(self, deadline: float, what: str) -> None:
        assert self._process is not None
        if (code := self._process.poll()) is not None:
            raise BenchFailed(f"the server ended with {code} before it {what}\n{self.last_words()}")
        if time.monotonic() > deadline:
            raise BenchFailed(f"the server had not {what} after {START_LIMIT_S} s\n{self.last_words()}")


def _session(process: psutil.Process) -> int | None:
    with contextlib.suppress(ProcessLookupError):
        return os.getsid(process.pid)
    return None


def _members(sessions: Collection[int]) -> list[psutil.Process]:
    """Processes of these sessions: also those that are below nobody of them any more."""
    return [process for process in psutil.process_iter() if _session(process) in sessions]


def _runs(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def _title(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline()).strip() or str(process.name())
    return str(process.pid)


def free_port() -> int:
    """A port of `HOST` that nobody listens on."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def shared_memory(processes: Iterable[psutil.Process]) -> set[Path]:
    """Files of shared memory that the processes have mapped."""
    found = set()
    for process in processes:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines():
                if (at := line.find("/dev/shm/")) >= 0:
                    found.add(Path(line[at:].removesuffix(" (deleted)")))
    return found


def last_lines(log: IO[bytes]) -> str:
    """The end of a log that other processes write to."""
    size = os.fstat(log.fileno()).st_size
    text = os.pread(log.fileno(), 1 << 14, max(0, size - (1 << 14))).decode(errors="replace")
    return "\n".join(text.splitlines()[-LAST_LINES:])
