"""A step as it was traced: torch's own kernels, in place where they were, before any pass.

This is what runs operation by operation: decomposed for the compiler the same step takes 1.2 to 1.5
times as long (measured, torch 2.13: ConvNet, TransformerEncoder, LSTM, GPT).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Container, Iterable
from dataclasses import replace

import torch
from torch import fx

from fulgurite.backends.csx.diagnostics.regions import region_of
from fulgurite.backends.csx.graph.graph import Graph, Kind, LazyGraph
from fulgurite.backends.csx.graph.op_schema import operation_name
from fulgurite.backends.csx.graph.passes import PASSES, are_observed, lower
from fulgurite.backends.csx.graph.passes.memories import changed_by, has_hidden_writes, storages_of
from fulgurite.backends.csx.graph.passes.prune import is_read, with_inputs
from fulgurite.backends.csx.graph.passes.rename import without_renames
from fulgurite.backends.patches import tracing


def let_views_copy(traced: Graph) -> Graph:
    """Make each view of a traced step a ``reshape``, which copies where it must; in place.

    Its result has the same numbers. Where operands lie turned, results lie otherwise than traced in
    decompositions of 35 operations, batch norm among them, and in kernels that ``graph.fakes``
    does not know: a ``view`` would be an error there.
    """
    for node in traced.operations():
        if node.target is torch.ops.aten.view.default:
            node.target = torch.ops.aten.reshape.default
    return traced


def lowered(traced: Graph) -> Graph:
    """A step after ``PASSES``, which run when somebody first looks at its operations.

    They run at once for a step that clears gradients of the step before in place, since they decide
    which of those are its inputs, and for one with a fused loss: a loss that cannot be one kernel
    is an error before the first step.
    """
    runs = None if any(map(region_of, traced.operations())) else _without_unread(traced)
    if runs is not None:
        later = LazyGraph(runs, _written(runs), functools.partial(_lower_later, runs))
        if are_observed():
            later.module  # noqa: B018  # whoever looks does it while a program is built
        return later
    graph = lower(traced, PASSES)
    return replace(graph, as_traced=_without_unread(traced, {id(item) for item in graph.inputs}))


def _lower_later(runs: Graph) -> fx.GraphModule:
    def take_inputs(graph: Graph) -> Graph:
        return with_inputs(graph, runs.inputs)

    # whoever looks first may do so within a validation's inference mode or under autocast, which
    # would be traced into the decompositions
    with tracing(), torch.inference_mode(False), torch._C._DisableAutocast():
        graph = lower(runs, PASSES)
        if len(graph.inputs) < len(runs.inputs):
            # who runs the program has bound the inputs of the step as it was traced: the graph
            # takes all of these, though passes found that it reads fewer
            graph = lower(graph, (take_inputs,))
    return graph.module


def _without_unread(traced: Graph, kept: Container[int] | None = None) -> Graph | None:
    """A step without the inputs that nothing reads, and without what only those are for.

    ``hold_state`` is no part of it: where a guard says that a step went wrong, whoever runs this
    graph puts the state back.

    Args:
        traced: the step.
        kept: the ids of the inputs that it is to have; without, all that it reads. None comes back
            where it reads others, and without ``kept`` where it clears gradients in place.
    """
    fresh = traced.copied()
    without_renames(fresh)
    given = list(zip(traced.inputs, fresh.find_nodes(op="placeholder"), strict=True))
    for item, node in given:
        if item.kind is Kind.GRADIENT and not (item.kept if kept is None else id(item) in kept):
            _leave_out_writes(fresh, node)
    _eliminate_dead(fresh)
    inputs = []
    for item, node in given:
        wanted = item.kind is not Kind.GRADIENT if kept is None else id(item) in kept
        # a gradient between steps that is cleared in place: what becomes of it the passes decide
        if node.users and not (wanted or item.kept or is_read(node)):
            return None
        if node.users or (wanted and kept is not None):
            inputs.append(item)
        else:
            fresh.erase_node(node)
    runs = traced.with_operations(fresh)
    return replace(runs, inputs=tuple(inputs))


def _leave_out_writes(graph: fx.Graph, gradient: fx.Node) -> None:
    """What is written into a gradient that nobody reads is that gradient."""
    for user in sorted(gradient.users, reverse=True):
        if user.target is torch.ops.aten.copy_.default and user.args[1] is not gradient:
            user.replace_all_uses_with(user.args[1])  # type: ignore[arg-type]
            graph.erase_node(user)


def _eliminate_dead(graph: fx.Graph) -> None:
    # a batch norm whose result nobody uses still counts: its schema hides that it writes the
    # running statistics
    graph.eliminate_dead_code(lambda node: node.is_impure() or has_hidden_writes(node))


def changed_before(graph: Graph, last: fx.Node) -> set[int]:
    """Positions of the inputs that operations before one change in place, also by views."""
    return changed_by_any(
        graph, itertools.takewhile(lambda node: node is not last, graph.operations())
    )


def _written(graph: Graph) -> frozenset[int]:
    return frozenset(changed_by_any(graph, graph.operations()))


def changed_by_any(graph: Graph, nodes: Iterable[fx.Node]) -> set[int]:
    """Positions of the inputs that some operations change in place, also by views."""
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
