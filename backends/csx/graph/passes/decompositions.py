"""How operations become those that the compiler knows."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

from fulgurite.backends import torch_compiler
from fulgurite.backends.csx.graph.dtypes import NARROW, moved_statistics
from fulgurite.backends.csx.graph.lstm import WRITTEN_OUT
from fulgurite.backends.csx.graph.op_schema import is_random
from fulgurite.backends.patches import applied, patches_of
from fulgurite.backends.supported import UnsupportedVersion
from fulgurite.backends.torch_versions import CHECKED


def decompositions() -> dict[Any, Any]:
    """The compiler's table, but for random operations: their draws must be eager's."""
    table = {
        operation: decomposition
        for operation, decomposition in _compilers_table().items()
        if not is_random(operation)
    }
    for operation in _NORMS:
        table[operation] = _with_full_statistics(table[operation])
    batch_norm = torch.ops.aten.native_batch_norm.default
    table[batch_norm] = _with_narrow_statistics(table[batch_norm])
    for operation in _LAID_OUT:
        table[operation] = _in_eager_layout(table[operation])
    return table | WRITTEN_OUT


def _compilers_table() -> dict[Any, Any]:
    """The decompositions of torch's compiler: 0.2 s of CPU where they are asked for first.

    Raises:
        UnsupportedVersion: this torch has them elsewhere.
    """
    try:
        from torch._export import utils

        every = functools.cache(utils._materialize_cpp_cia_ops)
        why = "it asks for the same list 29 times, 0.1 s of CPU (measured)"
        names = {"_materialize_cpp_cia_ops": every}
        with applied(patches_of(utils, names, why=why, checked=CHECKED)):
            table = torch_compiler.decompositions()
        prims = torch.ops.prims  # defined with the table
        pooled = prims._low_memory_max_pool_with_offsets
        places = prims._low_memory_max_pool_offsets_to_indices
    except (ImportError, AttributeError) as error:
        raise UnsupportedVersion("torch", f"lacks what programs are made with: {error}") from error
    aten = torch.ops.aten
    return {
        **table,
        aten.max_pool2d_with_indices.default: functools.partial(_max_pool, pooled, places, 2),
        aten.max_pool3d_with_indices.default: functools.partial(_max_pool, pooled, places, 3),
        aten.eye.default: _eye,
        aten.eye.m: _eye,
    }


def _eye(
    n: int,
    m: int | None = None,
    *,
    dtype: torch.dtype | None = None,
    device: Any = None,
    **rest: Any,
) -> Tensor:
    """As torch's, whose indices have the smallest type: there is no ``arange`` of uint16 on a CPU,
    where a step on parts runs operation by operation.
    """
    rows, columns = (torch.arange(size, device=device) for size in (n, n if m is None else m))
    return (rows[:, None] == columns).to(dtype or torch.get_default_dtype())


_NORMS = (
    torch.ops.aten.native_batch_norm.default,
    torch.ops.aten._native_batch_norm_legit.default,
    torch.ops.aten._native_batch_norm_legit_functional.default,
    torch.ops.aten.native_layer_norm.default,
    torch.ops.aten.native_group_norm.default,
)


def _with_full_statistics(decomposition: Callable[..., Any]) -> Callable[..., Any]:
    """Keep mean and deviation in the type of a norm's parameters, as eager kernels do.

    torch's decomposition rounds them to the input's type, bfloat16 under autocast, and the backward
    pass reads them: 2.5e-3 in the loss after a step of a ConvNet, 1e-3 of an MLP with LayerNorm
    (measured, torch 2.13).
    """

    def decomposed(x: Tensor, *rest: Any) -> Any:
        dtypes = [t.dtype for t in rest if isinstance(t, Tensor)]
        y, *statistics = decomposition(x.to(dtypes[0]) if dtypes else x, *rest)
        return y.to(x.dtype), *statistics

    return decomposed


def _with_narrow_statistics(decomposition: Callable[..., Any]) -> Callable[..., Any]:
    """Round running statistics of 16 bits as batch norm's kernel does: torch's rounds them once."""

    def decomposed(
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor | None,
        var: Tensor | None,
        training: bool,
        momentum: float,
        eps: float,
    ) -> Any:
        rest = (weight, bias), (training, momentum, eps)
        if not training or mean is None or var is None or mean.dtype not in NARROW:
            return decomposition(x, *rest[0], mean, var, *rest[1])
        moved = moved_statistics(x, mean, var, momentum)
        made = decomposition(x, *rest[0], None, None, *rest[1])
        mean.copy_(moved[0])
        var.copy_(moved[1])
        return made

    return decomposed


_LAID_OUT = (
    torch.ops.aten.cat.default,
    torch.ops.aten.native_batch_norm.default,
    torch.ops.aten.upsample_nearest1d.default,
    torch.ops.aten._upsample_nearest_exact1d.default,
)
"""Decomposed they leave another layout than their kernels do, for operands that lie turned."""


def _in_eager_layout(decomposition: Callable[..., Any]) -> Callable[..., Any]:
    """Lay out a result as the kernel does, which the next operation may rely on.

    torch's decomposition of ``cat`` copies the only operand that is not empty in the operand's own
    layout. A ``view`` of the result then fails, as in transformers' GPT-2, whose keys come after
    none.
    """

    def decomposed(x: Any, *rest: Any, **options: Any) -> Any:
        made = decomposition(x, *rest, **options)
        if made is NotImplemented:
            return made
        formats = {
            suggest_memory_format(one) for one in (x if isinstance(x, (list, tuple)) else [x])
        }
        # as the kernel of cat does: operands that lie in several ways give a contiguous result
        [layout] = formats if len(formats) == 1 else [torch.contiguous_format]
        if isinstance(made, tuple):
            return made[0].contiguous(memory_format=layout), *made[1:]
        return made.contiguous(memory_format=layout)

    return decomposed


_LARGEST_WINDOW = 25  # torch 2.13's limit for pooling in a loop of its own


def _max_pool(
    pooled: Callable[..., Any],
    places: Callable[..., Any],
    dims: int,
    x: Tensor,
    kernel: list[int],
    stride: list[int] | None = None,
    padding: int | list[int] = 0,
    dilation: int | list[int] = 1,
    ceil_mode: bool = False,
) -> Any:
    """As torch's decomposition, which asks a module of its compiler: 1.2 s to import (measured).

    ``pooled`` and ``places`` are the compiler's operations: largest values with where they are in
    their windows, and from that where they are in ``x``.
    """

    def listed(value: int | list[int]) -> list[int]:
        values = [value] if isinstance(value, int) else list(value)
        return values * dims if len(values) == 1 else values

    window = listed(kernel)
    if math.prod(window) > _LARGEST_WINDOW:
        return NotImplemented
    how = listed(stride or window), listed(padding), listed(dilation)
    values, offsets = pooled(x, window, *how, ceil_mode)
    return values, places(offsets, window, x.shape[-dims:], *how)
