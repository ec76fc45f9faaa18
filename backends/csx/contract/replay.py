"""Frozen reads, kept: when a step is traced again its code is told what it was told first.

``batch_idx``, ``self.current_epoch``, clocks and random numbers are other values on every batch,
and the user has been warned that the program keeps the first. Code that is traced again is told
these again, so that only what nobody was warned of can make another program.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

from lightning.pytorch.loggers.logger import DummyLogger

from fulgurite.backends.step_context import step_context


class Reads:
    """The frozen values that a trace read, in order."""

    def __init__(self) -> None:
        self._kept: dict[str, list[Any]] = {}
        self.begin(again=False)

    def begin(self, *, again: bool) -> None:
        """A trace begins, whose reads are kept; ``again``: it is told what is kept, in order."""
        self.again = again
        self._told: dict[str, int] = {}

    def value(self, name: str, value: Any) -> Any:
        """What the step is told for ``value``, which it reads now."""
        if self.again and name in ("logger", "loggers"):  # what it writes is written
            quiet = DummyLogger()
            return value and ([quiet] * len(value) if name == "loggers" else quiet)
        return self._next(name, lambda: value)

    def call(self, name: str, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """What the step is told by a clock or a random function that it calls now."""
        generator = getattr(function, "__self__", args[0] if args else None)
        states = _STATES.get(_kind(generator))
        if states is None:
            value = self._next(name, lambda: function(*args, **kwargs))
            if not self.again:  # the step may change what it got: a generator
                self._kept[name][-1] = copy.deepcopy(value)
            return copy.deepcopy(value) if self.again else value
        get, put = (getattr(generator, method) for method in states)
        now = get()
        before = self._next(name, lambda: now)
        if before is now:
            return function(*args, **kwargs)
        put(before)  # the same numbers again
        return function(*args, **kwargs)

    def _next(self, name: str, now: Callable[[], Any]) -> Any:
        kept, i = self._kept.setdefault(name, []), self._told.get(name, 0)
        if not self.again:
            value = now()
            kept.append(dict(value) if isinstance(value, dict) else value)
            return value
        self._told[name] = i + 1
        return kept[min(i, len(kept) - 1)] if kept else now()


_STATES = {"Random": ("getstate", "setstate"), "RandomState": ("get_state", "set_state")}


def _kind(generator: Any) -> str:
    if isinstance(generator, random.Random):
        return "Random"
    return "RandomState" if type(generator).__name__ == "RandomState" else ""


def told(name: str, value: Any) -> Any:
    """What a step that is traced is told for ``value``."""
    reads: Reads | None = step_context.get().reads
    return value if reads is None else reads.value(name, value)


def told_again() -> bool:
    """Whether a step is traced that is told what an earlier trace of it was told."""
    reads: Reads | None = step_context.get().reads
    return reads is not None and reads.again


def call_told(name: str, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """What a step that is traced is told by an impure function."""
    reads: Reads | None = step_context.get().reads
    return function(*args, **kwargs) if reads is None else reads.call(name, function, args, kwargs)
