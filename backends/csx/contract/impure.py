"""Functions that give another value on each call: clocks and random numbers of the host.

While a step is traced they warn when the user's code calls them. A profiler of Python's
(``sys.setprofile``) would see calls of every kind, but looks at all calls of a trace.

Not seen: ``datetime.now`` and numpy's generator objects, whose types are written in C; a function
that an object or a closure holds.
"""

from __future__ import annotations

import functools
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any

import numpy as np

from fulgurite.backends.csx.contract.frozen_reads import is_models, is_users, warn_frozen
from fulgurite.backends.csx.contract.replay import call_told
from fulgurite.backends.csx.graph.rng import note_draw
from fulgurite.backends.patches import Patch, patches_of

_CLOCKS = ("time", "perf_counter", "monotonic", "process_time", "thread_time")
_TEXTS = ("ctime", "localtime", "gmtime", "strftime")
_TIME = "on_train_batch_start and on_train_batch_end, which run on the host, to take the time"
_ANEW = ", which draw{} anew on every step"
_RANDOM = "torch.rand, torch.randint or torch.randperm" + _ANEW.format("")
_DRAWN = {
    "beta": "torch.distributions.Beta(a, b).sample()",
    "betavariate": "torch.distributions.Beta(a, b).sample()",
    "dirichlet": "torch.distributions.Dirichlet(concentration).sample()",
    "gamma": "torch.distributions.Gamma(shape, 1 / scale).sample()",
    "gammavariate": "torch.distributions.Gamma(alpha, 1 / beta).sample()",
    "exponential": "torch.empty(size).exponential_(1 / scale)",
    "expovariate": "torch.empty(()).exponential_(rate)",
    "normal": "mean + std * torch.randn(size)",
    "randn": "torch.randn(size)",
    "standard_normal": "torch.randn(size)",
    "gauss": "mean + std * torch.randn(())",
    "normalvariate": "mean + std * torch.randn(())",
    "uniform": "torch.empty(size).uniform_(low, high)",
    "binomial": "torch.bernoulli(torch.full(size, p))",
    "poisson": "torch.poisson(torch.full(size, rate))",
    "permutation": "x[torch.randperm(len(x))]",
    "shuffle": "x[torch.randperm(len(x))]",
    "sample": "x[torch.randperm(len(x))[:k]]",
    "choice": "x[torch.randint(len(x), (k,))], with weights x[torch.multinomial(weights, k)]",
    "choices": "x[torch.randint(len(x), (k,))], with weights x[torch.multinomial(weights, k)]",
}
"""What draws in a program as functions of Python's and NumPy's generators do."""
_OF_STATE = ("getstate", "setstate", "get_state", "set_state", "get_bit_generator")


def impure_functions() -> Iterator[Patch]:
    """Patches after which the user's calls in a step warn."""
    clocks = (*_CLOCKS, *(f"{clock}_ns" for clock in _CLOCKS), *_TEXTS)
    drawn = _methods_of(random, random._inst)
    numpys = (*_methods_of(np.random, np.random.mtrand._rand), "default_rng")
    yield from _warning(time, "time", clocks, _TIME, "Python 3.11")
    yield from _warning(random, "random", drawn, _RANDOM, "Python 3.11")
    yield from _warning(random.Random, "random.Random", drawn, _RANDOM, "Python 3.11")
    yield from _warning(np.random, "numpy.random", numpys, _RANDOM, "numpy 2.4")


def _warning(
    owner: Any, label: str, names: Iterable[str], remedy: str, checked: str
) -> Iterator[Patch]:
    """Patches of an owner's functions, which messages call ``label`` and the function's name."""
    functions = {
        name: _watched(getattr(owner, name), f"{label}.{name}()", remedy, name) for name in names
    }
    why = "the program keeps the value that the first step got, so the user is warned"
    return patches_of(owner, functions, why=why, checked=checked)


def _methods_of(module: ModuleType, generator: object) -> list[str]:
    """The functions of a module that are methods of its global generator."""
    return [
        name
        for name, value in vars(module).items()
        if getattr(value, "__self__", None) is generator and name not in _OF_STATE
    ]


def _watched(
    original: Callable[..., Any], label: str, remedy: str, name: str
) -> Callable[..., Any]:
    draws = remedy == _RANDOM
    if draws and name in _DRAWN:
        remedy = _DRAWN[name] + _ANEW.format("s")

    @functools.wraps(original)
    def watched(*args: Any, **kwargs: Any) -> Any:
        if draws:
            note_draw()
        if not (is_models if draws else is_users)(sys._getframe(1)):
            return original(*args, **kwargs)
        value = call_told(label, original, args, kwargs)
        warn_frozen(label, value, remedy, done="called")
        return value

    return watched
