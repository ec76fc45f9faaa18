"""Proxies: what a step finds in place of the numbers, strings and objects of its batch.

Every operation on a proxy notes that the value was read, and works on the value. A proxy is no int,
float or str: one that was could be read unseen by code written in C, and the value be frozen in
silence. To torch's own functions it is a ``SymInt`` or ``SymFloat``, which they take for numbers,
and show to the function mode of the trace. Checked against torch 2.13.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import numpy as np
import torch

PassedOn = int | str | tuple[Any, ...]
"""Where a call finds a value: the number of a leaf of its batch, the name of an argument, or the
path to a container in the batch."""


class Watched:
    """The base of all proxies; what they stand for is not among their attributes."""

    __slots__ = ()


class Held:
    """What a proxy stands for, whom to tell that it was read, and where each call finds it."""

    __slots__ = ("note", "source", "value")

    def __init__(self, value: Any, note: Callable[[], object], source: PassedOn) -> None:
        self.value, self.note, self.source = value, note, source


def held_by(value: Any) -> Held:
    """What a proxy stands for, unnoticed."""
    held: Held = object.__getattribute__(value, "_fulgurite_held")
    return held


def is_watched(value: Any) -> bool:
    """Whether a value is a proxy."""
    return issubclass(type(value), Watched)


def source_of(value: Any) -> PassedOn:
    """Where each call finds what a proxy stands for."""
    return held_by(value).source


def unwatched(value: Any) -> Any:
    """The number or string that a proxy stands for, noted as read; any other value itself."""
    if not is_watched(value) or type(value) is WatchedObject:
        return value
    held = held_by(value)
    held.note()
    return held.value


class WatchedObject(Watched):
    """A proxy for an object, which can be passed on, and not used."""

    def __getattribute__(self, name: str) -> Any:
        held = held_by(self)
        kind, refused = held.value
        if name == "__class__":
            held.note()
            return kind
        return refused()


def refuse(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
    """Raise for the use of an object."""
    held_by(self).value[1]()
    raise AssertionError


USES = """
    len iter next getitem setitem contains call bool eq ne lt le gt ge hash str repr format fspath
    int float index array add radd sub rsub mul rmul truediv rtruediv neg pow matmul rmatmul enter
    exit setattr reduce_ex copy deepcopy reversed
"""
for _use in USES.split():
    setattr(WatchedObject, f"__{_use}__", refuse)


def _forward(function: Callable[..., Any], swapped: bool = False) -> Callable[..., Any]:
    def method(self: Any, *others: Any) -> Any:
        values = [unwatched(self), *map(unwatched, others)]
        return function(*(reversed(values) if swapped else values))

    return method


def _attribute(name: str) -> property:
    return property(lambda self: getattr(unwatched(self), name))


def _same(self: Any, memo: Any = None) -> Any:
    """A copy of a constant is the constant."""
    return self


_ARITHMETIC = (operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv)
_INTEGER = (operator.mod, operator.pow, divmod)
_BITS = (operator.lshift, operator.rshift, operator.xor)
_COMPARISON = (operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge)
_UNARY = (operator.neg, operator.pos, operator.abs, round, math.trunc, math.floor, math.ceil)
_READ = (bool, str, repr, format, hash)


def _proxy(of: type, base: type, both: Iterable[Any], alone: Iterable[Any]) -> type[Any]:
    """The class of proxies for one of Python's types, which torch takes for a ``base``.

    ``both`` are functions of two operands, in either order, ``alone`` those of it alone.
    """
    body: dict[str, Any] = {name: _attribute(name) for name in dir(of) if name[0] != "_"}
    for function in both:
        name = function.__name__.rstrip("_")
        body[f"__{name}__"] = _forward(function)
        body[f"__r{name}__"] = _forward(function, swapped=True)
    for function in (*_COMPARISON, *_READ, *alone):
        body[f"__{function.__name__}__"] = _forward(function)
    body |= {
        "__class__": property(lambda self: of),
        "__init__": object.__init__,
        "__copy__": _same,
        "__deepcopy__": _same,
        "__reduce_ex__": lambda self, protocol: (of, (unwatched(self),)),
        "__array__": lambda self, dtype=None, copy=None: np.asarray(unwatched(self), dtype),
    }
    return type(f"_Watched{of.__name__.title()}", (Watched, base), body)


_NUMERIC = (*_ARITHMETIC, *_INTEGER)
_LOGIC = (operator.and_, operator.or_)
_INT = (int, float, complex, operator.index, operator.invert, *_UNARY)
_STR = (len, iter, operator.getitem, operator.contains)
PROXIES: dict[type, Any] = {
    int: _proxy(int, torch.SymInt, (*_NUMERIC, *_BITS, *_LOGIC), _INT),
    float: _proxy(float, torch.SymFloat, _NUMERIC, (int, float, complex, *_UNARY)),
    str: _proxy(str, object, (operator.add, operator.mul, operator.mod), _STR),
}
PROXIES[str].__fspath__ = _forward(str)
PROXIES[str].__int__ = _forward(int)
PROXIES[str].__float__ = _forward(float)
