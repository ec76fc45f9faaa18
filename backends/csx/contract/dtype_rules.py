"""Narrow floats: a run has one 16-bit type, that of its precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fulgurite.backends.csx.contract.rules import misuse
from fulgurite.backends.csx.diagnostics.user_lines import UserLine
from fulgurite.backends.csx.graph.dtypes import NARROW, STAND_IN

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
