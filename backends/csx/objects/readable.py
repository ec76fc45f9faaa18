"""What a step's Python can read on the host, to be compared with what it was before.

A walk from the step's functions and what it works on, along the names in their code: numbers,
strings and arrays by value, other objects by identity, containers by their keys and sizes. Tensors
and the state of optimizers are followed elsewhere. The walk does not see files, the inside of
objects written in C, nor what code of installed packages names.
"""

from __future__ import annotations

import array
import functools
import operator
import os
import types
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from itertools import chain
from types import FunctionType, MethodType, ModuleType
from typing import Any

import lightning.pytorch as pl
import numpy as np
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torchmetrics import Metric

from fulgurite.backends.csx.contract import is_scalar
from fulgurite.backends.csx.diagnostics.user_lines import (
    LIBRARIES,
    belongs_to_library,
    is_from_library,
)
from fulgurite.backends.csx.objects.discovery import codes_reached, names_in
from fulgurite.backends.csx.objects.python_state import FRAMEWORKS
from fulgurite.backends.csx.state import (
    attributes_of,
    child_name,
    dotted_name,
    elements,
    filled_cells,
    gradient_hooks,
    owner_of,
)

_DEEPEST, _LONGEST = 8, 1000  # containers within containers; elements that are looked into
_CHECKSUMMED = 1 << 20  # bytes of an array; of a larger one only the first are looked at
_BY_SYNTAX = frozenset(
    (*("forward", "__call__", "__iter__", "__next__", "__len__", "__bool__", "__float__"),
     *("__enter__", "__exit__", "__getattr__", "__str__", "__format__", "__hash__"),
     *(name for name in vars(operator) if name[:2] == "__"))
)  # fmt: skip
"""Methods that code calls without their names."""
_BY_ANY_NAME = {"getattr", "vars", "__dict__", "attrgetter", "eval", "exec", "globals", "locals"}
_BY_TRAINER = {"trainer", "lr_schedulers"}
_BY_UPDATES = {"update_count", "_update_count", "update_called"}
_ENVIRONMENT = {"environ", "getenv"}
_ELSEWHERE = (
    *(Tensor, Optimizer, LRScheduler, Metric),
    *(np.random.Generator, np.random.RandomState, np.random.BitGenerator),
)
_COMPILED = frozenset({*LIBRARIES, "numpy"}) - {"__main__", "collections", "types", "fractions"}
"""Packages and modules whose objects are compared by identity alone."""


class ReadableState:
    """What the step's code can read now, and whether that is still so.

    Args:
        functions: the step, and whatever else runs in it.
        module: every module of the step is in it.
        name: how the step's code reaches it.
        others: what else it works on: optimizers, callbacks, the trainer.
    """

    def __init__(
        self, functions: Iterable[Any], module: nn.Module, name: str, others: Iterable[object]
    ) -> None:
        self._others = list(others)
        owners = [None, *module.modules(), *self._others]
        hooks = [hook for owner in owners for held in _hooks_of(owner) for hook in held.values()]
        self._functions = [one for one in (*functions, *hooks) if not is_from_library(one)]
        self._module, self._name = module, name
        codes = codes_reached(self._functions, _BY_SYNTAX)
        self._names = _BY_SYNTAX.union(*map(names_in, codes))
        self._seen = self._walk()

    def changed(self) -> list[str]:
        """What is another than the last time that this was asked, as the user's code names it."""
        before, self._seen = self._seen, self._walk()
        names = list[str]()
        for name, was in before.items():
            # what is no longer found is no change by itself: that of the container around it is one
            now = self._seen.get(name, was)
            if name[-1] == ".":  # the attributes of something
                came = (one ^ other for one, other in zip(was, now, strict=False))
                names += (f"{name}{key}" for keys in came for key in sorted(keys))
            elif not all(map(_is_same, was, now)):
                names.append(name)
        return names

    def _walk(self) -> dict[str, list[Any]]:
        walk = _Walk(self._names)
        walk.hooks(None, "torch.nn.Module")
        for path, module in self._module.named_modules():
            walk.module(module, dotted_name(self._name, path))
        for one in self._functions:
            walk.visit(one, "", 0)
        for one in self._others:
            walk.other(one)
        if self._names & _ENVIRONMENT:
            walk.visit(dict(os.environ), "os.environ", 0)
        return walk.seen


class _Walk:
    """One walk.

    Attributes:
        seen: what was found under each name: closures of one function have the same.
    """

    def __init__(self, names: frozenset[str]) -> None:
        self._names, self._any = names, bool(names & _BY_ANY_NAME)
        self.seen: dict[str, list[Any]] = {}
        self._done: dict[int, Any] = {}  # the objects, so that no identity is used twice
        self._classes: set[type] = set()

    def module(self, module: nn.Module, name: str) -> None:
        """What a module holds, besides tensors, other modules and what every module has."""
        if id(module) in self._done:
            return
        self._done[id(module)] = module
        kind, own = type(module), vars(module)
        self.hooks(module, name)
        if isinstance(module, Metric) and not self._names.isdisjoint(_BY_UPDATES):
            self._note(f"{name}.update_count", module.update_count)
        if owner_of(kind).is_named_library:
            self._note(f"{name}.forward", own.get("forward", kind.forward))
            return
        items = {key: value for key, value in dict(own).items() if key not in FRAMEWORKS}
        self._attributes(items, name, 1, of=kind)

    def hooks(self, owner: object, name: str) -> None:
        """Which hooks are registered."""
        self._note(f"{name} hooks", (*map(tuple, _hooks_of(owner)),))

    def other(self, item: Any) -> None:
        """What an optimizer, a callback or the trainer holds."""
        kind = type(item)
        self.hooks(item, kind.__name__)
        if isinstance(item, pl.Trainer):
            held = {key: value for key, value in dict(vars(item)).items() if key in self._names}
            held |= {"datamodule": item.datamodule} if "datamodule" in self._names else {}  # type: ignore[attr-defined]
            for key, value in held.items():
                self.visit(value, f"trainer.{key}", 1)
            if not self._names.isdisjoint(_BY_TRAINER):
                for name, value in _of_libraries(item, self._names):
                    self._note(name, value)
        elif not owner_of(kind).is_library and not isinstance(item, nn.Module):
            common = vars(pl.Callback()) if isinstance(item, pl.Callback) else _OF_OPTIMIZERS
            items = {key: value for key, value in dict(vars(item)).items() if key not in common}
            self._attributes(items, kind.__name__, 1, of=kind)

    def visit(self, value: Any, name: str, depth: int) -> None:
        """Take in a value, and what is in it."""
        if isinstance(value, _ELSEWHERE):
            return
        if name:
            self._note(name, _comparable(value))
        if not (is_scalar(value) or id(value) in self._done or depth > _DEEPEST):
            self._done[id(value)] = value
            self._into(value, name, depth)

    def _note(self, name: str, value: Any) -> None:
        self.seen.setdefault(name, []).append(value)

    def _into(self, value: Any, name: str, depth: int) -> None:
        if isinstance(value, (dict, types.MappingProxyType)):
            items = _items(value)
            pairs = ((f"{name}[{_shown(key)}]", one) for key, one in items.items())
            self._inside(pairs, items, depth)
        elif isinstance(value, (list, deque, tuple)):
            held = list(value)
            self._inside(
                ((child_name(name, (True, i)), one) for i, one in enumerate(held)), held, depth
            )
        elif isinstance(value, FunctionType):
            self._function(value, depth)
        elif isinstance(value, MethodType):
            self.visit(value.__func__, name and f"{name}.__func__", depth + 1)
            owner = value.__self__
            self.visit(owner, f"{name}.__self__" if name else type(owner).__name__, depth + 1)
        elif isinstance(value, functools.partial):
            self.visit([value.func, value.args, value.keywords], name, depth + 1)
        elif isinstance(value, (property, staticmethod, classmethod)):
            function = value.fget if isinstance(value, property) else value.__func__
            self.visit(function, name, depth)
        elif isinstance(value, type):
            self._class(value, depth)
        elif isinstance(value, ModuleType):
            if not belongs_to_library(value):
                self._attributes(dict(vars(value)), value.__name__, depth)
        elif isinstance(value, nn.Module):
            for path, module in value.named_modules():
                self.module(module, dotted_name(name, path))
        if type(value).__module__.partition(".")[0] not in _COMPILED | {"builtins"}:
            self._attributes(attributes_of(value), name, depth, of=type(value))

    def _inside(self, items: Iterable[tuple[str, Any]], sized: Any, depth: int) -> None:
        if len(sized) <= _LONGEST:
            for name, item in items:
                self.visit(item, name, depth + 1)

    def _attributes(
        self, items: Mapping[str, Any], name: str, depth: int, of: type | None = None
    ) -> None:
        """Attributes, and the class ``of`` their owner; of the user's those that code names."""
        if not (self._any or (of is not None and owner_of(of).is_library)):
            items = {
                key: items[key]
                for key in items
                if key.lstrip("_") in self._names or key in self._names
            }
        self._note(f"{name}.", frozenset(_plain(items)))
        for key, value in items.items():
            self.visit(value, f"{name}.{'hparams' if key == '_hparams' else key}", depth + 1)
        if of is not None:
            self._class(of, depth)

    def _class(self, kind: type, depth: int) -> None:
        """What the user's classes have for their instances: methods, numbers, containers."""
        for owner in kind.__mro__:
            if owner not in self._classes and not owner_of(owner).is_library:
                self._classes.add(owner)
                own = {k: v for k, v in vars(owner).items() if k not in _OF_CLASSES}
                self._attributes(own, f"{owner.__module__}.{owner.__qualname__}", depth)

    def _function(self, function: FunctionType, depth: int) -> None:
        if belongs_to_library(function):
            return
        where, code = f"{function.__module__}.{function.__qualname__}", function.__code__
        for key, _, value in filled_cells(function):
            self.visit(value, f"{where}.{key}", depth + 1)
        defaults = [function.__defaults__, function.__kwdefaults__]
        self.visit(defaults, f"{where}.__defaults__", depth + 1)
        space = function.__globals__
        for name in names_in(code):
            if name in space:
                self.visit(space[name], f"{function.__module__}.{name}", depth + 1)


_OF_OPTIMIZERS = frozenset({"state", "param_groups", "defaults"})
_OF_CLASSES = frozenset(
    {
        *("__dict__", "__weakref__", "__module__", "__doc__", "__slots__"),
        *("__annotations__", "__annotations_cache__"),  # which Python makes when they are asked for
    }
)


def _hooks_of(owner: object) -> list[Mapping[int, Any]]:
    """What is registered with a module and its parameters, an optimizer, or (None) all modules."""
    match owner:
        case None:
            return [
                *(torch_module._global_forward_pre_hooks, torch_module._global_forward_hooks),
                *(torch_module._global_backward_pre_hooks, torch_module._global_backward_hooks),
            ]
        case Optimizer():  # not all call its __init__
            before = getattr(owner, "_optimizer_step_pre_hooks", {})
            return [before, getattr(owner, "_optimizer_step_post_hooks", {})]
        case nn.Module():
            return [
                *(owner._forward_pre_hooks, owner._forward_hooks),
                *(owner._backward_pre_hooks, owner._backward_hooks),
                *chain.from_iterable(map(gradient_hooks, owner.parameters(recurse=False))),
            ]
        case _:
            return []


def _of_libraries(trainer: pl.Trainer, names: frozenset[str]) -> Iterator[tuple[str, Any]]:
    """What code that asks the trainer may find in Lightning's own objects, and in datasets."""
    loop = trainer.fit_loop
    callbacks: list[pl.Callback] = vars(trainer)["callbacks"]
    held: list[Any] = [*callbacks, *(one.scheduler for one in trainer.lr_scheduler_configs)]
    held += [loop, loop.epoch_loop]
    for progress in (loop.epoch_progress, loop.epoch_loop.batch_progress):
        held += [progress.total, progress.current]
    if loop._combined_loader is not None:
        held += [getattr(one, "dataset", one) for one in loop._combined_loader.flattened]
    for one in held:
        for key, value in attributes_of(one).items():
            if key.lstrip("_") in names and (is_scalar(value) or isinstance(value, Tensor)):
                yield f"{type(one).__name__}.{key}", value


def _shown(key: Any) -> str:
    """A key of a dict: the numbers of a parameter would take milliseconds."""
    return repr(key) if is_scalar(key) else f"a {type(key).__name__}"


def _items(value: Any) -> dict[Any, Any]:
    return elements(value) if isinstance(value, dict) else dict(value)


def _plain(items: Mapping[Any, Any]) -> Iterator[Any]:
    """The keys of what is no tensor: programs themselves write those."""
    return (key for key, value in items.items() if not isinstance(value, Tensor))


def _comparable(value: Any) -> Any:
    """What is compared of a value: of a container its type and keys or length.

    What is in a container is compared under names of its own.
    """
    if isinstance(value, ContextVar):
        return _comparable(value.get(None))
    if isinstance(value, (dict, types.MappingProxyType)):
        items = _items(value)
        return type(value), tuple(_plain(items)) if len(items) <= _LONGEST else len(items)
    if isinstance(value, (list, deque)) or (isinstance(value, tuple) and not is_scalar(value)):
        long = len(value) > _LONGEST
        return type(value), len(value) if long else sum(not isinstance(v, Tensor) for v in value)
    if isinstance(value, (set, frozenset)):
        return type(value), frozenset(value) if len(value) <= _LONGEST else len(value)
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        content = value.flat[: _CHECKSUMMED // max(1, value.itemsize)]
        return value.shape, value.dtype.str, zlib.crc32(content.tobytes())
    return bytes(value) if isinstance(value, (array.array, bytearray)) else value


def _is_same(was: Any, now: Any) -> bool:
    """Whether nothing changed; NaN equals NaN."""
    if was is now:
        return True
    if type(was) is not type(now):
        return False
    if isinstance(was, tuple):
        return len(was) == len(now) and all(map(_is_same, was, now))
    if is_scalar(was):
        return repr(was) == repr(now)
    return isinstance(was, (frozenset, bytes)) and was == now
