"""A step that fails while it runs: which operation, which line of the user's, and why.

Compiled code checks labels and indices, and names a C++ file that is gone by then; torch's kernels
name no line. So the graph is run again operation by operation, on copies of what the step writes,
to the operation that fails.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from fulgurite.backends.csx.diagnostics.user_lines import line_of
from fulgurite.backends.csx.graph.collectives import has_collectives
from fulgurite.backends.csx.graph.graph import Graph, Kind
from fulgurite.backends.csx.graph.op_schema import operation_name
from fulgurite.backends.csx.graph.passes.as_traced import changed_before, changed_early
from fulgurite.backends.csx.graph.verify import on_copies

_TABLES = {"embedding": (0, 1, 0), "nll_loss_forward": (0, 1, -1), "nll_loss2d_forward": (0, 1, 1)}
"""Operations that look rows up: positions of the table and the indices; the table's dimension."""
_IGNORED = {"nll_loss_forward": 4, "nll_loss2d_forward": 4}
"""Where an operation's ``ignore_index`` stands, which is no class and is not wrong."""
_ALONG = ("gather", "index_select", "scatter", "index_add", "index_copy", "index_fill")
"""Begin the names of operations (table, dimension, indices, ...)."""
UNCHANGED = "The step changed nothing: weights, optimizer and buffers are as they were before it."
PERHAPS = (
    "A part of this step's updates may have been made: go on from a checkpoint, not from these"
    " weights."
)


def explained(
    graph: Graph, inputs: list[Tensor], error: Exception, compiled: bool
) -> tuple[Exception, bool]:
    """What to raise for an error that a run of a graph ended with, and whether it wrote nothing.

    An index out of range becomes an IndexError that names the line, the values and the batch's
    leaf; any other error is the same one, with a note that names the line.

    Args:
        graph: what ran.
        inputs: what it ran on; read here, not written.
        error: what it raised.
        compiled: whether compiled code ran, whose order of writes is not that of the operations.
    """
    written = graph.written()
    ran = graph if compiled else graph.runs
    finder = _Finder(ran.module)
    with on_copies(graph, inputs) as copies:
        try:
            finder.run(*copies)
        except (RuntimeError, IndexError) as found:
            why = found
        else:
            if not has_collectives(graph):  # alone it cannot, whoever the other process was
                error.add_note("Operation by operation the same step does not fail.")
            return error, not written
    node, graph = finder.node, ran
    assert node is not None
    untouched = not written or (not compiled and not _writes_before(graph, node))
    holds = UNCHANGED if untouched else PERHAPS
    line = line_of(node)
    where = "" if line is None else f"\n  at {line}\n      {line.source}"
    given = dict(zip(graph.placeholders(), copies, strict=True))
    wrong = _out_of_range(graph, node, {**finder.env, **given})
    if wrong is None:
        error.add_note(f"{operation_name(node.target)} failed: {why}{where}\n  {holds}")
        return error, untouched
    return IndexError(f"{wrong[0]}{where}\n  {wrong[1]}{holds}"), untouched


class _Finder(fx.Interpreter):
    """Runs a graph, and knows the operation that it is at."""

    node: fx.Node | None = None

    def run_node(self, n: fx.Node) -> Any:
        """Run one operation."""
        self.node = n
        return super().run_node(n)


def _writes_before(graph: Graph, failed: fx.Node) -> bool:
    """Whether operations before one changed inputs, and whoever ran them does not put them back."""
    return not changed_before(graph, failed) <= {*changed_early(graph)}


def _out_of_range(
    graph: Graph, node: fx.Node, values: dict[fx.Node, Any]
) -> tuple[str, str] | None:
    """What is wrong with an index of an operation, and where it comes from; None if nothing is."""
    for index, size in _indices(node, values):
        found: Tensor = values[index]
        # these alone count negative indices from the end
        lowest = -size if operation_name(node.target) in ("index", "index_put") else 0
        wrong = found[(found < lowest) | (found >= size)]
        ignored = _IGNORED.get(operation_name(node.target))
        if ignored is not None:
            wrong = wrong[wrong != node.args[ignored]]
        if wrong.numel():
            what = (
                f"An index is out of range: {operation_name(node.target)} got"
                f" {int(wrong.flatten()[0])}, where {size} rows or classes take {lowest} to"
                f" {size - 1}."
            )
            return what, _origin(graph, index, values)
    return None


def _indices(node: fx.Node, values: dict[fx.Node, Any]) -> Iterator[tuple[fx.Node, int]]:
    """The tensors of indices among an operation's arguments, and how many values are valid."""
    name, args = operation_name(node.target), node.args
    if name in _TABLES:
        table, index, dim = _TABLES[name]
        yield args[index], values[args[table]].shape[dim]  # type: ignore[index, misc]
    elif name.startswith(_ALONG):
        yield args[2], values[args[0]].shape[args[1]]  # type: ignore[index, misc]
    elif name in ("index", "index_put"):
        for dim, index in enumerate(args[1]):  # type: ignore[arg-type]
            if isinstance(index, fx.Node) and values[index].dtype != torch.bool:
                yield index, values[args[0]].shape[dim]  # type: ignore[index]


def _origin(graph: Graph, index: fx.Node, values: dict[fx.Node, Any]) -> str:
    """The leaves of the batch that an index is made of, and what they hold."""
    items = dict(zip(graph.placeholders(), graph.inputs, strict=True))
    seen: set[fx.Node] = set()
    found, todo = [], [index]
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        item = items.get(node)
        if item is not None and item.kind is Kind.BATCH:
            value: Tensor = values[node]
            if not value.is_floating_point() and value.numel():
                found.append(f"{item.name}, which holds {int(value.min())} to {int(value.max())}")
        todo += node.all_input_nodes
    made = f"It is made of {' and '.join(sorted(found))}.\n  " if found else ""
    remedy = "Remedy: labels below the number of classes, ids below the table's size."
    return f"{made}{remedy}\n  "
