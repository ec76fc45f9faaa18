"""Batches that are objects: dataclasses, graphs, encodings, anything that holds tensors.

A program knows lists, tuples, dicts and tensors. An object of the batch that has tensors in it is
*opened*: a dict of its attributes stands in its place. The step's code is given a *closed* copy of
the object, with what is traced in its attributes. What the step sets on the copy is set on the
user's object after every step, as is what it puts into a dict of the batch (``BatchChanges``).

Nothing of the user's object may be left on the copy that could be read and be another one in the
next batch: what is neither opened nor known to programs is a stand-in there that can only be passed
on. Classes and functions stay, and are compared.
"""

from __future__ import annotations

import copy
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.optim import Optimizer

from fulgurite.backends.csx.contract import PassThrough, make_container_proxy
from fulgurite.backends.csx.diagnostics.trace_errors import InputChanged, UnsupportedInput
from fulgurite.backends.csx.objects.batch_spec import CONSTANTS, OBJECT, Path, container_at
from fulgurite.backends.csx.state import Owner, attributes_of, dict_of, owner_of

_Run = Callable[[Any], Any]
_DEEPEST, _LONGEST = 8, 100
_CONTAINERS = (dict, list, tuple)
_NEVER = (
    *(type, ModuleType, FunctionType, BuiltinFunctionType, MethodType),
    *(nn.Module, Optimizer, np.ndarray, np.generic, Tensor),
)


class BatchObjects:
    """The objects in the batches of a stage: of the classes that the first had, if it had any."""

    def __init__(self) -> None:
        self._kinds: list[Any] | None = None

    def open(self, given: Any) -> OpenedBatch | None:
        """A batch whose objects are opened; None where there are none.

        Raises:
            InputChanged: the first batch had others.
        """
        if self._kinds == []:
            return None
        opened = OpenedBatch(given)
        if self._kinds is None:
            self._kinds = opened.kinds
        opened.check(self._kinds)
        return opened if self._kinds else None


class Attribute(str):
    """The name of an attribute, as a key of the dict that stands for its object."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f".{self}"


def keystr(path: Any) -> str:
    """A path in an opened batch as Python writes it: ``[0].x``."""
    keys = [repr(k.key) if isinstance(getattr(k, "key", None), Attribute) else str(k) for k in path]
    return "".join(keys)


class OpenedBatch:
    """A batch in which dicts stand for objects.

    Args:
        given: the batch as it came.

    Attributes:
        batch: the same with opened objects; ``given`` itself where there are none.
    """

    def __init__(self, given: Any) -> None:
        self._given = given
        self._objects: list[tuple[Any, dict[Any, Any], dict[Any, Any]]] = []
        self.kinds: list[Any] = []  # the objects' classes, and what else of them stays as it is
        self.batch = self._open(given, ())

    def check(self, kinds: list[Any]) -> None:
        """Raise where an earlier batch had objects of other classes."""
        if self.kinds != kinds:
            was, now = (", ".join(one.__name__ for one in some) for some in (kinds, self.kinds))
            raise InputChanged(
                f"The batch has other objects than the traced one: it had {was}, and now {now}.",
                remedy="return batches of one structure from the dataset or collate_fn",
            )

    def steps(self, entries: Callable[[], dict[str, _Run]]) -> dict[str, _Run]:
        """Entry points that are given opened batches, and close them for the step's code."""
        return {name: self._closing(run) for name, run in entries().items()}

    def _closing(self, run: _Run) -> _Run:
        def closed(batch: Any) -> Any:
            copies: list[_Copy] = []
            whole = _close(batch, self._given, copies, ())
            self._refuse_links(copies)
            result = run(whole)
            for one in copies:
                one.record_changes()
            # where the step returns a copy, each call has to give the object of its own batch
            passed = {id(one.object): make_container_proxy((*one.path, OBJECT)) for one in copies}
            return pytree.tree_map(lambda leaf: passed.get(id(leaf), leaf), result)

        return closed

    def with_users_objects(self, sources: Sequence[Any], passed: Sequence[Any]) -> list[Any]:
        """What a step passed on of an opened batch, with the user's objects in it.

        Args:
            sources: where it comes from.
            passed: what is there.
        """
        objects = {id(inside): one for one, inside, _ in self._objects}
        return [
            objects[id(value)] if type(source) is tuple and OBJECT in source[-1:] else value
            for source, value in zip(sources, passed, strict=True)
        ]

    def write_back(self) -> None:
        """Set on the user's objects what the step has set on theirs."""
        for one, opened, before in self._objects:
            for key, value in opened.items():
                if value is not before.get(key, _MISSING):
                    _set(one, key, value)
            for key in [key for key in before if key not in opened]:
                _delete(one, key)

    def _refuse_links(self, copies: list[_Copy]) -> None:
        """Raise where a copy leads to one of the user's objects."""
        known = {id(one) for one, *_ in self._objects}
        for one in copies:
            for name, item in one.before.items():
                # the step would reach the user's object, in which nothing is traced
                if isinstance(item, weakref.ref) and id(item()) in known:
                    raise _linked(one.object, name)

    def _open(self, value: Any, above: tuple[Any, ...]) -> Any:
        """What stands for a value inside the objects and containers ``above``."""
        if type(value) in _CONTAINERS or _is_named_tuple(value):
            items = value.values() if isinstance(value, dict) else value
            opened = [self._open(item, (*above, value)) for item in items]
            if all(a is b for a, b in zip(opened, items, strict=True)):
                return value
            if isinstance(value, dict):
                return dict(zip(value, opened, strict=True))
            return type(value)(*opened) if _is_named_tuple(value) else type(value)(opened)
        if len(above) > _DEEPEST or not _opens(value):
            return value
        if any(value is one for one in above):
            raise _linked(value, "attributes")
        self.kinds.append(type(value))
        inside: dict[Any, Any] = {}
        for key, item in attributes_of(value).items():
            if not _stays(item):
                inside[Attribute(key)] = self._open(item, (*above, value))
            elif not isinstance(item, weakref.ref):  # a class or function that the step may call
                self.kinds.append(item)
        self._objects.append((value, inside, dict(inside)))
        return inside


_MISSING = object()


def _linked(one: Any, name: str) -> UnsupportedInput:
    return UnsupportedInput(
        f"A {type(one).__name__} of the batch leads back to itself ({name}), and a step would work"
        " on two of it.",
        remedy="turn it into a dict of tensors in collate_fn or on_after_batch_transfer",
    )


def _opens(value: Any) -> bool:
    """Whether a value is an object that holds tensors."""
    if isinstance(value, (*_NEVER, *CONSTANTS, *_CONTAINERS)):
        return False
    ours = type(value).__mro__[:-1]
    return not all(map(_leads_elsewhere, ours)) and any(
        isinstance(leaf, Tensor) for leaf in _leaves(value, 0, set())
    )


def _leads_elsewhere(kind: type) -> bool:
    """Whether a class is a library's whose objects are more than what they hold."""
    plain = kind.__module__.partition(".")[0] in ("collections", "types")
    return owner_of(kind) in (Owner.FRAMEWORK, Owner.STANDARD) and not plain


def _leaves(value: Any, depth: int, seen: set[int]) -> Iterator[Any]:
    """The leaves of an object; of long containers those of the first elements."""
    if depth > _DEEPEST or id(value) in seen:
        return
    if isinstance(value, (*_NEVER, *CONSTANTS)):
        yield value
        return
    seen.add(id(value))
    if not isinstance(value, _CONTAINERS):
        value = attributes_of(value)
    for item in itertools.islice(value.values() if isinstance(value, dict) else value, _LONGEST):
        yield from _leaves(item, depth + 1, seen)


def _stays(item: Any) -> bool:
    """Whether an attribute stays on the copy as it is: it has nothing of this batch."""
    if isinstance(item, FunctionType):
        return not item.__closure__  # which may hold something of this batch
    return isinstance(item, (type, ModuleType, BuiltinFunctionType, weakref.ref))


def _is_named_tuple(value: Any) -> bool:
    return isinstance(value, tuple) and hasattr(value, "_fields")


class _Copy(NamedTuple):
    """A copy of an object that a step works on."""

    object: Any
    opened: dict[Any, Any]  # what stands for it in the traced batch
    before: dict[str, Any]  # its attributes
    path: Path  # to it in the batch

    def record_changes(self) -> None:
        """Put into the dict that stands for it what the step has set on it."""
        now = attributes_of(self.object)
        for key, value in now.items():
            if value is not self.before.get(key, _MISSING) and not _stays(value):
                self.opened[Attribute(key)] = value
        for key in [key for key in self.opened if key not in now]:
            del self.opened[key]


def _close(batch: Any, given: Any, copies: list[_Copy], path: Path) -> Any:
    """A batch with copies of the objects of ``given`` in it, that hold what ``batch`` holds."""
    if not isinstance(batch, _CONTAINERS):
        return batch
    if isinstance(batch, dict) and not isinstance(given, dict):
        one = copy.copy(given)
        held = attributes_of(one)
        for key in [key for key in held if key not in batch and not _stays(held[key])]:
            _delete(one, key)  # set by the step on an object that came before
        for key, value in batch.items():
            _set(one, key, _close(value, held.get(key), copies, (*path, key)))
        copies.append(_Copy(one, batch, attributes_of(one), path))
        return one
    items = batch if isinstance(batch, dict) else dict(enumerate(batch))
    closed = {
        key: _close(value, _item(given, key, value), copies, (*path, key))
        for key, value in items.items()
    }
    if all(closed[key] is value for key, value in items.items()):
        return batch
    if isinstance(batch, dict):
        return closed
    made = closed.values()
    return type(batch)(*made) if _is_named_tuple(batch) else type(batch)(made)


def _item(given: Any, key: Any, default: Any) -> Any:
    """What was at a place of a container; ``default`` where the step has added it."""
    if isinstance(given, dict):
        return given.get(key, default)
    return given[key] if isinstance(given, (list, tuple)) and key < len(given) else default


def _set(one: Any, key: str, value: Any) -> None:
    """Set an attribute, of a frozen dataclass too."""
    held = dict_of(one)
    # past __setattr__, but not past a property or a slot of the class
    if isinstance(held, dict) and (key in held or not hasattr(type(one), key)):
        held[str(key)] = value
    else:
        object.__setattr__(one, key, value)


def _delete(one: Any, key: str) -> None:
    if key in (dict_of(one) or {}):
        del one.__dict__[key]
    else:
        object.__delattr__(one, key)


def pass_through_values(
    sources: Sequence[PassThrough], batch: Any, given: Any, asked: Callable[[str], Any]
) -> list[Any]:
    """What this call has for the sources of ``Outputs.passed``.

    Args:
        sources: these.
        batch: of the structure that the program was traced with.
        given: the batch as it came, whose containers the step may change.
        asked: gives the others, by name.
    """
    leaves = pytree.tree_leaves(batch)

    def value(source: PassThrough) -> Any:
        if isinstance(source, tuple):
            return container_at(given, source)
        return leaves[source] if isinstance(source, int) else asked(source)

    return [value(source) for source in sources]
