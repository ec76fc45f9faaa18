"""The compile cache: compiled programs in a folder, found again by a key.

Words: an *entry* is a folder of files that ``build`` writes and ``load`` reads; the cache does not
look into them. It is sealed with its key (see ``entries``). In ``compile_dir`` lie

    <key>/          an entry; its modification time is when it was last used
    <key>.lock      locked exclusively while the entry is built or removed, shared while loaded
    <key>.mark      what the user of an entry says of this build of it alone, under the SHA-256 of
                    that and the entry's seal
    <key>.*.part    an entry while it is built; what a killed process left is swept

Loading an entry runs the code in it. So it is loaded only if every byte is as it was written, and
only from a folder that nobody else can write: then no byte changes between check and load either.
Whatever else has one of these names is removed. A folder that takes no files any more is left for a
temporary one. Locks are ``flock``'s: the system releases them when a process dies. Linux and macOS.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from fulgurite.backends.csx.compile.store.cache_folder import (
    SharedFolder,
    default_folder,
    folder_of_this_process,
    given_folder,
    make,
    read_only_folder,
    refuse_shared,
)
from fulgurite.backends.csx.compile.store.entries import (
    copy_into,
    is_odd,
    is_whole,
    remove,
    seal,
    seal_of,
    sha256,
)
from fulgurite.backends.csx.compile.store.upkeep import (
    KEY,
    PART,
    evict,
    forget,
    locked_key,
    mark_file,
    private,
    sweep,
)

Folders = str | Path | Sequence[str | Path] | None
"""Where compiled programs lie: a folder, or one and others from which they are copied."""
T = TypeVar("T")
U = TypeVar("U")

LIMIT_BYTES = 2 << 30  # assumed: some hundred programs
LIMIT_VARIABLE = "FULGURITE_CACHE_BYTES"
REPORTS = "reports"  # a folder in it: programs that the self-check found wrong
_SCRATCH = hashlib.sha256(b"scratch").hexdigest()


class UnfitEntry(Exception):
    """``load`` says that an entry, though whole, is not what its user needs: it is built again."""


class NothingStored(Exception):
    """No folder takes compiled programs, not even a temporary one; the text says why."""

    remedy = "Give compile_dir, a folder of your own with free space"


@dataclass(frozen=True, slots=True)
class Fetched(Generic[T]):
    """What ``load`` made of an entry, whether the entry had to be built first, and its marks.

    ``mark`` keeps a text for this build of the entry; ``marked`` is that of an earlier call, here
    or in another process.
    """

    value: T
    built: bool
    marked: str | None
    mark: Callable[[str], None]


class CompileCache:
    """A folder of compiled programs.

    It keeps within a limit of bytes: 2 GiB, or what the environment variable
    ``FULGURITE_CACHE_BYTES`` says. Past it the least recently used entries are evicted, but never
    one that this object or another process at this moment uses.

    Args:
        folder: where; made if missing. None is ``$XDG_CACHE_HOME/fulgurite``, or
            ``~/.cache/fulgurite``; where that cannot be written, a folder that ends with the
            process, and a warning. Of several the first is that one, and others are only read: an
            entry that is in one of them alone is copied, and checked as any.
        share: it keeps within one in so many bytes of the limit.

    Raises:
        PermissionError: others than the user can write the folder, or the user cannot; or one that
            is only read is not there, or others than its owner can write it.
        ValueError: the limit is no number of bytes.

    Attributes:
        folder: where entries lie; another one once that could not be written any more.
    """

    def __init__(self, folder: Folders = None, share: int = 1) -> None:
        folders = [folder] if isinstance(folder, (str, Path)) else folder or ()
        self.folder = given_folder(Path(folders[0])) if folders else default_folder()
        self._others = [read_only_folder(Path(other)) for other in folders[1:]]
        self._limit = limit_bytes() // share
        self._used: set[str] = set()
        self._left = False  # whether the folder is a temporary one by now

    def fetch(
        self,
        key: str,
        build: Callable[[Path], None],
        load: Callable[[Path], T],
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> Fetched[T]:
        """Load the entry of a key; build it where there is none, a damaged or an unfit one.

        Args:
            key: a SHA-256 in hexadecimal. Who comes with the same key gets the same entry.
            build: writes the entry's files into an empty folder, which then moves.
            load: makes something of a folder that ``build`` wrote, or raises UnfitEntry.
            waiting: entered while another process builds the same entry.

        Raises:
            PermissionError: others can write the folder by now.
            NothingStored: the folder takes no files any more, and a temporary one does not either.
        """
        assert KEY.fullmatch(key)
        return self._kept(lambda: self.fetch_here(key, build, load, waiting))

    def find(self, key: str, load: Callable[[Path], T]) -> Fetched[T] | None:
        """Load the entry of a key, where there is one that is whole, fits, and is not being built.

        Raises:
            PermissionError, NothingStored: as ``fetch``.
        """

        def look() -> Fetched[T] | None:
            refuse_shared(make(self.folder))
            self._used.add(key)
            # whoever builds it holds the lock, and steps do not wait for that
            with contextlib.suppress(BlockingIOError):
                with self._locked(key, fcntl.LOCK_SH | fcntl.LOCK_NB):
                    found = self._find(self.folder / key, load)
                if found is None and self._others:
                    with self._locked(key, fcntl.LOCK_EX | fcntl.LOCK_NB):
                        return self._copied(self.folder / key, load)
                return found
            return None

        return self._kept(look)

    def _kept(self, use: Callable[[], U]) -> U:
        """Use the folder; a temporary one where it takes no files any more."""
        while True:
            try:
                return use()
            except SharedFolder:
                raise
            except OSError as error:  # the disk is full, read-only, gone
                # which raises where there is no other folder: so this ends
                self.leave(error)

    def leave(self, why: OSError) -> None:
        """Go on in a temporary folder.

        Raises:
            NothingStored: it is one already, or there is none.
        """
        told = f"compile_dir={str(self.folder)!r} cannot be used any more ({why})"
        try:
            if self._left:
                raise why
            self.folder, self._left = folder_of_this_process(told), True
        except OSError as error:
            raise NothingStored(f"compiled programs cannot be written: {error}") from None

    def fetch_here(
        self,
        key: str,
        build: Callable[[Path], None],
        load: Callable[[Path], T],
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> Fetched[T]:
        """As ``fetch``, but an OSError where the folder takes no files any more."""
        refuse_shared(make(self.folder))  # which may be gone, or have other rights by now
        entry = self.folder / key
        self._used.add(key)
        # many may load at once: only who finds nothing asks for the lock alone
        with self._locked(key, fcntl.LOCK_SH, waiting):
            found = self._find(entry, load)
            if found is not None:
                return found
        with self._locked(key, fcntl.LOCK_EX, waiting):
            # who held the lock may have built it
            found = self._find(entry, load) or self._copied(entry, load)
            if found is not None:
                return found
            self._build(entry, build)
            fetched = self._fetched(entry, load, built=True)
        with contextlib.suppress(OSError):
            self.evict()
        return fetched

    def _find(self, entry: Path, load: Callable[[Path], T]) -> Fetched[T] | None:
        """An entry that is whole and fits."""
        if not is_whole(entry):
            return None
        try:
            found = self._fetched(entry, load, built=False)
        except UnfitEntry:
            return None
        with contextlib.suppress(OSError):
            os.utime(entry)
        return found

    def _fetched(self, entry: Path, load: Callable[[Path], T], built: bool) -> Fetched[T]:
        sealed, mark = seal_of(entry), mark_file(self.folder, entry.name)
        put = functools.partial(_put_mark, mark, sealed)
        return Fetched(load(entry), built, _mark_of(mark, sealed), put)

    def _build(self, entry: Path, build: Callable[[Path], None]) -> None:
        """Build beside the entry and move it into place, under its exclusive lock."""
        sweep(self.folder, entry.name)
        part = Path(tempfile.mkdtemp(dir=self.folder, prefix=f"{entry.name}.", suffix=PART))
        try:
            build(part)
            seal(part, entry.name)
            remove(entry)  # a damaged one
            part.rename(entry)
        except BaseException:
            forget(self.folder, entry.name)
            raise

    def _copied(self, entry: Path, load: Callable[[Path], T]) -> Fetched[T] | None:
        """An entry of one of the folders that are only read, copied under its exclusive lock."""
        copies = (one for one in self._others if _was_copied(one / entry.name, entry))
        return next((found for _ in copies if (found := self._find(entry, load))), None)

    @contextlib.contextmanager
    def scratch(self) -> Iterator[Path]:
        """An empty folder in the cache's for the block; what a killed process leaves is swept."""
        refuse_shared(make(self.folder))
        with self._locked(_SCRATCH, fcntl.LOCK_EX):
            try:
                yield Path(tempfile.mkdtemp(dir=self.folder, prefix=f"{_SCRATCH}.", suffix=PART))
            finally:
                forget(self.folder, _SCRATCH)

    def evict(self, limit: int | None = None, before: float = -math.inf) -> None:
        """Remove entries that nobody uses past the limit, as ``upkeep.evict`` does.

        Args:
            limit: another one than the cache's own, in bytes.
            before: entries that were last used before this time go however few there are.

        Raises:
            OSError: something could not be removed.
        """
        evict(self.folder, self._limit if limit is None else limit, self._used, before)

    def _locked(
        self,
        key: str,
        how: int,
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> AbstractContextManager[None]:
        return locked_key(self.folder, key, how, waiting)


def _was_copied(other: Path, entry: Path) -> bool:
    """Copy an entry to its place in another folder, under its exclusive lock, if it is whole."""
    if not other.is_dir():
        return False
    sweep(entry.parent, entry.name)
    part = Path(tempfile.mkdtemp(dir=entry.parent, prefix=f"{entry.name}.", suffix=PART))
    try:
        whole = copy_into(other, part)
        if whole:
            remove(entry)
            part.rename(entry)
        return whole
    except OSError:  # it is gone meanwhile, or damaged: as if it were not there
        return False
    finally:
        remove(part)


def _mark_of(mark: Path, sealed: bytes) -> str | None:
    whole = mark.exists() and not is_odd(mark)
    begins, _, text = mark.read_bytes().partition(b"\n") if whole else (b"", b"", b"")
    return text.decode() if begins == sha256(sealed + text) else None


def _put_mark(mark: Path, sealed: bytes, text: str) -> None:
    # without a mark the next run checks the code once more, and that is all
    with contextlib.suppress(OSError):
        if is_odd(mark):
            remove(mark)
        with open(mark, "wb", opener=private) as file:
            file.write(sha256(sealed + text.encode()) + b"\n" + text.encode())


def limit_bytes() -> int:
    """How many bytes programs may take: ``FULGURITE_CACHE_BYTES``, or 2 GiB.

    Raises:
        ValueError: it is no number of bytes.
    """
    text = os.environ.get(LIMIT_VARIABLE)
    if text is None:
        return LIMIT_BYTES
    if not text.isdecimal():
        raise ValueError(f"{LIMIT_VARIABLE} must be a number of bytes; got {text!r}.")
    return int(text)
