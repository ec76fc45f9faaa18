"""Drop operations that compute nothing."""

from __future__ import annotations

import copy

import torch
from torch import fx

from fulgurite.backends.csx.graph import Graph

_ALIASES = {
    torch.ops.aten.detach.default,
    torch.ops.aten.detach_copy.default,
    torch.ops.aten.alias.default,
    torch.ops.aten.lift_fresh.default,
}


def simplify(graph: Graph) -> Graph:
    """Drop ``detach`` and its kin (there is no autograd inside a program), and dead operations.

    Random operations stay even where their result is unused: they move the random state, as
    eagerly.
    """
    module = copy.copy(graph.module)
    module.graph = fresh = copy.deepcopy(graph.module.graph)
    for node in reversed(list(fresh.nodes)):
        if getattr(node.target, "namespace", "") == "profiler":  # Optimizer.step's time span
            fresh.erase_node(node)
    for node in list(fresh.nodes):
        if node.target in _ALIASES:
            node.replace_all_uses_with(node.args[0])
            fresh.erase_node(node)
    fresh.eliminate_dead_code()
    _complete_lines(fresh)
    module.recompile()
    return graph.with_module(module)


def _complete_lines(graph: fx.Graph) -> None:
    """Give operations that functionalization added the line of what they work on."""
    for node in graph.nodes:
        if node.op == "call_function" and not node.meta.get("stack_trace"):
            sources = [n for n in reversed(node.all_input_nodes) if n.meta.get("stack_trace")]
            if sources:
                node.meta["stack_trace"] = sources[0].meta["stack_trace"]
