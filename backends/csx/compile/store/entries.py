"""An entry of the compile cache: a folder that is sealed with its key, and checked byte by byte.

An entry's *manifest* holds its key and the SHA-256 of every file in it; its *seal*, the manifest's
first line, is the SHA-256 of the manifest's other lines. An entry is named by its key: one that was
copied or renamed to another key is not whole.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

MANIFEST = "manifest"


def is_whole(entry: Path) -> bool:
    """Whether an entry is there, is the user's alone, and holds every byte of what its name says.

    A file that the manifest does not list is damage too: Python might run it.
    """
    try:
        return all(is_ours(path) for path in _all_in(entry)) and _is_sealed(entry, entry.name)
    except OSError:
        return False


def copy_into(entry: Path, folder: Path) -> bool:
    """Copy an entry that another user made, who alone can write it, into an empty folder.

    Returns:
        Whether what arrived is whole, and this user's alone.

    Raises:
        OSError: it is gone meanwhile, or cannot be read, or the folder takes no files.
    """
    owner = entry.parent.lstat().st_uid
    if not all(is_ours(path, owner) for path in _all_in(entry)):
        return False
    shutil.copytree(entry, folder, copy_function=shutil.copyfile, dirs_exist_ok=True)
    _leave_to_owner(folder)
    return _is_sealed(folder, entry.name)


def _all_in(entry: Path) -> Iterator[Path]:
    yield entry
    yield from entry.rglob("*")


def _is_sealed(folder: Path, key: str) -> bool:
    seal, _, listed = (folder / MANIFEST).read_bytes().partition(b"\n")
    return seal == sha256(listed) and listed == _listing(folder, key)


def seal_of(entry: Path) -> bytes:
    """The seal of an entry that is whole: of its key, and of everything in it."""
    return (entry / MANIFEST).read_bytes().partition(b"\n")[0]


def seal(folder: Path, key: str) -> None:
    """Write the manifest, and leave everything to its owner, whatever the process's umask is."""
    listed = _listing(folder, key)
    (folder / MANIFEST).write_bytes(sha256(listed) + b"\n" + listed)
    _leave_to_owner(folder)


def _leave_to_owner(folder: Path) -> None:
    for path in _all_in(folder):
        path.chmod(0o700 if path.is_dir() else 0o600)


def _listing(folder: Path, key: str) -> bytes:
    """The key, and a line for each file but the manifest: its SHA-256 and its path."""
    lines = [f"key {key}\n"]
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path != folder / MANIFEST:
            with open(path, "rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            lines.append(f"{digest}  {path.relative_to(folder)}\n")
    return "".join(lines).encode()


def sha256(data: bytes) -> bytes:
    """A checksum, in hexadecimal."""
    return hashlib.sha256(data).hexdigest().encode()


def is_ours(path: Path, owner: int | None = None) -> bool:
    """Whether something is a file or folder that nobody but its owner can write.

    Args:
        path: where.
        owner: whose it must be; None: this user's.
    """
    found = path.lstat()
    kind = stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)
    alone = not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return kind and alone and found.st_uid == (os.geteuid() if owner is None else owner)


def is_odd(path: Path) -> bool:
    """Whether something else than a file that its owner can open has a name: a folder, a link."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return False
    return not stat.S_ISREG(mode) or mode & 0o600 != 0o600


def remove(path: Path) -> None:
    """Remove what has a name, if anything: a folder with all in it, a file, a link and no more."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISDIR(path.lstat().st_mode):
            path.unlink()
            return
        try:
            shutil.rmtree(path)
        except PermissionError:  # a folder in it that its owner made unreadable
            _open_up(path)
            shutil.rmtree(path)


def _open_up(folder: Path) -> None:
    folder.chmod(0o700)
    for inner in folder.iterdir():
        if inner.is_dir() and not inner.is_symlink():
            _open_up(inner)
