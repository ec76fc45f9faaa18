"""Reads checkpoints in parts: whole, or the parts that a process is to hold.

Nothing that is in one is run: torch's own reader takes the folder's ``.metadata`` as a pickle of
anything, and values beside tensors too. A chunk is read piece by piece, so that beside the tensors
that are read into no more is in memory than a piece.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import pickle
import zipfile
from collections.abc import Callable, Iterator, Mapping
from enum import EnumMeta
from itertools import product
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
)
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from fulgurite.backends.checkpoints.damage import ANOTHER, CheckpointError
from fulgurite.backends.checkpoints.folders import METADATA, MODEL, OPTIMIZER, REST

_PIECE_BYTES = 1 << 20  # malloc keeps larger ones: 16 MB left holes of 70 MB beside 240 MB

TreePath = tuple[str | int, ...]
Make = Callable[[TreePath, torch.Size, torch.dtype], Any]
"""What a tensor is read into, by its place in the folder: a tensor, or a part of one."""


def whole(path: TreePath, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Memory for all of a tensor."""
    return torch.empty(shape, dtype=dtype)


class FolderReader:
    """An opened checkpoint in parts; ``check_folder`` has looked at it.

    Args:
        path: the folder.
        weights_only: False where it may run what it holds.

    Raises:
        CheckpointError: it holds something else than a checkpoint in parts does.
    """

    def __init__(self, path: str | os.PathLike[str], weights_only: bool = True) -> None:
        self.path, self._weights_only = Path(path), weights_only
        with self._damage():
            with open(self.path / METADATA, "rb") as file:
                self._metadata: Metadata = _Unpickler(file).load()
            paths = self._metadata.planner_data or {}
            self.tensors: dict[TreePath, Any] = {}
            self._keys: dict[TreePath, str] = {}
            for key, found in self._metadata.state_dict_metadata.items():
                place = tuple(paths.get(key, (key,)))
                self._keys[place] = key
                if not isinstance(found, BytesStorageMetadata):
                    self.tensors[place] = found

    @contextlib.contextmanager
    def _damage(self) -> Iterator[None]:
        try:
            yield
        except (AttributeError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
            told = str(error).partition("\n")[0]
            what = f"is no checkpoint in parts that can be read ({told})"
            raise CheckpointError(self.path, what, ANOTHER) from None

    def rest(self) -> dict[str, Any]:
        """All of Lightning's dict but weights and states of optimizers."""
        weights_only = self._weights_only
        found = torch.load(self.path / REST, map_location="cpu", weights_only=weights_only)
        return cast("dict[str, Any]", found)

    def checkpoint(self, tensor: Callable[[TreePath], Any] | None = None) -> dict[str, Any]:
        """Lightning's dict.

        Args:
            tensor: gives what stands in the dict for the tensor of a place; left out, ``read``.
        """
        tree: dict[str, Any] = {}
        read = tensor or self.read
        for place in self._keys:
            _put(tree, place, read(place) if place in self.tensors else self.value(place))
        found: dict[str, Any] = self.rest()
        for name in (MODEL, "state_dict"):  # as ModelParallelStrategy calls it
            if name in tree:
                found["state_dict"] = tree[name]
        states = [tree[name] for i in range(len(tree)) if (name := f"{OPTIMIZER}{i}") in tree]
        if states:  # torch's own planner leaves out what is empty
            found["optimizer_states"] = [{"state": {}, **state} for state in states]
        return found

    def value(self, place: TreePath) -> Any:
        """What stands at a place and is no tensor."""
        index, weights_only = MetadataIndex(self._keys[place]), self._weights_only
        with self._damage(), self._record(index) as record:
            return torch.load(record, map_location="cpu", weights_only=weights_only)

    def read(self, place: TreePath, make: Make = whole) -> Any:
        """A tensor."""
        found = self.tensors[place]
        target = make(place, found.size, found.properties.dtype)
        wanted = (
            target.__create_chunk_list__()
            if hasattr(target, "__create_chunk_list__")
            else [ChunkStorageMetadata(torch.Size([0] * len(found.size)), found.size)]
        )
        with self._damage():
            for item in create_read_items_for_chunk_list(self._keys[place], found, wanted):
                part = (
                    target.__get_tensor_shard__(item.dest_index)
                    if hasattr(target, "__get_tensor_shard__")
                    else target
                )
                with self._record(item.storage_index) as record:
                    _read(record, item, _narrowed(part, item.dest_offsets, item.lengths))
        return target

    @contextlib.contextmanager
    def _record(self, index: MetadataIndex) -> Iterator[IO[bytes]]:
        at = self._metadata.storage_data[index]
        if at.transform_descriptors:
            raise CheckpointError(self.path, "is compressed, which is not read here", ANOTHER)
        name = Path(at.relative_path)
        if name.is_absolute() or ".." in name.parts:
            raise CheckpointError(self.path, f"names a file outside of it, {name}", ANOTHER)
        with open(self.path / name, "rb", buffering=0) as file:
            yield cast("IO[bytes]", io.BufferedReader(_Slice(file, at.offset, at.length)))


def _read(record: IO[bytes], item: ReadItem, target: Tensor) -> None:
    """Read a rectangle of a chunk that torch.save wrote into a tensor of its shape."""
    with torch.serialization.skip_data():  # what it is, without what is in it
        saved = torch.load(record, map_location="cpu", weights_only=True)
    if not saved.is_contiguous() or saved.storage_offset():
        record.seek(0)
        saved = torch.load(record, map_location="cpu", weights_only=True)
        target.copy_(_narrowed(saved, item.storage_offsets, item.lengths))
        return
    record.seek(0)
    archive: Any = torch._C.PyTorchFileReader(record)  # torch 2.13, whose types lack the method
    at = archive.get_record_offset("data/0")
    # one more dimension, so that a number has one too
    sizes, offsets = (1, *saved.shape), (0, *item.storage_offsets)
    lengths, target = (1, *item.lengths), target.unsqueeze(0)
    strides = [math.prod(sizes[d + 1 :]) for d in range(len(sizes))]
    # from this dimension on all of the rectangle lies in one stretch
    d = max((d for d in range(len(sizes)) if lengths[d] != sizes[d]), default=0)
    while lengths[d] == 1 and d + 1 < len(sizes):
        d += 1  # pieces are cut along it
    rows = max(1, _PIECE_BYTES // max(1, strides[d] * saved.itemsize))
    for outer in product(*map(range, lengths[:d])):
        begin = sum((o + i) * s for o, i, s in zip(offsets, outer, strides, strict=False))
        stretch = target[outer]
        for row in range(0, lengths[d], rows):
            piece = stretch[row : row + rows]
            first = begin + (offsets[d] + row) * strides[d]
            record.seek(at + first * saved.itemsize)
            piece.copy_(_values(record, piece.shape, saved.dtype))


def _values(file: IO[bytes], shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """So many values from where a file stands."""
    found = torch.empty(shape, dtype=dtype)
    n_bytes = found.nbytes
    if file.readinto(found.view(-1).view(torch.uint8).numpy()) != n_bytes:  # type: ignore[attr-defined]
        raise EOFError("it ends too early")
    return found


def _narrowed(tensor: Tensor, offsets: torch.Size, lengths: torch.Size) -> Tensor:
    for d, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        tensor = tensor.narrow(d, offset, length)
    return tensor


class _Slice(io.RawIOBase):
    """A stretch of a file, as a file."""

    def __init__(self, file: io.FileIO, begin: int, n_bytes: int) -> None:
        self._file, self._begin, self._n_bytes, self._at = file, begin, n_bytes, 0

    def readable(self) -> bool:
        """Yes."""
        return True

    seekable = readable

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """As a file."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._n_bytes}[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        """As a file."""
        view = memoryview(buffer)[: max(0, self._n_bytes - self._at)]
        self._file.seek(self._begin + self._at)
        n_read = self._file.readinto(view) or 0
        self._at += n_read
        return n_read


_DATA = "torch.distributed.checkpoint.metadata"
_OTHERS = {
    *(("pathlib", "PosixPath"), ("torch", "Size"), ("torch.serialization", "_get_layout")),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
}


class _Unpickler(pickle.Unpickler):
    """Makes what torch puts into ``.metadata``, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        """A class of torch.distributed.checkpoint, or a number type.

        Raises:
            CheckpointError: it is another one.
        """
        if (module, name) == ("builtins", "getattr"):
            return _member  # an Enum's, as Python writes it before 3.11.4
        if module == "pathlib._local":  # as Python 3.13 writes it
            module = "pathlib"
        found = None
        if module in (_DATA, "torch") or (module, name) in _OTHERS:
            found = super().find_class(module, name)
        is_data = isinstance(found, type) and found.__module__ == _DATA
        if is_data or isinstance(found, torch.dtype) or (module, name) in _OTHERS:
            return found
        raise _foreign(f"{module}.{name}")


def _member(kind: Any, name: str) -> Any:
    """The member of an enumeration.

    Raises:
        CheckpointError: something else is wanted.
    """
    if isinstance(kind, EnumMeta) and name in kind.__members__:
        return kind[name]
    raise _foreign(f"{kind!r}.{name}")


def _foreign(name: str) -> CheckpointError:
    what = f"names {name}, which no checkpoint in parts does, and could run code"
    return CheckpointError(METADATA, what, ANOTHER)


def _put(tree: Any, place: TreePath, value: Any) -> None:
    """Put a value to its place in dicts, and in lists where a number says which."""
    for key, following in zip(place, (*place[1:], None), strict=True):
        if isinstance(tree, list):
            tree.extend([None] * (int(key) + 1 - len(tree)))
        if following is None:
            tree[key] = value
            return
        if (tree.get(key) if isinstance(tree, Mapping) else tree[key]) is None:
            tree[key] = [] if isinstance(following, int) else {}
        tree = tree[key]
