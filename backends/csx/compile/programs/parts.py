"""A large graph in parts: what comes again in it is compiled once, and called each time.

The compiler's time grows with the number of operations, and most of them come again: a layer, its
backward pass and its updates for each layer, a time step for each step. The operations of a graph
are cut into *parts* where stretches of them come again; equal parts are one. A part is a graph of
its own, which reads some values and gives others (words: ``item_order``).
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor, fx
from torch.fx._lazy_graph_module import _LazyGraphModule

from fulgurite.backends.csx.compile.programs.item_order import (
    ItemOrder,
    Repeat,
    repeats,
    writes_input,
)
from fulgurite.backends.csx.compile.programs.steps import Layout
from fulgurite.backends.csx.compile.store import fingerprint
from fulgurite.backends.csx.graph.graph import Graph

SMALL = 600  # operations: they compile in seconds, and run best as one
SHARE = 0.3  # of the operations, that must be saved for calls to be worth it

_NUMBER = "number"  # in a node's ``meta``: of operations, in the whole graph

Given = tuple[int, int | None]
"""A result of a stretch: the number of the item in it, and which of the item's results."""


@dataclass(frozen=True, slots=True)
class Part:
    """A graph of its own: what its inputs look like, and its content as text."""

    module: fx.GraphModule
    examples: tuple[Tensor, ...]
    text: str
    read_by_others: bool  # whether what it gives goes to other parts
    policy: str = "medium"  # or "aggressive"
    library: frozenset[int] = frozenset()  # operations that are not to be generated


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a part: its index, and the numbers of the values that it reads and gives.

    ``operations`` are the part's, as they are numbered in the whole graph.
    """

    part: int
    reads: tuple[int, ...]
    gives: tuple[int, ...]
    operations: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ViewBetween:
    """A view of a value that is made between calls."""

    layout: Layout
    reads: tuple[int, ...]
    gives: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Division:
    """A graph as calls of parts, with the numbers of its inputs' and outputs' values."""

    parts: tuple[Part, ...]
    calls: tuple[Call | ViewBetween, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


def numbered(graph: Graph) -> Graph:
    """Number the operations of a graph, which passes and parts keep."""
    fresh = graph.copied()
    nodes = [node for node in fresh.nodes if node.op == "call_function"]
    for i, node in enumerate(nodes):
        node.meta[_NUMBER] = i
    return graph.with_operations(fresh)


def operations_of(module: fx.GraphModule) -> tuple[int, ...]:
    """The operations of a part, as the whole graph numbers them; -1 for those it did not have."""
    nodes = (node for node in module.graph.nodes if node.op == "call_function")
    return tuple(node.meta.get(_NUMBER, -1) for node in nodes)


def whole(graph: Graph) -> Part:
    """A graph as one part."""
    examples = tuple(item.example for item in graph.inputs)
    return as_part(graph.module, examples, read_by_others=False)


def divided(graph: Graph) -> Division | None:
    """Cut a graph into parts; None where it is better compiled as one."""
    if sum(1 for _ in graph.operations()) < SMALL:
        return None
    order = ItemOrder.of(graph)
    if order is None:
        return None
    found = [_equal(order, one) for one in repeats(order.symbols(), order.cut_costs())]
    found = [one for one in found if one.starts]
    if sum(one.saved for one in found) < SHARE * len(order.items):
        return None
    return _assembled(order, _cut(order, found))


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Some items as a part, the values that it reads, and the places of those that it gives."""

    part: Part
    reads: list[fx.Node]
    gives: list[Given]


def _equal(order: ItemOrder, repeat: Repeat) -> Repeat:
    """Of stretches of equal symbols those that are connected alike too."""
    texts = [one.part.text for one in _occurrences(order, repeat)]
    counts = Counter(texts)
    both = zip(repeat.starts, texts, strict=True)
    return Repeat(tuple(start for start, text in both if counts[text] > 1), repeat.length)


def _occurrences(order: ItemOrder, repeat: Repeat) -> list[_Stretch]:
    """The stretches of a repeat, as parts.

    Each gives whatever any of them has to give: else the last layer, of which others read something
    else than of the first ones, would be another part.
    """
    stretches = [range(start, start + repeat.length) for start in repeat.starts]
    gives = {one for stretch in stretches for one in _given(order, stretch)}
    return [_cut_out(order, stretch, gives) for stretch in stretches]


def _given(order: ItemOrder, stretch: range) -> set[Given]:
    places = map(order.place, order.read_after(stretch))
    return {(at - stretch.start, element) for at, element in places}


def _cut(order: ItemOrder, found: Iterable[Repeat]) -> dict[int, _Stretch]:
    """All items, by starts: what lies between stretches that come again is one part each."""
    cut, ends = dict[int, _Stretch](), dict[int, int]()
    for repeat in found:
        for start, one in zip(repeat.starts, _occurrences(order, repeat), strict=True):
            cut[start], ends[start] = one, start + repeat.length
    at = 0
    for start in [*sorted(ends), len(order.items)]:
        if at < start:
            stretch = range(at, start)
            cut[at] = _cut_out(order, stretch, _given(order, stretch))
        at = ends.get(start, start)
    return cut


def _cut_out(order: ItemOrder, stretch: range, gives: set[Given]) -> _Stretch:
    """Some items as a part. Its inputs come in the order in which they are read."""
    items = [order.items[i] for i in stretch]
    fresh, own = fx.Graph(), dict[fx.Node, fx.Node]()
    reads = order.operands(items)
    for i, value in enumerate(reads):
        own[value] = fresh.placeholder(f"value_{i}")
        own[value].meta = dict(value.meta)

    def copied(node: fx.Node) -> fx.Node:
        if node not in own:
            for one in node.all_input_nodes:
                copied(one)
            own[node] = fresh.node_copy(node, own.__getitem__)
        return own[node]

    for item in items:
        if not writes_input(item):
            copied(item)
    # in one order for all occurrences: results are told by their position, and equal parts are one.
    # None, which is the whole item, cannot be compared with a number
    given = sorted(gives, key=lambda one: (one[0], -1 if one[1] is None else one[1]))
    results = []
    for at, element in given:
        result = own[items[at]]
        if element is not None:
            value = result.meta["val"][element]
            result = fresh.call_function(operator.getitem, (result, element))
            result.meta["val"] = value
        results.append(result)
    for item in items:  # last: the compiler reads an operand of ``clone`` for its result
        copied(item)
    fresh.output(tuple(results))
    examples = tuple(value.meta["val"] for value in reads)
    # lazy: a GraphModule writes its Python when it is made, and nobody runs that of a part
    part = as_part(_LazyGraphModule(order.module, fresh), examples, read_by_others=True)
    return _Stretch(part, reads, given)


def as_part(
    module: fx.GraphModule, examples: tuple[Tensor, ...], read_by_others: bool = False
) -> Part:
    """A graph as a part."""
    # the layouts of inputs too: the compiler writes strides into its loops
    text = "\n".join(
        [
            *map(fingerprint.layout, examples),
            *fingerprint.described_operations(module),
        ]
    )
    return Part(module, examples, text, read_by_others)


def _assembled(order: ItemOrder, cut: dict[int, _Stretch]) -> Division:
    """Number parts and values."""
    parts: dict[str, Part] = {}
    for one in cut.values():
        parts.setdefault(one.part.text, one.part)
    indices = {text: i for i, text in enumerate(parts)}
    inputs = order.module.graph.find_nodes(op="placeholder")
    numbers: dict[fx.Node | Given, int] = {node: i for i, node in enumerate(inputs)}
    calls: list[Call | ViewBetween] = []

    def number(value: fx.Node) -> int:
        if value in numbers:
            return numbers[value]
        # what items give is numbered by its place: a part knows its results by that, not by nodes
        if value not in order.picks:
            return numbers[order.place(value)]
        whole, layout = order.view_of(value)
        behind = number(whole)
        numbers[value] = len(numbers)
        calls.append(ViewBetween(layout, (behind,), (numbers[value],)))
        return numbers[value]

    for start in sorted(cut):
        one = cut[start]
        reads = tuple(map(number, one.reads))
        gives = [(start + at, element) for at, element in one.gives]
        numbers |= {value: len(numbers) + i for i, value in enumerate(gives)}
        gives_numbers = tuple(numbers[value] for value in gives)
        operations = operations_of(one.part.module)
        calls.append(Call(indices[one.part.text], reads, gives_numbers, operations))
    outputs = tuple(map(number, order.outputs))
    return Division(tuple(parts.values()), tuple(calls), tuple(range(len(inputs))), outputs)
