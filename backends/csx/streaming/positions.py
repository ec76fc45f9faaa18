"""Where the operations of a graph work on which inputs, and a graph that says when it is there."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from torch import Tensor, fx

from fulgurite.backends.csx.graph.graph import Graph, Kind, storage_of
from fulgurite.backends.csx.graph.op_schema import is_view
from fulgurite.backends.csx.graph.passes.memories import storages_of
from fulgurite.backends.csx.graph.update import FORMULAS, UPDATE, portions
from fulgurite.backends.csx.streaming.residency import LEAST_BYTES, Uses, begin_call


def streamed_inputs(graph: Graph) -> list[int]:
    """Positions of the inputs that may be in files."""
    return [i for i, item in enumerate(graph.inputs) if item.kind is Kind.STATE]


def most_at_once(uses: Uses, graph: Graph) -> tuple[int, list[str]]:
    """The bytes of state that one call works on, at most, and the names of the inputs."""
    sizes = [item.example.untyped_storage().nbytes() for item in graph.inputs]
    sizes = [size if size >= LEAST_BYTES else 0 for size in sizes]
    most = max(uses.calls, key=lambda call: sum(sizes[i] for i in call), default=())
    return sum(sizes[i] for i in most), [graph.inputs[i].name for i in most if sizes[i]]


def with_positions(
    module: fx.GraphModule, graph: Graph, written: frozenset[int]
) -> tuple[fx.GraphModule, Uses]:
    """Insert ``begin_call`` before operations that use streamed state, and list what each uses.

    An update of many parameters is split into one for each parameter.

    Args:
        module: the operations, with the graph's inputs.
        graph: whose they are.
        written: positions of the inputs that they write.
    """
    fresh = copy.deepcopy(module.graph)
    for node in list(fresh.find_nodes(op="call_function", target=UPDATE)):
        _split(node)
    placeholders = list(fresh.find_nodes(op="placeholder"))
    at = {storage_of(placeholders[i].meta["val"]): i for i in streamed_inputs(graph)}
    calls: list[tuple[int, ...]] = []
    for node in list(fresh.nodes):
        used = sorted({at[one] for one in _worked_on(node) if one in at})
        if used:
            with fresh.inserting_before(node):
                fresh.call_function(begin_call, (len(calls),))
            calls.append(tuple(used))
    return fx.GraphModule(module, fresh), Uses(tuple(calls), written)


def _worked_on(node: fx.Node) -> Iterator[Any]:
    """The memories that an operation works on."""
    if node.op == "call_module" or (node.op == "call_function" and not is_view(node.target)):
        for one in node.all_input_nodes:
            yield from storages_of(one)


def _split(update: fx.Node) -> None:
    """Write an update as one for each parameter; small ones are updated together."""
    given: Any = update.args
    state, gradients, numbers, how = given
    lists = [state[i : i + len(gradients)] for i in range(0, len(state), len(gradients))]
    values: list[Tensor] = [one.meta["val"] for one in gradients]
    with update.graph.inserting_before(update):
        for some in portions(values, LEAST_BYTES):
            own = [one for each in lists for one in each[some]]
            part = update.graph.call_function(UPDATE, (own, gradients[some], numbers, how))
            part.meta = {**update.meta, FORMULAS: update.meta[FORMULAS][some]}
    update.graph.erase_node(update)
