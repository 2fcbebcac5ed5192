"""One maker at a time, nothing half made, nothing left behind; damage found; troubles told in one line."""

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from async_pp.errors import ConfigError
from async_pp.models import Recipe, cache, ensure
from async_pp.models.cache import Workspace, cache_root
from async_pp.models.manifest import MANIFEST, find_damage
from async_pp.models.progress import Silent
from tests.models import fake_recipe as fake

PROGRAM = Path(fake.__file__)


def start(root: Path, mode: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, str(PROGRAM), str(root), mode], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def read_until(program: "subprocess.Popen[str]", start_of_line: str) -> str:
    assert program.stdout is not None
    for line in program.stdout:
        if line.startswith(start_of_line):
            return line.strip()
    raise AssertionError(f"it ended without saying {start_of_line!r}")


@pytest.fixture
def started() -> Iterator[list["subprocess.Popen[str]"]]:
    programs: list[subprocess.Popen[str]] = []
    yield programs
    for program in programs:
        program.kill()
        program.communicate()


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def make(root: Path, recipe: Recipe | None = None, *, verify: bool = False) -> Path:
    return ensure(recipe or fake.recipe(), root, progress=Silent(), verify=verify)


def test_made_once_and_found_again(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = make(tmp_path)
    assert names(folder) == {"half.bin", MANIFEST}
    assert names(tmp_path / "models") == {"fake", "fake.lock"}
    assert make(tmp_path, verify=True) == folder
    assert capfd.readouterr().out.count("building") == 1


def test_killed_run_leaves_no_model_and_next_run_cleans_up(
    tmp_path: Path, started: list["subprocess.Popen[str]"]
) -> None:
    started.append(start(tmp_path, "hold"))
    read_until(started[0], "building")
    started[0].kill()
    started[0].wait()
    left = names(tmp_path / "models")
    assert "fake" not in left
    assert any(name.endswith(".tmp") for name in left)
    make(tmp_path)
    assert names(tmp_path / "models") == {"fake", "fake.lock"}


def test_second_process_waits_says_for_whom_and_builds_nothing(
    tmp_path: Path, started: list["subprocess.Popen[str]"]
) -> None:
    started.append(start(tmp_path, "hold"))
    read_until(started[0], "building")
    started.append(start(tmp_path, "go"))
    assert str(started[0].pid) in read_until(started[1], "stage waiting for process")
    assert started[0].stdin is not None
    started[0].stdin.write("go\n")
    started[0].stdin.flush()
    done = read_until(started[0], "done")
    rest = started[1].communicate()[0]
    assert rest.strip() == done  # nothing else was said: it did not build
    assert started[0].wait() == started[1].wait() == 0


def test_waiter_takes_over_when_the_maker_is_killed(tmp_path: Path, started: list["subprocess.Popen[str]"]) -> None:
    started.append(start(tmp_path, "hold"))
    read_until(started[0], "building")
    started.append(start(tmp_path, "go"))
    read_until(started[1], "stage waiting")
    started[0].kill()
    read_until(started[1], "building")
    read_until(started[1], "done")
    assert (tmp_path / "models" / "fake" / "half.bin").read_bytes() == fake.CONTENT


@pytest.mark.parametrize(
    "spoil",
    [
        lambda folder: (folder / "half.bin").write_bytes(b"short"),
        lambda folder: (folder / "half.bin").unlink(),
        lambda folder: (folder / "half.bin").write_bytes(b"W" + fake.CONTENT[1:]),  # same size, newer
        lambda folder: (folder / MANIFEST).unlink(),
        lambda folder: (folder / MANIFEST).write_text("[]"),
        lambda folder: (folder / MANIFEST).write_bytes(b"\xff{"),
    ],
    ids=["short", "absent", "edited", "no manifest", "wrong manifest", "unreadable manifest"],
)
def test_damage_is_found_and_repaired(tmp_path: Path, spoil: object) -> None:
    folder = make(tmp_path)
    assert callable(spoil)
    spoil(folder)
    assert find_damage(folder, name="fake", version=1) is not None
    assert make(tmp_path) == folder
    assert (folder / "half.bin").read_bytes() == fake.CONTENT
    assert names(tmp_path / "models") == {"fake", "fake.lock"}


def test_silent_rot_is_found_by_verify_only(tmp_path: Path) -> None:
    folder = make(tmp_path)
    file = folder / "half.bin"
    before = file.stat()
    file.write_bytes(b"W" + fake.CONTENT[1:])
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert find_damage(folder, name="fake", version=1) is None
    assert find_damage(folder, name="fake", version=1, full=True) == "half.bin does not match its checksum"
    make(tmp_path, verify=True)
    assert file.read_bytes() == fake.CONTENT


def test_a_copy_with_new_times_is_accepted(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = make(tmp_path)
    os.utime(folder / "half.bin", (1, 1))
    make(tmp_path)
    assert capfd.readouterr().out.count("building") == 1


def test_another_recipe_version_is_made_again(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    make(tmp_path)
    make(tmp_path, fake.recipe(version=2))
    assert capfd.readouterr().out.count("building") == 2


def test_disk_full_before_starting_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 99, 1))
    with pytest.raises(ConfigError, match="no space left for the fake model: 5 MB are needed") as caught:
        make(tmp_path, fake.recipe(needed_bytes=5_000_000))
    assert "\n" not in str(caught.value)
    assert names(tmp_path / "models") == {"fake.lock"}


def test_disk_full_on_the_way_is_one_clear_line_and_leaves_nothing(tmp_path: Path) -> None:
    def build(workspace: Workspace) -> None:
        (workspace.out / "some").write_bytes(b"x")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(ConfigError, match="no space left"):
        make(tmp_path, Recipe("fake", 1, "the fake model", "a test", 0, build))
    assert names(tmp_path / "models") == {"fake.lock"}


def test_a_cache_folder_that_cannot_be_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="set ASYNC_PP_CACHE"):
        make(tmp_path / "file")


def test_cache_root_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("ASYNC_PP_CACHE", raising=False)
    assert cache_root() == tmp_path / ".cache" / "async_pp"
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_root() == Path("/x/async_pp")
    monkeypatch.setenv("ASYNC_PP_CACHE", "/y")
    assert cache_root() == Path("/y")
