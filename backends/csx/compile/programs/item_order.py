"""The operations of a graph in a row, in the order in which parts are cut from it.

Words: an *item* is an operation that computes or writes something; a *value* is an input of the
graph, or what an item gives: the item's node, or, where it gives several tensors, the node of one
of them. What only looks at values (a view, a constant) is no item: it is *made again* where it is
needed, or, where it picks one of many (a time step of a sequence), it is made between parts and
given to them: so that steps are equal.

A *stretch* is a start and a length; its *occurrences* are stretches of equal symbols that do not
overlap: layers, time steps, an optimizer's equal updates.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, fx
from torch._ops import OpOverload

from fulgurite.backends.csx.compile.programs.steps import Layout
from fulgurite.backends.csx.compile.store.fingerprint import layout, target_of, text_of
from fulgurite.backends.csx.graph.graph import Graph, Kind, storage_of
from fulgurite.backends.csx.graph.op_schema import is_alias, written_nodes

_COPY = torch.ops.aten.copy_.default
_PICKS = (torch.ops.aten.select.int, torch.ops.aten.slice.Tensor)
_MANY = 8  # assumed: elements of a tuple of views that is made for its elements' sake
_CONSTANTS = (
    *(torch.ops.aten.full.default, torch.ops.aten.scalar_tensor.default),
    *(torch.ops.aten.arange.start_step, torch.ops.prims.iota.default),
)


class ItemOrder:
    """The items of a graph.

    The final write of a state comes as soon as nobody reads the state's old value, beside what
    computes the new one: so equal layers are equal stretches, updates and all.

    Attributes:
        module: the graph's.
        items: in order.
        outputs: the values that the graph returns.
        picks: what may be made between parts.
    """

    def __init__(
        self, module: fx.GraphModule, outputs: list[fx.Node], numbers: set[fx.Node]
    ) -> None:
        self.module, self.outputs, self._numbers = module, outputs, numbers
        self._behind: dict[fx.Node, tuple[fx.Node, ...]] = {}
        self.picks: set[fx.Node] = set()
        items, writes = [], []
        for node in module.graph.nodes:
            if node.op in ("placeholder", "output") or self._is_element(node):
                continue
            if writes_input(node):
                writes.append(node)
            # what the graph returns is an item, view or not: a part has to give it
            elif _looks_only(node) and node not in outputs:
                self._behind[node] = self.values(node.all_input_nodes)
                if _picks(node) and self._is_view_of_one(node):
                    self.picks.add(node)
            else:
                items.append(node)
        self.items = self._with_writes(items, writes)
        self._at = {item: i for i, item in enumerate(self.items)}
        self._last_read = self._reads(self.items) | dict.fromkeys(outputs, len(self.items))

    @classmethod
    def of(cls, graph: Graph) -> ItemOrder | None:
        """That of a graph; None if it does what is not known here."""
        (output,) = graph.module.graph.find_nodes(op="output")
        storages = {storage_of(item.example) for item in graph.inputs}
        known = all(isinstance(one, fx.Node) and one.op != "get_attr" for one in output.args[0])
        writes = [node for node in graph.operations() if written_nodes(node)]
        final = all(writes_input(node) and not node.users for node in writes)
        # two inputs of one memory: what is written by the one name is read by the other
        if len(storages) < len(graph.inputs) or not known or not final:
            return None
        written = {storage_of(node.all_input_nodes[0].meta["val"]) for node in writes}
        if not written.isdisjoint(storage_of(one.meta["val"]) for one in output.args[0]):
            return None  # a view of a state would go from part to part
        both = zip(graph.inputs, graph.placeholders(), strict=True)
        numbers = {node for item, node in both if item.kind is Kind.NUMBERS}
        order = cls(graph.module, list(output.args[0]), numbers)
        return None if order._reads_what_it_wrote() else order

    def values(self, nodes: Iterable[fx.Node]) -> tuple[fx.Node, ...]:
        """The values behind some nodes, each once, in order."""
        found = (value for node in nodes for value in self._behind.get(node, (node,)))
        return tuple(dict.fromkeys(found))

    def operands(self, items: list[fx.Node]) -> list[fx.Node]:
        """What a part of some items is given: values, and picks of values that others give."""
        inside = set(items)
        written = {item.all_input_nodes[0] for item in items if writes_input(item)}
        found: dict[fx.Node, None] = {}

        def visit(node: fx.Node) -> None:
            values = self.values([node])
            foreign = not any(self.item_of(value) in inside for value in values)
            # of what the part writes it has to see that it reads it
            if node in self.picks and foreign and written.isdisjoint(values):
                found[node] = None
            elif node in self._behind:
                for one in node.all_input_nodes:
                    visit(one)
            elif foreign:
                found[node] = None

        for item in items:
            for node in item.all_input_nodes:
                visit(node)
        return list(found)

    def view_of(self, pick: fx.Node) -> tuple[fx.Node, Layout]:
        """The value that a pick is a view of, and its layout in that."""
        (value,) = self._behind[pick]
        view, whole = pick.meta["val"], value.meta["val"]
        offset = view.storage_offset() - whole.storage_offset()
        return value, (tuple(view.shape), view.stride(), offset)

    def item_of(self, value: fx.Node) -> fx.Node:
        """The item that gives a value."""
        return value.all_input_nodes[0] if self._is_element(value) else value

    def read_after(self, stretch: range) -> list[fx.Node]:
        """The values of a stretch of items that others read, or that the graph returns."""
        return [
            value
            for value, last in self._last_read.items()
            if value.op != "placeholder"
            and last not in stretch
            and self._at[self.item_of(value)] in stretch
        ]

    def place(self, value: fx.Node) -> tuple[int, int | None]:
        """Where a value is born: its item's number, and which of the item's results it is."""
        element: Any = value.args[1] if self._is_element(value) else None
        return self._at[self.item_of(value)], element

    def symbols(self) -> list[int]:
        """A number for each item: equal for the same operation on operands of the same layout."""
        numbers: dict[str, int] = {}
        return [numbers.setdefault(self._described(item), len(numbers)) for item in self.items]

    def cut_costs(self) -> list[float]:
        """Of a cut before each item, and after the last: the bytes that are kept across it."""
        changes = [0.0] * (len(self.items) + 2)
        for value, last in self._last_read.items():
            if value.op != "placeholder":
                changes[self._at[self.item_of(value)] + 1] += _bytes(value)
                changes[last + 1] -= _bytes(value)
        costs, total = [], 0.0
        for change in changes[:-1]:
            total += change
            costs.append(total)
        return costs

    def _is_element(self, node: fx.Node) -> bool:
        """Whether a node is one result of an item that has several."""
        return node.target is operator.getitem and node.args[0] not in self._behind

    def _reads_what_it_wrote(self) -> bool:
        """Whether an operation reads an input after it was written: its new value, not its old."""
        written: set[fx.Node] = set()
        for node in self.module.graph.nodes:
            sources = node.all_input_nodes[1:] if writes_input(node) else node.all_input_nodes
            if node.op != "output" and not written.isdisjoint(self.values(sources)):
                return True
            if writes_input(node):
                written.add(node.all_input_nodes[0])
        return False

    def _is_view_of_one(self, node: fx.Node) -> bool:
        """Whether a node is a view of one value, and may be made between parts.

        Views of the numbers of param groups may not: each part makes its own again.
        """
        values = self._behind[node]
        if len(values) != 1 or values[0] in self._numbers:
            return False
        # what is made between parts is a layout, and a layout has no dtype
        return bool(values[0].meta["val"].dtype == node.meta["val"].dtype)

    def _reads(self, items: list[fx.Node]) -> dict[fx.Node, int]:
        """Where each value is read last."""
        return {
            value: i for i, item in enumerate(items) for value in self.values(item.all_input_nodes)
        }

    def _with_writes(self, items: list[fx.Node], writes: list[fx.Node]) -> list[fx.Node]:
        """Items with each write after the one that computes it, and all that read the input.

        A write whose new value is itself an input's stays at the end, and that input's too.
        """
        at, read = {item: i for i, item in enumerate(items)}, self._reads(items)
        late: set[fx.Node] = set()
        targets = {write: write.all_input_nodes[0] for write in writes}
        sources = {write: self.values(write.all_input_nodes[1:]) for write in writes}
        for write in writes:
            # two states that change places, say: written at once, one would be overwritten before
            # it is read
            inputs = [value for value in sources[write] if value.op == "placeholder"]
            late.update([targets[write], *inputs] if inputs else [])
        after: dict[int, list[fx.Node]] = {}
        for write in writes:
            place = len(items) - 1
            if targets[write] not in late:
                born = [at[self.item_of(value)] for value in sources[write]]
                place = max([*born, read.get(targets[write], 0)])
            after.setdefault(place, []).append(write)
        return [one for i, item in enumerate(items) for one in (item, *after.get(i, ()))]

    def _described(self, node: fx.Node) -> str:
        operands = {one: self._operand(one) for one in node.all_input_nodes}
        return f"{target_of(self.module, node)} {text_of((node.args, node.kwargs), operands)}"

    def _operand(self, node: fx.Node) -> str:
        if node in self._behind and node not in self.picks:
            return f"({self._described(node)})"
        value = node.meta.get("val")
        return layout(value) if isinstance(value, Tensor) else type(value).__name__


def writes_input(node: fx.Node) -> bool:
    """Whether a node is the final write of an input."""
    return node.target is _COPY and node.all_input_nodes[0].op == "placeholder"


def _looks_only(node: fx.Node) -> bool:
    """Whether a node computes nothing: it can be made again where it is needed."""
    if node.op == "get_attr" or node.target is operator.getitem:
        return True
    if not isinstance(node.target, OpOverload):
        return False
    if node.target in _CONSTANTS:
        return not node.all_input_nodes
    return is_alias(node.target)


def _picks(node: fx.Node) -> bool:
    """Whether a node is a view that picks one of many equal ones."""
    if node.target is operator.getitem:
        tuple_of_views = node.all_input_nodes[0].meta.get("val")
        return isinstance(tuple_of_views, (tuple, list)) and len(tuple_of_views) > _MANY
    return node.target in _PICKS


def _bytes(node: fx.Node) -> float:
    value = node.meta.get("val")
    return value.numel() * value.element_size() if isinstance(value, Tensor) else 0


CALL_SYMBOLS = 8  # assumed: a call costs as much as it costs to compile so many operations
LEAST = 3 * CALL_SYMBOLS  # symbols that are saved, for it to be worth a call
_SHIFTS = 24  # distances that are looked at, the most frequent first

Symbols = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Repeat:
    """Equal stretches: where each starts, in order, and how many symbols each has."""

    starts: tuple[int, ...]
    length: int

    @property
    def saved(self) -> int:
        """Symbols that need not be compiled, less what the calls cost."""
        return (len(self.starts) - 1) * self.length - len(self.starts) * CALL_SYMBOLS


def repeats(symbols: Sequence[int], cut_costs: Sequence[float]) -> list[Repeat]:
    """The stretches that come again, none overlapping another, those that save most first.

    Args:
        symbols: equal numbers mean equal operations.
        cut_costs: of a cut before each symbol and after the last one: where a layer may begin
            anywhere (``abcabcab`` is ``abc`` twice, or ``bca``), it begins where cuts cost least.
    """
    s = np.asarray(symbols, dtype=np.int64)
    costs = np.asarray(cut_costs, dtype=np.float64)
    free = np.ones(len(s), dtype=bool)
    found: list[Repeat] = []
    while True:
        best = max(_candidates(s, free, costs), key=lambda one: one.saved, default=None)
        if best is None or best.saved < LEAST:
            return found
        found.append(best)
        for start in best.starts:
            free[start : start + best.length] = False


def _candidates(s: Symbols, free: NDArray[np.bool_], costs: NDArray[np.float64]) -> list[Repeat]:
    found = []
    for shift in _distances(s, free):
        equal = (s[:-shift] == s[shift:]) & free[:-shift] & free[shift:]
        for start, length in _runs(equal):
            # equal to what stands ``shift`` later, and at least as long as that: it repeats itself
            if length >= shift:
                found.append(_periods(start, start + length + shift, shift, costs))
            # shorter ones cost less to compile than to call; of longer ones there may be more
            elif length > CALL_SYMBOLS:
                found.append(_everywhere(s, free, start, length))
    return found


def _distances(s: Symbols, free: NDArray[np.bool_]) -> list[int]:
    """How far apart equal windows of ``CALL_SYMBOLS`` symbols lie, the most frequent first."""
    if len(s) <= CALL_SYMBOLS:
        return []
    windows = np.lib.stride_tricks.sliding_window_view(s, CALL_SYMBOLS)
    allowed = np.lib.stride_tricks.sliding_window_view(free, CALL_SYMBOLS).all(axis=1)
    last: dict[bytes, int] = {}
    counts: Counter[int] = Counter()
    for i in np.flatnonzero(allowed):
        window = windows[i].tobytes()
        if window in last:
            counts[int(i) - last[window]] += 1
        last[window] = int(i)
    # a layer that comes again makes all its windows vote for one distance
    return [shift for shift, _ in counts.most_common(_SHIFTS)]


def _runs(equal: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Start and length of each longest run of True."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], equal, [False])).astype(np.int8)))
    return [(int(a), int(b - a)) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def _periods(begin: int, end: int, period: int, costs: NDArray[np.float64]) -> Repeat:
    """Of a stretch that repeats itself after each ``period``: how it is best cut into equal ones.

    Several periods make one stretch where many small calls would cost more than is saved.
    """
    times, rest = divmod(end - begin, period)
    first = min(
        range(begin, begin + rest + 1),
        key=lambda start: _excess(range(start, start + times * period + 1, period), costs),
    )
    choices = [
        Repeat(tuple(range(first, first + times // k * k * period, k * period)), k * period)
        for k in range(1, times + 1)
    ]
    return max(choices, key=lambda one: one.saved)


def _excess(cuts: range, costs: NDArray[np.float64]) -> float:
    """How much dearer cuts are than those around them.

    A forward pass keeps more with each layer, so that all cuts grow: the first would always win.
    """
    excess = []
    for cut in cuts:
        half = min(cuts.step // 2, cut, len(costs) - 1 - cut)
        excess.append(costs[cut] - costs[cut - half : cut + half + 1].mean())
    return float(np.mean(excess))


def _everywhere(s: Symbols, free: NDArray[np.bool_], start: int, length: int) -> Repeat:
    """All free occurrences of a stretch."""
    windows = np.lib.stride_tricks.sliding_window_view(s, length)
    allowed = np.lib.stride_tricks.sliding_window_view(free, length).all(axis=1)
    starts: list[int] = []
    for i in np.flatnonzero((windows == s[start : start + length]).all(axis=1) & allowed):
        if not starts or i >= starts[-1] + length:
            starts.append(int(i))
    return Repeat(tuple(starts), length)
