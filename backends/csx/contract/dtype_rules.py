"""Narrow floats: a run has one 16-bit type, that of its precision, and dtypes are written out.

Lightning's "bf16-true" makes bfloat16 torch's default while ``training_step`` runs. An operation
that was traced without a dtype (``randn(4, 8)``, an integer tensor divided by 2) would take the
default of whenever it is run again, which is float32: it gets its dtype while it is traced.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from fulgurite.backends.csx.contract.rules import misuse
from fulgurite.backends.csx.diagnostics.user_lines import UserLine
from fulgurite.backends.csx.graph.dtypes import NARROW, STAND_IN
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


_TRACED_AS = {"bfloat16": torch.bfloat16, "float16": torch.float16, "cbfloat16": STAND_IN}


class OneNarrowType:
    """Hold one trace to one 16-bit type: the run's, or else the first that the step makes.

    Args:
        name: the run's, where it has one.
    """

    def __init__(self, name: str | None) -> None:
        self._name = name
        self._dtype = None if name is None else _TRACED_AS[name]
        self._first: UserLine | None = None  # what made it, in a run without one

    def check(self, what: str, dtype: torch.dtype, line: Callable[[], UserLine | None]) -> None:
        """Raise UnsupportedDtype where ``what``, a result of the step, is of a second type."""
        if dtype not in NARROW or dtype is self._dtype:
            return
        if self._dtype is None:
            self._dtype, self._name, self._first = dtype, _short(dtype), line()
            return
        where = f", since {self._first.place}" if self._first is not None else ""
        named = {"what": what, "dtype": _short(dtype), "allowed": str(self._dtype)}
        raise misuse("second_narrow", line(), first=f"{self._name}{where}", **named)

    def literal(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """The arguments by which ``func`` takes in float32 what is to be a literal of cbfloat16.

        A literal is a constant of the program: made of the stand-in it would have two bits less.
        None for other calls.
        """
        if self._name != "cbfloat16" or func not in _OF_LITERALS:
            return None
        *tensor, data = args or (kwargs.get("data"),)
        own = getattr(tensor[0], "dtype", None) if tensor else None
        if isinstance(data, Tensor) or kwargs.get("dtype", own) is not STAND_IN:
            return None
        if func is Tensor.__setitem__:
            return (*tensor, torch.tensor(data, dtype=torch.float32).to(STAND_IN)), kwargs
        return args, {**kwargs, "dtype": torch.float32}


_OF_LITERALS = (torch.tensor, torch.as_tensor, Tensor.new_tensor, Tensor.__setitem__)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
