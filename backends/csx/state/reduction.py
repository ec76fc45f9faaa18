"""Gradients of several processes: each one's become their mean, inside the step.

As in torch's DistributedDataParallel: gradients are put into buckets in the order in which the
backward pass reaches them, and a bucket that is full is on its way while that pass goes on. Here
each is an all-reduce of the graph, by torch's functional collectives.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fulgurite.backends.csx.graph.collectives import Processes
from fulgurite.backends.csx.state.gradients import Gradients

BUCKET_BYTES = 25 * 2**20  # as DistributedDataParallel's; a smaller one first, as it has
FIRST_BUCKET_BYTES = 2**20


@dataclass(slots=True)
class _Bucket:
    gradients: list[Tensor] = field(default_factory=list)
    begun: Tensor | None = None

    @property
    def nbytes(self) -> int:
        return sum(gradient.nbytes for gradient in self.gradients)


class Reduction:
    """The gradients of one backward pass."""

    def __init__(self, processes: Processes) -> None:
        self._processes, self._buckets = processes, list[_Bucket]()
        self._open: dict[torch.dtype, _Bucket] = {}

    def add(self, parameter: Tensor) -> None:
        """A gradient is there: on its way with others, as soon as their bucket is full."""
        gradient = parameter.grad
        assert gradient is not None
        bucket = self._open.get(gradient.dtype)
        if bucket is None:
            bucket = self._open[gradient.dtype] = _Bucket()
            self._buckets.append(bucket)
        bucket.gradients.append(gradient)
        is_first = len(self._buckets) == 1
        if bucket.nbytes >= (FIRST_BUCKET_BYTES if is_first else BUCKET_BYTES):
            self._send(bucket)

    def _send(self, bucket: _Bucket) -> None:
        del self._open[bucket.gradients[0].dtype]
        bucket.begun = self._processes.begin_sum(_flat(bucket.gradients) / self._processes.count)

    def finish(self) -> None:
        """Send what is left, and put each mean where the gradient is."""
        for bucket in list(self._open.values()):
            self._send(bucket)
        for bucket in self._buckets:
            assert bucket.begun is not None
            _put(self._processes.wait(bucket.begun), bucket.gradients)


@contextlib.contextmanager
def reduced(gradients: Gradients, processes: Processes) -> Iterator[None]:
    """Let what a backward pass inside the block leaves in ``p.grad`` be the processes' mean."""
    reduction = Reduction(processes)
    gradients.arrived = reduction.add
    try:
        yield
    finally:
        gradients.arrived = None
    with torch.no_grad():
        reduction.finish()


@torch.no_grad()
def share_first(tensors: list[Tensor], processes: Processes) -> None:
    """Give tensors the values of the first process's."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    begun = [(processes.begin_broadcast(_flat(some)), some) for some in by_dtype.values()]
    for flat, some in begun:
        _put(processes.wait(flat), some)


def _flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def _put(flat: Tensor, tensors: list[Tensor]) -> None:
    pieces = torch.split(flat, [tensor.numel() for tensor in tensors])
    for tensor, piece in zip(tensors, pieces, strict=True):
        tensor.copy_(piece.view(tensor.shape))
