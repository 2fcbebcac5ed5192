"""A real server as a child process: start it, find its ranks, and see that nothing of it is left."""

import contextlib
import getpass
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import httpx
import psutil

from async_pp.serve.preflight import bind

STOP_LIMIT_S = 10


def _caches():
    """What PyTorch compiles (for log-probabilities) is kept where it always is, not in the server's private folder."""
    return {"TORCHINDUCTOR_CACHE_DIR": f"{tempfile.gettempdir()}/torchinductor_{getpass.getuser()}"}


class Server:
    """`python PROGRAM ARGV --port FREE`, `-m async_pp.serve` as a rule, with a private folder for its runtime files.

    Attributes:
        lines: what it has printed so far, standard output and error together.
    """

    def __init__(self, *argv, env=None, program=("-m", "async_pp.serve")):
        with contextlib.closing(bind("127.0.0.1", 0)) as holder:
            self.port = holder.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.folder = Path(tempfile.mkdtemp(prefix="serve-"))
        self.process = subprocess.Popen(
            [sys.executable, *program, *argv, "--port", str(self.port)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**_caches(), **os.environ, "TMPDIR": str(self.folder), **(env or {})},
        )
        self.lines = []
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._family = []
        self._runtime = []

    def _read(self):
        for line in self.process.stdout:
            with self._news:
                self.lines.append(line.rstrip("\n"))
                self._news.notify_all()
        with self._news:
            self.lines.append("END")
            self._news.notify_all()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in [self.process, *self._family]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()
        self._reader.join()
        self.process.stdout.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def wait_for(self, text, timeout=90, count=1):
        """The printed line with `text` in it that is the first, or as many as `count` says."""

        def found():
            return [line for line in self.lines if text in line]

        with self._news:
            self._news.wait_for(lambda: len(found()) >= count or self.lines[-1:] == ["END"], timeout)
            lines = found()
        assert len(lines) >= count, f"{text!r} was not printed:\n" + "\n".join(self.lines)
        return lines[count - 1]

    def ready(self, text="serving on"):
        """Wait until it prints that it serves; note the processes that belong to it."""
        self.wait_for(text)
        self._family = psutil.Process(self.process.pid).children(recursive=True)
        self._runtime = [path.name for path in self.folder.glob("async_pp*")]
        return self

    def ranks(self):
        """Its rank processes in order of rank: the zygote's children, in the order of forking."""
        (zygote,) = psutil.Process(self.process.pid).children()
        return sorted(zygote.children(), key=lambda child: child.pid)

    def code(self, timeout=STOP_LIMIT_S):
        """Its exit code; waits for its end."""
        return self.process.wait(timeout)

    def left(self):
        """What is left of it after its end: processes (given a second, as after a kill), files, shared memory."""
        _, left = psutil.wait_procs(self._family, timeout=1)
        alive = [process for process in left if not _is_dead(process)]
        return [*alive, *self.folder.glob("async_pp*"), *self._shared_memory()]

    def _shared_memory(self):
        """Shared memory of an epoch is named after its runtime folder."""
        return [path for name in self._runtime for path in Path("/dev/shm").glob(f"{name}*")]

    def client(self, timeout=60):
        """An HTTP client for it."""
        return httpx.Client(base_url=self.url, timeout=timeout)


class Raw:
    """A client that asks for a completion and does not read what comes."""

    def __init__(self, server, body, key="none"):
        self.socket = socket.socket()
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self.socket.connect(("127.0.0.1", server.port))
        content = httpx.Request("POST", server.url, json=body).content
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        self.socket.sendall(head.encode() + content)

    def leave(self, how):
        if how == "half-close":
            self.socket.shutdown(socket.SHUT_WR)
            return
        if how == "reset":
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()


def _is_dead(process):
    """Gone, or a zombie that waits for an init process which does not reap: nothing of the server's doing."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def events(response):
    """The data of a server-sent event stream; the last one is "[DONE]" when it ended properly."""
    for line in response.iter_lines():
        if line.startswith("data: "):
            text = line.removeprefix("data: ")
            yield text if text == "[DONE]" else json.loads(text)
