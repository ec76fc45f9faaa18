"""Python's ``math`` on traced numbers: ``math.sqrt(group["lr"])`` is a traced number too.

C functions take a float's value without asking it, so the functions of ``math`` are replaced while
a trace lasts. Those that torch does not have take the value, with a guard.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fulgurite.backends.csx.hyperparams.traced_float import TracedNumber, plain
from fulgurite.backends.patches import Patch, patches_of

_ON_TENSORS: dict[str, Callable[..., Any]] = {
    **{name: getattr(torch, name) for name in ("sqrt", "exp", "exp2", "expm1", "log1p")},
    **{name: getattr(torch, name) for name in ("log2", "log10", "sin", "cos", "tan", "atan")},
    **{name: getattr(torch, name) for name in ("sinh", "cosh", "tanh", "asin", "acos", "erf")},
    "fabs": torch.abs,
}
_ASK_THEIR_ARGUMENT = {"floor", "ceil", "trunc"}
"""Functions that call a method of their argument, which a traced number has."""


def traced_math() -> Iterator[Patch]:
    """Patches by which the functions of ``math`` take traced numbers."""
    functions = {
        name: _traced(name, function)
        for name, function in vars(math).items()
        if callable(function) and not name.startswith("_") and name not in _ASK_THEIR_ARGUMENT
    }
    why = "C reads a traced number's value unseen, and the program would keep it"
    return patches_of(math, functions, why=why, checked="Python 3.11")


def _traced(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    on_tensor = _ON_TENSORS.get(name)

    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        if not any(isinstance(arg, TracedNumber) for arg in args):
            return original(*args, **kwargs)
        if on_tensor is not None:
            return args[0].apply(f"math.{name}({{}})", on_tensor, original)
        if name == "pow":
            return args[0] ** args[1]
        if name == "log":
            return _log(original, *args)
        values = [plain(arg, f"math.{name}") for arg in args]
        return original(*values, **kwargs)

    return function


def _log(original: Callable[[float], float], value: Any, base: Any = None) -> Any:
    def log(x: Any) -> Any:
        traced = isinstance(x, TracedNumber)
        return x.apply("math.log({})", torch.log, original) if traced else original(x)

    return log(value) if base is None else log(value) / log(base)
