"""Tensors inside the lists, tuples, dicts and objects that a module holds: each one is state.

Words: an attribute of a *holder* (a module, or another object that the step works on) holds a
*tree* of lists, tuples, dicts, deques and objects of the user's classes. A *leaf* is a tensor in
it, a *path* the way to it from the attribute.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Set
from types import SimpleNamespace
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.loggers import Logger
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, Sampler
from torchmetrics import Metric

from fulgurite.backends.csx.contract import ValuelessTensor
from fulgurite.backends.csx.diagnostics.trace_errors import StateChanged
from fulgurite.backends.csx.state import (
    Owner,
    PathStep,
    Place,
    child_name,
    children,
    dotted_name,
    owner_of,
    refill,
)
from fulgurite.backends.patches import MISSING

Path = tuple[PathStep, ...]

_WIDEST = 1024  # items of a container that is searched; longer ones are collections of data
DEEPEST = 8  # steps of a path
_MOST = 20_000  # places that are looked at in one attribute
_NOT_STATE = (
    *(LightningDataModule, Trainer, Logger, Metric),
    *(Optimizer, LRScheduler, DataLoader, Dataset, Sampler, type),
)
_OF_MODULES = ("_parameters", "_buffers", "_modules")
_NOT_SEARCHED = frozenset((*_OF_MODULES, "_trainer", "_fabric", "_hparams_initial"))


def held_in(value: Any) -> list[tuple[PathStep, Any]] | None:
    """What is in a container or an object that may hold state; None where a value is neither."""
    return children(value, _may_hold_state)


def _may_hold_state(value: Any) -> bool:
    if isinstance(value, _NOT_STATE):
        return False
    plain = isinstance(value, (nn.Module, SimpleNamespace))
    return plain or not owner_of(type(value)).is_library


class AttributeTree:
    """The tree in one attribute, as if it were a dict of its places by their paths.

    Args:
        root: the attribute, in the holder's ``__dict__``.
    """

    __slots__ = ("root",)

    def __init__(self, root: Place) -> None:
        self.root = root

    def __getitem__(self, path: Path) -> Any:
        """What is there now; KeyError where the path leads nowhere."""
        value = self.root.container[self.root.key]
        try:
            for is_item, key in path:
                value = value[key] if is_item else getattr(value, key)
        except (LookupError, AttributeError, TypeError):
            raise KeyError(path) from None
        return value

    def get(self, path: Path, default: Any = None) -> Any:
        """What is there now, or ``default``."""
        try:
            return self[path]
        except KeyError:
            return default

    def __setitem__(self, path: Path, value: Any) -> None:
        """Put a value there; a tuple on the way cannot be changed, and is replaced by another."""
        if not path:
            self.root.put(value)
            return
        (is_item, key), parent = path[-1], path[:-1]
        try:
            holder = self[parent]
            if isinstance(holder, tuple):
                items = [*holder[:key], value, *holder[key + 1 :]]
                make = getattr(type(holder), "_make", type(holder))
                self[parent] = make(items)
            elif is_item:
                holder[key] = value
            else:  # past the class's own __setattr__, which may do more, or refuse
                object.__setattr__(holder, key, value)
        except (LookupError, AttributeError, TypeError):
            raise StateChanged(
                f"{self.place(path).name} is filled after every step, and has no place any more:"
                " what holds it was changed after the step was traced.",
                remedy="keep the lists, dicts and objects that hold it as they were",
            ) from None

    def pop(self, path: Path, default: Any = None) -> Any:
        """Take a value out."""
        value = self.get(path, default)
        if not path:
            self.root.put(MISSING)
        elif path in self:
            (is_item, key), holder = path[-1], self[path[:-1]]
            if is_item:
                del holder[key]
            else:
                object.__delattr__(holder, key)
        return value

    def __contains__(self, path: Path) -> bool:
        return self.get(path, MISSING) is not MISSING

    def place(self, path: Path) -> Place:
        """A place in the tree, with the user's name of it."""
        text = self.root.name
        of_module = ""
        for is_item, key in path:
            if not is_item and key in _OF_MODULES:
                of_module = key  # its items are attributes to the user
            else:
                text, of_module = child_name(text, (is_item and not of_module, key)), ""
        return Place(self, path, text)


class ClassAttributes:
    """The attributes that a module finds in its class, as if they were in a dict of its own.

    ``outs: list = []`` in a class body is one list of all instances, until the host sets
    ``module.outs = []``.
    """

    __slots__ = ("_module",)

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __getitem__(self, key: str) -> Any:
        return getattr(self._module, key)

    def get(self, key: str, default: Any = None) -> Any:
        """What the module finds by this name now."""
        return getattr(self._module, key, default)

    def __setitem__(self, key: str, value: Any) -> None:
        """Let the module find a value: in its class, if that is where it is, else on itself."""
        self.pop(key)  # what is on the module hides what is in its class
        if self.get(key) is not value:
            vars(self._module)[key] = value

    def pop(self, key: str, default: Any = None) -> Any:
        """Take away what is on the module itself."""
        return vars(self._module).pop(key, default)


def _in_class(module: nn.Module) -> dict[str, Any]:
    """The lists, dicts and deques of the user's that a module has from its class."""
    found: dict[str, Any] = {}
    for kind in reversed(type(module).__mro__):
        if owner_of(kind) is not Owner.FRAMEWORK:
            found.update({key: one for key, one in vars(kind).items() if key[:2] != "__"})
    return {
        key: value
        for key, value in found.items()
        if isinstance(value, (list, dict, deque)) and key not in vars(module)
    }


def lies_in(place: Place, filled: Set[Place]) -> bool:
    """Whether a place, or one that it lies in, is among those that are filled."""
    if place in filled:
        return True
    if not isinstance(place.container, AttributeTree):
        return False
    tree, path = place.container, place.key
    above = [Place(tree, path[:i]) for i in range(len(path))]
    return tree.root in filled or any(one in filled for one in above)


class Trees:
    """The trees that holders hold, as they are now.

    Args:
        holders: modules and other objects, by their names.
        registered: the identity of all registered modules and their parameters, which are state
            already; modules are holders of their own.
    """

    def __init__(self, holders: Iterable[tuple[str, object]], registered: set[int]) -> None:
        self._registered = registered
        self.content: dict[int, tuple[Any, list[tuple[PathStep, Any]]]] = {}  # of each container
        self.roots: list[tuple[AttributeTree, Any]] = []
        self.places: list[Place] = []
        self.holders = list(holders)
        for name, holder in self.holders:
            if isinstance(holder, nn.Module):
                for key, value in vars(holder).items():
                    if key not in _NOT_SEARCHED:
                        key_name = "hparams" if key == "_hparams" else key
                        self._search_root(vars(holder), key, dotted_name(name, key_name), value)
                for key, value in _in_class(holder).items():
                    self._search_root(ClassAttributes(holder), key, dotted_name(name, key), value)
            elif id(holder) not in self.content:  # not in another one's tree
                self._search_root({0: holder}, 0, name, holder)

    def _search_root(
        self, owner: dict[Any, Any] | ClassAttributes, key: Any, name: str, value: Any
    ) -> None:
        if self.enters(value) is not None:
            tree = AttributeTree(Place(owner, key, name))
            self.roots.append((tree, value))
            self._budget = _MOST
            self._search(value, tree, (), [])

    def enters(self, value: Any) -> list[tuple[PathStep, Any]] | None:
        """What is in a container or an object that is searched."""
        return None if id(value) in self._registered else held_in(value)

    def _search(self, value: Any, tree: AttributeTree, path: Path, above: list[int]) -> None:
        if type(value) is ValuelessTensor:  # an earlier trace left it, in an object that it made
            return
        if isinstance(value, Tensor):
            if value.layout is torch.strided and id(value) not in self._registered:
                self.places.append(tree.place(path))
            return
        if id(value) in above:
            return
        items = self.enters(value)
        if items is None:
            return
        self.content[id(value)] = value, items
        self._budget -= len(items)
        if len(items) <= _WIDEST and len(path) < DEEPEST and self._budget > 0:
            for step, item in items:
                self._search(item, tree, (*path, step), [*above, id(value)])

    def order(self) -> dict[str, int]:
        """A number for each place, by its name, in the order in which a walk finds them now.

        A dict is walked in the order in which its keys were set. Two traces of one step that set
        them in the same order so list their outputs in the same order.
        """
        names: dict[str, int] = {}

        def visit(value: Any, tree: AttributeTree, path: Path) -> None:
            items = None if len(path) >= DEEPEST else self.enters(value)
            for step, item in items or () if len(items or ()) <= _WIDEST else ():
                names.setdefault(tree.place((*path, step)).name, len(names))
                if len(names) < _MOST:
                    visit(item, tree, (*path, step))

        for tree, _ in self.roots:
            names.setdefault(tree.root.name, len(names))
            visit(tree.root.get(), tree, ())
        return names

    def restore(self) -> None:
        """Make everything as it was; what did not change is not touched."""
        for value, items in self.content.values():
            put_back(value, items)


def same(now: list[tuple[PathStep, Any]], before: list[tuple[PathStep, Any]]) -> bool:
    """Whether two contents hold the same objects in the same places."""
    return len(now) == len(before) and all(
        a == c and b is d for (a, b), (c, d) in zip(now, before, strict=True)
    )


def put_back(value: Any, items: list[tuple[PathStep, Any]]) -> None:
    """Give a container or an object these items; a tuple cannot have others."""
    if isinstance(value, (list, deque)):
        refill(value, [item for _, item in items])
    elif not isinstance(value, tuple):
        refill(value, {key: item for (_, key), item in items if item is not MISSING})


def holders_in(module: nn.Module, root: str) -> Iterator[tuple[str, object]]:
    """The modules whose attributes are searched: the user's own, and other packages'."""
    for path, one in module.named_modules():
        if owner_of(type(one)) is not Owner.FRAMEWORK and not isinstance(one, Metric):
            yield dotted_name(root, path), one
