"""Functions that give another value on each call: clocks and random numbers of the host.

While a step is traced they warn when the user's code calls them. Each is replaced in its own module
and wherever a module of the user's holds it by name (``from time import time``). A profiler of
Python's (``sys.setprofile``) would see calls of every kind, but looks at all calls of a trace.

Not seen: ``datetime.now`` and numpy's generator objects, whose types are written in C; a function
that an object or a closure holds.
"""

from __future__ import annotations

import functools
import random
import sys
import time
from collections.abc import Callable, Iterator
from types import FunctionType, ModuleType
from typing import Any

from torch import nn

from fulgurite.backends.csx.contract.frozen_reads import is_users, warn_frozen
from fulgurite.backends.csx.contract.replay import call_told
from fulgurite.backends.csx.diagnostics.user_lines import user_modules

_CLOCKS = ("time", "perf_counter", "monotonic", "process_time", "thread_time")
_TEXTS = ("ctime", "localtime", "gmtime", "strftime")
_TIME = "on_train_batch_start and on_train_batch_end, which run on the host, to take the time"
_RANDOM = "torch.rand, torch.randint or torch.randperm, which draw anew on every step"
_STATES = ("getstate", "setstate", "get_state", "set_state", "get_bit_generator")


def impure_functions(root: nn.Module) -> Iterator[tuple[Any, str, Any]]:
    """Changes (owner, name, value) after which the user's calls in a step of ``root`` warn."""
    watched: dict[int, Callable[..., Any]] = {}
    for owner, name, label, remedy in _functions():
        original = getattr(owner, name)
        replacement = _watched(original, label, remedy)
        yield owner, name, replacement
        if isinstance(owner, ModuleType):
            watched[id(original)] = replacement
    for owner in (*user_modules(), *_unlisted(root)):
        for name, value in list(vars(owner).items()):
            if id(value) in watched:
                yield owner, name, watched[id(value)]


def _functions() -> Iterator[tuple[Any, str, str, str]]:
    """(owner, name, name in messages, remedy) of each."""
    for name in (*_CLOCKS, *(f"{clock}_ns" for clock in _CLOCKS), *_TEXTS):
        yield time, name, f"time.{name}()", _TIME
    for name in _methods_of(random, random._inst):
        yield random, name, f"random.{name}()", _RANDOM
        yield random.Random, name, f"random.Random.{name}()", _RANDOM
    numbers = sys.modules.get("numpy.random")
    if numbers is not None:
        for name in (*_methods_of(numbers, numbers.mtrand._rand), "default_rng"):
            yield numbers, name, f"numpy.random.{name}()", _RANDOM


class _Namespace:
    """Global names that no module in ``sys.modules`` has: of a file that was run by its path."""

    def __init__(self, names: dict[str, Any]) -> None:
        self.__dict__ = names


def _unlisted(root: nn.Module) -> Iterator[_Namespace]:
    """Where the classes of modules come from, as far as ``sys.modules`` does not know."""
    for kind in {kind for module in root.modules() for kind in type(module).__mro__}:
        if kind.__module__ not in sys.modules:
            functions = [value for value in vars(kind).values() if isinstance(value, FunctionType)]
            yield from (_Namespace(function.__globals__) for function in functions[:1])


def _methods_of(module: ModuleType, generator: object) -> list[str]:
    """The functions of a module that are methods of its global generator."""
    return [
        name
        for name, value in vars(module).items()
        if getattr(value, "__self__", None) is generator and name not in _STATES
    ]


def _watched(original: Callable[..., Any], label: str, remedy: str) -> Callable[..., Any]:
    @functools.wraps(original)
    def watched(*args: Any, **kwargs: Any) -> Any:
        if not is_users(sys._getframe(1)):
            return original(*args, **kwargs)
        value = call_told(label, original, args, kwargs)
        warn_frozen(label, value, remedy, done="called")
        return value

    return watched
