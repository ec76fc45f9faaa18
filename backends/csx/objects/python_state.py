"""The Python state that a step's code can reach: put back after a second trace, and compared.

Containers, objects of the user's, closures, defaults of arguments and the globals that the step's
code names, numpy's arrays and generators, bytes. Iterators are found (itertools' up to Python
3.13), and not put back; neither are files and objects of other packages.
"""

from __future__ import annotations

import argparse
import functools
import pickle
import random
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from types import CellType, FunctionType, MethodType, SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import numpy as np
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from fulgurite.backends.csx.contract import is_scalar
from fulgurite.backends.csx.diagnostics.user_lines import belongs_to_library
from fulgurite.backends.csx.objects.discovery import names_in
from fulgurite.backends.csx.state import (
    ARRAYS,
    GENERATORS,
    Place,
    child_name,
    content,
    dict_of,
    dotted_name,
    elements,
    filled_cells,
    filled_slots,
    owner_of,
    refill,
)
from fulgurite.backends.patches import MISSING

_DEEPEST, _LONGEST = 8, 1000  # containers within containers; elements that are looked into
_LARGEST = 1 << 24  # bytes of an array that is copied
_NOTHING, _ELEMENTS = "nothing", "elements"  # in the text of a ``Change``
_FUNCTIONS = (FunctionType, MethodType, functools.partial)
_ELSEWHERE = (nn.Module, Optimizer, LRScheduler)  # whose state is compared elsewhere
_PLAIN_OBJECTS = (SimpleNamespace, argparse.Namespace)
_OPAQUE = (str, bytes, int, float, complex, bool, type(None), Tensor, Enum, type, types.ModuleType)
_STATELESS = random.SystemRandom  # a generator without a state: its methods are watched


@dataclass(frozen=True, slots=True)
class _Values:
    """Some of the values that something holds, by their names: of a class, of slots, of a cell."""

    get: Callable[[str, Any], Any]
    put: Callable[[str, Any], object]


@dataclass(frozen=True, slots=True)
class _Position:
    """Where an iterator was."""

    place: Any


@dataclass(slots=True)
class _SavedContent:
    """Something that may change, what was in it, and how the user reaches it."""

    item: Any
    before: Any
    name: str
    whole: bool = True  # whether what is in ``item`` and not in ``before`` is new

    def restore(self) -> None:
        """Put it back as it was; iterators cannot be."""
        if isinstance(self.before, _Position):
            return
        if self.whole:
            refill(self.item, self.before)
            return
        # globals, a class: what is there beside the known names is none of the step's
        put = self.item.put if isinstance(self.item, _Values) else self.item.__setitem__
        for key, value in self.before.items():
            if self.item.get(key, MISSING) is not value:
                put(key, value)


@dataclass(frozen=True, slots=True)
class Change:
    """A Python value that changed: the user's name of its place, and what it was and is."""

    name: str
    before: str
    now: str
    is_draw: bool = False  # of a random generator

    def __str__(self) -> str:
        return f"{self.name} was changed from {self.before} to {self.now}"


class PythonState:
    """What the code of a step can reach: of module ``root``, whose name is ``name``, and others."""

    def __init__(self, root: nn.Module, name: str, others: Iterable[object]) -> None:
        self._kept: dict[int, _SavedContent] = {}
        self._seen: dict[int, Any] = {}
        self._scalars: dict[int, dict[str, Any]] = {}  # globals, by the identity of their dict
        for path, module in root.named_modules():
            if not owner_of(type(module)).is_named_library:
                where = dotted_name(name, path)
                self._code(type(module))
                self._attributes(module, where)
        for item in others:
            kind = type(item)
            if isinstance(item, _FUNCTIONS):
                self._visit(item, "", 0)
            elif isinstance(item, pl.Callback) and owner_of(kind).is_named_library:
                hooks = (hook for hook in vars(item).values() if isinstance(hook, _FUNCTIONS))
                self._visit((*hooks,), "", 0)  # of a LambdaCallback
            elif not (owner_of(kind).is_named_library or isinstance(item, _ELSEWHERE)):
                self._code(kind)
                self._attributes(item, kind.__name__)

    def restore(self) -> None:
        """Put all back."""
        for kept in self._kept.values():
            kept.restore()

    def changes(self) -> Iterator[Change]:
        """The Python values that are others now: a counter's, an element's."""
        for kept in self._kept.values():
            yield from _changes(kept)

    def traced(self, holds: Callable[[Any], bool]) -> Iterator[tuple[Place, Any, Any]]:
        """Places in dicts where there now is what ``holds`` says: (place, before, now)."""
        for kept in self._kept.values():
            if isinstance(kept.item, dict):
                for key, value in elements(kept.item).items():
                    before = kept.before.get(key, MISSING)
                    if value is not before and holds(value):
                        yield Place(kept.item, key), before, value

    # -- looking -------------------------------------------------------------------------------

    def _keep(self, item: Any, before: Any, name: str, *, whole: bool = True) -> None:
        self._kept[id(item)] = _SavedContent(item, before, name, whole)

    def _attributes(self, owner: Any, name: str, depth: int = 0) -> None:
        own = vars(owner)
        if id(own) in self._kept:
            return
        before = dict(own)
        self._keep(own, before, f"{name}.")
        for key, value in before.items():
            if not (isinstance(owner, (nn.Module, pl.Callback)) and key in FRAMEWORKS):
                shown = key.removeprefix("_") if key == "_hparams" else key
                self._visit(value, f"{name}.{shown}", depth + 1)

    def _visit(self, value: Any, name: str, depth: int) -> None:
        if isinstance(value, _OPAQUE) or id(value) in self._seen or depth > _DEEPEST:
            return
        if isinstance(value, _STATELESS):
            return
        self._seen[id(value)] = value
        if isinstance(value, (dict, list, deque)):
            before = content(value)
            self._keep(value, before, name)
            self._items(before, name, depth)
        elif isinstance(value, tuple):
            self._items(value, name, depth)
        elif isinstance(value, np.ndarray):
            if value.nbytes <= _LARGEST and value.flags.writeable:
                self._keep(value, content(value), name)
        elif isinstance(value, (set, *ARRAYS, *GENERATORS)):
            self._keep(value, content(value), name)
        elif isinstance(value, memoryview):
            self._visit(value.obj, name, depth + 1)
        elif (place := _place_of(value)) is not None:
            self._keep(value, _Position(place), name)
        elif isinstance(value, FunctionType):
            self._function(value, name, depth)
        elif isinstance(value, MethodType):
            self._visit((value.__func__, value.__self__), name, depth + 1)
        elif isinstance(value, functools.partial):
            self._visit((value.func, value.args, value.keywords), name, depth + 1)
        elif isinstance(value, _ELSEWHERE):
            return
        elif isinstance(value, _PLAIN_OBJECTS) or not owner_of(type(value)).is_library:
            self._object(value, name, depth)

    def _items(self, items: Any, name: str, depth: int) -> None:
        if len(items) <= _LONGEST:
            pairs = items.items() if isinstance(items, dict) else enumerate(items)
            for key, item in pairs:
                self._visit(item, child_name(name, (True, key)), depth + 1)

    def _object(self, value: Any, name: str, depth: int) -> None:
        self._code(type(value))
        if isinstance(dict_of(value), dict):
            self._attributes(value, name, depth)
        held = filled_slots(value)
        if held:
            slots = _Values(
                lambda key, default: getattr(value, key, default),
                lambda key, item: object.__setattr__(value, key, item),
            )
            self._keep(slots, held, f"{name}.", whole=False)
            if len(held) <= _LONGEST:
                for key, item in held.items():
                    self._visit(item, child_name(name, (False, key)), depth + 1)

    def _function(self, function: FunctionType, name: str, depth: int) -> None:
        if belongs_to_library(function):
            return
        for key, cell, value in filled_cells(function):
            self._keep(_of_cell(cell), {key: value}, "", whole=False)
            self._visit(value, key, depth + 1)
        for key, value in _defaults(function):
            self._visit(value, key, depth + 1)
        self._globals(function, depth)

    def _code(self, kind: type) -> None:
        """The globals that the methods of a class name."""
        for owner in kind.__mro__:
            if id(owner) in self._seen or owner_of(owner).is_named_library:
                continue
            self._seen[id(owner)] = owner
            self._class(owner)
            for value in list(vars(owner).values()):
                function = getattr(value, "__func__", getattr(value, "fget", value))
                function = getattr(function, "__wrapped__", function)
                if isinstance(function, FunctionType):
                    self._visit(function, function.__name__, 1)

    def _class(self, kind: type) -> None:
        """The Python values that are a class's own."""
        own = vars(kind)  # a view, which nobody can write
        held = {key: value for key, value in own.items() if key[:2] != "__" and is_scalar(value)}
        if held:
            values = _Values(own.get, functools.partial(setattr, kind))
            self._keep(values, held, f"{kind.__name__}.", whole=False)
        for key, value in own.items():
            if isinstance(value, (dict, list, set, deque)) and key[:2] != "__":
                self._visit(value, f"{kind.__name__}.{key}", 1)

    def _globals(self, function: FunctionType, depth: int) -> None:
        space, scalars = function.__globals__, self._scalars
        for name in names_in(function.__code__):
            if name not in space:
                continue
            value = space[name]
            if is_scalar(value):
                if id(space) not in scalars:
                    held = scalars[id(space)] = {}
                    self._keep(space, held, "", whole=False)
                scalars[id(space)][name] = value
            else:
                self._visit(value, name, depth + 1)


FRAMEWORKS = frozenset((*vars(nn.Module()), *vars(pl.LightningModule()), *vars(pl.Callback()))) - {
    "_hparams"
}
"""Attributes that every module, LightningModule or Callback has."""


def _defaults(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """The arguments of a function that have a default, and that."""
    values, code = function.__defaults__ or (), function.__code__
    first = code.co_argcount - len(values)
    yield from zip(code.co_varnames[first : code.co_argcount], values, strict=True)
    yield from (function.__kwdefaults__ or {}).items()


def _changes(kept: _SavedContent) -> Iterator[Change]:
    item, before = kept.item, kept.before
    if isinstance(item, GENERATORS):
        if pickle.dumps(content(item)) != pickle.dumps(before):
            yield Change(kept.name, "where it was", "a later draw", is_draw=True)
        return
    if isinstance(before, dict):
        of_attributes, keys = kept.name.endswith("."), [*before]
        if kept.whole:
            keys += [key for key in item if key not in before]
        # a dict's own get, whatever its class has: one may make what is asked for
        get = functools.partial(dict.get, item) if isinstance(item, dict) else item.get
        for key in keys:
            bare = of_attributes or not kept.name
            name = f"{kept.name}{key}" if bare else child_name(kept.name, (True, key))
            yield from _difference(name, before.get(key, MISSING), get(key, MISSING))
    elif isinstance(before, ARRAYS):
        yield from _difference(kept.name, before, item)
    elif isinstance(before, _Position) and _place_of(item) != before.place:
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
                yield from _difference(child_name(kept.name, (True, i)), was, now)


def _difference(name: str, was: Any, now: Any) -> Iterator[Change]:
    """A change of a Python scalar, an array or bytes; NaN equals NaN."""
    if isinstance(was, ARRAYS) and type(was) is type(now) and not _holds_the_same(was, now):
        yield Change(name, "what it held", "other values")
    if was is now or not all(one is MISSING or is_scalar(one) for one in (was, now)):
        return
    if type(was) is not type(now) or repr(was) != repr(now):
        before, after = (_NOTHING if one is MISSING else repr(one) for one in (was, now))
        yield Change(name, before, after)


def _of_cell(cell: CellType) -> _Values:
    """What a closure's cell holds, under any name."""

    def get(key: str, default: Any) -> Any:
        try:
            return cell.cell_contents
        except ValueError:  # emptied
            return default

    return _Values(get, lambda key, value: setattr(cell, "cell_contents", value))


def _holds_the_same(was: Any, now: Any) -> bool:
    if isinstance(was, np.ndarray) and (was.dtype, was.shape) != (now.dtype, now.shape):
        return False
    return bool(was.tobytes() == now.tobytes() if hasattr(was, "tobytes") else was == now)


def _place_of(value: Any) -> Any:
    """How far an iterator of Python's own is, as something comparable.

    None for what is no iterator, and for one of which that is not known.
    """
    if isinstance(value, types.GeneratorType):
        frame = value.gi_frame
        held = {} if frame is None else frame.f_locals
        scalars = [(key, repr(one)) for key, one in held.items() if is_scalar(one)]
        return (None if frame is None else frame.f_lasti, *scalars)
    if not hasattr(value, "__next__") or type(value).__module__ not in ("builtins", "itertools"):
        return None
    try:
        made = value.__reduce__()  # what pickle would make it of again says how far it is
    except (TypeError, DeprecationWarning):  # itertools' lose it: a warning in Python 3.13
        return None
    return tuple([_within(part) for part in made[1:]])


def _within(part: Any) -> Any:
    """Something comparable for a part of what an iterator's ``__reduce__`` gives."""
    if isinstance(part, tuple):
        return tuple([_within(one) for one in part])
    if isinstance(part, list):
        return id(part), len(part)
    return part if is_scalar(part) else _place_of(part) or id(part)
