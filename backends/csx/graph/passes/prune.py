"""Drop the inputs that a step does not depend on."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from fulgurite.backends.csx.graph.graph import Graph, Input, Kind
from fulgurite.backends.csx.graph.op_schema import written_nodes


def prune(graph: Graph) -> Graph:
    """Drop inputs without a reader; a gradient that is only ever overwritten is no state."""
    fresh = graph.copied()
    kept = []
    for item, node in zip(graph.inputs, list(fresh.find_nodes(op="placeholder")), strict=True):
        only_written = all(_overwrites(user, node) for user in node.users)
        if item.kind is Kind.GRADIENT and only_written and not item.kept:
            for user in sorted(node.users, reverse=True):
                user.replace_all_uses_with(user.args[1])
                fresh.erase_node(user)
        if node.users:
            kept.append(item)
        else:
            fresh.erase_node(node)
    fresh.eliminate_dead_code()
    return replace(graph.with_operations(fresh), inputs=tuple(kept))


def with_inputs(graph: Graph, inputs: tuple[Input, ...]) -> Graph:
    """The same operations with these inputs, in this order, some of which they do not read."""
    fresh, known = fx.Graph(), dict(zip(map(id, graph.inputs), graph.placeholders(), strict=True))
    new: dict[fx.Node, fx.Node] = {}
    for i, item in enumerate(inputs):
        taken = fresh.placeholder(f"input_{i}")
        taken.meta["val"] = item.example
        if id(item) in known:
            taken.meta = dict(known[id(item)].meta)
            new[known[id(item)]] = taken
    output = fresh.graph_copy(graph.module.graph, new)
    fresh.output(output)
    return replace(graph.with_operations(fresh), inputs=inputs)


def _overwrites(user: fx.Node, node: fx.Node) -> bool:
    """Whether ``user`` replaces the values of ``node`` without reading them."""
    # of its first operand, copy takes the layout alone
    copies = user.target is torch.ops.aten.copy.default and user.args[1] is not node
    return node in written_nodes(user) or copies


def read_inputs(graph: Graph) -> set[int]:
    """The positions of inputs whose values the program reads before it overwrites them."""
    return {i for i, node in enumerate(graph.runs.placeholders()) if is_read(node)}


def is_read(node: fx.Node) -> bool:
    """Whether a step reads the values that one of its inputs begins with."""
    first = min(node.users, default=None)
    if first is None or first.target not in _OVERWRITING:
        return first is not None
    return first.args[0] is not node or node in first.args[1:]


_OVERWRITING = frozenset(
    {
        *(torch.ops.aten.copy_.default, torch.ops.aten.copy.default, torch.ops.aten.zero_.default),
        *(torch.ops.aten.fill_.Scalar, torch.ops.aten.fill_.Tensor),
    }
)
