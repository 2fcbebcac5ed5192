"""Making a model folder once: lock, build aside, check, rename.

Layout below the root (`$ASYNC_PP_CACHE`, else `$XDG_CACHE_HOME/async_pp`, else `~/.cache/async_pp`):

    models/NAME/            a finished model: complete by construction, with its manifest
    models/.NAME.XXXX.tmp/  being made, or left by a killed run (removed by the next holder of the lock)
    models/NAME.lock        held (flock) by the one process that makes NAME; carries its process id
    downloads/              finished intermediate stages, kept so that a killed run resumes

The lock belongs to an open file, so the kernel frees it when its holder dies, however it dies. It is handed down to the
child that does the heavy work, so that an orphaned child also keeps others out until it is gone.
"""

import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from async_pp.errors import ConfigError
from async_pp.models.manifest import find_damage, sync, write_manifest
from async_pp.models.progress import Progress, StderrProgress


@dataclass(frozen=True)
class Workspace:
    """Where a recipe works: `out` becomes the model folder, `downloads` keeps finished stages between runs.

    `lock_fd` is to be inherited by any child that writes below these folders.
    """

    out: Path
    downloads: Path
    progress: Progress
    lock_fd: int


@dataclass(frozen=True)
class Recipe:
    """How one model folder is made.

    Attributes:
        name: of the folder; letters, digits and hyphens.
        version: raise it when `build` would make something else from the same name.
        title: what a person calls it.
        source: where its content comes from, in words.
        needed_bytes: the disk space that a run takes at its largest.
        build: fills `Workspace.out` with flat files. May raise ConfigError or OSError.
    """

    name: str
    version: int
    title: str
    source: str
    needed_bytes: int
    build: Callable[[Workspace], None]


def cache_root() -> Path:
    """The folder all cached files live in; it need not exist yet."""
    if override := os.environ.get("ASYNC_PP_CACHE"):
        return Path(override).expanduser()
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg).expanduser() / "async_pp"
    return Path.home() / ".cache" / "async_pp"


def ensure(
    recipe: Recipe, cache_dir: Path | None = None, *, progress: Progress | None = None, verify: bool = False
) -> Path:
    """The finished folder of `recipe`, made now if it is absent or damaged.

    Any number of processes may call this at once: one makes it, the others wait for that one. A call that is killed
    leaves nothing under the final name.

    Raises:
        ConfigError: it cannot be made here; one line that says what to do.
    """
    root = cache_root() if cache_dir is None else Path(cache_dir).expanduser()
    folder = root / "models" / recipe.name
    if folder.is_dir() and find_damage(folder, name=recipe.name, version=recipe.version, full=verify) is None:
        return folder
    progress = StderrProgress() if progress is None else progress
    try:
        _make(recipe, root, folder, progress, verify)
    except OSError as error:
        raise ConfigError(_explain(error, recipe, root)) from error
    return folder


def _make(recipe: Recipe, root: Path, folder: Path, progress: Progress, verify: bool) -> None:
    models, downloads = folder.parent, root / "downloads"
    models.mkdir(parents=True, exist_ok=True)
    downloads.mkdir(parents=True, exist_ok=True)
    with _locked(models / f"{recipe.name}.lock", recipe, progress) as lock_fd:
        _remove_leftovers(models, f".{recipe.name}.")
        if folder.exists():
            # Looked at again: while this process waited, another may have finished it.
            damage = find_damage(folder, name=recipe.name, version=recipe.version, full=verify)
            if damage is None:
                return
            progress.stage(f"{folder} has to be made again: {damage}")
        _require_space(recipe, root)
        aside = Path(tempfile.mkdtemp(prefix=f".{recipe.name}.", suffix=".tmp", dir=models))
        try:
            recipe.build(Workspace(aside, downloads, progress, lock_fd))
            progress.stage("writing checksums")
            write_manifest(aside, name=recipe.name, version=recipe.version, source=recipe.source)
            _publish(aside, folder)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
        progress.stage(f"{recipe.title} is ready in {folder}")


def _publish(aside: Path, folder: Path) -> None:
    aside.chmod(0o755)
    if folder.exists():
        # A folder cannot be renamed over a full one. Between the two renames there is no model, never half of one.
        old = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".tmp", dir=folder.parent))
        folder.rename(old / "old")
        aside.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
    else:
        aside.rename(folder)
    sync(folder.parent)


def _remove_leftovers(models: Path, prefix: str) -> None:
    for path in models.iterdir():
        if path.name.startswith(prefix) and path.name.endswith(".tmp"):
            shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _locked(path: Path, recipe: Recipe, progress: Progress) -> Iterator[int]:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
            progress.stage(f"waiting for process {holder}, which is making {recipe.title}")
            fcntl.flock(fd, fcntl.LOCK_EX)
        os.ftruncate(fd, 0)
        os.pwrite(fd, str(os.getpid()).encode(), 0)
        yield fd
    finally:
        os.close(fd)


def _require_space(recipe: Recipe, root: Path) -> None:
    if shutil.disk_usage(root).free < recipe.needed_bytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(root))


def _explain(error: OSError, recipe: Recipe, root: Path) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        need = f"{recipe.needed_bytes / 1e6:.0f} MB"
        return f"no space left for {recipe.title}: {need} are needed in {root}; free some or set ASYNC_PP_CACHE"
    where = error.filename or root
    return f"cannot make {recipe.title}: {error.strerror or error} ({where}); set ASYNC_PP_CACHE to a usable folder"
