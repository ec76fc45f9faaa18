"""Tensors whose memory is a file: mapped, shared with it, and without a name from the start.

The system reads a page of such memory from the file when it is used first, and writes it back when
it wants to. So whatever is said here of what is needed and what is not, values are right. A file is
gone with the last tensor over it, or with the process, however that ends. A process that is forked
has this memory for itself: what it writes there goes into no file.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor

from fulgurite.backends.runtime import advise, map_file, unmap_file

_DONTNEED, _WILLNEED = mmap.MADV_DONTNEED, mmap.MADV_WILLNEED
_POPULATE_READ, _POPULATE_WRITE = 22, 23  # madvise(2), from Linux 5.14 on
_PREFIX = ".fulgurite-state-"


class Mapped:
    """The memory of one storage, which is a range of a file.

    Args:
        storage: of this memory; it is not held.
        file: which has it.
        offset: where it begins there.

    Attributes:
        address: its first byte.
        nbytes: of its pages.
        is_resident: whether it is in memory, as far as ``Residency`` knows.
    """

    __slots__ = ("__weakref__", "_file", "_offset", "_storage", "address", "is_resident", "nbytes")

    def __init__(self, storage: torch.UntypedStorage, file: _File, offset: int) -> None:
        self._storage = weakref.ref(storage)
        self._file, self._offset = file, offset
        self.address = storage.data_ptr()
        self.nbytes = _in_pages(storage.nbytes())
        self.is_resident = False

    @property
    def is_gone(self) -> bool:
        """Whether there is no tensor over it any more."""
        return self._storage() is None

    def keep_own(self) -> None:
        """Let what is written from now on stay this process's own."""
        if not self.is_gone:
            map_file(self._file.descriptor, self._offset, self.nbytes, at=self.address)

    def drop(self) -> None:
        """Take its pages out of this process's memory; the file has what is in them."""
        self._advise(_DONTNEED)

    def bring(self, is_written: bool) -> None:
        """Read it into memory; with ``is_written`` so that it can be written at once."""
        # without: a page is made writable by the first write, each by a fault of its own
        if not self._advise(_POPULATE_WRITE if is_written else _POPULATE_READ):
            self._advise(_WILLNEED)  # an older system

    def _advise(self, advice: int) -> bool:
        storage = self._storage()  # held for the call: else another's memory may lie there
        if storage is None:
            return True
        return advise(self.address, self.nbytes, advice)


class _File:
    """A file without a name, of which each storage takes a range.

    Raises:
        OSError: there can be none in the folder.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self._end, self._process = folder, 0, os.getpid()
        self.descriptor, name = tempfile.mkstemp(prefix=_PREFIX, dir=folder)
        os.unlink(name)
        weakref.finalize(self, os.close, self.descriptor)

    def mapped(self, nbytes: int) -> tuple[torch.UntypedStorage, Mapped]:
        """Memory of zeros, which is a range of this file.

        Raises:
            OSError: the disk has no room for it, or the file system cannot map files.
        """
        offset, length = self._end, _in_pages(nbytes)
        # all of it now: where the disk is full later, a write into memory kills the process
        os.posix_fallocate(self.descriptor, offset, length)
        self._end += length
        address = map_file(self.descriptor, offset, length)
        memory = (ctypes.c_byte * nbytes).from_address(address)
        # it holds this file, too; when Python ends, there may be tensors over it yet
        weakref.finalize(memory, self._free, address, offset, length).atexit = False
        storage = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
        return storage, Mapped(storage, self, offset)

    def _free(self, address: int, offset: int, length: int) -> None:
        # the file of a process that was forked is its parent's
        is_own = os.getpid() == self._process
        unmap_file(address, length, (self.descriptor, offset) if is_own else None)


def _in_pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


class Files:
    """What is in files, of this process.

    Attributes:
        folder: for further ones.
    """

    def __init__(self) -> None:
        self.folder = Path()
        self._file: _File | None = None
        self._at: dict[int, Mapped] = {}  # by address

    def __iter__(self) -> Iterator[Mapped]:
        return iter([*self._at.values()])

    def __bool__(self) -> bool:
        return bool(self._at)

    def storage(self, nbytes: int) -> torch.UntypedStorage:
        """New memory that is a file.

        Raises:
            OSError: the disk has no room for it, or the file system cannot map files.
        """
        try:
            if self._file is None or self._file.folder != self.folder:
                self._file = _File(self.folder)
            storage, mapped = self._file.mapped(nbytes)
        except OSError as error:
            why = error.strerror or str(error)
            raise OSError(
                error.errno,
                f"max_resident_bytes: {nbytes:,} bytes of state do not go into a file ({why})."
                " Remedy: as model_dir a folder that can be written to, on a disk of this machine"
                " with room for it; or a larger max_resident_bytes",
                str(self.folder),
            ) from None
        there = {address: one for address, one in self._at.items() if not one.is_gone}
        # at once, for a thread may look at them meanwhile
        self._at = there | {mapped.address: mapped}
        return storage

    def find(self, tensor: Tensor) -> Mapped | None:
        """The file that is a tensor's memory."""
        one = self._at.get(tensor.untyped_storage().data_ptr())
        return None if one is None or one.is_gone else one

    def residents(self) -> list[Mapped]:
        """What is in memory."""
        return [one for one in self._at.values() if one.is_resident and not one.is_gone]


def warn_of_memory(folder: Path) -> None:
    """Warn of a folder whose files are in memory themselves, as those of /dev/shm are."""
    there = next(one for one in (folder, *folder.absolute().parents) if one.exists())
    device = os.stat(there).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        mount, _, kind = line.partition(" - ")
        if mount.split()[2] == number and kind.split()[0] in ("tmpfs", "ramfs"):
            rank_zero_warn(
                f"max_resident_bytes: {folder} is on a {kind.split()[0]}, whose files are in"
                " memory: state beyond the budget is, too. Give a model_dir on a disk."
            )
            return


def over(storage: torch.UntypedStorage, like: Tensor) -> Tensor:
    """A tensor over a storage, laid out as another one."""
    made = torch.empty(0, dtype=like.dtype)
    return made.set_(storage, like.storage_offset(), like.size(), like.stride())
