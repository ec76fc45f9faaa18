"""Numbers and strings of a batch while it is traced: constants that tell when they are read."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any


class _Watched:
    """Stands for a number of the batch while tracing, and notes that it was read.

    It is no number itself: a subclass of int could be read unseen, by ``range`` or ``math.exp``.
    """

    __slots__ = ("note", "value")

    def __init__(self, value: Any, note: Callable[[], None]) -> None:
        self.value, self.note = value, note

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self.value)

    def __getattr__(self, name: str) -> Any:
        return getattr(unwatched(self), name)

    def __hash__(self) -> int:
        return hash(unwatched(self))


class _WatchedStr(str):
    """The same for a string, which many functions accept only as a real one."""

    note: Callable[[], None]

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("__"):
            str.__getattribute__(self, "__dict__").get("note", lambda: None)()
        return str.__getattribute__(self, name)


WATCHED = _Watched.__name__


def watch(value: Any, note: Callable[[], None]) -> Any:
    """A stand-in for a number or a string that calls ``note`` when it is read; else ``value``."""
    if type(value) in (int, float):
        return _Watched(value, note)
    if type(value) is str:
        watched = _WatchedStr(value)
        vars(watched)["note"] = note
        return watched
    return value


def unwatched(value: Any) -> Any:
    """A watched value as it is, noted as read; any other value unchanged."""
    if type(value) is _Watched:
        value.note()
        return value.value
    return value


def _forward(function: Callable[..., Any], swapped: bool = False) -> Callable[..., Any]:
    def method(self: _Watched, *others: Any) -> Any:
        values = [unwatched(self), *map(unwatched, others)]
        return function(*(reversed(values) if swapped else values))

    return method


_ARITHMETIC = (operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv)
_INTEGER = (operator.mod, operator.pow, divmod, operator.lshift, operator.rshift, operator.xor)
_COMPARISON = (operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge)
_CONVERSION = (operator.index, int, float, complex, bool, str, repr, format)
_UNARY = (operator.neg, operator.pos, operator.abs, round, math.trunc, math.floor, math.ceil)
_function: Any
for _function in (*_ARITHMETIC, *_INTEGER):
    setattr(_Watched, f"__{_function.__name__}__", _forward(_function))
    setattr(_Watched, f"__r{_function.__name__}__", _forward(_function, swapped=True))
for _function in (*_COMPARISON, *_CONVERSION, *_UNARY):
    setattr(_Watched, f"__{_function.__name__}__", _forward(_function))


def _noting(name: str) -> Callable[..., Any]:
    original = getattr(str, name)

    def method(self: _WatchedStr, *others: Any) -> Any:
        vars(self)["note"]()
        return original(self, *others)

    return method


_STRING = (
    "add",
    "mul",
    "rmul",
    "mod",
    "len",
    "getitem",
    "contains",
    "iter",
    "str",
    "repr",
    "format",
)
for _name in ("eq", "ne", "lt", "le", "gt", "ge", "hash", *_STRING):
    setattr(_WatchedStr, f"__{_name}__", _noting(f"__{_name}__"))
for _convert in (int, float):
    setattr(_WatchedStr, f"__{_convert.__name__}__", lambda self, to=_convert: to(self + ""))
