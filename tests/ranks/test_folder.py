"""Private folders: made for one, removed by whoever is left, and never taken from somebody who lives."""

import os
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from async_pp.errors import ConfigError
from async_pp.ranks import folder
from async_pp.ranks.folder import RuntimeFolder, sweep


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for temporary files, and one for shared memory, of this test's own."""
    (tmp_path / "tmp").mkdir()
    (tmp_path / "shm").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setattr(folder, "SHARED_MEMORY", tmp_path / "shm")
    return tmp_path / "tmp"


def left_by_a_power_loss() -> Path:
    """A folder with something in it, whose owner has not removed it."""
    made = RuntimeFolder.named()
    assert made.make()
    (made.path / "engine.sock").touch()
    os.mkfifo(made.path / "handover-0-1")
    (folder.SHARED_MEMORY / f"{made.path.name}-cpu-0").touch()
    os.close(made._lock)
    return made.path


def test_it_is_private_and_goes_with_what_is_in_it_and_its_shared_memory(temporary: Path) -> None:
    before = os.umask(0)
    try:
        made = RuntimeFolder.named()
        assert made.make()
    finally:
        os.umask(before)
    assert stat.S_IMODE(made.path.stat().st_mode) == 0o700
    (made.path / "engine.sock").touch()
    others = folder.SHARED_MEMORY / "async_pp-00000000-cpu"
    others.touch()
    (folder.SHARED_MEMORY / f"{made.path.name}-cpu-0").touch()
    made.remove()
    made.remove()
    assert not list(temporary.iterdir())
    assert list(folder.SHARED_MEMORY.iterdir()) == [others]


def test_the_next_start_removes_what_was_left_and_nothing_that_is_in_use(temporary: Path) -> None:
    living = RuntimeFolder.named()
    assert living.make()
    left = left_by_a_power_loss()
    (temporary / "async_pp-bench-x1y2z3w4").mkdir(0o700)  # another kind of folder
    assert sweep() == [left]
    assert sweep() == []
    assert not left.exists()
    assert not list(folder.SHARED_MEMORY.iterdir())
    assert living.path.exists()
    living.remove()


def test_a_folder_of_another_process_is_taken_only_when_that_has_ended(temporary: Path) -> None:
    program = (
        "import sys, tempfile; tempfile.tempdir = sys.argv[1]\n"
        "from async_pp.ranks.folder import RuntimeFolder\n"
        "made = RuntimeFolder.named(); assert made.make(); print(made.path, flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", program, str(temporary)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        path = Path(owner.stdout.readline().strip())
        assert sweep() == []
        owner.send_signal(signal.SIGKILL)
        owner.wait()
        assert sweep() == [path]


def test_links_and_what_is_not_private_are_left_alone(temporary: Path, tmp_path: Path) -> None:
    target = tmp_path / "of somebody"
    target.mkdir(0o700)
    (target / "precious").touch()
    (temporary / "async_pp-0123abcx").symlink_to(target)
    (temporary / "async_pp-0123abcy").mkdir(0o755)
    (temporary / "async_pp-0123abcz").touch(0o700)
    inside = left_by_a_power_loss()
    (inside / "link").symlink_to(target)
    assert sweep() == [inside]
    assert (target / "precious").exists()
    assert len(list(temporary.iterdir())) == 3


def test_another_users_folder_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    left = left_by_a_power_loss()
    with monkeypatch.context() as other:
        other.setattr(os, "geteuid", lambda: os.getuid() + 1)
        assert sweep() == []
    assert sweep() == [left]


def test_a_folder_that_a_sweep_took_in_the_moment_it_was_made_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sweep of another start comes between making and locking, or between opening and locking."""
    made = RuntimeFolder.named()
    locked = folder._locked

    def swept_first(path: Path) -> int:
        monkeypatch.setattr(folder, "_locked", locked)
        assert sweep() == [path]
        return locked(path)

    monkeypatch.setattr(folder, "_locked", swept_first)
    assert not made.make()

    made = RuntimeFolder.named()
    flock = folder.fcntl.flock

    def swept_while_open(descriptor: int, operation: int) -> None:
        monkeypatch.setattr(folder.fcntl, "flock", flock)
        assert sweep() == [made.path]
        flock(descriptor, operation)

    monkeypatch.setattr(folder.fcntl, "flock", swept_while_open)
    assert not made.make()
    assert made._lock == -1


def test_many_starts_at_once_take_nothing_from_each_other(temporary: Path) -> None:
    """Two sweepers that never rest, while folders come and go."""
    over = threading.Event()

    def sweeps() -> Iterator[None]:
        while not over.is_set():
            sweep()
            yield

    sweepers = [threading.Thread(target=lambda: list(sweeps())) for _ in range(2)]
    for thread in sweepers:
        thread.start()
    try:
        taken = 0
        for _ in range(300):
            made = RuntimeFolder.named()
            if not made.make():
                taken += 1
                continue
            (made.path / "engine.sock").touch()
            sweep()
            assert (made.path / "engine.sock").exists()
            made.remove()
        assert taken < 300
    finally:
        over.set()
        for thread in sweepers:
            thread.join()
    sweep()
    assert not list(temporary.iterdir())


@pytest.mark.parametrize("problem", ["absent", "a file"])
def test_a_folder_for_temporary_files_that_cannot_be_used_is_a_clear_error(
    problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / problem))
    if problem == "a file":
        (tmp_path / problem).touch()
    assert sweep() == []
    with pytest.raises(ConfigError, match="TMPDIR"):
        RuntimeFolder.named().make()
