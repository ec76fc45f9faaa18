"""What the calls of a program read from memory, and what they write into it.

A call reads the values that other calls made, and the graph's inputs: each once, however often it
uses it, and of a view only what it looks at. It writes what others read, what the graph returns,
and new values of state. What one call alone makes and reads costs nothing: it stays where the call
keeps it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx

from fulgurite.backends.csx.compile.programs.kernels import Kernels
from fulgurite.backends.csx.costs.graph_values import Value, Values, module_name, viewed
from fulgurite.backends.csx.graph.collectives import is_wait
from fulgurite.backends.csx.graph.graph import Graph
from fulgurite.backends.csx.graph.op_schema import written_nodes

_COPY = torch.ops.aten.copy_.default  # reads nothing of what it overwrites


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Bytes read and written."""

    read_bytes: int = 0
    written_bytes: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        """Of both."""
        return Traffic(
            read_bytes=self.read_bytes + other.read_bytes,
            written_bytes=self.written_bytes + other.written_bytes,
        )


@dataclass(frozen=True, slots=True)
class Move:
    """What a call moves for the sake of one operation."""

    call: int
    operation: fx.Node
    traffic: Traffic


def traffic(graph: Graph, kernels: Kernels) -> tuple[Traffic, ...]:
    """What each of ``kernels.calls`` reads and writes."""
    total = [Traffic() for _ in kernels.calls]
    for move in moves(graph, kernels):
        total[move.call] += move.traffic
    return tuple(total)


def moves(graph: Graph, kernels: Kernels) -> Iterator[Move]:
    """What calls move, for the sake of which operation; together it is all that they move."""
    values = Values(graph, kernels.calls)
    written: dict[Value, None] = dict.fromkeys(values.outputs())
    for i, operations in enumerate(values.operations):
        for value, views in _reads(values, operations).items():
            written[value] = None
            yield Move(i, views[0][0], Traffic(read_bytes=viewed(views, value)))
    for value in written:
        if value.node in values.maker:
            yield Move(values.maker[value.node], value.node, Traffic(written_bytes=value.bytes))
    yield from _state_writes(values)


def _reads(values: Values, operations: list[fx.Node]) -> dict[Value, list[tuple[fx.Node, fx.Node]]]:
    """The values of others that a call reads: by whom, and by which views, in order."""
    own = set(operations)
    found: dict[Value, list[tuple[fx.Node, fx.Node]]] = {}
    for node in operations:
        # the memory that it gives is the collective's, which is counted there
        # waiting moves nothing: the collective has counted it
        if is_wait(node.target):
            continue
        overwritten = written_nodes(node) if node.target is _COPY else []
        for operand in node.all_input_nodes:
            for value, view in () if operand in overwritten else values.behind(operand):
                if value.node not in own:
                    found.setdefault(value, []).append((node, view))
    return found


def _state_writes(values: Values) -> Iterator[Move]:
    """Final writes; one in no call is part of the call that makes the new value."""
    for node, target in values.writes():
        tensor = target.meta["val"]
        moved = Traffic(written_bytes=tensor.numel() * tensor.element_size())
        sources = [v.node for one in node.all_input_nodes[1:] for v, _ in values.behind(one)]
        makers = [one for one in sources if one in values.maker]
        # an optimizer's write is of no module: it counts for who made the value
        said = node if module_name(node) or not makers else makers[0]
        if node in values.maker:
            yield Move(values.maker[node], said, moved)
        elif makers:
            yield Move(max(values.maker[one] for one in makers), said, moved)
