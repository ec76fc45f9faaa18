"""Gradients of several processes: each one's become their mean, inside the step.

As in torch's DistributedDataParallel: gradients are put into buckets in the order in which the
backward pass reaches them, and a bucket that is full is on its way while that pass goes on. Here
each is an all-reduce of the graph, by torch's functional collectives. The last one takes other
numbers along: what the processes tell each other and logged values, whose mean is wanted, and the
buffers of the first process, to which the others add zeros.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from fulgurite.backends.csx.graph.collectives import (
    BUCKET_BYTES,
    FIRST_BUCKET_BYTES,
    Processes,
)
from fulgurite.backends.csx.state import Gradients


@dataclass(slots=True)
class _Bucket:
    """Tensors of one dtype: their mean is wanted, or their sum."""

    means: list[Tensor] = field(default_factory=list)
    sums: list[Tensor] = field(default_factory=list)
    begun: Tensor | None = None

    @property
    def tensors(self) -> list[Tensor]:
        return self.means + self.sums

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


class Reduction:
    """The gradients of one backward pass, and what travels along."""

    def __init__(self, processes: Processes) -> None:
        self._processes, self._buckets = processes, list[_Bucket]()
        self._open: dict[torch.dtype, _Bucket] = {}

    def add(self, tensor: Tensor, *, as_sum: bool = False) -> None:
        """Take a tensor that is computed; it is sent with others when their bucket is full.

        It becomes the mean of all processes' tensors, or their sum. Where all but the first process
        have zeros, the sum is the first one's tensor to the bit.
        """
        bucket = self._open.get(tensor.dtype)
        if bucket is None:
            bucket = self._open[tensor.dtype] = _Bucket()
            self._buckets.append(bucket)
        (bucket.sums if as_sum else bucket.means).append(tensor)
        is_first = len(self._buckets) == 1
        if bucket.nbytes >= (FIRST_BUCKET_BYTES if is_first else BUCKET_BYTES):
            self._send(bucket)

    def _send(self, bucket: _Bucket) -> None:
        del self._open[bucket.tensors[0].dtype]
        # as in DistributedDataParallel, each process divides before the sum
        parts = [_flat(bucket.means) / self._processes.count] if bucket.means else []
        parts += [_flat(bucket.sums)] if bucket.sums else []
        flat = parts[0] if len(parts) == 1 else torch.cat(parts)
        bucket.begun = self._processes.begin_sum(flat)

    def finish(self) -> None:
        """Send what is left, and put each mean or sum where the tensor is."""
        for bucket in list(self._open.values()):
            self._send(bucket)
        for bucket in self._buckets:
            assert bucket.begun is not None
            _put(self._processes.wait(bucket.begun), bucket.tensors)


@dataclass(slots=True)
class Piggyback:
    """Tensors that are sent in the last bucket of gradients, to need no message of their own.

    Attributes:
        means: tensors that become the mean of all processes'.
        firsts: tensors that become the first process's.
    """

    means: list[Tensor] = field(default_factory=list)
    firsts: list[Tensor] = field(default_factory=list)


@contextlib.contextmanager
def reduced(
    gradients: Gradients, processes: Processes, is_first: Tensor, has_others: bool
) -> Iterator[Piggyback]:
    """Let what a backward pass inside the block leaves in ``p.grad`` be the processes' mean.

    Yields what is to travel along, for the block to fill.

    Args:
        gradients: of the pass.
        processes: all of them.
        is_first: whether this is the first process, read by the program.
        has_others: whether earlier passes may have left gradients that are this process's own.
    """
    reduction, along, known = Reduction(processes), Piggyback(), set[int]()

    def arrived(parameter: Tensor) -> None:
        assert parameter.grad is not None
        known.add(id(parameter))
        if id(parameter) not in gradients.sharded:
            reduction.add(parameter.grad)

    gradients.arrived = arrived
    try:
        with reducing_parts(gradients, processes):
            yield along
    finally:
        gradients.arrived = None
    with torch.no_grad():
        for gradient in gradients.others(known) if has_others else ():
            reduction.add(gradient)
        for tensor in along.means:
            reduction.add(tensor)
        pieces = [[torch.where(is_first, p, 0.0) for p in _pieces(one)] for one in along.firsts]
        for piece in itertools.chain(*pieces):
            reduction.add(piece, as_sum=True)
        reduction.finish()
        for tensor, found in zip(along.firsts, pieces, strict=True):
            tensor.copy_(_whole(found, tensor))


@contextlib.contextmanager
def reducing_parts(gradients: Gradients, processes: Processes) -> Iterator[None]:
    """Let gradients of sharded parameters become the processes' mean inside the block."""
    gradients.reduce = lambda gradient: processes.wait(
        processes.begin_sum(gradient / processes.count)
    )
    try:
        yield
    finally:
        gradients.reduce = None


_BITS = 22  # of an integer in a float32, whose integers are exact up to 24


def _pieces(tensor: Tensor) -> list[Tensor]:
    """A tensor of any dtype as some of float32 or float64, without rounding."""
    tensor = tensor.detach()
    if tensor.is_complex():
        return [tensor.real.clone(), tensor.imag.clone()]
    if tensor.is_floating_point():
        return [tensor.clone() if tensor.dtype == torch.float64 else tensor.float()]
    low, whole = 2**_BITS - 1, tensor.long()
    shifts = (2 * _BITS, _BITS, 0)
    # the highest piece keeps the sign
    return [((whole >> n) & (low if n < shifts[0] else -1)).float() for n in shifts]


def _whole(pieces: list[Tensor], like: Tensor) -> Tensor:
    """What ``_pieces`` was given."""
    if like.is_complex():
        return torch.complex(*pieces)
    if like.is_floating_point():
        return pieces[0].to(like.dtype)
    high, middle, low = (piece.long() for piece in pieces)
    return ((high << 2 * _BITS) | (middle << _BITS) | low).to(like.dtype)


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


class ChangedBuffers:
    """The buffers that a step changes, from its beginning on."""

    def __init__(self, module: nn.Module) -> None:
        self._modules = list(module.modules())
        self._seen = [_versions(one) for one in self._modules]
        self._are_taken = False

    def take(self, is_last: bool = False) -> list[Tensor]:
        """Those that were changed since they were taken last.

        A normalization's statistics change unseen: they are taken until the step's last backward
        pass, before which it changes them.
        """
        unseen = not (is_last and self._are_taken)
        changed = [
            module
            for module, was in zip(self._modules, self._seen, strict=True)
            if _versions(module) != was or (unseen and _keeps_statistics(module))
        ]
        self._are_taken = True
        return list({id(b): b for one in changed for b in one.buffers(recurse=False)}.values())

    def mark_written(self) -> None:
        """Those that were taken have been written."""
        self._seen = [_versions(one) for one in self._modules]


def _versions(module: nn.Module) -> list[tuple[int, int]]:
    """What tells whether Python changed a module's buffers."""
    return [(id(buffer), buffer._version) for buffer in module.buffers(recurse=False)]


def _keeps_statistics(module: nn.Module) -> bool:
    """Whether a normalization changes its buffers by itself, which Python does not see."""
    return isinstance(module, _NormBase) and module.training and module.track_running_stats
