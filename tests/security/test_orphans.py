"""A program that is killed by SIGKILL leaves no process, folder, socket or shared memory, wherever it was."""

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from async_pp.models import resolve_model
from tests import conftest

ENDED_S = 1.0
"""On a machine whose cores are free. Ending a process is work: its memory is given back page by page."""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder for temporary files, with a path that is short enough for sockets."""
    made = Path(tempfile.mkdtemp(prefix="o-"))
    yield made
    shutil.rmtree(made)


def killed(folder: Path, *arguments: str, freeze: Sequence[int] = ()) -> tuple[int, set[str]]:
    """Run the program to its gate and kill it. Returns how many processes it had, and the files it had made.

    Args:
        folder: for its temporary files.
        arguments: its gate, and what it runs.
        freeze: which of its processes are stopped before: 0 is the zygote, ranks follow.
    """
    command = [sys.executable, "-m", "tests.security.orphan", *arguments]
    environment = {**os.environ, **conftest.ENVIRONMENT, "TMPDIR": str(folder)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as program:
        assert program.stdout is not None
        lines = iter(program.stdout.readline, "")
        pids = next(([int(word) for word in line.split()] for line in lines if line.strip()[:1].isdigit()), [])
        watched = [os.pidfd_open(pid) for pid in pids]
        files = {path.name for path in folder.rglob("*")} | {path.name for path in Path("/dev/shm").iterdir()}
        for number in freeze:
            frozen = psutil.Process(pids[number])
            frozen.suspend()
            while frozen.status() != psutil.STATUS_STOPPED:
                pass
        program.send_signal(signal.SIGKILL)
        program.wait()
    limit_s = ENDED_S * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
    try:
        left, until = set(watched), time.monotonic() + limit_s
        while left:
            ended, _, _ = select.select(list(left), [], [], max(0.0, until - time.monotonic()))
            assert ended, f"{len(left)} of {len(pids)} processes outlived their program by {limit_s:.1f} s"
            left -= set(ended)
    finally:
        for descriptor in watched:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            os.close(descriptor)
    return len(pids), files


def left_in_memory(before: set[Path]) -> set[Path]:
    """Names of shared memory that came since and that nobody uses: what a living process has is another program's."""
    came = set(Path("/dev/shm").iterdir()) - before
    used: set[Path] = set()
    for process in Path("/proc").glob("[0-9]*") if came else ():
        with contextlib.suppress(OSError):  # it has ended, or is somebody else's
            lines = (process / "maps").read_text().splitlines()
            used |= {Path(line.split(maxsplit=5)[-1]) for line in lines if "/dev/shm/" in line}
            used |= {descriptor.readlink() for descriptor in (process / "fd").iterdir()}
    return came - used


def left_in(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith("async_pp")]


@pytest.mark.parametrize(
    "gate, processes, made",
    [("import", 1, False), ("keep", 1, False), ("spawn", 2, True), ("load", 3, True), ("step", 3, True)],
)
def test_nothing_outlives_a_killed_program(gate: str, processes: int, made: bool, folder: Path) -> None:
    before = set(Path("/dev/shm").iterdir())
    found, files = killed(folder, gate)
    assert found >= processes
    assert ("engine.sock" in files) == made
    assert left_in(folder) == []
    assert left_in_memory(before) == set()


@pytest.mark.parametrize("gate, frozen", [("keep", [0]), ("spawn", [0, 1]), ("load", [0]), ("step", [0, 1, 2])])
def test_nothing_outlives_it_though_it_is_frozen(gate: str, frozen: list[int], folder: Path) -> None:
    before = set(Path("/dev/shm").iterdir())
    killed(folder, gate, freeze=frozen)
    assert left_in(folder) == []
    assert left_in_memory(before) == set()


@pytest.mark.vllm
@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "gate, stages, in_stage",
    [
        ("load", 1, 2),
        pytest.param("device", 1, 2, marks=pytest.mark.slow),
        pytest.param("ready", 1, 2, marks=pytest.mark.slow),
        pytest.param("device", 2, 1, marks=pytest.mark.slow),
        pytest.param("load", 2, 1, marks=pytest.mark.slow),
        pytest.param("ready", 2, 1, marks=pytest.mark.slow),
    ],
)
def test_nothing_of_vllm_outlives_it(gate: str, stages: int, in_stage: int, folder: Path) -> None:
    before = set(Path("/dev/shm").iterdir())
    found, files = killed(folder, gate, str(resolve_model("tiny")), str(stages), str(in_stage))
    assert found >= 3
    assert "engine.sock" in files
    assert left_in(folder) == []
    assert left_in_memory(before) == set()
