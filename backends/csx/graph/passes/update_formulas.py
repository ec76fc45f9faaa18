"""Write an optimizer's updates as the operations of their formula, for each parameter."""

from __future__ import annotations

import torch
from torch import fx

from fulgurite.backends.csx.graph.graph import Graph
from fulgurite.backends.csx.graph.update import FORMULAS, UPDATE, Formula


def write_updates_out(graph: Graph) -> Graph:
    """Replace each update by its operations; those of a parameter come after one another."""
    if not any(node.target is UPDATE for node in graph.operations()):
        return graph
    fresh = graph.copied()
    for node in list(fresh.find_nodes(op="call_function", target=UPDATE)):
        state, gradients, numbers, _ = node.args
        count = len(gradients)
        formulas: list[Formula] = node.meta[FORMULAS]
        with fresh.inserting_before(node), graph.mode, torch.no_grad():
            for i, formula in enumerate(formulas):
                own = [state[k] for k in range(i, len(state), count)]
                _write(fresh, formula, [own[0], gradients[i], *own[1:], *numbers])
        fresh.erase_node(node)
    return graph.with_operations(fresh)


def _write(graph: fx.Graph, formula: Formula, operands: list[fx.Node]) -> None:
    new: dict[fx.Node, fx.Node] = {}
    given = iter(operands)
    for node in formula.graph.nodes:
        if node.op == "placeholder":
            new[node] = next(given)
            continue
        new[node] = graph.node_copy(node, new.__getitem__)
        values = fx.map_arg((new[node].args, new[node].kwargs), lambda one: one.meta["val"])
        new[node].meta["val"] = node.target(*values[0], **values[1])
