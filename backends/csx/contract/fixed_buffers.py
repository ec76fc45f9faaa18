"""Buffers whose values Python reads: ``if self.initted:``, ``self.size.item()``.

A buffer that the step does not write is as constant as a Python number in an attribute, and so is
what follows from such buffers alone. Its value is read once. A step that reads a buffer so and
writes it too is refused, on the line that reads; a change on the host is found by
``FrozenScalars``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch._C import DisableTorchFunction
from torch.utils._python_dispatch import _disable_current_modes
from torchmetrics import Metric

from fulgurite.backends.csx.contract.frozen_scalars import Access
from fulgurite.backends.csx.diagnostics.errors import TraceError
from fulgurite.backends.csx.diagnostics.user_lines import UserLine
from fulgurite.backends.csx.graph.op_schema import (
    is_alias,
    is_mutable,
    is_random,
    is_uninitialized,
    written_nodes,
)
from fulgurite.backends.csx.state.storage import member
from fulgurite.backends.torch_versions import DETACHING

LARGEST = 64  # operations that a value may follow from (assumed: flags and sizes take fewer)


class Buffer(NamedTuple):
    """A buffer of a module, and what has its values while the step is traced."""

    module: nn.Module
    key: str
    where: str  # what the user calls it
    fake: Tensor
    values: Tensor


class FixedBuffers:
    """The values of buffers in one trace, and who read them.

    Args:
        line: the user's line that runs now.
    """

    def __init__(self, line: Callable[[], UserLine | None]) -> None:
        self._line = line
        self._tracker: Any = {}
        self._buffers: dict[fx.Node, Buffer] = {}
        self._reads: list[tuple[set[fx.Node], TraceError, UserLine | None]] = []

    def find(
        self, module: nn.Module, root: str, tracker: Any, values: Mapping[int, Tensor]
    ) -> None:
        """Find the buffers of a module and those in it, which are inputs of the graph.

        Args:
            module: the module; ``root`` is how the user reaches it.
            tracker: which node of the graph each tensor is.
            values: the real tensor behind each fake, by the fake's identity.
        """
        self._tracker = tracker
        for path, one in module.named_modules():
            for key, fake in one._buffers.items() if not isinstance(one, Metric) else ():
                node = tracker[fake].proxy.node if id(fake) in values else None
                if node is not None and _is_input(node):
                    where = member(root, path, key)
                    self._buffers[node] = Buffer(one, key, where, fake, values[id(fake)])

    def read(self, tensor: Tensor, refusal: Callable[[], TraceError]) -> Tensor | None:
        """The value of a tensor that follows from buffers alone, or None.

        ``refusal`` makes the error where the step turns out to write one of them.
        """
        found = self._tracker.get(tensor)
        if found is None or tensor.numel() != 1:
            return None
        values: dict[fx.Node, Tensor] = {}
        value = self._value(found.proxy.node, values)
        if value is not None:
            sources = values.keys() & self._buffers.keys()
            self._reads.append((sources, refusal(), self._line()))
        return value

    def _value(self, node: fx.Node, values: dict[fx.Node, Tensor]) -> Tensor | None:
        if node in values:
            return values[node]
        if len(values) >= LARGEST or is_written(node):
            return None
        if node in self._buffers:
            values[node] = self._buffers[node].values
            return values[node]
        func: Any = node.target
        if node.op != "call_function" or not isinstance(func, torch._ops.OpOverload):
            return None
        if is_mutable(func) or is_random(func) or is_uninitialized(func):
            return None
        if any(self._value(one, values) is None for one in node.all_input_nodes):
            return None
        args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
        with DisableTorchFunction(), _disable_current_modes(), torch.no_grad():
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
        return is_written(node) or buffer.module._buffers.get(buffer.key) is not buffer.fake

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


def is_written(node: fx.Node) -> bool:
    """Whether an operation of the graph so far changes a tensor, or a view of it, in place."""
    return any(node in written_nodes(user) for user in node.users) or any(
        is_written(user) for user in _views(node.users)
    )


def _views(nodes: Iterable[fx.Node]) -> Iterator[fx.Node]:
    for node in nodes:
        target: Any = node.target
        has_schema = isinstance(target, torch._ops.OpOverload)
        if target is operator.getitem or (has_schema and is_alias(target)):
            yield node
