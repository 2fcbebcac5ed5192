"""The private folder of one epoch (mode 0700): its socket, its rendezvous file, and the name of its shared memory.

Who removes it: the engine when the epoch ends; the zygote when the engine's process was killed (see `zygote`); the next
engine's start when both were, as in a loss of power. The last must never take a folder that is in use, so the engine
holds a lock (flock) on the folder itself, which the kernel lets go of with its process. Nothing is waited for.

No links are followed and nothing of another user is touched: the folder lies where everybody may write.
"""

import fcntl
import os
import re
import secrets
import shutil
import stat
import string
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Self

from async_pp.errors import ConfigError

SHARED_MEMORY = Path("/dev/shm")

_LETTERS = string.ascii_lowercase + string.digits
_NAME = re.compile(r"async_pp-[a-z0-9]{8}")


class RuntimeFolder:
    """A folder that this process owns, from `make` to `remove`.

    Attributes:
        path: where it is. Its name is given to no other folder, and begins the names of the epoch's shared memory.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = -1

    @classmethod
    def named(cls) -> Self:
        """A folder that does not exist yet, in the folder for temporary files."""
        # No more letters: a socket's path has room for little more than a hundred characters in all.
        letters = "".join(secrets.choice(_LETTERS) for _ in range(8))
        return cls(Path(tempfile.gettempdir()) / f"async_pp-{letters}")

    def make(self) -> bool:
        """Make it and lock it. Returns False when the start of another engine swept it away in that moment.

        Raises:
            ConfigError: the folder for temporary files cannot be used.
        """
        try:
            self.path.mkdir(mode=0o700)
            try:
                self._lock = _locked(self.path)
            except (FileNotFoundError, BlockingIOError):
                return False
        except OSError as error:
            raise ConfigError(f"a private folder cannot be made: {error}: set TMPDIR to another folder") from error
        if _is(self._lock, self.path):
            return True
        self._unlock()
        return False

    def remove(self) -> None:
        """Remove it with all that is in it and the shared memory of its name. May be called again."""
        remove(self.path)
        self._unlock()

    def unlink_shared_memory(self) -> None:
        """Take the names away: once every rank has mapped it the memory lives without, and no death can leave it."""
        unlink_shared_memory(self.path.name)

    def _unlock(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def remove(path: Path) -> None:
    """Remove a folder and the shared memory of its name, whoever owns it."""
    unlink_shared_memory(path.name)
    shutil.rmtree(path, ignore_errors=True)


def unlink_shared_memory(name: str) -> None:
    """Remove this user's files in shared memory whose names begin with `name` and a dash."""
    for path in SHARED_MEMORY.glob(f"{name}-*"):
        with suppress(OSError):
            if path.lstat().st_uid == os.geteuid():
                path.unlink()


def sweep() -> list[Path]:
    """Remove what engines left that had no chance to. Returns the folders.

    Only folders of this user with mode 0700 and a name of ours, whose owner has gone. Blocks for as long as it takes to
    read the folder for temporary files.
    """
    return [path for path in _ours(Path(tempfile.gettempdir())) if _removed_if_left(path)]


def _ours(folder: Path) -> list[Path]:
    with suppress(OSError), os.scandir(folder) as entries:
        return [Path(entry.path) for entry in entries if _NAME.fullmatch(entry.name)]
    return []


def _removed_if_left(path: Path) -> bool:
    try:
        lock = _locked(path)
    except OSError:  # in use, not ours, or gone
        return False
    try:
        if not _is(lock, path):
            return False
        remove(path)
        return True
    finally:
        os.close(lock)


def _locked(path: Path) -> int:
    """A descriptor that holds the lock of a private folder of this user.

    Raises:
        BlockingIOError: somebody else holds it.
        OSError: it is gone, a link, not private, or cannot be locked.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) != 0o700:
            raise PermissionError(f"{path} is not private to this user")
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _is(descriptor: int, path: Path) -> bool:
    """Whether the path still names what the descriptor has open."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except OSError:
        return False
