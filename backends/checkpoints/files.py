"""Files and folders that appear when they are complete.

A checkpoint is written under a temporary name in the same folder (a *part*), flushed to the disk,
and renamed. Whoever is killed leaves a part, and every file that was there before. The writer holds
a lock on its part, which the system takes away when the process ends: so a part without a lock is
left over, and parts of living processes are left alone. A checkpoint that is a folder is removed by
its rename to a part.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from io import FileIO
from pathlib import Path
from typing import IO, Any, cast

import torch

_PART = ".fulgurite-{}.part"
_PART_BYTES = 1 << 16  # of what is written at once: a tensor's memory, and no header


Save = Callable[[Any, IO[bytes]], None]


def write(
    checkpoint: Any,
    path: str | Path,
    save: Save | None = None,
    when_written: Callable[[], None] | None = None,
) -> None:
    """Write what ``torch.save`` writes; the file appears, or is replaced, when it is complete.

    Args:
        checkpoint: what to write.
        path: of the file.
        save: writes it to a stream; None is ``torch.save``, as it is now.
        when_written: called whenever a part of it was written.

    Raises:
        OSError: it cannot be written; ``path`` is what it was before, and no part is left. Or
            the folder cannot be flushed; ``path`` is the new file.
    """
    path = Path(path)
    with named(path), part(path.parent) as file:
        # what the file raises comes as it is, and not as torch's RuntimeError
        with Sink(file, when_written).raising() as stream:
            (save or torch.save)(checkpoint, stream)
        # before it has its name: else that may lead to nothing that was written, if the power fails
        os.fsync(file.fileno())
        os.replace(str(file.name), path)
    flush_name(path)


class Sink:
    """A file that remembers why it could not be written to."""

    def __init__(self, file: FileIO, when_written: Callable[[], None] | None = None) -> None:
        self._file, self._when_written = file, when_written
        self.failure: OSError | None = None

    @contextlib.contextmanager
    def raising(self) -> Iterator[IO[bytes]]:
        """Raise the file's error, and not the RuntimeError that torch makes of it."""
        try:
            yield cast("IO[bytes]", self)
        except RuntimeError:
            if self.failure is None:
                raise
        if self.failure is not None:
            raise self.failure

    def write(self, data: Any) -> int:
        """Write, or take note of the reason and write nothing any more."""
        if self.failure is None:
            try:
                left = memoryview(data).cast("B")
                while left:
                    # a raw file takes at most 2 GB at a time on Linux
                    left = left[self._file.write(left) :]
                if self._when_written is not None and len(data) >= _PART_BYTES:
                    self._when_written()
                return len(data)
            except OSError as failure:
                self.failure = failure
        return 0

    def flush(self) -> None:
        """Nothing: the file is flushed when it is complete."""


@contextlib.contextmanager
def named(path: Path, holds: str = "") -> Iterator[None]:
    """Name a checkpoint that cannot be written, and say what holds."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        is_there = os.path.exists(path)
        before = "the file of that name is still the one before" if is_there else "no file"
        why = f"({os.strerror(error.errno)})"
        text = (
            f"A checkpoint was written, but its folder could not be flushed to disk {why}: {holds}"
            if holds
            else f"A checkpoint could not be written {why}; {before} is left, and earlier"
            " checkpoints are as they were. Free space, or give another model_dir"
        )
        raise OSError(error.errno, text, str(path)) from None


@contextlib.contextmanager
def part(folder: Path) -> Iterator[FileIO]:
    """A new file with a temporary name and a lock; gone afterwards, unless it was renamed."""
    folder.mkdir(parents=True, exist_ok=True)
    while True:
        name = folder / _part_name()
        with open(name, "xb", buffering=0) as file:
            with contextlib.suppress(OSError):  # a file system without locks: nobody sweeps there
                fcntl.flock(file, fcntl.LOCK_EX)
            if not _is_there(file, name):
                continue  # another process swept it before it had its lock
            try:
                yield file
            finally:
                name.unlink(missing_ok=True)
            return


@contextlib.contextmanager
def part_folder(parent: Path) -> Iterator[Path]:
    """The same as a folder; whatever has its name afterwards is removed."""
    parent.mkdir(parents=True, exist_ok=True)
    while True:
        name = parent / _part_name()
        name.mkdir()
        with _opened(name) as descriptor:
            with contextlib.suppress(OSError):  # as for a file
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if not _is_there(descriptor, name):
                continue
            try:
                yield name
            finally:
                _remove(name)
            return


@contextlib.contextmanager
def _opened(path: Path, mode: int = os.O_RDONLY) -> Iterator[int]:
    descriptor = os.open(path, mode)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _is_there(file: FileIO | int, name: Path) -> bool:
    try:
        return os.path.samestat(
            os.stat(file if isinstance(file, int) else file.fileno()), name.stat()
        )
    except FileNotFoundError:
        return False


def appear(made: Path, path: Path) -> None:
    """Rename a complete folder to ``path``; an earlier folder of that name is renamed to ``made``.

    Both at once where the file system can exchange two names. Where it cannot (NFS), the earlier
    folder is called ``NAME.before`` for a moment: a process that is killed just then leaves it so.
    """
    if not os.path.lexists(path):
        os.rename(made, path)
        return
    if _exchange(made, path):
        return
    before = path.with_name(f"{path.name}.before")
    _remove(before)
    os.rename(path, before)
    os.rename(made, path)
    os.rename(before, made)


_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # fcntl.h and stdio.h of Linux


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two names, in one step; whether the file system can do that."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    names = os.fsencode(one), os.fsencode(other)
    if not rename(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE):
        return True
    error = ctypes.get_errno()
    if error in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return False
    raise OSError(error, os.strerror(error), str(other))


def remove_folder(path: Path) -> None:
    """Remove a folder: it has its name with all that is in it, or not at all."""
    name = path.parent / _part_name()
    os.rename(path, name)
    with contextlib.suppress(FileNotFoundError):  # another process sweeps it
        _remove(name)


def _remove(path: Path) -> None:
    """Remove a file, a link, or a folder with all that is in it, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sweep(folder: str | Path) -> list[Path]:
    """Remove the parts in a folder that no living process writes; returns which those were."""
    swept = []
    for name in sorted(Path(folder).glob(_PART.format("*"))):
        with contextlib.suppress(OSError):  # locked, or somebody else's, or swept by another
            if name.is_symlink():
                name.unlink()
            else:
                # network file systems lock no file that is open for reading alone
                mode = os.O_RDONLY if name.is_dir() else os.O_RDWR
                with _opened(name, mode) as descriptor:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    _remove(name)
            swept.append(name)
    return swept


def link(target: str | Path, name: str | Path) -> None:
    """Make a symbolic link to a file, in one step: the name leads to the old or to the new."""
    name = Path(name)
    while True:
        # a link is made under another name and renamed, for no system call replaces one
        part_name = name.parent / _part_name()
        os.symlink(os.path.relpath(target, name.parent), part_name)
        with contextlib.suppress(FileNotFoundError):  # another process swept it: once more
            os.replace(part_name, name)
            break
    flush_folder(name.parent)


def _part_name() -> str:
    return _PART.format(f"{os.getpid()}-{uuid.uuid4().hex[:8]}")


def flush_name(path: Path) -> None:
    """Flush the name of a checkpoint that has appeared to the disk."""
    with named(path, "the new one is there, and may be gone when the machine fails now"):
        flush_folder(path.parent)


def flush_folder(folder: Path) -> None:
    """Flush the names of a folder's files to the disk."""
    with _opened(folder) as descriptor:
        os.fsync(descriptor)
