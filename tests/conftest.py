"""What all tests share: the environment vLLM needs on a test machine, and the leak check after each test.

The environment is set here, before any test imports vLLM, because vLLM reads most of it once. The leak check compares child
processes, threads, file descriptors, /dev/shm and runtime folders before and after each test, and the tasks of the test's own loop
before it closes. It looks once, without waiting: what a test started must be gone when the test is over.
"""

import asyncio
import gc
import inspect
import os
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from multiprocessing import resource_tracker
from pathlib import Path

import psutil
import pytest
import uvloop
import zmq
from tqdm import tqdm

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "GLOO_SOCKET_IFNAME": "lo",
    "VLLM_HOST_IP": "127.0.0.1",
    "TOKENIZERS_PARALLELISM": "false",
}
RUNTIME_PREFIXES = ("async-pp", "async_pp")


def set_environment() -> None:
    """Set what vLLM needs to run offline on the loopback interface; values that are set already win."""
    for key, value in ENVIRONMENT.items():
        os.environ.setdefault(key, value)


set_environment()


KEPT_PROCESSES: set[int] = set()
KEPT_DESCRIPTORS: set[int] = set()
"""What outlives a test by intent: the zygote that is launched ahead for the next engine (tests/vllm/engines.py)."""


@dataclass(frozen=True)
class Held:
    """What this process holds of the machine."""

    processes: frozenset[tuple[int, str]]
    threads: frozenset[threading.Thread]
    descriptors: frozenset[tuple[int, str]]
    files: frozenset[str]

    @classmethod
    def now(cls) -> "Held":
        """Take stock."""
        return cls(_processes(), frozenset(threading.enumerate()), _descriptors(), _files())


def _processes() -> frozenset[tuple[int, str]]:
    # Python's own resource tracker stays for the life of the process by design.
    tracker = getattr(resource_tracker._resource_tracker, "_pid", None)
    found = set()
    for child in psutil.Process().children(recursive=True):
        if child.pid == tracker or child.pid in KEPT_PROCESSES:
            continue
        try:
            found.add((child.pid, " ".join(child.cmdline()) or child.name()))
        except psutil.NoSuchProcess:
            continue
        except psutil.ZombieProcess:
            found.add((child.pid, "zombie"))
    return frozenset(found)


def _descriptors() -> frozenset[tuple[int, str]]:
    tracker = getattr(resource_tracker._resource_tracker, "_fd", None)
    found = set()
    for entry in os.listdir("/proc/self/fd"):
        try:
            found.add((int(entry), os.readlink(f"/proc/self/fd/{entry}")))
        except FileNotFoundError:
            continue  # the descriptor of the listing itself
    return frozenset((fd, target) for fd, target in found if fd != tracker and fd not in KEPT_DESCRIPTORS)


def _files() -> frozenset[str]:
    shared = {f"/dev/shm/{name}" for name in os.listdir("/dev/shm")}
    folders = {tempfile.gettempdir(), os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()}
    runtime = {
        str(path)
        for folder in folders
        if Path(folder).is_dir()
        for path in Path(folder).iterdir()
        if path.name.startswith(RUNTIME_PREFIXES)
    }
    return frozenset(shared | runtime)


def _of_others(path: str) -> bool:
    """Return whether a running process outside this one's tree uses path: other test runs may share the machine."""
    ours = {os.getpid(), *(pid for pid, _ in _processes())}
    for process in psutil.process_iter():
        if process.pid in ours:
            continue
        try:
            maps = Path(f"/proc/{process.pid}/maps").read_text()
            targets = [os.readlink(entry) for entry in Path(f"/proc/{process.pid}/fd").iterdir()]
            sockets = Path(f"/proc/{process.pid}/net/unix").read_text()
        except OSError:
            continue
        if path in maps or any(target.startswith(path) for target in targets) or f"{path}/" in sockets:
            return True
    return False


def _left_over(before: Held) -> list[str]:
    after = Held.now()
    return [
        *(f"process {pid}: {command}" for pid, command in sorted(after.processes - before.processes)),
        *(f"thread {thread.name}" for thread in after.threads - before.threads),
        *(f"descriptor {fd}: {target}" for fd, target in sorted(after.descriptors - before.descriptors)),
        *(
            f"file {path}"
            for path in sorted(after.files - before.files)
            if not _of_others(path) and Path(path).exists()  # another run's may be gone by now
        ),
    ]


@pytest.fixture(scope="session", autouse=True)
def libraries_are_warm() -> None:
    """What libraries make once per process and keep: uvloop a pipe, pyzmq a thread that frees zero-copy messages.

    tqdm would start a thread with its first progress bar, whichever test shows one: it is told not to.
    """
    tqdm.monitor_interval = 0
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.sleep(0))
    with zmq.Context() as context, context.socket(zmq.PUSH) as push, context.socket(zmq.PULL) as pull:
        pull.bind("inproc://warm")
        push.connect("inproc://warm")
        push.send(bytes(1 << 20), copy=False)
        pull.recv()


@pytest.fixture(autouse=True)
def leak_check(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves a process, thread, descriptor, shared memory or runtime folder behind.

    A test that needs a process-wide thing to live on (a module's shared zygote) is marked `leaks(reason)`; so is one whose
    leak is another library's.
    """
    if request.node.get_closest_marker("leaks"):
        yield
        return
    before = Held.now()
    yield
    if _left_over(before):
        gc.collect()  # only what survives the collector is a leak
        if left := _left_over(before):
            pytest.fail("left behind: " + "; ".join(left))


@pytest.fixture
async def _tasks() -> AsyncIterator[None]:
    before = asyncio.all_tasks()
    yield
    left = asyncio.all_tasks() - before - {asyncio.current_task()}
    if left:
        pytest.fail("tasks left behind: " + ", ".join(sorted(task.get_name() for task in left if task)))


@pytest.fixture(autouse=True)
def task_check(request: pytest.FixtureRequest, leak_check: None) -> None:
    """Fail an async test that leaves a task in its loop. Set up after leak_check, so the loop is closed before that looks."""
    if inspect.iscoroutinefunction(getattr(request, "function", None)):
        request.getfixturevalue("_tasks")


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers of this folder."""
    config.addinivalue_line("markers", "leaks(reason): no leak check, for the reason given")
