"""The nodes of a captured graph, written as those of a functional one."""

from __future__ import annotations

import functools
import itertools
import operator
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._prims_common import compute_elementwise_output_strides
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import traceback
from torch.fx.experimental.proxy_tensor import (
    PythonKeyTracer,
    _ProxyTensor,
    get_innermost_proxy_mode,
)
from torch.fx.node import map_aggregate
from torch.utils._python_dispatch import _disable_current_modes

from fulgurite.backends.csx.graph.graph import Graph, storage_of
from fulgurite.backends.csx.graph.op_schema import is_alias, is_mutable, written
from fulgurite.backends.csx.graph.passes.memories import (
    changed_by,
    functional,
    layout_of,
    layouts_of,
    tensors_of,
)
from fulgurite.backends.torch_versions import last_node

_aten: Any = torch.ops.aten
_OF_VALUE = ("val", "tensor_meta")  # what is noted of a result
_LOW_PRECISION = (torch.bfloat16, torch.float16)


class NotPlain(Exception):
    """A graph cannot be rewritten node by node; torch functionalizes it as a whole instead."""


@dataclass(frozen=True, slots=True)
class _Expansion:
    """The nodes that an operation became, to be copied where it comes with such arguments again.

    Args:
        operands: the nodes that it was given.
        nodes: what it became, with what tracing noted of each.
        result: its result, of nodes.
        changed: operands that it changed in place, and the nodes that they are then.
    """

    operands: list[fx.Node]
    nodes: list[tuple[fx.Node, dict[str, Any]]]
    result: Any
    changed: dict[fx.Node, fx.Node]


class Rewriting:
    """Writes a graph's nodes into the one that is being traced."""

    def __init__(self, graph: Graph, memories: dict[fx.Node, int], table: dict[Any, Any]) -> None:
        mode = get_innermost_proxy_mode()
        assert mode is not None
        assert isinstance(mode.tracer, PythonKeyTracer)
        self._graph, self._memories, self._table = graph, memories, table
        self._tracer, self._nodes = mode.tracer, mode.tracer.graph
        self._new: dict[fx.Node, Any] = {}  # what a node is now
        self._stale: set[fx.Node] = set()  # views of what was changed since
        self._relaid: set[fx.Node] = set()  # that now lie in memory as the capture did not see it
        self._over: dict[int, list[fx.Node]] = defaultdict(list)  # by memory
        self._changed: set[int] = set()  # memories that in-place operations changed
        self._expansions: dict[Any, _Expansion] = {}

    def run(self) -> Any:
        """Write all of them; returns the results, which are fake tensors."""
        states = list(zip(self._graph.placeholders(), self._nodes.nodes, strict=True))
        for node, new in states:
            # with the capture's own fake, operations on it may be copied (see _stays)
            new.meta["val"] = node.meta["val"]
            self._is_now(node, new)
        for node in self._graph.operations():
            self._write(node)
        [results] = self._graph.module.graph.output_node().args
        outputs = self._values(self._mapped(results))
        for node, new in states:
            if self._memories[node] in self._changed:
                write = self._nodes.call_function(_aten.copy_.default, (new, self._new[node]))
                write.meta = {name: node.meta[name] for name in _OF_VALUE if name in node.meta}
        return outputs

    def _write(self, node: fx.Node) -> None:
        if node.target is operator.getitem:
            self._is_now(node, self._part(node))
        elif is_mutable(node.target):
            self._change(node)
        elif self._stays(node):
            self._is_now(node, self._copied(node))
        else:
            self._is_now(node, self._expanded(node, node.target))

    def _copied(self, node: fx.Node) -> fx.Node:
        return self._nodes.node_copy(node, self._now)

    def _part(self, node: fx.Node) -> Any:
        whole, part = node.args
        parts = self._now(whole)  # type: ignore[arg-type]
        return self._copied(node) if isinstance(parts, fx.Node) else parts[part]

    def _is_now(self, node: fx.Node, new: Any) -> None:
        self._set(node, new)
        self._over[self._memories[node]].append(node)

    def _set(self, node: fx.Node, new: Any) -> None:
        self._new[node] = new
        self._relaid.discard(node)
        is_copy = not isinstance(new, fx.Node) or new.meta.get("val") is node.meta.get("val")
        if not is_copy and layouts_of(new) != layouts_of(node):
            self._relaid.add(node)

    def _now(self, node: fx.Node) -> Any:
        """What a node is now; a view of what was changed since is made again."""
        if node in self._stale:
            self._stale.remove(node)
            is_part = node.target is operator.getitem
            self._set(node, self._part(node) if is_part else self._expanded(node, node.target))
        return self._new[node]

    def _all_are_now(self, node: fx.Node, new: fx.Node) -> None:
        """A node was changed in place: each node over its memory means the new one from now on."""
        for other in self._over[self._memories[node]]:
            if layouts_of(other) == layouts_of(node):
                self._set(other, new)
                self._stale.discard(other)
            else:
                self._stale.add(other)

    def _mapped(self, args: Any) -> Any:
        return fx.map_arg(args, self._now)

    def _stays(self, node: fx.Node) -> bool:
        """Whether a node may be copied with what the capture noted of it."""
        if node.target in self._table:
            return False
        for operand in node.all_input_nodes:
            new = self._now(operand)
            if not isinstance(new, fx.Node) or operand in self._relaid:
                return False
            if is_alias(node.target) and new.meta.get("val") is not operand.meta.get("val"):
                return False  # it would be noted as a view of another's memory
        return not any(
            tensor.dtype in _LOW_PRECISION  # where the compiler rounds is noted while tracing
            for one in (node, *node.all_input_nodes)
            for tensor in tensors_of(one)
        )

    def _change(self, node: fx.Node) -> None:
        """Write an in-place operation as the one that returns what it makes."""
        operation: Any = node.target
        made = self._expanded(node, functional(operation))
        self._is_now(node, None)  # its operand's memory, which gets its value below
        for old, new in zip(
            written(operation, node.args, node.kwargs),
            made if isinstance(made, (list, tuple)) else [made],
            strict=True,
        ):
            [before] = tensors_of(old)
            # bfloat16.mul_(float32) stays bfloat16, where mul() gives float32
            if new.meta["val"].dtype != before.dtype:
                to = _aten._to_copy.default
                new, _ = self._expansion(node, to, (new,), {"dtype": before.dtype})
            now = new.meta["val"]
            if now.shape != before.shape or not _may_lie_as(now, before):
                raise NotPlain
            self._changed.add(self._memories[old])
            self._all_are_now(old, new)

    def _expanded(self, node: fx.Node, operation: Any) -> Any:
        """What an operation on a node's arguments is: nodes, as it returns tensors."""
        args, kwargs = self._mapped(node.args), self._mapped(node.kwargs)
        result, changed = self._expansion(node, operation, args, kwargs)
        for old in node.all_input_nodes if changed else ():
            new = self._now(old)
            if isinstance(new, fx.Node) and new in changed:
                if old not in changed_by(node):
                    raise NotPlain
                self._all_are_now(old, changed[new])
        return result

    def _expansion(
        self, node: fx.Node, operation: Any, args: Any, kwargs: Any
    ) -> tuple[Any, dict[fx.Node, fx.Node]]:
        """What an operation on new nodes is, and what those that it changes are from then on."""
        operands: dict[fx.Node, int] = {}
        storages: dict[int, int] = {}
        key = (operation, *(_key(part, operands, storages) for part in (args, kwargs)))
        known = self._expansions.get(key)
        if known is None:
            known = self._traced(node, operation, args, kwargs, list(operands))
            self._expansions[key] = known
            return known.result, known.changed
        new = dict(zip(known.operands, operands, strict=True))
        memory = {
            storage_of(a): b.untyped_storage()
            for before, now in new.items()
            for a, b in zip(tensors_of(before), tensors_of(now), strict=True)
        }
        line = {name: value for name, value in node.meta.items() if name not in _OF_VALUE}
        for one, noted in known.nodes:
            new[one] = self._nodes.node_copy(one, lambda of: new.get(of, of))
            value = map_aggregate(noted.get("val"), functools.partial(_again, memory=memory))
            new[one].meta = {**line, **noted, "val": value}
        found = fx.map_arg(known.result, lambda of: new.get(of, of))
        return found, {new[before]: new[now] for before, now in known.changed.items()}

    def _traced(
        self, node: fx.Node, operation: Any, args: Any, kwargs: Any, operands: list[fx.Node]
    ) -> _Expansion:
        """Trace an operation; its nodes have the line of another."""
        last = last_node(self._nodes)  # None: a step that reads no input
        with traceback.set_current_meta(node):
            result = operation(*self._values(args), **self._values(kwargs))
        made = list(itertools.takewhile(lambda one: one is not last, reversed(self._nodes.nodes)))
        nodes = []
        for one in reversed(made):
            one.meta.pop("from_node", None)  # which nobody reads
            noted = {k: v for k, v in one.meta.items() if k in _OF_VALUE or k not in node.meta}
            nodes.append((one, noted))
        return _Expansion(
            operands=operands,
            nodes=nodes,
            result=map_aggregate(result, self._node_of),
            changed={
                operand: now
                for operand in operands
                for tensor in tensors_of(operand)
                if (now := self._node_of(tensor)) is not operand
            },
        )

    def _values(self, args: Any) -> Any:
        """The fake tensors of nodes, known to the tracer."""
        return fx.map_arg(args, self._value)

    def _value(self, node: fx.Node) -> Any:
        value, tracker = node.meta["val"], self._tracer.tensor_tracker
        if isinstance(value, Tensor) and value not in tracker:
            tracker[value] = _ProxyTensor(fx.Proxy(node, self._tracer), None)
        return value

    def _node_of(self, value: Any) -> Any:
        """The node of a tensor."""
        if not isinstance(value, Tensor):
            return value
        found = self._tracer.tensor_tracker.get(value)
        if found is None:
            raise NotPlain
        return found.proxy.node


def _may_lie_as(now: Tensor, before: Tensor) -> bool:
    """Whether a tensor can be used as one that lay in memory as ``before``: views of it, too.

    It can where that one was a part of something (``gates.chunk(4)[0]``) and this one has its
    elements in the same order without gaps.
    """
    return now.stride() in (before.stride(), compute_elementwise_output_strides(before))


def _key(value: Any, operands: dict[fx.Node, int], storages: dict[int, int]) -> Any:
    """What an expansion depends on; each node is numbered, and each memory that they share."""
    if isinstance(value, fx.Node):
        number = operands.setdefault(value, len(operands))
        layouts = [
            (*layout_of(tensor), storages.setdefault(storage_of(tensor), len(storages)))
            for tensor in tensors_of(value)
        ]
        return number, *layouts
    if isinstance(value, (list, tuple)):
        return tuple([_key(item, operands, storages) for item in value])
    if isinstance(value, dict):
        return tuple([(name, _key(item, operands, storages)) for name, item in value.items()])
    return type(value), repr(value)


def _again(value: Any, memory: dict[int, torch.UntypedStorage]) -> Any:
    """A fake tensor like another, in memory of its own: ``memory`` has what was made for others."""
    if not isinstance(value, FakeTensor):
        return value
    storage = memory.get(storage_of(value))
    if storage is None:
        storage = torch.UntypedStorage(  # type: ignore[no-untyped-call]
            value.untyped_storage().nbytes(), device="meta"
        )
        memory[storage_of(value)] = storage
    with _disable_current_modes():
        meta = torch.empty(0, dtype=value.dtype, device="meta")
        meta.set_(storage, value.storage_offset(), value.shape, value.stride())
        return FakeTensor(value.fake_mode, meta, value.fake_device)
