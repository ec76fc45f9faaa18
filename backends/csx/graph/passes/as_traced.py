"""A step as it was traced: torch's own kernels, in place where they were, before any pass.

This is what runs operation by operation: decomposed for the compiler the same step takes 1.2 to 1.5
times as long (measured, torch 2.13: ConvNet, TransformerEncoder, LSTM, GPT).
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import torch
from torch import fx

from fulgurite.backends.csx.graph.graph import Graph, Kind
from fulgurite.backends.csx.graph.op_schema import operation_name
from fulgurite.backends.csx.graph.passes.memories import changed_by, changes_untold, storages_of
from fulgurite.backends.csx.graph.passes.rename import without_renames


def as_traced(traced: Graph, lowered: Graph) -> Graph | None:
    """The step before the passes that made ``lowered`` of it, with the inputs of that.

    None where a pass left out an input that it reads. Where state is held (``hold``), whoever runs
    it has to do that.
    """
    fresh = traced.copied()
    for node in reversed(list(fresh.nodes)):
        if getattr(node.target, "namespace", "") == "profiler":
            fresh.erase_node(node)
    in_place_views = any(
        torch.Tag.inplace_view in getattr(node.target, "tags", ()) for node in fresh.nodes
    )
    if not in_place_views:
        without_renames(fresh)
    kept = {id(item) for item in lowered.inputs}
    for item, node in zip(traced.inputs, list(fresh.find_nodes(op="placeholder")), strict=True):
        if id(item) in kept:
            continue
        if item.kind is Kind.GRADIENT:
            _leave_out_writes(fresh, node)
        _eliminate_dead(fresh)
        if node.users:
            return None
        fresh.erase_node(node)
    _eliminate_dead(fresh)
    return replace(traced.with_operations(fresh), inputs=lowered.inputs)


def _leave_out_writes(graph: fx.Graph, gradient: fx.Node) -> None:
    """What is written into a gradient that nobody reads is that gradient."""
    for user in sorted(gradient.users, reverse=True):
        if user.target is torch.ops.aten.copy_.default and user.args[1] is not gradient:
            user.replace_all_uses_with(user.args[1])  # type: ignore[arg-type]
            graph.erase_node(user)


def _eliminate_dead(graph: fx.Graph) -> None:
    graph.eliminate_dead_code(lambda node: node.is_impure() or changes_untold(node))


def changed_before(graph: Graph, last: fx.Node) -> set[int]:
    """Positions of the inputs that operations before one change in place, also by views."""
    nodes = itertools.takewhile(lambda node: node is not last, graph.operations())
    changed = {
        storage for node in nodes for one in changed_by(node) for storage in storages_of(one)
    }
    inputs = enumerate(graph.placeholders())
    return {i for i, node in inputs if not changed.isdisjoint(storages_of(node))}


def changed_early(graph: Graph) -> list[int]:
    """Positions of the inputs that are changed before an operation that may yet find an index out
    of range, or a matrix without a factor: statistics of norms, counts.
    """
    mays = [node for node in graph.operations() if _may_fail(operation_name(node.target))]
    return sorted(changed_before(graph, mays[-1])) if mays else []


def _may_fail(name: str) -> bool:
    return name in _LOOKS_UP or (name.startswith(_MAY_FAIL) and name not in _NEVER_FAIL)


_LOOKS_UP = ("embedding", "nll_loss_forward", "nll_loss2d_forward", "index", "index_put")
_MAY_FAIL = (
    *("gather", "scatter", "index_select", "index_add", "index_copy", "index_fill"),
    *("embedding_bag", "linalg_", "cholesky", "multinomial", "take", "bincount"),
)
"""Begin the names of other operations that fail for values."""
_NEVER_FAIL = ("linalg_vector_norm", "linalg_cross")
