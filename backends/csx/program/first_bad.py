"""Which operation of a step gave the first result that is not finite.

The step is run once more, operation by operation, and of each result it is noted whether it holds
NaN or infinities. From what the step returns one goes back as long as an operand is not finite
either: infinities alone, as in the mask of an attention, are no fault.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fulgurite.backends.csx.diagnostics.user_lines import line_of, module_of
from fulgurite.backends.csx.graph.graph import Graph, Kind
from fulgurite.backends.csx.graph.op_schema import operation_name
from fulgurite.backends.csx.graph.verify import on_copies

FINITE, INFINITE, NAN = 0, 1, 2
_WORDS = {INFINITE: "infinite", NAN: "NaN"}


def first_not_finite(graph: Graph, inputs: list[Tensor], leaves: Sequence[str]) -> str | None:
    """Run a graph again, to no effect, and name the first result that is not finite.

    Args:
        graph: the step.
        inputs: its inputs; the random state is the one of now.
        leaves: names of the batch's tensors.

    Returns:
        What it is and where it comes from, in words; None where all is finite.
    """
    seen = _Watched(graph.module)
    with on_copies(graph, inputs) as copies, torch.no_grad():
        seen.run(*copies)
    root = _root(graph, seen.kinds)
    if root is None:
        return None
    if root.op == "placeholder":
        i = graph.placeholders().index(root)
        return _of_input(graph, i, inputs[i], leaves)
    kind, text = seen.kinds[root], _of_operation(root)
    infinities = [_back(n, seen.kinds) for n in root.all_input_nodes if seen.kinds.get(n)]
    if infinities and infinities[0].op != "placeholder":
        text += f"\n  of an infinity that is the result of {_of_operation(infinities[0])}"
    return f"The first result that is {_WORDS[kind]} is that of {text}"


def _of_operation(node: fx.Node) -> str:
    inside, line = module_of(node), line_of(node)
    where = f" in {inside}" if inside else ""
    at = f"\n    at {line}\n        {line.source}" if line is not None else ""
    return f"{operation_name(node.target) or node.target}{where}{at}"


def in_words(name: str, value: Tensor) -> str | None:
    """``batch[0] is NaN at [3, 1] (2 of 64 elements)``; None where all of it is finite."""
    if not value.is_floating_point() or not (kind := _kind(value)):
        return None
    bad = value.isnan() if kind == NAN else value.isinf()
    place = bad.nonzero()[0].tolist()
    at = f" at {place} ({int(bad.sum())} of {bad.numel()} elements)" if place else ""
    return f"{name} is {_WORDS[kind]}{at}"


def _of_input(graph: Graph, i: int, value: Tensor, leaves: Sequence[str]) -> str:
    item = graph.inputs[i]
    name = leaves[item.index] if item.kind is Kind.BATCH else item.name
    words = in_words(name, value) or f"{name} is not finite"
    if item.kind is Kind.BATCH:
        return f"The batch was not finite: {words}."
    return (
        f"It was not finite before the step: {words}. Where the steps before had finite losses, a"
        " gradient was not: CheckLoss(gradients=True) names it."
    )


def _kind(value: Tensor) -> int:
    if bool(value.isnan().any()):
        return NAN
    return INFINITE if bool(value.isinf().any()) else FINITE


class _Watched(fx.Interpreter):
    """Notes of each result whether it is finite."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.kinds: dict[fx.Node, int] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if isinstance(value, Tensor) and value.is_floating_point():
            self.kinds[n] = _kind(value)
        return value


def _root(graph: Graph, kinds: dict[fx.Node, int]) -> fx.Node | None:
    """Where what is not finite begins: behind what the step returns, or else where NaN begins."""
    order = {node: i for i, node in enumerate(graph.module.graph.nodes)}
    returned = graph.module.graph.output_node().all_input_nodes
    starts = [node for node in returned if kinds.get(node)]
    # all results may be finite where a gradient is not: then what the step writes has the NaN.
    # Infinities alone are no fault
    starts = starts or [node for node, kind in kinds.items() if kind == NAN]
    return min((_back(node, kinds) for node in starts), key=order.__getitem__, default=None)


def _back(node: fx.Node, kinds: dict[fx.Node, int]) -> fx.Node:
    """Where it begins: NaN comes of NaN, infinities come of infinities or NaN."""
    while True:
        above = [one for one in node.all_input_nodes if kinds.get(one, FINITE) >= kinds[node]]
        if not above:
            return node
        node = above[0]
