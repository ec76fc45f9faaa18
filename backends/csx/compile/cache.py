"""The compile cache: compiled programs in a folder, found again by a key.

Words: an *entry* is a folder of files that ``build`` writes and ``load`` reads; the cache does not
look into them. Its *manifest* holds the SHA-256 of every file in it. In ``compile_dir`` lie

    <key>/          an entry; its modification time is when it was last used
    <key>.lock      locked exclusively while the entry is built or removed, shared while loaded
    <key>.mark      the seal of an entry that its user found to be right; of no other build of it
    <key>.*.part    an entry while it is built; what a killed process left is swept

Loading an entry runs the code in it. So it is loaded only if every byte is as it was written, and
only from a folder that nobody else can write: then no byte changes between check and load either.
Locks are ``flock``'s: the system releases them when a process dies. Linux and macOS.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import hashlib
import os
import re
import shutil
import stat
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

T = TypeVar("T")

LIMIT_BYTES = 2 << 30  # assumed: some hundred programs
LIMIT_VARIABLE = "FULGURITE_CACHE_BYTES"
MANIFEST = "manifest"
_LOCK, _PART, _MARK = ".lock", ".part", ".mark"
_KEY = re.compile("[0-9a-f]{64}")  # nothing else in the folder is ever touched


@dataclass(frozen=True, slots=True)
class Fetched(Generic[T]):
    """What ``load`` made of an entry, whether the entry had to be built first, and its marks.

    ``marked`` is whether ``mark`` was called for this build of it, now or by an earlier process.
    """

    value: T
    built: bool
    marked: bool
    mark: Callable[[], None]


class CompileCache:
    """A folder of compiled programs.

    It keeps within a limit of bytes: 2 GiB, or what the environment variable
    ``FULGURITE_CACHE_BYTES`` says. Past it the least recently used entries are evicted, but never
    one that this object or another process at this moment uses.

    Args:
        folder: where; made if missing. None is ``$XDG_CACHE_HOME/fulgurite``, or
            ``~/.cache/fulgurite``; where that cannot be written, a folder that ends with the
            process, and a warning.

    Raises:
        PermissionError: others than the user can write the folder, or the user cannot.
        ValueError: the limit is no number of bytes.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        self.folder = _default_folder() if folder is None else _own_folder(Path(folder))
        self._limit = _limit_bytes()
        self._used: set[str] = set()

    def fetch(
        self,
        key: str,
        build: Callable[[Path], None],
        load: Callable[[Path], T],
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> Fetched[T]:
        """Load the entry of a key; build it where there is none, or a damaged one.

        Args:
            key: a SHA-256 in hexadecimal. Who comes with the same key gets the same entry.
            build: writes the entry's files into an empty folder, which then moves.
            load: makes something of a folder that ``build`` wrote.
            waiting: entered while another process builds the same entry.
        """
        assert _KEY.fullmatch(key)
        entry = _own_folder(self.folder) / key  # which may be gone, or have other rights by now
        self._used.add(key)
        with self._locked(key, fcntl.LOCK_SH, waiting):
            if is_whole(entry):
                os.utime(entry)
                return self._fetched(entry, load, built=False)
        with self._locked(key, fcntl.LOCK_EX, waiting):
            built = not is_whole(entry)  # who held the lock may have built it
            if built:
                self._build(entry, build)
            fetched = self._fetched(entry, load, built)
        if built:
            self._evict()
        return fetched

    def _fetched(self, entry: Path, load: Callable[[Path], T], built: bool) -> Fetched[T]:
        seal, mark = _seal_of(entry), self._mark_file(entry.name)

        def put() -> None:
            with contextlib.suppress(OSError), open(mark, "wb", opener=_private) as file:
                file.write(seal)

        marked = mark.is_file() and mark.read_bytes() == seal
        return Fetched(load(entry), built, marked, put)

    def _build(self, entry: Path, build: Callable[[Path], None]) -> None:
        """Build beside the entry and move it into place, under its exclusive lock."""
        self._sweep(entry.name)
        part = Path(tempfile.mkdtemp(dir=self.folder, prefix=f"{entry.name}.", suffix=_PART))
        try:
            build(part)
            _seal(part)
            _remove(entry)  # a damaged one
            part.rename(entry)
        finally:
            _remove(part)

    def _sweep(self, key: str) -> None:
        """Remove what a dead process was building: a live one would hold the lock."""
        for part in self.folder.glob(f"{key}.*{_PART}"):
            _remove(part)

    def _evict(self) -> None:
        """Past the limit evict the least recently used entries that nobody uses at this moment.

        What dead processes were building goes too.
        """
        for key in {path.name.partition(".")[0] for path in self.folder.glob("*.*")}:
            self._remove_unless_locked(key, entry_too=False)
        entries = sorted(self._entries())
        total = sum(size for _, size, _ in entries)
        for _, size, key in entries:
            if total <= self._limit:
                break
            if key not in self._used and self._remove_unless_locked(key, entry_too=True):
                total -= size

    def _entries(self) -> Iterator[tuple[float, int, str]]:
        """When each entry was last used, its bytes, and its key."""
        for path in self.folder.iterdir():
            if _KEY.fullmatch(path.name):
                with contextlib.suppress(FileNotFoundError):  # removed by another process
                    size = sum(inner.lstat().st_size for inner in path.rglob("*"))
                    yield path.stat().st_mtime, size, path.name

    def _remove_unless_locked(self, key: str, *, entry_too: bool) -> bool:
        if not _KEY.fullmatch(key):
            return False
        try:
            with self._locked(key, fcntl.LOCK_EX | fcntl.LOCK_NB):
                self._sweep(key)
                if entry_too:
                    _remove(self.folder / key)
                if not (self.folder / key).exists():
                    self._mark_file(key).unlink(missing_ok=True)
                    self._lock_file(key).unlink(missing_ok=True)
        except BlockingIOError:
            return False
        return True

    def _lock_file(self, key: str) -> Path:
        return self.folder / f"{key}{_LOCK}"

    def _mark_file(self, key: str) -> Path:
        return self.folder / f"{key}{_MARK}"

    @contextlib.contextmanager
    def _locked(
        self,
        key: str,
        how: int,
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> Iterator[None]:
        while True:
            with open(self._lock_file(key), "a", opener=_private) as file:
                _flock(file.fileno(), how, waiting)
                if _is_still(file.fileno(), self._lock_file(key)):
                    yield
                    return


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)  # who can open a file can lock it


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
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False


# -- entries ---------------------------------------------------------------------------------------


def is_whole(entry: Path) -> bool:
    """Whether an entry is there, is the user's alone, and holds every byte that was written.

    The manifest's first line is the SHA-256 of its other lines, as ``sha256sum`` writes them. A
    file that it does not list is damage too: Python might run it.
    """
    try:
        if not all(_is_ours(path) for path in (entry, *entry.rglob("*"))):
            return False
        seal, _, listed = (entry / MANIFEST).read_bytes().partition(b"\n")
        return seal == _sha256(listed) and listed == _listing(entry)
    except OSError:
        return False


def _seal_of(entry: Path) -> bytes:
    """The SHA-256 of everything in an entry that is whole."""
    return (entry / MANIFEST).read_bytes().partition(b"\n")[0]


def _seal(folder: Path) -> None:
    """Write the manifest, and leave everything to its owner, whatever the process's umask is."""
    listed = _listing(folder)
    (folder / MANIFEST).write_bytes(_sha256(listed) + b"\n" + listed)
    for path in folder.rglob("*"):
        path.chmod(0o700 if path.is_dir() else 0o600)


def _listing(folder: Path) -> bytes:
    """A line for each file but the manifest: its SHA-256 and its path."""
    lines = []
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path != folder / MANIFEST:
            with open(path, "rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            lines.append(f"{digest}  {path.relative_to(folder)}\n")
    return "".join(lines).encode()


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).hexdigest().encode()


def _remove(folder: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        # a compiler that outlived its killed parent may still write: then the next sweep ends it
        shutil.rmtree(folder, ignore_errors=folder.suffix == _PART)


# -- the folder ------------------------------------------------------------------------------------


def _limit_bytes() -> int:
    text = os.environ.get(LIMIT_VARIABLE)
    if text is None:
        return LIMIT_BYTES
    if not text.isdecimal():
        raise ValueError(f"{LIMIT_VARIABLE} must be a number of bytes; got {text!r}.")
    return int(text)


def _default_folder() -> Path:
    home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    try:
        folder = home.expanduser() / "fulgurite"
        _make(folder)
    except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home
        return _folder_of_this_process(str(error))
    return _own_folder(folder)


@functools.cache
def _folder_of_this_process(why: str) -> Path:
    warnings.warn(
        f"Compiled programs are not kept: the default compile_dir cannot be used ({why})."
        " Remedy: backend('CSX', compile_dir=...), a folder of your own.",
        stacklevel=2,
    )
    folder = tempfile.mkdtemp(prefix="fulgurite-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def _own_folder(folder: Path) -> Path:
    """The folder, made if missing; an error unless it is this user's alone to write."""
    folder = folder.expanduser()
    try:
        _make(folder)
    except OSError as error:
        raise PermissionError(
            f"compile_dir={str(folder)!r} cannot be used ({error}). Give a folder of your own."
        ) from None
    folder = folder.resolve()
    refused = f"compile_dir={str(folder)!r} holds code that will be run, and"
    if folder.stat().st_uid != os.geteuid():
        raise PermissionError(f"{refused} belongs to another user. Give a folder of your own.")
    if not _is_ours(folder):
        raise PermissionError(f"{refused} others can write it. Type: chmod go-w '{folder}'")
    for parent in folder.parents:
        mode = parent.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise PermissionError(
                f"{refused} everybody can write {str(parent)!r}, where they could replace it."
                f" Type: chmod o-w '{parent}', or give another folder."
            )
    return folder


def _make(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(f"no permission to write {str(folder)!r}")
    file = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # some network file systems have none
    finally:
        os.close(file)


def _is_ours(path: Path) -> bool:
    """Whether this user owns a file or folder, and alone can write it; a link never is."""
    found = path.lstat()
    kind = stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)
    alone = not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return kind and alone and found.st_uid == os.geteuid()
