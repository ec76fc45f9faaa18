"""Python scalars in attributes of modules, and buffers, that a program has as constants.

A step that reads ``self.kl_weight`` or a Dropout's ``p`` is traced with the value that it finds:
its program is for that value alone. ``FrozenScalars`` compares before each step; where the host has
changed one, another program is needed.

So it is with a buffer whose value Python reads (``if self.initted:``, ``self.size.item()``) and
that the step does not write, and with what follows from such buffers alone (``FrozenBuffers``). A
step that reads a buffer so and writes it too is refused, on the line that reads.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from itertools import chain
from operator import is_, itemgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch._C import DisableTorchFunction
from torch.utils._python_dispatch import _disable_current_modes
from torchmetrics import Metric

from fulgurite.backends.csx.contract.rules import misuse
from fulgurite.backends.csx.diagnostics.trace_errors import TraceError
from fulgurite.backends.csx.diagnostics.user_lines import UserLine
from fulgurite.backends.csx.graph.op_schema import (
    is_mutable,
    is_random,
    is_uninitialized,
    is_written,
)
from fulgurite.backends.csx.graph.recorder import Nodes
from fulgurite.backends.csx.state import brief, dotted_name, owner_of
from fulgurite.backends.patches import MISSING
from fulgurite.backends.torch_versions import DETACHING

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
    """A read of an attribute of a module, or a write to it; or a read of a param group."""

    module: Any  # or the group
    name: str
    where: str  # what the user calls it: ``self.net.scale``
    before: Any  # what it held before the step touched it
    line: UserLine | None

    @property
    def container(self) -> dict[str, Any]:
        """The dict that holds the attribute: a buffer may be None."""
        module = self.module
        if isinstance(module, dict):
            return module
        held: tuple[dict[str, Any], ...] = module._buffers, module._parameters
        return next((one for one in held if self.name in one), vars(module))

    def now(self) -> Any:
        """What the attribute holds now, or what the class has for it."""
        value = self.container.get(self.name, MISSING)
        kind: type = type(self.module)
        return scalar_of_class(kind, self.name) if value is MISSING else value

    def undo(self) -> None:
        """Put back what it held before."""
        if self.before is MISSING:
            self.container.pop(self.name, None)
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


class HostChange(NamedTuple):
    """A value that a program has as a constant is another one now."""

    what: str  # in words
    error: TraceError  # to raise where no other program may be built


class FrozenScalars:
    """The scalars that a program has as constants, as they are now.

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
        self._absent = [read for read in unique.values() if read.now() is MISSING]
        self._reads = [read for read in unique.values() if is_scalar(read.now())]
        self._values = [read.now() for read in self._reads]
        names: dict[int, tuple[dict[str, Any], list[str]]] = {}
        own = [read for read in self._reads if read.name in read.container]
        for read in own:
            names.setdefault(id(read.container), (read.container, []))[1].append(read.name)
        self._getters = [  # one key twice: each gives a tuple
            (itemgetter(*keys, keys[0]), container) for container, keys in names.values()
        ]
        self._by_class = [read for read in self._reads if read.name not in read.container]
        without = (*self._absent, *self._by_class)
        self._not_there = [(one.container, one.name) for one in without]
        self._last: Any = None  # what the getters gave when all was compared
        self._found: HostChange | None = None  # then

    def changed_by_now(self) -> HostChange | None:
        """The first that has changed: asked at every step, for loaders run code of the user too.

        Buffers, and what classes have, are as when ``changed`` was called last.
        """
        now = self._now()
        gone = now is None or any(name in held for held, name in self._not_there)
        if gone or now != self._last:
            return self.changed()
        return self._found

    def _now(self) -> list[Any] | None:
        try:  # a call for each module: 1 µs where one for each scalar took 2 (measured)
            return [get(container) for get, container in self._getters]
        except KeyError:  # gone, or the class has it
            return None

    def changed(self) -> HostChange | None:
        """The first that the host has changed."""
        now, last = self._now(), self._last
        untouched = (
            self._found is None
            and now is not None
            and last is not None
            # not by ==: 1.0 is another value than 1
            and all(map(is_, chain.from_iterable(now), chain.from_iterable(last)))
        )
        self._found, self._last = next(self._changes(untouched), None), now
        return self._found

    def _changes(self, untouched: bool) -> Iterator[HostChange]:
        for read, before in self._buffers:
            value = read.now()
            if not isinstance(value, Tensor) or not _is_same(value, before):
                yield _changed(read, before, value)
        for read in self._absent:
            if (value := read.now()) is not MISSING:
                yield _changed(read, MISSING, value)
        if self._by_class:
            scalar_of_class.cache_clear()  # the class may have got another
        elif untouched:
            return
        for read, was in zip(self._reads, self._values, strict=True):
            value = read.now()
            if value is not was and not is_same_scalar(value, was):
                yield _changed(read, was, value)


def _changed(read: Access, was: Any, value: Any) -> HostChange:
    name, remedy = read.name, ""
    if type(was) in (bool, int, float) and not owner_of(type(read.module)).is_library:
        remedy = f"{buffer_code(name, was, value)}, and self.{name}.fill_(value) on the host"
        if type(was) is bool:
            remedy += f"; torch.where(self.{name}, a, b) in the step"
        if read.line is not None and ".log" in read.line.source:
            remedy += f". To log it: self.log(..., self.{name}) in on_train_batch_end"
    elif isinstance(was, Tensor):
        asked = (
            "torch.where(condition, a, b) where Python asks"
            if was.dtype is torch.bool
            else ("tensor operations where Python reads it")
        )
        remedy = f"{asked}, which see {read.where} in each step; or set it before fit, and leave it"
    found = {"attribute": read.where, "before": _shown(was), "now": _shown(value)}
    what = "{attribute} was {before}, and now is {now}".format(**found)
    return HostChange(what, misuse("frozen_changed", read.line, remedy=remedy, **found))


def is_same_scalar(value: Any, was: Any) -> bool:
    """Whether Python computes the same with both: 1, 1.0 and True are equal, and 0.0 and -0.0."""
    same = type(value) is type(was) and is_scalar(value) and value == was
    return bool(same) and repr(value) == repr(was)


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


def buffer_code(name: str, value: Any, later: Any = None) -> str:
    """Code that makes a buffer of what is a Python number now; ``later`` is one that it gets."""
    held = float(value) if type(later) is float else value  # an int64 buffer would cut it off
    made = f'self.register_buffer("{name}", torch.tensor({held!r}))'
    return f"{made} in __init__ instead of self.{name} = {value!r}"


LARGEST = 64  # operations that a value may follow from (assumed: flags and sizes take fewer)
MOST_ELEMENTS = 1 << 16  # of such a value: buffers that are read are compared from then on


class Buffer(NamedTuple):
    """A buffer of a module or a frozen parameter, and what has its values while it is traced."""

    module: nn.Module
    key: str
    where: str  # what the user calls it
    fake: Tensor
    values: Tensor


class FrozenBuffers:
    """The values of buffers in one trace, and who read them.

    Args:
        line: the user's line that runs now.
    """

    def __init__(self, line: Callable[[], UserLine | None]) -> None:
        self._line = line
        self._tracker = Nodes()
        self._buffers: dict[fx.Node, Buffer] = {}
        self._reads: list[tuple[set[fx.Node], TraceError, UserLine | None]] = []

    def find(
        self, module: nn.Module, root: str, tracker: Nodes, values: Mapping[int, Tensor]
    ) -> None:
        """Find buffers and frozen parameters of a module and those in it: inputs of the graph.

        Args:
            module: the module; ``root`` is how the user reaches it.
            tracker: which node of the graph each tensor is.
            values: the real tensor behind each fake, by the fake's identity.
        """
        self._tracker = tracker
        for path, one in module.named_modules():
            frozen = {
                key: p
                for key, p in one._parameters.items()
                if p is not None and not p.requires_grad and p.numel() <= MOST_ELEMENTS
            }
            held = {} if isinstance(one, Metric) else {**frozen, **one._buffers}
            for key, fake in held.items():
                node = tracker[fake] if id(fake) in values else None
                if node is not None and _is_input(node):
                    where = dotted_name(root, path, key)
                    self._buffers[node] = Buffer(one, key, where, fake, values[id(fake)])

    def read(self, tensor: Tensor, refusal: Callable[[], TraceError]) -> Tensor | None:
        """The value of a tensor that follows from buffers alone, or None.

        ``refusal`` makes the error where the step turns out to write one of them.
        """
        found = self._tracker.get(tensor)
        if found is None or tensor.numel() > MOST_ELEMENTS:
            return None
        values: dict[fx.Node, Tensor] = {}
        value = self._value(found, values)
        if value is not None:
            sources = values.keys() & self._buffers.keys()
            self._reads.append((sources, refusal(), self._line()))
        return value

    def _value(
        self, node: fx.Node, values: dict[fx.Node, Tensor], by: fx.Node | None = None
    ) -> Tensor | None:
        """The value of a node, as it is, or as ``by`` alone finds it, which changes it in place."""
        if node in values:
            return values[node]
        # what the step has written is the step's, and another on every batch
        if len(values) >= LARGEST or is_written(node, but_by=by):
            return None
        if node in self._buffers:
            values[node] = self._buffers[node].values
            return values[node]
        func: Any = node.target
        if node.op != "call_function" or not isinstance(func, torch._ops.OpOverload):
            return None
        if is_random(func) or is_uninitialized(func):
            return None
        changed = node.args[0] if is_mutable(func) else None
        if changed in self._buffers or any(
            self._value(one, values, node if one is changed else None) is None
            for one in node.all_input_nodes
        ):
            return None

        def known(one: fx.Node) -> Tensor:
            return values[one].clone() if one is changed else values[one]

        # the buffers' own values, beside the trace: Python is to go the way that it goes eagerly
        with DisableTorchFunction(), _disable_current_modes(), torch.no_grad():
            args, kwargs = fx.map_arg((node.args, node.kwargs), known)
            value = func(*args, **kwargs)
        if not isinstance(value, Tensor):
            return None
        values[node] = value
        return value

    def check(self) -> None:
        """When the step has run: it must not have written what it read.

        Raises:
            TraceError: it has.
        """
        for sources, error, _ in self._reads:
            if any(map(self._is_changed, sources)):
                raise error

    def _is_changed(self, node: fx.Node) -> bool:
        buffer = self._buffers[node]
        module, key = buffer.module, buffer.key
        now = module._buffers[key] if key in module._buffers else module._parameters.get(key)
        return is_written(node) or now is not buffer.fake

    def accesses(self) -> Iterator[Access]:
        """The buffers that were read, to be compared from now on."""
        for sources, _, line in self._reads:
            for node in sources:
                module, name, where, before, _ = self._buffers[node]
                yield Access(module=module, name=name, where=where, before=before, line=line)


def _is_input(node: fx.Node) -> bool:
    """Whether a tensor is an input by itself, not a part of memory that others share."""
    if node.target in DETACHING:
        node = node.all_input_nodes[0]
    return node.op == "placeholder"
