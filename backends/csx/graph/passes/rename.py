"""Drop operations that give a tensor another name: nothing inside a graph differentiates it."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fulgurite.backends.csx.graph.graph import Graph
from fulgurite.backends.torch_versions import DETACHING

RENAMES = {
    *DETACHING,
    torch.ops.aten.detach_copy.default,
    torch.ops.aten.lift_fresh.default,
}

COPIES = {*RENAMES, torch.ops.aten.clone.default}
_EMPTY, _COPY = torch.ops.aten.new_empty_strided.default, torch.ops.aten.copy_.default


def original_of(node: fx.Node) -> Any:
    """The node that another only renames, or is autograd's copy of; None where it is neither.

    Autograd makes a gradient ``p.grad``, or copies it in two operations where somebody else holds
    it at that moment: a thread that looks at frames, as sampling profilers do.
    """
    if node.target in RENAMES:
        return node.args[0]
    copies = [node] if node.target is _COPY else node.users if node.target is _EMPTY else ()
    for one in copies:
        made: Any = one.args[0] if one.target is _COPY else None
        if getattr(made, "target", None) is _EMPTY and made.args[0] is one.args[1]:
            return one.args[1] if node in (made, one) else None
    return None


def drop_renames(graph: Graph) -> Graph:
    """Replace ``detach`` and its kin by what they rename; decompositions bring more of them."""
    if not any(node.target in RENAMES for node in graph.operations()):
        return graph
    return graph.with_operations(without_renames(graph.copied()))


def without_renames(operations: fx.Graph) -> fx.Graph:
    """Leave out what only renames, in the graph given; names of what is turned in place stay."""
    for node in list(operations.nodes):
        # x.detach().t_() turns the new name alone: without that name, x itself would be turned
        if node.target in RENAMES and not _is_turned(node) and not _is_turned(node.args[0]):
            node.replace_all_uses_with(node.args[0])
            operations.erase_node(node)
    return operations


def _is_turned(node: fx.Node) -> bool:
    """Whether an operation transposes a tensor in place, which its other names must not see."""
    tag = torch.Tag.inplace_view
    return any(tag in getattr(user.target, "tags", ()) for user in node.users)
