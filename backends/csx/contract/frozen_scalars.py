"""Python scalars in attributes of modules, and buffers, that a program has as constants.

A step that reads ``self.kl_weight`` or a Dropout's ``p`` is traced with the value that it finds.
The host may not change it afterwards: ``FrozenScalars`` compares, at every epoch's start and after
hooks that somebody overrides.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fulgurite.backends.csx.contract.rules import misuse
from fulgurite.backends.csx.diagnostics.errors import TraceError
from fulgurite.backends.csx.diagnostics.user_lines import UserLine
from fulgurite.backends.csx.state.python_objects import owner_of
from fulgurite.backends.csx.state.storage import brief
from fulgurite.backends.patches import MISSING

_PLAIN = frozenset(
    (*(bool, int, float, complex, str, type(None), tuple), *(torch.dtype, slice, range, torch.Size))
)


def may_be_scalar(kind: type) -> bool:
    """Whether values of a type are scalars, or tuples that may hold them alone."""
    return kind in _PLAIN or issubclass(kind, (Enum, np.generic))


def is_scalar(value: Any) -> bool:
    """Whether a value is a Python scalar, an enum, None, or a tuple of these."""
    if type(value) is tuple:
        return all(map(is_scalar, value))
    return may_be_scalar(type(value))


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """A read of an attribute of a module, or a write to it."""

    module: nn.Module
    name: str
    where: str  # what the user calls it: ``self.net.scale``
    before: Any  # what it held before the step touched it
    line: UserLine | None

    @property
    def container(self) -> dict[str, Any]:
        """The dict that holds the attribute: a buffer may be None."""
        buffers: dict[str, Any] = self.module._buffers
        return buffers if self.name in buffers else vars(self.module)

    def now(self) -> Any:
        """What the attribute holds now, or what the class has for it."""
        value = self.container.get(self.name, MISSING)
        kind: type = type(self.module)
        return scalar_of_class(kind, self.name) if value is MISSING else value

    def undo(self) -> None:
        """Put back what it held before."""
        if self.before is MISSING:
            del self.container[self.name]
        else:
            self.container[self.name] = self.before


@functools.lru_cache(maxsize=4096)
def scalar_of_class(kind: type, name: str) -> Any:
    """The scalar that a class of the user's gives its instances under a name, or none."""
    owners = (one for one in kind.__mro__ if name in vars(one))
    owner = next(owners, None)
    if owner is None or owner_of(owner).is_library:
        return MISSING
    value = vars(owner)[name]
    return value if is_scalar(value) else MISSING


class FrozenScalars:
    """The scalars that a program has as constants: what they hold now, they have to keep.

    Args:
        reads: those that the step read.
    """

    def __init__(self, reads: Iterable[Access]) -> None:
        unique = {(id(read.module), read.name): read for read in reads}
        self._buffers = [
            (read, value.clone())
            for read in unique.values()
            if isinstance(value := read.now(), Tensor)
        ]
        self._reads = [read for read in unique.values() if is_scalar(read.now())]
        self._values = [read.now() for read in self._reads]
        names: dict[int, tuple[dict[str, Any], list[str]]] = {}
        for read in self._reads:
            names.setdefault(id(read.container), (read.container, []))[1].append(read.name)
        self._getters = [(itemgetter(*keys), container) for container, keys in names.values()]
        self._last: Any = None  # what the getters gave when all was as it has to be

    def check(self) -> None:
        """Compare.

        Raises:
            FrozenValueChanged: the host changed one.
        """
        for read, before in self._buffers:
            value = read.now()
            if not isinstance(value, Tensor) or not _is_same(value, before):
                raise _changed(read, before, value)
        try:  # a call for each module: 1 µs where one for each scalar took 2 (measured)
            now = [get(container) for get, container in self._getters]
        except KeyError:  # gone, or the class has it
            now = None
        if now is not None and now == self._last:
            return
        scalar_of_class.cache_clear()  # the class may have got another
        for read, was in zip(self._reads, self._values, strict=True):
            value = read.now()
            if value is not was and not (is_scalar(value) and value == was):
                raise _changed(read, was, value)
        self._last = now


def _changed(read: Access, was: Any, value: Any) -> TraceError:
    name, remedy = read.name, ""
    if type(was) in (bool, int, float) and not owner_of(type(read.module)).is_library:
        remedy = f"{buffer_code(name, was)}, and self.{name}.fill_(value) on the host"
        if type(was) is bool:
            remedy += f"; torch.where(self.{name}, a, b) in the step"
    elif isinstance(was, Tensor):
        asked = (
            "torch.where(condition, a, b) where Python asks"
            if was.dtype is torch.bool
            else ("tensor operations where Python reads it")
        )
        remedy = f"{asked}, which see {read.where} in each step; or set it before fit, and leave it"
    found = {"attribute": read.where, "before": _shown(was), "now": _shown(value)}
    return misuse("frozen_changed", read.line, remedy=remedy, **found)


def _is_same(value: Tensor, before: Tensor) -> bool:
    """Whether all values are equal; NaN is equal to NaN."""
    return torch.equal(value, before) or (
        value.shape == before.shape
        and value.is_floating_point()
        and torch.allclose(value, before, rtol=0, atol=0, equal_nan=True)
    )


def _shown(value: Any) -> str:
    if isinstance(value, Tensor) and value.numel() <= 8:
        return repr(value.tolist())
    return "gone" if value is MISSING else repr(value) if is_scalar(value) else brief(value)


def buffer_code(name: str, value: Any) -> str:
    """Code that makes a buffer of what is a Python number now."""
    made = f'self.register_buffer("{name}", torch.tensor({value!r}))'
    return f"{made} in __init__ instead of self.{name} = {value!r}"
