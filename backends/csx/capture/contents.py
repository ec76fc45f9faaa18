"""What is in Python values that are no containers: bytes, iterators' places, slots."""

from __future__ import annotations

import array
import types
from dataclasses import dataclass
from typing import Any

import numpy as np

from fulgurite.backends.csx.contract.frozen_scalars import is_scalar

BYTES = (np.ndarray, bytearray, array.array)


class Slots:
    """The slots of an object, as a dict has its values."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner

    def get(self, key: str, default: Any) -> Any:
        """What is in a slot."""
        return getattr(self._owner, key, default)


@dataclass(frozen=True, slots=True)
class Position:
    """Where an iterator was."""

    place: Any


def holds_the_same(was: Any, now: Any) -> bool:
    if isinstance(was, np.ndarray) and (was.dtype, was.shape) != (now.dtype, now.shape):
        return False
    return bool(was.tobytes() == now.tobytes() if hasattr(was, "tobytes") else was == now)


def place_of(value: Any) -> Any:
    """Where an iterator of Python's own is; None for what is none, and where that is not known."""
    if isinstance(value, types.GeneratorType):
        frame = value.gi_frame
        held = {} if frame is None else frame.f_locals
        scalars = [(key, repr(one)) for key, one in held.items() if is_scalar(one)]
        return (None if frame is None else frame.f_lasti, *scalars)
    if not hasattr(value, "__next__") or type(value).__module__ not in ("builtins", "itertools"):
        return None
    try:
        made = value.__reduce__()
    except TypeError:
        return None
    return tuple([_within(part) for part in made[1:]])


def _within(part: Any) -> Any:
    """A part of what an iterator can be made of again, to be compared."""
    if isinstance(part, tuple):
        return tuple([_within(one) for one in part])
    if isinstance(part, list):
        return id(part), len(part)
    return part if is_scalar(part) else place_of(part) or id(part)
