"""What a finished model folder says about itself, and whether that is still true.

The manifest is the last file written and names every other file with size, modification time and SHA-256. The quick
check compares names, sizes and times; a file whose time differs (the folder was copied, or the file was touched) is
read and hashed instead, so a copy is accepted and an edit is not. The full check hashes everything.
"""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

MANIFEST = "async_pp.manifest.json"
_FORMAT = 1
_BLOCK_BYTES = 4 << 20


def sha256_of(path: Path, on_bytes: Callable[[int], None] | None = None) -> str:
    """The SHA-256 of a file in hex; `on_bytes` is told the size of each block read."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
            if on_bytes is not None:
                on_bytes(len(block))
    return digest.hexdigest()


def sync(path: Path) -> None:
    """Force a file or folder to the disk, so that a later rename cannot outlive its content."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_manifest(folder: Path, *, name: str, version: int, source: str) -> None:
    """Hash and sync every file of `folder` (flat), then write and sync the manifest.

    Args:
        folder: holds the finished files.
        name: the recipe's name.
        version: the recipe's version; a folder made by another version is made again.
        source: where the content comes from, in words.
    """
    files: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.iterdir()):
        path.chmod(0o644)  # safetensors writes files that only their owner can read
        sync(path)
        status = path.stat()
        files[path.name] = {"size": status.st_size, "mtime_ns": status.st_mtime_ns, "sha256": sha256_of(path)}
    content = {"format": _FORMAT, "name": name, "version": version, "source": source, "files": files}
    target = folder / MANIFEST
    target.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    sync(target)
    sync(folder)


def find_damage(folder: Path, *, name: str, version: int, full: bool = False) -> str | None:
    """Why `folder` cannot be used as it is, in words, or None when it can.

    Never raises for what is in the folder: any content that cannot be read is a damage like the others.
    """
    try:
        content = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if (content["format"], content["name"], content["version"]) != (_FORMAT, name, version):
            return "it was made by another version of this package"
        for file_name, expected in content["files"].items():
            if damage := _file_damage(folder / file_name, expected, full):
                return damage
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"its manifest cannot be read ({error})"
    return None


def _file_damage(path: Path, expected: dict[str, Any], full: bool) -> str | None:
    status = path.stat()
    if status.st_size != expected["size"]:
        return f"{path.name} has {status.st_size} bytes instead of {expected['size']}"
    untouched = status.st_mtime_ns == expected["mtime_ns"]
    if (full or not untouched) and sha256_of(path) != expected["sha256"]:
        return f"{path.name} does not match its checksum"
    return None
