"""The Python state that a step's code can reach: put back after a second trace, and compared.

Containers, objects of the user's, closures and the globals that the step's code names, numpy's
arrays and generators, bytes. Iterators are found, and not put back; neither are files and objects
of other packages.
"""

from __future__ import annotations

import argparse
import array
import functools
import random
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from types import CellType, CodeType, FunctionType, MethodType, SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import numpy as np
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from fulgurite.backends.csx.capture.contents import BYTES, Position, Slots, holds_the_same, place_of
from fulgurite.backends.csx.contract.frozen_scalars import is_scalar
from fulgurite.backends.csx.diagnostics.user_lines import LIBRARIES, belongs_to_library
from fulgurite.backends.csx.state.places import Place
from fulgurite.backends.csx.state.snapshot import dict_kind, elements
from fulgurite.backends.csx.state.storage import dict_of, member
from fulgurite.backends.patches import MISSING

_DEEPEST, _LONGEST = 8, 1000  # containers within containers; elements that are looked into
_LARGEST = 1 << 24  # bytes of an array that is copied
_NOTHING, _ELEMENTS = "nothing", "elements"  # in the text of a ``Change``
_FUNCTIONS = (FunctionType, MethodType, functools.partial)
_ELSEWHERE = (nn.Module, Optimizer, LRScheduler)  # whose state is compared elsewhere
_PLAIN_OBJECTS = (SimpleNamespace, argparse.Namespace)
_OPAQUE = (str, bytes, int, float, complex, bool, type(None), Tensor, Enum, type, types.ModuleType)


@dataclass(slots=True)
class _Kept:
    """Something that may change, and a function that puts it back as it was.

    ``before`` is its copy where it is a container, ``name`` how the user reaches it.
    """

    item: Any
    before: Any
    name: str
    restore: Callable[[], None]
    told: bool = True  # whether a change is the user's, who wants to know


@dataclass(frozen=True, slots=True)
class Change:
    """A Python value that changed: the user's name of its place, and what it was and is."""

    name: str
    before: str
    now: str
    is_of_array: bool = False

    def __str__(self) -> str:
        return f"{self.name} was changed from {self.before} to {self.now}"


class PythonState:
    """What the code of a step can reach: of module ``root``, whose name is ``name``, and others."""

    def __init__(self, root: nn.Module, name: str, others: Iterable[object]) -> None:
        self._kept: dict[int, _Kept] = {}
        self._seen: dict[int, Any] = {}
        self._scalars: dict[int, dict[str, Any]] = {}  # globals, by the identity of their dict
        for path, module in root.named_modules():
            if not _is_frameworks(type(module)):
                where = member(name, path)
                self._code(type(module))
                self._attributes(module, where, scalars=False)
        for item in others:
            kind = type(item)
            if isinstance(item, _FUNCTIONS):
                self._look(item, "", 0)
            elif isinstance(item, pl.Callback) and _is_frameworks(kind):
                hooks = (hook for hook in vars(item).values() if isinstance(hook, _FUNCTIONS))
                self._look((*hooks,), "", 0)  # of a LambdaCallback
            elif not (_is_frameworks(kind) or isinstance(item, _ELSEWHERE)):
                self._code(kind)
                self._attributes(item, kind.__name__, scalars=True)

    def restore(self) -> None:
        """Put all back."""
        for kept in self._kept.values():
            kept.restore()

    def changes(self) -> Iterator[Change]:
        """The Python values that are others now: a counter's, an element's."""
        for kept in self._kept.values():
            yield from (one for one in _changes(kept) if kept.told or one.is_of_array)

    def traced(self, holds: Callable[[Any], bool]) -> Iterator[tuple[Place, Any, Any]]:
        """Places in dicts where there now is what ``holds`` says: (place, before, now)."""
        for kept in self._kept.values():
            if isinstance(kept.item, dict):
                for key, value in elements(kept.item).items():
                    before = kept.before.get(key, MISSING)
                    if value is not before and holds(value):
                        yield Place(kept.item, key), before, value

    # -- looking -------------------------------------------------------------------------------

    def _keep(self, item: Any, before: Any, name: str, restore: Callable[[], None]) -> _Kept:
        kept = self._kept[id(item)] = _Kept(item, before, name, restore)
        return kept

    def _attributes(self, owner: Any, name: str, *, scalars: bool, depth: int = 0) -> None:
        own = vars(owner)
        if id(own) in self._kept:
            return
        before = dict(own)
        kept = self._keep(own, before, f"{name}.", lambda: _refill_dict(own, before))
        kept.told = scalars
        for key, value in before.items():
            if not (isinstance(owner, (nn.Module, pl.Callback)) and key in FRAMEWORKS):
                self._look(value, f"{name}.{key.removeprefix('_') if key == '_hparams' else key}",
                           depth + 1)  # fmt: skip

    def _look(self, value: Any, name: str, depth: int) -> None:
        if isinstance(value, _OPAQUE) or id(value) in self._seen or depth > _DEEPEST:
            return
        self._seen[id(value)] = value
        if isinstance(value, dict):
            before = elements(value)
            self._keep(value, before, name, lambda: _refill_dict(value, before))
            self._inside(((f"{name}[{key!r}]", one) for key, one in before.items()), before, depth)
        elif isinstance(value, (list, deque, tuple)):
            items = list(value)
            if not isinstance(value, tuple):
                self._keep(value, items, name, lambda: _refill(value, items))
            self._inside(((f"{name}[{i}]", one) for i, one in enumerate(items)), items, depth)
        elif isinstance(value, set):
            members = set(value)
            self._keep(value, members, name, lambda: _refill(value, members))
        elif isinstance(value, np.ndarray):
            if value.nbytes <= _LARGEST and value.flags.writeable:
                content = value.copy()
                self._keep(value, content, name, lambda: np.copyto(value, content))
        elif isinstance(value, (bytearray, array.array)):
            here: Any = value
            held = here[:]
            self._keep(value, held, name, lambda: here.__setitem__(slice(None), held))
        elif isinstance(value, memoryview):
            self._look(value.obj, name, depth + 1)
        elif (place := place_of(value)) is not None:
            self._keep(value, Position(place), name, lambda: None)
        elif isinstance(value, (random.Random, np.random.Generator, np.random.RandomState)):
            self._keep(value, None, name, _random_state(value))
        elif isinstance(value, FunctionType):
            self._function(value, name, depth)
        elif isinstance(value, MethodType):
            self._look((value.__func__, value.__self__), name, depth + 1)
        elif isinstance(value, functools.partial):
            self._look((value.func, value.args, value.keywords), name, depth + 1)
        elif isinstance(value, _ELSEWHERE):
            return
        elif isinstance(value, _PLAIN_OBJECTS) or not belongs_to_library(type(value)):
            self._object(value, name, depth)

    def _inside(self, items: Iterable[tuple[str, Any]], sized: Any, depth: int) -> None:
        if len(sized) <= _LONGEST:
            for name, item in items:
                self._look(item, name, depth + 1)

    def _object(self, value: Any, name: str, depth: int) -> None:
        self._code(type(value))
        if isinstance(dict_of(value), dict):
            self._attributes(value, name, scalars=True, depth=depth)
        slots = [s for kind in type(value).__mro__ for s in vars(kind).get("__slots__", ())]
        held = {s: getattr(value, s) for s in slots if hasattr(value, s)}
        if held and not isinstance(slots, str):
            self._keep(Slots(value), held, f"{name}.", lambda: _set_all(value, held))
            self._inside(((f"{name}.{key}", one) for key, one in held.items()), held, depth)

    def _function(self, function: FunctionType, name: str, depth: int) -> None:
        if belongs_to_library(function):
            return
        for key, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=True
        ):
            try:
                value = cell.cell_contents
            except ValueError:  # not filled yet
                continue
            self._keep(cell, {key: value}, "", lambda c=cell, v=value: _fill(c, v))  # type: ignore[misc]
            self._look(value, key, depth + 1)
        self._globals(function, depth)

    def _code(self, kind: type) -> None:
        """The globals that the methods of a class name."""
        for owner in kind.__mro__:
            if id(owner) in self._seen or _is_frameworks(owner):
                continue
            self._seen[id(owner)] = owner
            self._class(owner)
            for value in list(vars(owner).values()):
                function = getattr(value, "__func__", getattr(value, "fget", value))
                function = getattr(function, "__wrapped__", function)
                if isinstance(function, FunctionType):
                    self._look(function, function.__name__, 1)

    def _class(self, kind: type) -> None:
        """The Python values that are a class's own."""
        own = vars(kind)  # a view, which nobody can write
        held = {key: value for key, value in own.items() if key[:2] != "__" and is_scalar(value)}
        if held:
            self._keep(own, held, f"{kind.__name__}.", lambda: _set_changed(kind, held))
        for key, value in own.items():
            if isinstance(value, (dict, list, set, deque)) and key[:2] != "__":
                self._look(value, f"{kind.__name__}.{key}", 1)

    def _globals(self, function: FunctionType, depth: int) -> None:
        space, scalars = function.__globals__, self._scalars
        for name in _names(function.__code__):
            if name not in space:
                continue
            value = space[name]
            if is_scalar(value):
                if id(space) not in scalars:
                    held = scalars[id(space)] = {}
                    self._keep(space, held, "", functools.partial(space.update, held))
                scalars[id(space)][name] = value
            else:
                self._look(value, name, depth + 1)


FRAMEWORKS = frozenset((*vars(nn.Module()), *vars(pl.LightningModule()), *vars(pl.Callback()))) - {
    "_hparams"
}
"""Attributes that every module, LightningModule or Callback has."""


def _is_frameworks(kind: type) -> bool:
    """Whether a class is torch's, Lightning's, ours, or of the standard library."""
    return kind.__module__.partition(".")[0] in LIBRARIES


def _names(code: CodeType) -> set[str]:
    inner = (one for one in code.co_consts if isinstance(one, CodeType))
    return set(code.co_names).union(*map(_names, inner))


def _changes(kept: _Kept) -> Iterator[Change]:
    item, before = kept.item, kept.before
    if isinstance(item, CellType):
        [(key, was)] = before.items()
        item, before = {key: item.cell_contents}, {key: was}
    if isinstance(before, dict):
        of_attributes, keys = kept.name.endswith("."), [*before]
        whole = isinstance(kept.item, dict) and kept.name
        if whole:  # of globals and classes only those that were kept
            keys += [key for key in item if key not in before]
        for key in keys:
            name = (
                f"{kept.name}{key}" if of_attributes or not kept.name else f"{kept.name}[{key!r}]"
            )
            yield from _difference(name, before.get(key, MISSING), _value(item, key))
    elif isinstance(before, BYTES):
        yield from _difference(kept.name, before, item)
    elif isinstance(before, Position) and place_of(item) != before.place:
        yield Change(kept.name, "where it was", "a later element")
    elif isinstance(before, set):
        for one in item ^ before:
            if is_scalar(one):
                yield Change(kept.name, f"{len(before)} {_ELEMENTS}", f"{len(item)}")
                return
    elif isinstance(before, list):
        if len(before) != len(item):
            last = item[-1] if item else MISSING
            if last is MISSING or is_scalar(last):
                yield Change(kept.name, f"{len(before)} {_ELEMENTS}", f"{len(item)}")
        else:
            for i, (was, now) in enumerate(zip(before, item, strict=True)):
                yield from _difference(f"{kept.name}[{i}]", was, now)


def _difference(name: str, was: Any, now: Any) -> Iterator[Change]:
    """A change of a Python scalar, an array or bytes; NaN equals NaN."""
    if isinstance(was, BYTES) and type(was) is type(now) and not holds_the_same(was, now):
        yield Change(name, "what it held", "other values", is_of_array=True)
    if was is now or not all(one is MISSING or is_scalar(one) for one in (was, now)):
        return
    if type(was) is not type(now) or repr(was) != repr(now):
        before, after = (_NOTHING if one is MISSING else repr(one) for one in (was, now))
        yield Change(name, before, after)


def _refill_dict(item: dict[Any, Any], before: dict[Any, Any]) -> None:
    now, kind = elements(item), dict_kind(item)
    if len(now) == len(before) and all(
        a is c and b is d for (a, b), (c, d) in zip(now.items(), before.items(), strict=True)
    ):
        return
    for key in [key for key in now if key not in before]:
        kind.pop(item, key)
    for key, value in before.items():
        if dict.get(item, key, MISSING) is not value:
            kind.__setitem__(item, key, value)


def _value(item: Any, key: Any) -> Any:
    """What a dict has, whatever its class's ``get`` does, or a view of one."""
    return dict.get(item, key, MISSING) if isinstance(item, dict) else item.get(key, MISSING)


def _refill(item: Any, before: Any) -> None:
    if len(item) != len(before) or any(a is not b for a, b in zip(item, before, strict=True)):
        item.clear()
        (item.update if isinstance(item, set) else item.extend)(before)


def _fill(cell: CellType, value: Any) -> None:
    cell.cell_contents = value


def _set_changed(kind: type, values: dict[str, Any]) -> None:
    for key, value in values.items():
        if vars(kind).get(key) is not value:
            setattr(kind, key, value)


def _set_all(owner: Any, values: dict[str, Any]) -> None:
    for key, value in values.items():
        object.__setattr__(owner, key, value)


def _random_state(generator: Any) -> Callable[[], None]:
    if isinstance(generator, np.random.Generator):
        state = generator.bit_generator.state

        def restore() -> None:
            generator.bit_generator.state = state

        return restore
    python = isinstance(generator, random.Random)
    now = generator.getstate() if python else generator.get_state()
    return lambda: generator.setstate(now) if python else generator.set_state(now)
