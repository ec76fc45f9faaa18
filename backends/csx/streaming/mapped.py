"""Tensors whose memory is a file: mapped, shared with it, and without a name from the start.

The system reads a page of such memory from the file when it is used first, and writes it back when
it wants to. So whatever is said here of what is needed and what is not, values are right. A file is
gone with the last tensor over it, or with the process, however that ends.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor

from fulgurite.backends.runtime import advise

_DONTNEED, _WILLNEED = mmap.MADV_DONTNEED, mmap.MADV_WILLNEED
_POPULATE_READ, _POPULATE_WRITE = 22, 23  # madvise(2), from Linux 5.14 on
_PREFIX = ".fulgurite-state-"


class Mapped:
    """The memory of one storage, which is a file.

    Args:
        storage: of this memory; it is not held.

    Attributes:
        address: its first byte.
        nbytes: of its pages.
        is_resident: whether it is in memory, as far as ``Residency`` knows.
    """

    __slots__ = ("__weakref__", "_storage", "address", "is_resident", "nbytes")

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._storage = weakref.ref(storage)
        self.address = storage.data_ptr()
        self.nbytes = -(-storage.nbytes() // mmap.PAGESIZE) * mmap.PAGESIZE
        self.is_resident = False

    @property
    def is_gone(self) -> bool:
        """Whether there is no tensor over it any more."""
        return self._storage() is None

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


def storage_in_file(nbytes: int, folder: Path) -> torch.UntypedStorage:
    """Memory of zeros that is a file in a folder; the file has no name any more.

    Raises:
        OSError: the disk has no room for it, or the file system cannot map files.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(prefix=_PREFIX, dir=folder)
        try:
            # all of it now: where the disk is full later, a write into memory kills the process
            os.posix_fallocate(descriptor, 0, nbytes)
            mapped = torch.UntypedStorage.from_file(name, True, nbytes)
            assert isinstance(mapped, torch.UntypedStorage)
            return mapped
        finally:
            os.unlink(name)
            os.close(descriptor)
    except OSError as error:
        why = os.strerror(error.errno) if error.errno else str(error)
        raise OSError(
            error.errno,
            f"max_resident_bytes: {nbytes:,} bytes of state do not go into a file ({why}). Remedy:"
            " free space, another model_dir on a disk of this machine, or a larger"
            " max_resident_bytes",
            str(folder),
        ) from None
    except RuntimeError as error:  # torch's, of mmap(2)
        raise OSError(
            f"max_resident_bytes: files in {folder} cannot be mapped into memory ({error}). Remedy:"
            " another model_dir, on a disk of this machine"
        ) from None


class Files:
    """What is in files, of this process.

    Attributes:
        folder: for further ones.
    """

    def __init__(self) -> None:
        self.folder = Path()
        self._at: dict[int, Mapped] = {}  # by address

    def __iter__(self) -> Iterator[Mapped]:
        return iter([*self._at.values()])

    def __bool__(self) -> bool:
        return bool(self._at)

    def storage(self, nbytes: int) -> torch.UntypedStorage:
        """New memory that is a file.

        Raises:
            OSError: see ``storage_in_file``.
        """
        storage = storage_in_file(nbytes, self.folder)
        there = {address: one for address, one in self._at.items() if not one.is_gone}
        # at once, for a thread may look at them meanwhile
        self._at = there | {storage.data_ptr(): Mapped(storage)}
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
