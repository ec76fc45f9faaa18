"""Python objects: who owns their class, what they contain, names in messages, how to restore.

Whoever follows what a step can reach asks here: snapshots, trees of state, the undoing of traces,
audits, batches that are objects, the discovery of what a function works on. ``owner_of`` says
whether a class is the user's or a library's. ``children`` lists what a container or an object
holds, each with the *step* that leads to it, and ``child_name`` is its name in messages.
``content`` copies what a mutable object holds, and ``refill`` puts that copy back.
"""

from __future__ import annotations

import array
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from enum import Enum, auto
from operator import is_
from types import CellType, FunctionType
from typing import Any

import numpy as np
from torch import Tensor

from fulgurite.backends.csx.diagnostics.user_lines import LIBRARIES, belongs_to_library
from fulgurite.backends.csx.state.storage import brief, dict_of
from fulgurite.backends.patches import MISSING

PathStep = tuple[bool, Any]
"""How to get from something to what is in it: (whether it is an item, its key; else an attribute,
its name)."""

ARRAYS = (np.ndarray, bytearray, array.array)
GENERATORS = (random.Random, np.random.Generator, np.random.RandomState)
_FRAMEWORKS = ("torch", "lightning", "pytorch_lightning", "lightning_fabric", "torchmetrics")


class Owner(Enum):
    """Whose a class is."""

    USER = auto()
    PACKAGE = auto()  # installed, and none of those below
    STANDARD = auto()  # Python's standard library
    FULGURITE = auto()
    FRAMEWORK = auto()  # torch, Lightning, torchmetrics

    @property
    def is_library(self) -> bool:
        """Whether it belongs to what the user did not write."""
        return self is not Owner.USER

    @property
    def is_named_library(self) -> bool:
        """Whether it is Python's, a framework's or ours.

        Not so of other installed packages: a step may keep state in objects of their classes.
        """
        return self not in (Owner.USER, Owner.PACKAGE)


def owner_of(kind: type) -> Owner:
    """Whose a class is, by its module and that module's file."""
    package = str(kind.__module__).partition(".")[0]
    if package not in LIBRARIES:
        return Owner.PACKAGE if belongs_to_library(kind) else Owner.USER
    if package in _FRAMEWORKS:
        return Owner.FRAMEWORK
    return Owner.FULGURITE if package == "fulgurite" else Owner.STANDARD


# -- what is in it ---------------------------------------------------------------------------------


def dict_kind(item: dict[Any, Any]) -> type[dict[Any, Any]]:
    """Whose methods see a dict as it is: a subclass's own may make its elements when asked."""
    return OrderedDict if isinstance(item, OrderedDict) else dict


def elements(item: dict[Any, Any]) -> dict[Any, Any]:
    """What a dict holds, in its order."""
    return dict(dict_kind(item).items(item))


def slot_names(kind: type) -> Iterator[str]:
    """The slots that a class and its bases give their instances."""
    for owner in kind.__mro__:
        slots = vars(owner).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__"):
                yield name


def filled_slots(value: object) -> dict[str, Any]:
    """What is in an object's slots."""
    held = {name: getattr(value, name, MISSING) for name in slot_names(type(value))}
    return {name: item for name, item in held.items() if item is not MISSING}


def attributes_of(value: object) -> dict[str, Any]:
    """What an object holds itself: in its ``__dict__``, and in slots."""
    own = dict_of(value)
    return (dict(own) if isinstance(own, dict) else {}) | filled_slots(value)


def children(value: Any, opens: Callable[[Any], bool]) -> list[tuple[PathStep, Any]] | None:
    """What is in a list, tuple, deque or dict, or in an object; None where a value is neither.

    Args:
        value: any.
        opens: whether an object that is no such container is to be looked into. A slot of it that
            is empty is among the children, as MISSING: it may be filled later.
    """
    if isinstance(value, (Tensor, str)):
        return None
    if isinstance(value, dict):
        return [((True, key), item) for key, item in elements(value).items()]
    if isinstance(value, (list, tuple, deque)):
        return [((True, i), item) for i, item in enumerate(value)]
    if not opens(value):
        return None
    found = [((False, key), item) for key, item in (dict_of(value) or {}).items()]
    slots = slot_names(type(value))
    return found + [((False, name), getattr(value, name, MISSING)) for name in slots]


def filled_cells(function: FunctionType) -> Iterator[tuple[str, CellType, Any]]:
    """A closure's variables, the cells that hold them, and their values."""
    cells = function.__closure__ or ()
    for name, cell in zip(function.__code__.co_freevars, cells, strict=True):
        try:
            yield name, cell, cell.cell_contents
        except ValueError:  # not filled yet
            continue


def child_name(owner: str, step: PathStep) -> str:
    """What messages call what is in something, by what they call that."""
    is_item, key = step
    if not is_item:
        return f"{owner}.{key}"
    return f"{owner}[{brief(key) if isinstance(key, Tensor) else repr(key)}]"  # a fake has no repr


# -- and putting it back ---------------------------------------------------------------------------


def content(value: Any) -> Any:
    """A copy of what is in a value, for ``refill``.

    Of a dict a dict, of a list or deque a list, of a set a set, of an array its values, of a random
    generator its state, of another object its attributes.
    """
    if isinstance(value, dict):
        return elements(value)
    if isinstance(value, (list, deque)):
        return list(value)
    if isinstance(value, set):
        return set(value)
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, ARRAYS):
        return value[:]
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.RandomState):
        return value.get_state()
    return attributes_of(value)


def refill(value: Any, before: Any) -> None:
    """Give a value back what ``content`` found in it; what did not change is not touched.

    A dict is not emptied unless its keys have another order: other threads may read it.
    """
    if isinstance(value, dict):
        _refill_dict(value, before)
    elif isinstance(value, (list, deque)):
        if len(value) != len(before) or not all(map(is_, value, before)):
            # as of dicts: a subclass's own methods may do more than that
            kind: Any = list if isinstance(value, list) else deque
            kind.clear(value)
            kind.extend(value, before)
    elif isinstance(value, set):
        if set(map(id, value)) != set(map(id, before)):
            set.clear(value)
            set.update(value, before)
    elif isinstance(value, np.ndarray):
        np.copyto(value, before)
    elif isinstance(value, ARRAYS):
        value[:] = before
    elif isinstance(value, np.random.Generator):
        value.bit_generator.state = before
    elif isinstance(value, random.Random):
        value.setstate(before)
    elif isinstance(value, np.random.RandomState):
        value.set_state(before)
    else:
        _refill_object(value, before)


def _refill_dict(value: dict[Any, Any], before: dict[Any, Any]) -> None:
    now, kind = elements(value), dict_kind(value)
    if len(now) == len(before) and all(
        a is c and b is d for (a, b), (c, d) in zip(now.items(), before.items(), strict=True)
    ):
        return
    for key in [key for key in now if key not in before]:
        kind.pop(value, key)
    for key, item in before.items():
        if dict.get(value, key, MISSING) is not item:
            kind.__setitem__(value, key, item)
    if not all(map(is_, elements(value), before)):  # keys may be tensors, which == compares
        kind.clear(value)
        for key, item in before.items():
            kind.__setitem__(value, key, item)


def _refill_object(value: Any, before: dict[str, Any]) -> None:
    now = attributes_of(value)
    for name in [name for name in now if name not in before]:
        object.__delattr__(value, name)  # past the class's own: a frozen dataclass refuses
    for name, item in before.items():
        if now.get(name, MISSING) is not item:
            object.__setattr__(value, name, item)


class Snapshot:
    """The Python state of objects, to be put back after a failed trace.

    Attribute dicts are copied, and the dicts, lists and sets in them, three levels deep; the
    objects that they hold are not.
    """

    def __init__(self, objects: Iterable[object]) -> None:
        self._before: dict[int, tuple[Any, Any, str, object]] = {}
        for item in objects:
            self._keep(vars(item), 4, type(item).__name__, item)

    def _keep(self, container: Any, levels: int, name: str, root: object) -> None:
        if id(container) in self._before or not levels:
            return
        copy = content(container)
        self._before[id(container)] = (container, copy, name, root)
        items = copy.items() if isinstance(copy, dict) else enumerate(copy)
        for key, value in items:
            if isinstance(value, (dict, list, set)):
                inner = f"{name}.{key}" if levels == 4 else f"{name}[{brief(key)}]"
                self._keep(value, levels - 1, inner, root)

    def containers(self) -> Iterator[tuple[Any, Any, str, object]]:
        """Each container, its copy, its name, and the object that it belongs to."""
        yield from self._before.values()

    def tensors(self) -> list[Tensor]:
        """The tensors that the containers hold."""
        values = [c.values() if isinstance(c, dict) else c for _, c, _, _ in self._before.values()]
        return [value for items in values for value in items if isinstance(value, Tensor)]

    def before(self, container: Any) -> Any:
        """The copy of a container, or None if it was not there."""
        kept = self._before.get(id(container))
        return None if kept is None else kept[1]

    def restore(self) -> None:
        """Make everything as it was; what did not change is not touched."""
        for container, copy, _, _ in self._before.values():
            refill(container, copy)
