"""Frozen reads, kept: when a step is traced again its code is told what it was told first.

``batch_idx``, ``self.current_epoch``, clocks and random numbers are other values on every batch,
and the user has been warned that the program keeps the first. Code that is traced again is told
these again, so that only what nobody was warned of can make another program.
"""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from lightning.pytorch.loggers.logger import DummyLogger


class Reads:
    """The frozen values that a trace read, in order."""

    current: ClassVar[Reads | None] = None  # of the trace that runs
    again: ClassVar[bool] = False  # whether it is told the values of an earlier one

    def __init__(self) -> None:
        self._kept: dict[str, list[Any]] = {}
        self._told: dict[str, int] = {}

    @contextlib.contextmanager
    def used(self, *, again: bool) -> Iterator[None]:
        """Keep what is read while the block runs; ``again``: tell it once more."""
        before = Reads.current, Reads.again
        Reads.current, Reads.again = self, again
        self._told = {}
        try:
            yield
        finally:
            Reads.current, Reads.again = before

    def value(self, name: str, value: Any) -> Any:
        """What the step is told for ``value``, which it reads now."""
        if Reads.again and name in ("logger", "loggers"):  # what it writes is written
            quiet = DummyLogger()
            return value and ([quiet] * len(value) if name == "loggers" else quiet)
        return self._next(name, lambda: value)

    def call(self, name: str, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """What the step is told by a clock or a random function that it calls now."""
        generator = getattr(function, "__self__", args[0] if args else None)
        states = _STATES.get(_kind(generator))
        if states is None:
            value = self._next(name, lambda: function(*args, **kwargs))
            if not Reads.again:  # the step may change what it got: a generator
                self._kept[name][-1] = copy.deepcopy(value)
            return copy.deepcopy(value) if Reads.again else value
        get, put = (getattr(generator, method) for method in states)
        now = get()
        before = self._next(name, lambda: now)
        if before is now:
            return function(*args, **kwargs)
        put(before)  # the same numbers again
        return function(*args, **kwargs)

    def _next(self, name: str, now: Callable[[], Any]) -> Any:
        kept, i = self._kept.setdefault(name, []), self._told.get(name, 0)
        if not Reads.again:
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
    return value if Reads.current is None else Reads.current.value(name, value)


def call_told(name: str, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """What a step that is traced is told by an impure function."""
    if Reads.current is None:
        return function(*args, **kwargs)
    return Reads.current.call(name, function, args, kwargs)
