"""The default dtype of a trace, written into its operations.

Lightning's "bf16-true" makes bfloat16 torch's default while ``training_step`` runs. An operation
that was traced without a dtype (``randn(4, 8)``, an integer tensor divided by 2) would take the
default of whenever it is run again, which is float32: it gets its dtype while it is traced.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from fulgurite.backends.csx.graph.op_schema import arguments_of, is_mutable


def with_explicit_dtype(func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments of an ATen operation such that its result does not rest on the default."""
    default = torch.get_default_dtype()
    if default is torch.float32:
        return args, kwargs
    tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    if not tensors:
        names = [argument.name for argument in arguments_of(func)]
        if "dtype" in names and kwargs.get("dtype") is None:
            return args, {**kwargs, "dtype": _dtype_of_factory(func, args, kwargs)}
    elif _promotes(func, tensors) and _result_dtype(func, args, kwargs) is default:
        args, kwargs = pytree.tree_map_only(Tensor, lambda t: t.to(default), (args, kwargs))
    return args, kwargs


def _dtype_of_factory(func: Any, args: Any, kwargs: Any) -> torch.dtype:
    """By its result, for arguments decide too: ``full((2,), 1)`` is int64."""
    options = {**kwargs, "device": "meta"}
    with _disable_current_modes():
        dtype: torch.dtype = func(*args, **options).dtype
    return dtype


def _promotes(func: Any, tensors: list[Tensor]) -> bool:
    """Whether a floating result can come of integers alone, by torch's rules for promotion."""
    elementwise = torch.Tag.pointwise in func.tags and not is_mutable(func)
    return elementwise and not any(t.is_floating_point() or t.is_complex() for t in tensors)


def _result_dtype(func: Any, args: Any, kwargs: Any) -> torch.dtype | None:
    def meta(tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")

    with _disable_current_modes():
        result = func(*pytree.tree_map_only(Tensor, meta, args), **kwargs)
    return result.dtype if isinstance(result, Tensor) else None
