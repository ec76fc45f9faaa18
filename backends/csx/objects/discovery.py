"""What a function works on: modules, optimizers and schedulers, by the names its code has for them.

Nobody lists them; they are found from the function's arguments, the globals and closure cells that
its code reads, and, for other objects and Python modules, the attributes that its code names. The
code of the user's functions and methods that are reached is searched in the same way. What a name
made at run time leads to (``getattr(self, prefix + "_net")``) is not found.
"""

from __future__ import annotations

import functools
import inspect
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from fulgurite.backends.closures import is_closure
from fulgurite.backends.csx.contract import ConstantSource
from fulgurite.backends.csx.diagnostics.mentions import mentions
from fulgurite.backends.csx.diagnostics.user_lines import belongs_to_library
from fulgurite.backends.csx.state import child_name, dict_of, dotted_name, filled_cells, owner_of
from fulgurite.backends.patches import MISSING

_CALLED_BY_SYNTAX = ("forward", "__call__")
_WRAPPERS = (MethodType, functools.partial, property, staticmethod, classmethod)
_CONTENT = "cell_contents"


@dataclass(slots=True)
class Discovery:
    """What was found, each under the shortest name."""

    modules: dict[str, nn.Module] = field(default_factory=dict)
    optimizers: dict[str, Optimizer] = field(default_factory=dict)
    schedulers: dict[str, LRScheduler] = field(default_factory=dict)
    objects: dict[str, object] = field(default_factory=dict)  # the user's own
    places: list[tuple[Any, Any, object]] = field(default_factory=list)  # where they were found
    tensors: list[ConstantSource] = field(default_factory=list)  # that no module holds

    def is_current(self) -> bool:
        """Whether each still is where it was found: in a dict, a list or a closure's cell."""
        try:
            for container, key, value in self.places:
                if (container.cell_contents if key is _CONTENT else container[key]) is not value:
                    return False
        except (LookupError, ValueError):  # gone; an empty cell
            return False
        return True


class _Attributes(dict[Any, Any]):
    """An object whose attributes its class holds, or slots; or a closure's cell."""

    def __init__(self, owner: object) -> None:
        super().__init__()
        self.owner = owner

    def __getitem__(self, key: Any) -> Any:
        return getattr(self.owner, key, None)


def discover(function: Any, arguments: dict[str, Any]) -> Discovery:
    """Find what a function works on, also from ``arguments`` by their names in its code."""
    walk = _Walk()
    for name, value in arguments.items():
        walk.visit(name, value)
    walk.visit("self", function)
    walk.follow()
    return walk.found


def attributes_read(functions: Iterable[Any]) -> set[str]:
    """The names of attributes that functions read, and those of the user's that they name."""
    return {name for code in codes_reached(functions) for name in code.co_names}


def codes_reached(functions: Iterable[Any], called: Iterable[str] = ()) -> list[CodeType]:
    """The code of functions, and of those of the user's that they name or that are ``called``."""
    walk = _Walk()
    walk.names = set(called)
    for function in functions:
        function = inspect.unwrap(function)
        code = getattr(getattr(function, "__func__", function), "__code__", None)
        if code is not None:
            walk.note_names(code)  # a library's function too, whose inside the walk does not enter
        walk.visit("self", function)
    walk.follow()
    return list(walk.codes)


class _Walk:
    """One search; breadth first, so that short names win."""

    def __init__(self) -> None:
        self.found = Discovery()
        self._queue: deque[tuple[str, Any, Any, Any]] = deque()
        self._seen: dict[int, Any] = {}  # the objects, so that no identity is used twice
        self._spaces: list[tuple[str, Any]] = []  # whose attributes are reached if code names them
        self.names = set(_CALLED_BY_SYNTAX)
        self.codes: dict[CodeType, None] = {}  # that was searched, in order

    def visit(self, name: str, value: Any, container: Any = None, key: Any = None) -> None:
        """Put a value into the queue, once, with the place where it is."""
        if isinstance(value, Tensor) and container is not None:
            self.found.tensors.append(ConstantSource(value, name, container, (key,)))
        if id(value) not in self._seen and not isinstance(value, (Tensor, str, int, float)):
            self._seen[id(value)] = value
            self._queue.append((name, value, container, key))

    def follow(self) -> None:
        """Work until nothing new is reached: code that is found late may name more attributes."""
        while self._queue:
            while self._queue:
                self._open(*self._queue.popleft())
            for name, space in self._spaces:
                for key, value in _named_attributes(space, self.names):
                    own = dict_of(space)
                    held = isinstance(own, dict) and key in own
                    self.visit(
                        child_name(name, (False, key)),
                        value,
                        own if held else _Attributes(space),
                        key,
                    )

    def _open(self, name: str, value: Any, container: Any, key: Any) -> None:
        """Keep a value, or visit what is in it."""
        kept = self._kept(value)
        if kept is not None:
            kept[_free(name, kept)] = value
            if key is _CONTENT:
                self.found.places.append((container.owner, key, value))
            elif container is not None and not isinstance(container, _Attributes):
                self.found.places.append((container, key, value))
        if isinstance(value, nn.Module):
            for path, module in value.named_modules():
                if not owner_of(type(module)).is_library:
                    self._spaces.append((dotted_name(name, path), module))
        elif kept is self.found.objects or (
            isinstance(value, (ModuleType, type)) and not belongs_to_library(value)
        ):
            self._spaces.append((name, value))
        elif isinstance(value, FunctionType):
            self._open_function(value)
        elif isinstance(value, _WRAPPERS):
            for part, inner in _parts(value):
                self.visit(part, inner)
        elif isinstance(value, dict):
            for key, item in value.items():
                self.visit(child_name(name, (True, key)), item, value, key)
        elif isinstance(value, (list, tuple)):
            for i, item in enumerate(value):
                self.visit(child_name(name, (True, i)), item, value, i)

    def _kept(self, value: Any) -> dict[str, Any] | None:
        """Where a value is to be kept; None for what only leads to others."""
        if isinstance(value, nn.Module):
            return self.found.modules
        if isinstance(value, Optimizer):
            return self.found.optimizers
        if isinstance(value, LRScheduler):
            return self.found.schedulers
        leads = (FunctionType, ModuleType, type, dict, list, tuple)
        known = isinstance(value, leads) or owner_of(type(value)).is_library
        return None if known else self.found.objects

    def _open_function(self, function: FunctionType) -> None:
        if is_closure(function):
            return  # it runs on the host
        if belongs_to_library(function):
            self.visit(function.__name__, getattr(function, "__wrapped__", None))
            return
        code = function.__code__
        for name, cell, value in filled_cells(function):
            self.visit(name, value, _Attributes(cell), _CONTENT)
        defaults = function.__defaults__ or ()
        names = code.co_varnames[: code.co_argcount]
        for name, value in zip(reversed(names), reversed(defaults), strict=False):
            self.visit(name, value)
        for name, value in (function.__kwdefaults__ or {}).items():
            self.visit(name, value)
        self.note_names(code)
        for one in _codes(code):
            for name in dict.fromkeys(said.name for said in mentions(one) if said.is_global):
                value = function.__globals__.get(name, MISSING)
                if value is not MISSING:
                    self.visit(name, value, function.__globals__, name)

    def note_names(self, code: CodeType) -> None:
        """What a function's code names, and that of the functions in it."""
        for one in _codes(code):
            self.codes[one] = None
        self.names |= names_in(code)


def _free(name: str, taken: dict[str, Any]) -> str:
    """The name, or one like it: helpers may call other things so."""
    return name if name not in taken else _free(f"{name}'", taken)


@functools.lru_cache(maxsize=4096)
def names_in(code: CodeType) -> frozenset[str]:
    """The names in a function's code and in that of the functions in it, and strings like names."""
    found = {*code.co_names}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found |= names_in(constant)
        elif isinstance(constant, str) and constant.isidentifier():  # getattr(self, "net")
            found.add(constant)
    return frozenset(found)


def _codes(code: CodeType) -> Iterator[CodeType]:
    """A function's code and that of the functions in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, functools.partial):
        yield "func", value.func
        yield from ((f"args[{i}]", arg) for i, arg in enumerate(value.args))
        yield from value.keywords.items()
    elif isinstance(value, property):
        yield "fget", value.fget
    else:
        yield "self", getattr(value, "__self__", None)
        yield "func", value.__func__


def _named_attributes(space: Any, names: set[str]) -> Iterator[tuple[str, Any]]:
    """The attributes of an object, class or Python module that are among ``names``.

    Of the classes all that define one: ``super()`` may call any of them.
    """
    kind = space if isinstance(space, type) else type(space)
    for name in sorted(names):
        for owner in (space, *kind.__mro__):
            value = (dict_of(owner) or {}).get(name, MISSING)
            if inspect.ismemberdescriptor(value):  # of __slots__
                value = getattr(space, name, MISSING)
            if value is not MISSING:
                yield name, value
