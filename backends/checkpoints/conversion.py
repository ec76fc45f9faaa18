"""A checkpoint in parts made one file, and back; tensor by tensor.

No more is in memory than a tensor and a piece: of a file that is written, memory is taken for each
tensor when its turn comes; of one that is read, what was written of it is given back.
"""

from __future__ import annotations

import errno
import math
import mmap
import os
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex

from fulgurite.backends.checkpoints.chunks import FlatPart
from fulgurite.backends.checkpoints.damage import CheckpointError, check_file, check_lightning
from fulgurite.backends.checkpoints.files import appear, flush_name, named, part_folder, write
from fulgurite.backends.checkpoints.folder_reader import FolderReader, TreePath
from fulgurite.backends.checkpoints.folder_writer import Planner, finish
from fulgurite.backends.checkpoints.folders import (
    check_folder,
    in_parts,
    labelled,
    without_parts,
)
from fulgurite.backends.runtime import advise


def to_file(folder: Path, target: Path) -> None:
    """Write what a folder holds as Lightning writes a checkpoint of one process.

    Raises:
        CheckpointError: the folder is damaged, or is no checkpoint.
        FileExistsError: something has the target's name.
        OSError: it cannot be written.
    """
    _refuse_existing(target)
    check_folder(folder)
    reader = FolderReader(folder)
    fills: dict[int, Callable[[], None]] = {}

    def reserved(place: TreePath) -> Tensor:
        found = reader.tensors[place]
        tensor = _reserved(found.size, found.properties.dtype)
        fills[tensor.data_ptr()] = lambda: reader.read(place, lambda *_: tensor)
        return tensor

    checkpoint = reader.checkpoint(reserved)
    check_lightning(folder, checkpoint)
    if "optimizer_states" in checkpoint:  # torch's own labels are numbers
        states = checkpoint["optimizer_states"]
        checkpoint["optimizer_states"] = [labelled(state, int) for state in states]
    write(checkpoint, target, lambda value, stream: _save(value, stream, fills))


def _reserved(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """A tensor that takes memory when it is written to, and gives it back to the system."""
    n_bytes = shape.numel() * dtype.itemsize
    if n_bytes < _SMALL_BYTES:  # a process may have some 65,000 mappings
        return torch.empty(shape, dtype=dtype)
    # not malloc's, which keeps what it has got
    memory = mmap.mmap(-1, n_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


_SMALL_BYTES = 1 << 16


def _save(checkpoint: Any, stream: IO[bytes], fills: Mapping[int, Callable[[], None]]) -> None:
    """``torch.save`` (torch 2.13), with tensors that are read before they are written."""
    with torch.serialization._open_zipfile_writer(stream) as writer:
        filling = _Filling(writer, fills)
        torch.serialization._save(checkpoint, filling, pickle, 2, False)  # type: ignore[no-untyped-call]


class _Filling:
    """The writer of a zip file, which has a tensor's values read for its record alone."""

    def __init__(self, writer: Any, fills: Mapping[int, Callable[[], None]]) -> None:
        self._writer, self._fills = writer, fills

    def write_record(self, name: str, data: Any, n_bytes: int) -> None:
        """Write a record."""
        address = data.data_ptr() if isinstance(data, torch.UntypedStorage) else 0
        fill = self._fills.get(address) if address else None
        if fill is not None:
            fill()
        self._writer.write_record(name, data, n_bytes)
        if fill is not None:
            _release(address, n_bytes)


def to_folder(file: Path, target: Path, count: int) -> None:
    """Write what a checkpoint of one process holds in so many parts.

    Raises:
        CheckpointError: the file is damaged, or is no checkpoint of Lightning's.
        FileExistsError: something has the target's name.
        OSError: it cannot be written.
    """
    _refuse_existing(target)
    check_file(file)
    checkpoint = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    check_lightning(file, checkpoint)
    if "state_dict" not in checkpoint:
        raise CheckpointError(file, "has no weights", "Give a checkpoint that has some.")
    if states := checkpoint.get("optimizer_states"):
        # numbers would come back as places in a list
        checkpoint["optimizer_states"] = [labelled(state, str) for state in states]
    tree = in_parts(checkpoint)
    planners = [_Releasing(_part(tree, number, count)) for number in range(count)]
    plans, metadata = planners[0].create_global_plan([one.create_local_plan() for one in planners])
    with named(target), part_folder(target.parent) as folder:
        written = [
            planner.write(folder, number, plan)
            for number, (planner, plan) in enumerate(zip(planners, plans, strict=True))
        ]
        finish(folder, metadata, written, without_parts(checkpoint))
        appear(folder, target)
    flush_name(target)


def _part(tree: Any, number: int, count: int) -> Any:
    """A tree with the part of each tensor; whole are those that are small, or lie otherwise."""
    if isinstance(tree, Mapping):
        return {key: _part(value, number, count) for key, value in tree.items()}
    is_cut = isinstance(tree, Tensor) and tree.layout == torch.strided and tree.is_contiguous()
    if not is_cut or tree.numel() < count:
        return tree
    length = math.ceil(tree.numel() / count)
    begin = number * length
    return FlatPart(tree.shape, begin, tree.view(-1)[begin : begin + length])


class _Releasing(Planner):
    """Gives back the memory of a mapped file that was written."""

    _written: Tensor | None = None

    def lookup_object(self, index: MetadataIndex) -> Any:
        """What is written next."""
        if self._written is not None:
            _release(self._written.data_ptr(), self._written.nbytes)
        found = super().lookup_object(index)
        self._written = found if isinstance(found, Tensor) and found.is_contiguous() else None
        return found


def _release(address: int, n_bytes: int) -> None:
    """Let the system take the whole pages of mapped memory: a file's can be read again."""
    begin = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    whole = (address + n_bytes - begin) // mmap.PAGESIZE * mmap.PAGESIZE
    if n_bytes >= _SMALL_BYTES and whole > 0:
        advise(begin, whole, mmap.MADV_DONTNEED)


def _refuse_existing(target: Path) -> None:
    if os.path.lexists(target):
        what = "Something of that name is there, and is left as it is. Give another name"
        raise FileExistsError(errno.EEXIST, what, str(target))
