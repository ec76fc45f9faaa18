"""The values of a graph: which call makes each, and what others look at of it.

Words: a *value* is an input of the graph, a constant, or one tensor that an operation computes; it
is told by its node, and by its place in the node's results where there are several. A *view* is no
value: it looks at one, or at a part of it. An operation that is in no call was folded into those
that read it: whoever reads it reads what it was made of.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx

from fulgurite.backends.csx.compile.programs.kernels import KernelCall, Maker
from fulgurite.backends.csx.diagnostics.user_lines import module_of, split_backward
from fulgurite.backends.csx.graph.collectives import is_wait
from fulgurite.backends.csx.graph.graph import Graph
from fulgurite.backends.csx.graph.op_schema import is_view, written_nodes

_aten = torch.ops.aten
_PICKS = (_aten.embedding, _aten.gather, _aten.index, _aten.index_select)


@dataclass(frozen=True, slots=True)
class Value:
    """One tensor of a graph: ``element`` counts among the node's results, if it has several."""

    node: fx.Node
    element: int | None = None

    @property
    def tensor(self) -> Tensor:
        """What it looks like, without values."""
        if self.node.op == "get_attr":
            found = operator.attrgetter(str(self.node.target))(self.node.graph.owning_module)
        else:
            found = self.node.meta["val"]
        tensor: Tensor = found if self.element is None else found[self.element]
        return tensor

    @property
    def bytes(self) -> int:
        """Of its elements."""
        return self.tensor.numel() * self.tensor.element_size()


class Values:
    """The values of a graph, and the calls that make them.

    Args:
        graph: the graph.
        calls: of kernels, in order.

    Attributes:
        operations: the operations of each call.
        maker: the first call that computes an operation.
        position: of each node among the graph's operations.
    """

    def __init__(self, graph: Graph, calls: Iterable[KernelCall]) -> None:
        self._graph = graph
        nodes = list(graph.operations())
        self.position = {node: i for i, node in enumerate(nodes)}
        self.operations = [[nodes[i] for i in one] for one in _computed(nodes, list(calls))]
        self.maker: dict[fx.Node, int] = {}
        for i, computed in enumerate(self.operations):
            for node in computed:
                self.maker.setdefault(node, i)
        self._behind: dict[fx.Node, tuple[tuple[Value, fx.Node], ...]] = {}

    def behind(self, node: fx.Node) -> tuple[tuple[Value, fx.Node], ...]:
        """The values that a node is or looks at, each with the view of it that is looked at."""
        if node not in self._behind:
            self._behind[node] = tuple(self._found(node))
        return self._behind[node]

    def outputs(self) -> list[Value]:
        """What the graph returns."""
        given = self._graph.module.graph.output_node().all_input_nodes
        return list(dict.fromkeys(value for node in given for value, _ in self.behind(node)))

    def writes(self) -> Iterator[tuple[fx.Node, fx.Node]]:
        """Each write into an input, with the node of what is written into."""
        for node in self.position:
            for target in written_nodes(node):
                yield node, target

    def _found(self, node: fx.Node) -> Iterator[tuple[Value, fx.Node]]:
        if node.op != "call_function":
            yield Value(node), node
            return
        source = _looked_at(node)
        if source is not None and (node.target is not operator.getitem or is_view(source.target)):
            for value, _ in self.behind(source):
                yield value, node
        elif source is not None and source in self.maker:
            yield Value(source, int(node.args[1])), node  # type: ignore[arg-type]
        elif source is None and node in self.maker:
            found = node.meta.get("val")
            if isinstance(found, Tensor):
                yield Value(node), node
            elif isinstance(found, (tuple, list)):
                for i, one in enumerate(found):
                    if isinstance(one, Tensor):
                        yield Value(node, i), node
        else:
            # in no call: it was folded into those that read it, who read what it was made of
            for one in (source or node).all_input_nodes:
                yield from self.behind(one)


def _computed(nodes: list[fx.Node], calls: Sequence[KernelCall]) -> Iterator[list[int]]:
    """What each call computes itself, in order.

    The compiler notes more operations with a call than it computes: those that its operands are
    made of, and those that take its result. One of torch's kernels computes the last of them, which
    then is no other call's, and others only if no other call does. A generated kernel computes
    cheap operations again where it reads them, but no sums.
    """
    inside = [sorted(call.operations) for call in calls]
    torchs = [call.maker is not Maker.GENERATED for call in calls]
    last = {found[-1] for found, one in zip(inside, torchs, strict=True) if one and found}
    generated = {i for found, one in zip(inside, torchs, strict=True) if not one for i in found}
    generated -= last
    done = set[int]()
    for found, one in zip(inside, torchs, strict=True):
        if one:
            own = [i for i in found if i not in done and i not in generated]
            done.update(own)
        else:
            own = [i for i in found if i not in last and i not in done]
            done.update(i for i in own if _sums(nodes[i]))
        yield own


def _sums(node: fx.Node) -> bool:
    """Whether an operation makes less than it reads, of all of it: a sum, a mean, a maximum.

    The few elements of a pool's window are looked at again where its result is read.
    """
    if getattr(node.target, "overloadpacket", None) in _PICKS or "pool" in str(node.target):
        return False
    return _most([node]) < _most(node.all_input_nodes)


def _most(nodes: Iterable[fx.Node]) -> int:
    """The elements of the largest tensor in what nodes give."""
    leaves = pytree.tree_leaves([node.meta.get("val") for node in nodes])
    return max((leaf.numel() for leaf in leaves if isinstance(leaf, Tensor)), default=0)


def _looked_at(node: fx.Node) -> fx.Node | None:
    """What a view, one of several results, or an operation in place is memory of."""
    if written := written_nodes(node):
        return written[0]
    in_place = is_view(node.target) or is_wait(node.target)
    if in_place or node.target is _aten._unsafe_view.default:
        return node.all_input_nodes[0]
    return None


def viewed(views: Iterable[tuple[fx.Node, fx.Node]], value: Value) -> int:
    """The bytes of a value that operations read, each once.

    What picks elements by their number (``embedding``, ``gather``) reads as many as it gives, at
    most.

    Args:
        views: who reads, and the view of the value that it looks at.
        value: the value.
    """
    seen: dict[Any, int] = {}
    for reader, view in views:
        tensor = value.tensor if view is value.node else view.meta["val"]
        runs = _runs(tensor)
        key, count = (tensor.storage_offset(), runs), prod(size for size, _ in runs)
        if getattr(reader.target, "overloadpacket", None) in _PICKS and reader.args[0] is view:
            count = min(count, reader.meta["val"].numel())
        seen[key] = max(seen.get(key, 0), count * tensor.element_size())
    return min(value.bytes, sum(seen.values()))


def _runs(tensor: Tensor) -> tuple[tuple[int, int], ...]:
    """Size and stride of each dimension, in one form for all views of the same elements."""
    if tensor.numel() == 0:
        return ((0, 1),)
    found: list[tuple[int, int]] = []
    both = zip(tensor.shape, tensor.stride(), strict=True)
    for size, stride in sorted((one for one in both if one[0] > 1 and one[1]), key=lambda x: x[1]):
        if found and found[-1][0] * found[-1][1] == stride:
            found[-1] = (found[-1][0] * size, found[-1][1])
        else:
            found.append((size, stride))
    return tuple(found)


def is_backward(node: fx.Node) -> bool:
    """Whether an operation belongs to a backward pass."""
    return split_backward(module_of(node))[1]


def module_name(node: fx.Node) -> str:
    """``net.0 (Linear)``, in its backward pass too; empty outside of modules."""
    return split_backward(module_of(node))[0]
