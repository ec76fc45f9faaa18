"""Files that appear when they are complete.

A checkpoint is written under a temporary name in the same folder (a *part*), flushed to the disk,
and renamed. Whoever is killed leaves a part, and every file that was there before. The writer holds
a lock on its part, which the system takes away when the process ends: so a part without a lock is
left over, and parts of living processes are left alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import uuid
from collections.abc import Callable, Iterator
from io import FileIO
from pathlib import Path
from typing import IO, Any, cast

import torch

_PART = ".fulgurite-{}.part"
_PART_BYTES = 1 << 16  # of what is written at once: a tensor's memory, and no header


def write(
    checkpoint: Any, path: str | Path, when_written: Callable[[], None] | None = None
) -> None:
    """Write what ``torch.save`` writes; the file appears, or is replaced, when it is complete.

    Args:
        checkpoint: whatever ``torch.save`` takes.
        path: of the file.
        when_written: called whenever a part of it was written.

    Raises:
        OSError: it cannot be written; ``path`` is what it was before, and no part is left. Or
            the folder cannot be flushed; ``path`` is the new file.
    """
    path = Path(path)
    with _named(path), part(path.parent) as file:
        _save(checkpoint, file, when_written)
        # before it has its name: else that may lead to nothing that was written, if the power fails
        os.fsync(file.fileno())
        os.replace(str(file.name), path)
    with _named(path, "the new one is there, and may be gone when the machine fails now"):
        _flush_folder(path.parent)


def _save(checkpoint: Any, file: FileIO, when_written: Callable[[], None] | None) -> None:
    """``torch.save``; what the file raises comes as it is, and not as torch's RuntimeError."""
    sink = _Sink(file, when_written)
    try:
        torch.save(checkpoint, cast("IO[bytes]", sink))
    except RuntimeError:
        if sink.failure is None:
            raise
    if sink.failure is not None:
        raise sink.failure


class _Sink:
    """A file that remembers why it could not be written to."""

    def __init__(self, file: FileIO, when_written: Callable[[], None] | None) -> None:
        self._file, self._when_written = file, when_written
        self.failure: OSError | None = None

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
def _named(path: Path, holds: str = "") -> Iterator[None]:
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


def _is_there(file: FileIO, name: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), name.stat())
    except FileNotFoundError:
        return False


def sweep(folder: str | Path) -> list[Path]:
    """Remove the parts in a folder that no living process writes; returns which those were."""
    swept = []
    for name in sorted(Path(folder).glob(_PART.format("*"))):
        with contextlib.suppress(OSError):  # locked, or somebody else's, or swept by another
            if not name.is_symlink():
                with open(name, "r+b") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    name.unlink()
            else:
                name.unlink()
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
    _flush_folder(name.parent)


def _part_name() -> str:
    return _PART.format(f"{os.getpid()}-{uuid.uuid4().hex[:8]}")


def _flush_folder(folder: Path) -> None:
    """Flush the names of a folder's files to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
