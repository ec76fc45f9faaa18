"""Python's ``math`` on traced numbers: ``math.sqrt(group["lr"])`` is a traced number too.

C functions take a float's value without asking it, so the functions of ``math`` are replaced while
a trace lasts: in ``math``, and in modules that took them from there (``from math import sqrt``).
Those that torch does not have take the value, with a guard.
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch

from fulgurite.backends.csx.diagnostics.user_lines import LIBRARIES, imported, user_modules
from fulgurite.backends.csx.hyperparams.traced_float import TracedNumber, plain
from fulgurite.backends.patches import patched

_ON_TENSORS: dict[str, Callable[..., Any]] = {
    **{name: getattr(torch, name) for name in ("sqrt", "exp", "exp2", "expm1", "log1p")},
    **{name: getattr(torch, name) for name in ("log2", "log10", "sin", "cos", "tan", "atan")},
    **{name: getattr(torch, name) for name in ("sinh", "cosh", "tanh", "asin", "acos", "erf")},
    "fabs": torch.abs,
}


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


_ASKS = {"floor", "ceil", "trunc"}  # by a method of their argument


@contextlib.contextmanager
def traced_math() -> Iterator[None]:
    """Let the functions of ``math`` take traced numbers."""
    originals = {
        name: function
        for name, function in vars(math).items()
        if callable(function) and not name.startswith("_") and name not in _ASKS
    }
    replacements = {id(f): _traced(name, f) for name, f in originals.items()}
    changes = [
        (module, name, replacements[id(value)])
        for module in {math, *user_modules(), *_packages_with_math(imported())}
        for name, value in vars(module).items()
        if id(value) in replacements
    ]
    with patched(changes):
        yield


@functools.lru_cache(maxsize=1)
def _packages_with_math(imported: int) -> list[ModuleType]:
    """Modules that hold one of ``math``'s functions; of packages, whose names seldom change."""
    functions = set(map(id, vars(math).values()))
    return [
        module
        for name, module in list(sys.modules.items())
        if isinstance(module, ModuleType)
        and name.partition(".")[0] not in LIBRARIES
        and not functions.isdisjoint(map(id, vars(module).values()))
    ]
