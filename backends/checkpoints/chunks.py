"""Parts of a tensor as torch.distributed.checkpoint knows them: in rectangular chunks.

A *part* is a stretch of a tensor's elements in order (row-major), as processes hold them in weight
streaming. A *chunk* is a rectangle. A part of a matrix is at most three: the end of a row, whole
rows, the begin of a row; of a tensor of n dimensions at most 2n - 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType


class FlatPart:
    """A part of a tensor, with what torch.distributed.checkpoint asks of one (torch 2.13).

    Args:
        shape: of the whole tensor.
        begin: the part's first element.
        values: its elements, flat; those beyond the whole's end are left out.
    """

    def __init__(self, shape: Sequence[int], begin: int, values: Tensor) -> None:
        self._shape = torch.Size(shape)
        n_elements = max(0, min(values.numel(), math.prod(self._shape) - begin))
        self._begin, self._values = begin, values.detach()[:n_elements]

    def size(self) -> torch.Size:
        """The whole's."""
        return self._shape

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        end = self._begin + self._values.numel()
        return [
            ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))
            for offsets, sizes in _chunks(self._shape, self._begin, end)
        ]

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        properties = TensorProperties(dtype=self._values.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self._shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """The view of a chunk."""
        begin = 0
        for chunk in self.__create_chunk_list__():
            n_elements = math.prod(chunk.sizes)
            if chunk.offsets == index.offset:
                return self._values[begin : begin + n_elements].view(chunk.sizes)
            begin += n_elements
        raise KeyError(index)


_Rectangle = tuple[tuple[int, ...], tuple[int, ...]]
"""Where it begins in each dimension, and its sizes."""


def _chunks(shape: Sequence[int], begin: int, end: int) -> Iterator[_Rectangle]:
    """The rectangles of which elements ``begin`` to ``end`` are made, in order."""
    if begin >= end:
        return
    if len(shape) <= 1:
        yield ((begin,), (end - begin,)) if shape else ((), ())
        return
    n_row = math.prod(shape[1:])
    row, first = divmod(begin, n_row)
    if first or end - begin < n_row:  # of one row alone, whose end may come first
        stop = min(end, (row + 1) * n_row)
        for offsets, sizes in _chunks(shape[1:], first, stop - row * n_row):
            yield (row, *offsets), (1, *sizes)
        yield from _chunks(shape, stop, end)
        return
    n_rows = (end - begin) // n_row
    yield (row, *[0] * (len(shape) - 1)), (n_rows, *shape[1:])
    yield from _chunks(shape, (row + n_rows) * n_row, end)
