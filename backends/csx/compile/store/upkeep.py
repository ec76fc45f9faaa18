"""What lies in the folder of a compile cache by a key, under which lock, and what of it is removed.

Nothing else than what bears one of these names is ever touched, and no link is followed.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from fulgurite.backends.csx.compile.store.cache_folder import locked
from fulgurite.backends.csx.compile.store.entries import MANIFEST, is_odd, remove

LOCK, PART, MARK = ".lock", ".part", ".mark"
KEY = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, order=True)
class Entry:
    """An entry, whole or not; times are as ``time.time`` says them."""

    used: float
    size_bytes: int
    key: str
    built: float


def entries_in(folder: Path) -> list[Entry]:
    """The entries in a folder, the one that was used longest ago first."""
    found = []
    for path in folder.iterdir():
        if KEY.fullmatch(path.name):
            with contextlib.suppress(FileNotFoundError):  # removed by another process
                found.append(_entry(path))
    return sorted(found)


def _entry(path: Path) -> Entry:
    inside = [] if path.is_symlink() else list(path.rglob("*"))
    used, manifest = path.lstat().st_mtime, path / MANIFEST
    built = manifest.lstat().st_mtime if manifest in inside else used
    return Entry(used, sum(inner.lstat().st_size for inner in inside), path.name, built)


def begun_in(folder: Path) -> set[str]:
    """The keys of what was not finished in a folder, and of locks and marks without an entry."""
    # one look for all keys: one for each took seconds from a thousand programs on
    names = {path.name for path in folder.iterdir()}
    found = set()
    for name in names:
        key, dot, rest = name.partition(".")
        alone = PART if key in names else (LOCK, PART, MARK)
        if dot and KEY.fullmatch(key) and f".{rest}".endswith(alone):
            found.add(key)
    return found


def evict(
    folder: Path, limit_bytes: int, used: Collection[str] = (), before: float = -math.inf
) -> None:
    """Remove entries, the least recently used first, but none that a process builds or loads now.

    What dead processes were building goes too.

    Args:
        folder: of the cache.
        limit_bytes: entries go until what is left keeps within it.
        used: keys that stay.
        before: entries that were last used before this time go however few there are.

    Raises:
        OSError: something could not be removed.
    """
    for key in begun_in(folder):
        remove_unless_locked(folder, key, entry_too=False)
    entries = entries_in(folder)
    total = sum(entry.size_bytes for entry in entries)
    for entry in entries:
        if total <= limit_bytes and entry.used >= before:
            break
        if entry.key not in used and remove_unless_locked(folder, entry.key, entry_too=True):
            total -= entry.size_bytes


def remove_unless_locked(folder: Path, key: str, *, entry_too: bool) -> bool:
    """Remove what was begun under a key, and the entry if asked to; False where it is used now."""
    try:
        with locked_key(folder, key, fcntl.LOCK_EX | fcntl.LOCK_NB):
            sweep(folder, key)
            if entry_too:
                remove(folder / key)
            if not (folder / key).exists():
                forget(folder, key)
    except BlockingIOError:
        return False
    return True


def forget(folder: Path, key: str) -> None:
    """Leave nothing of an entry that was not built; called under its exclusive lock."""
    sweep(folder, key)
    for path in (mark_file(folder, key), lock_file(folder, key)):
        with contextlib.suppress(OSError):
            remove(path)


def sweep(folder: Path, key: str) -> None:
    """Remove what a dead process was building: a live one would hold the lock."""
    for part in folder.glob(f"{key}.*{PART}"):
        with contextlib.suppress(OSError):  # where its compiler still writes: the next one does
            remove(part)


def lock_file(folder: Path, key: str) -> Path:
    """The file that is locked while the entry of a key is used."""
    return folder / f"{key}{LOCK}"


def mark_file(folder: Path, key: str) -> Path:
    """The file that says which build of an entry was found to be right."""
    return folder / f"{key}{MARK}"


@contextlib.contextmanager
def locked_key(
    folder: Path,
    key: str,
    how: int,
    waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Iterator[None]:
    """Hold the lock of a key; ``waiting`` is entered while another process holds it.

    Raises:
        BlockingIOError: it does, and ``how`` says not to wait.
    """
    path = lock_file(folder, key)
    while True:
        if is_odd(path):
            with locked(folder, fcntl.LOCK_EX):  # or it is another's new lock that is removed
                if is_odd(path):
                    remove(path)
        with open(path, "a", opener=private) as file:
            _flock(file.fileno(), how, waiting)
            if _is_still(file.fileno(), path):
                yield
                return


def private(path: str, flags: int) -> int:
    """Open a file that is its owner's alone: who can open a file can lock it."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


def _flock(file: int, how: int, waiting: Callable[[], AbstractContextManager[None]]) -> None:
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        if how & fcntl.LOCK_NB:
            raise
        with waiting():
            fcntl.flock(file, how)


def _is_still(file: int, path: Path) -> bool:
    """Whether an open file still has its name: who removes an entry removes its lock file too."""
    try:
        return os.path.samestat(os.fstat(file), path.lstat())
    except FileNotFoundError:
        return False
