"""Which nodes of a captured graph lie in the same memory, and what may be changed there."""

from __future__ import annotations

import functools
import operator
from collections import defaultdict
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx
from torch._ops import OpOverload

from fulgurite.backends.csx.graph.graph import Graph, storage_of
from fulgurite.backends.csx.graph.op_schema import (
    arguments_of,
    is_alias,
    is_mutable,
    written_nodes,
)

_aten: Any = torch.ops.aten
_STATISTICS: dict[Any, tuple[int, int]] = {_aten.native_batch_norm.default: (3, 4)}
"""Operations that change arguments of which their schema says nothing, and their positions."""
_IS_TRAINING = 5
"""Position of the argument without which they change nothing."""


def with_new_views(graph: Graph) -> Graph:
    """Let ``transpose_`` and its kin return a view, where nobody uses the tensor again as it was.

    ``nn.GRU(batch_first=True)`` calls it.
    """
    views = {node: view for node in graph.operations() if (view := _as_view(node)) is not None}
    if not views:
        return graph
    operations = graph.copied()
    for node, copied in zip(graph.module.graph.nodes, operations.nodes, strict=True):
        copied.target = views.get(node, copied.target)
    return graph.with_operations(operations)


def _as_view(node: fx.Node) -> OpOverload | None:
    """The operation that returns a view, where an operation makes one of its argument."""
    if torch.Tag.inplace_view not in getattr(node.target, "tags", ()):
        return None
    seen: Any = node.args[0]
    view = _out_of_place(node.target)  # type: ignore[arg-type]
    again = any(user > node for user in seen.users)
    if view is None or not is_alias(view) or seen.op == "placeholder" or again:
        return None
    return view


def memories_of(graph: Graph) -> dict[fx.Node, int] | None:
    """A number for the memory that each node's tensors lie in; None if all is not known of it."""
    memories: dict[fx.Node, int] = {}
    inputs: dict[int, int] = {}  # by storage
    for node in graph.module.graph.nodes:
        if not _is_known(node):
            return None
        source = _lies_in(node)
        if source is not None:
            if storages_of(node) != storages_of(source):
                return None  # a pass noted another's memory
            memories[node] = memories[source]
        else:
            memories[node] = len(memories)
            if node.op == "placeholder":
                [storage] = storages_of(node)
                memories[node] = inputs.setdefault(storage, memories[node])
    return memories


def _is_known(node: fx.Node) -> bool:
    """Whether a node is an input, the output, or an operation of which all is said."""
    if node.op != "call_function" or node.target is operator.getitem:
        return node.op != "get_attr"
    operation = node.target
    if not isinstance(operation, OpOverload):
        return False
    return not is_mutable(operation) or functional(operation) is not None


def _lies_in(node: fx.Node) -> fx.Node | None:
    """The node in whose memory another's tensors are.

    torch's "unsafe" views are none: what they look at is not used again.
    """
    if node.op != "call_function":
        return None
    first: Any = node.args[0] if node.args else None
    if node.target is operator.getitem:
        return first if is_alias(first.target) else None
    return first if isinstance(first, fx.Node) and is_alias(node.target) else None


def is_plain(graph: Graph, memories: dict[fx.Node, int]) -> bool:
    """Whether each value that is read from changed memory follows from the changed tensor alone.

    It does where the operation changed all of that memory, and where it is read afterwards in the
    layout in which the operation saw it.
    """
    order = {node: i for i, node in enumerate(graph.module.graph.nodes)}
    over: dict[int, list[fx.Node]] = defaultdict(list)
    for node, memory in memories.items():
        over[memory].append(node)
    for node in graph.operations():
        for changed in changed_by(node):
            first, *others = over[memories[changed]]
            # two inputs over one memory: what changes one of them changes the other
            if any(other.op == "placeholder" for other in others):
                return False
            if any(other.target is _aten.as_strided.default for other in others):
                return False  # it counts from where memory begins, which a new tensor does not
            if layouts_of(first) == layouts_of(changed):
                continue
            # a part of the memory was changed (x[:, 0] = 1). A state is written as a whole, and
            # whoever reads the rest later reads it in another layout: neither can be had of the
            # part
            if first.op == "placeholder" or any(
                layouts_of(other) != layouts_of(changed)
                and any(order[user] > order[node] for user in other.users)
                for other in (first, *others)
            ):
                return False
    return True


def changed_by(node: fx.Node) -> list[fx.Node]:
    """The nodes whose tensors a node changes in place, whether its schema says so or not."""
    hidden = [node.args[i] for i in _STATISTICS[node.target]] if has_hidden_writes(node) else []
    return [*written_nodes(node), *(arg for arg in hidden if isinstance(arg, fx.Node))]


def has_hidden_writes(node: fx.Node) -> bool:
    """Whether a node changes tensors of which its schema says nothing."""
    return node.target in _STATISTICS and node.args[_IS_TRAINING] is not False


@functools.cache
def functional(operation: OpOverload) -> OpOverload | None:
    """The operation that returns what an in-place one makes of its first argument.

    None where there is none, or where it would change how a tensor lies in memory.
    """
    twin = None if torch.Tag.inplace_view in operation.tags else _out_of_place(operation)
    first, *rest = arguments_of(operation)
    if twin is None or any(argument.alias_info is not None for argument in rest):
        return None
    returns = [str(result.type) for result in twin._schema.returns]
    return twin if returns == [str(first.type)] else None


def _out_of_place(operation: OpOverload) -> OpOverload | None:
    """The operation of the same name without the underscore, of the same arguments."""
    namespace, _, name = operation._schema.name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), name[:-1], None) if name[-1] == "_" else None
    types = [str(argument.type) for argument in arguments_of(operation)]
    for overload in () if packet is None else packet.overloads():
        twin: OpOverload = getattr(packet, overload)
        same = types == [str(argument.type) for argument in arguments_of(twin)]
        if same and not is_mutable(twin):
            return twin
    return None


def tensors_of(node: fx.Node) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(node.meta.get("val")) if isinstance(leaf, Tensor)]


def layout_of(x: Tensor) -> tuple[Any, ...]:
    return x.dtype, x.shape, x.stride(), x.storage_offset(), x.device


def storages_of(node: fx.Node) -> set[int]:
    return {storage_of(tensor) for tensor in tensors_of(node)}


def layouts_of(node: fx.Node) -> list[tuple[Any, ...]]:
    return [layout_of(tensor) for tensor in tensors_of(node)]
