"""Graphs cut into parts everywhere, not where they repeat: for tests of what parts do."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fulgurite.backends.csx.compile.fabric import Call
from fulgurite.backends.csx.compile.host import host_fabric
from fulgurite.backends.csx.compile.inductor import generate as inductor
from fulgurite.backends.csx.compile.programs import parts
from fulgurite.backends.csx.compile.programs.item_order import ItemOrder, Repeat
from fulgurite.backends.csx.compile.programs.parts import Division, ViewBetween
from fulgurite.backends.csx.graph.graph import Graph
from fulgurite.backends.csx.graph.passes import INTERPRETER_PASSES, lower


def in_pieces(graph: Graph, length: int) -> Division | None:
    """A graph in parts of so many operations; None where it is never cut."""
    order = ItemOrder.of(graph)
    if order is None or len(order.items) <= length:
        return None
    starts = range(0, len(order.items) - length + 1, length)
    return parts._assembled(
        order, parts._cut(order, [Repeat((start,), length) for start in starts])
    )


def run(division: Division, inputs: Sequence[Tensor]) -> list[Tensor]:
    """What a division gives, its parts run by torch's own kernels."""
    values = dict(zip(division.inputs, inputs, strict=True))
    for call in division.calls:
        read = [values[number] for number in call.reads]
        if isinstance(call, ViewBetween):
            size, stride, offset = call.layout
            offset += read[0].storage_offset()
            results: Sequence[Tensor] = [read[0].as_strided(size, stride, offset)]
        else:
            results = division.parts[call.part].module(*read)
        values |= zip(call.gives, results, strict=True)
    return [values[number] for number in division.outputs]


def cutting(length: int) -> None:
    """Let every program of this process be cut, compiled or run operation by operation."""
    whole = host_fabric.reference_of

    def one_by_one(graph: Graph) -> Call:
        division = in_pieces(lower(graph, INTERPRETER_PASSES), length)
        return whole(graph) if division is None else lambda inputs: run(division, inputs)

    host_fabric.reference_of = one_by_one
    inductor.divided = lambda graph: in_pieces(graph, length)
