"""Leave out the zero that a gradient is before the first backward pass of a step."""

from __future__ import annotations

import torch
from torch import fx

from fulgurite.backends.csx.graph.graph import Graph

_ADD = torch.ops.aten.add.Tensor


def fold_zeros(graph: Graph) -> Graph:
    """Replace ``zero + x`` by ``x`` where an input is zero whenever the step begins.

    A loop that ends in ``zero_grad`` then needs no memory for gradients between steps.
    """
    if not any(item.zero for item in graph.inputs):
        return graph
    fresh = graph.copied()
    for item, node in zip(graph.inputs, list(fresh.find_nodes(op="placeholder")), strict=True):
        for user in list(node.users) if item.zero else ():
            if user.target is _ADD and not user.kwargs:
                [other] = [arg for arg in user.args if arg is not node]
                if _alike(user, other):
                    user.replace_all_uses_with(other)
                    fresh.erase_node(user)
    return graph.with_operations(fresh)


def _alike(node: fx.Node, other: object) -> bool:
    if not isinstance(other, fx.Node):
        return False
    a, b = node.meta["val"], other.meta["val"]
    return (a.shape, a.dtype) == (b.shape, b.dtype)
