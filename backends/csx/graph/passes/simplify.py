"""Drop operations that compute nothing, or nothing new."""

from __future__ import annotations

import torch
from torch import fx

from fulgurite.backends.csx.graph.graph import Graph
from fulgurite.backends.csx.graph.op_schema import is_mutable, is_random, is_uninitialized


def simplify(graph: Graph) -> Graph:
    """Drop repeated and dead operations.

    Random operations stay even where their result is unused: they move the random state, as
    eagerly.
    """
    fresh = graph.copied()
    _merge_repeated(fresh)
    fresh.eliminate_dead_code()
    _complete_lines(fresh)
    return graph.with_operations(fresh)


def _complete_lines(graph: fx.Graph) -> None:
    """Give operations that functionalization added the line of what they work on."""
    for node in graph.nodes:
        if node.op == "call_function" and not node.meta.get("stack_trace"):
            sources = [n for n in reversed(node.all_input_nodes) if n.meta.get("stack_trace")]
            if sources:
                node.meta["stack_trace"] = sources[0].meta["stack_trace"]


def _merge_repeated(graph: fx.Graph) -> None:
    """Compute equal operations on equal arguments once: parameters repeat an optimizer's scalars.

    torch's own ``fx_graph_cse`` merges in-place random operations such as ``uniform_``.
    """
    returned = set(graph.output_node().all_input_nodes)
    seen: dict[tuple[object, str, str], fx.Node] = {}
    for node in list(graph.nodes):
        target = node.target
        if (
            not isinstance(target, torch._ops.OpOverload)
            or is_mutable(target)
            or is_random(target)
            or is_uninitialized(target)
            or node in returned
        ):
            continue
        first = seen.setdefault((target, repr(node.args), repr(node.kwargs)), node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)
