"""The messages of a step on parts (``shard_state``): few, and on their way while it computes.

Small ones that do not depend on each other go together, since a message takes long however small it
is (0.3 ms over gloo, where 256 KB take 0.5; measured). Of large ones no more than one is on its way
in each direction, and only as long as whole tensors that are alive together stay within a limit:
what is computed meanwhile is found from how long each of them lives as the graph stands.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from fulgurite.backends.csx.graph.collectives import (
    Processes,
    functional,
    is_collective,
    is_scatter,
    is_wait,
)
from fulgurite.backends.csx.graph.graph import Graph
from fulgurite.backends.csx.graph.op_schema import is_view

_ATEN: Any = torch.ops.aten


def value_of(node: fx.Node) -> Any:
    """The fake tensor that stands for what a node computes."""
    return node.meta["val"]


def nbytes_of(node: fx.Node) -> int:
    """The bytes of its elements."""
    value: Tensor = value_of(node)
    return value.numel() * value.itemsize


class Operations:
    """The operations of a graph that becomes another one, and how more are made.

    Attributes:
        fresh: they.
        graph: the graph that it was.
        processes: those that run it.
    """

    def __init__(self, graph: Graph, processes: Processes) -> None:
        self.graph, self.processes = graph, processes
        self.fresh = graph.copied()

    def call(self, like: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A new operation, of the line and the module of ``like``."""
        node = self.fresh.call_function(target, args, kwargs)
        with self.graph.mode, torch.no_grad():
            value = target(*fx.map_arg(args, value_of), **fx.map_arg(kwargs, value_of))
        node.meta = {**like.meta, "val": value}
        return node

    def flat(self, node: Any, like: fx.Node) -> fx.Node:
        """All elements of a tensor in a row."""
        return self.call(like, _ATEN.reshape.default, node, [value_of(node).numel()])

    def gathered(self, part: fx.Node, like: fx.Node) -> Message:
        """Each process's part, one after the other."""
        to_all = self.processes.count, self.processes.group
        begun = self.call(like, functional.all_gather_into_tensor.default, part, *to_all)
        return Message(begun, self.call(like, functional.wait_tensor.default, begun))

    def order(self) -> dict[fx.Node, int]:
        """Where each node stands."""
        return {node: i for i, node in enumerate(self.fresh.nodes)}

    def alive(self) -> set[fx.Node]:
        """Nodes whose result somebody uses; all others are gone."""
        # to torch a wait is an effect, also where all processes have begun in vain
        self.fresh.eliminate_dead_code(lambda node: node.is_impure() and not is_wait(node.target))
        return set(self.fresh.nodes)

    def rows_together(self, like: fx.Node, tensors: list[fx.Node], rows: int) -> fx.Node:
        """Tensors beside each other, each as so many rows."""
        each = [self.call(like, _ATEN.reshape.default, one, [rows, -1]) for one in tensors]
        return self.call(like, _ATEN.cat.default, each, 1) if len(each) > 1 else each[0]

    def columns(self, like: fx.Node, rows: fx.Node, widths: list[int]) -> list[fx.Node]:
        """What ``rows_together`` was given, each flat."""
        found, at = [], 0
        for width in widths:
            column = self.call(like, _ATEN.slice.Tensor, rows, 1, at, at + width)
            found.append(self.flat(column, like))
            at += width
        return found


@dataclass(frozen=True, slots=True)
class Message:
    """A collective that begins with one node, and whose result is there with another."""

    begun: fx.Node
    wait: fx.Node

    @property
    def sent(self) -> fx.Node:
        """What each process sends."""
        return self.begun.all_input_nodes[0]


def merge(operations: Operations, messages: Iterable[Message]) -> None:
    """Let messages of one kind, reductions, go together where none depends on another.

    Args:
        operations: whose they are.
        messages: small ones of one dtype.
    """
    members: list[Message] = []
    by_begun = {message.begun: message for message in messages}
    later: dict[fx.Node, None] = {}  # what depends on a member

    def send(before: fx.Node) -> None:
        if len(members) > 1:
            with operations.fresh.inserting_before(before):
                waits = _send_together(operations, members)
            for node in later:
                if node not in waits:
                    before.prepend(node)
        members.clear()
        later.clear()

    for node in list(operations.fresh.nodes):
        depends = any(one in later for one in node.all_input_nodes)
        if depends and (node in by_begun or _is_effect(node)):
            send(node)
        elif depends:
            later[node] = None
        if node in by_begun:
            members.append(by_begun[node])
            later[by_begun[node].wait] = None


def _send_together(operations: Operations, members: list[Message]) -> set[fx.Node]:
    """Send and wait once for all; returns the nodes that waited, which are gone."""
    begun = members[-1].begun
    rows = operations.processes.count if is_scatter(begun.target) else 1
    sent = operations.rows_together(begun, [one.sent for one in members], rows)
    call = operations.call(begun, begun.target, operations.flat(sent, begun), *begun.args[1:])
    done = operations.call(begun, functional.wait_tensor.default, call)
    row = operations.call(begun, _ATEN.reshape.default, done, [1, -1])
    widths = [value_of(one.wait).numel() for one in members]
    for one, piece in zip(members, operations.columns(begun, row, widths), strict=True):
        shape = list(value_of(one.wait).shape)
        one.wait.replace_all_uses_with(operations.call(begun, _ATEN.reshape.default, piece, shape))
        operations.fresh.erase_node(one.wait)
        operations.fresh.erase_node(one.begun)
    return {one.wait for one in members}


def overlap(
    operations: Operations, gathers: list[Message], scatters: list[Message], limit: int
) -> None:
    """Begin to gather earlier, and wait for gradients that are scattered later.

    Args:
        operations: whose they are.
        gathers, scatters: messages.
        limit: of bytes of whole tensors that are alive at once because of that.
    """
    nodes, order = list(operations.fresh.nodes), operations.order()
    gathers = sorted(gathers, key=lambda one: order[one.wait])
    scatters = sorted(scatters, key=lambda one: order[one.wait])
    alive = [0] * (len(nodes) + 1)  # bytes, at each node
    for one in gathers:
        _add(alive, order[one.begun], _last_use(one.wait, order), nbytes_of(one.wait))
    made = [order[_first_of(one.sent)] for one in scatters]
    for one, at in zip(scatters, made, strict=True):
        _add(alive, at, order[one.wait], nbytes_of(one.sent))

    end = len(nodes) - 1  # what is returned
    moves: list[tuple[Message, fx.Node]] = []
    for one, until in zip(scatters, [*made, end][1:], strict=True):
        at, size = order[one.wait] + 1, nbytes_of(one.sent)
        while at < until and alive[at] + size <= limit:
            alive[at] += size
            at += 1
        if at > order[one.wait] + 1:
            moves.append((one, nodes[at]))
    before = 0
    for one in gathers:
        at, size = order[one.begun], nbytes_of(one.wait)
        source = _source(one)
        # a part that the step computes is there when it is computed
        least = max(before, max(order[node] for node in source.all_input_nodes) + 1)
        while at > least and alive[at - 1] + size <= limit:
            at -= 1
            alive[at] += size
        if at < order[source]:
            for node in dict.fromkeys((source, one.begun)):
                nodes[at].prepend(node)
        before = order[one.wait] + 1
    for one, until_node in moves:
        _defer(one.wait, until_node)


def _source(message: Message) -> fx.Node:
    """The first node of a message: a part may be cast before it is sent."""
    sent = message.sent
    alone = sent.op == "call_function" and len(sent.users) == 1 and not is_collective(sent.target)
    return sent if alone and _memory_of(sent) is sent else message.begun


def _defer(wait: fx.Node, until: fx.Node) -> None:
    """Move a node, and what depends on it, to before another one that stands after it.

    Or to before the first effect that depends on it.
    """
    later, node = {wait: None}, wait.next
    while node is not until:
        if any(one in later for one in node.all_input_nodes):
            if _is_effect(node):
                break
            later[node] = None
        node = node.next
    for one in later:
        node.prepend(one)


def _is_effect(node: fx.Node) -> bool:
    return node.op == "output" or node.target is _ATEN.copy_.default


def _memory_of(node: fx.Node) -> fx.Node:
    """The node that made the memory that a view is of."""
    while node.op == "call_function" and _is_like_view(node):
        node = node.all_input_nodes[0]
    return node


def _first_of(node: fx.Node) -> fx.Node:
    """The operation that allocates a gradient's memory; pointwise ones after it, such as the
    division by the number of processes, reuse that memory.
    """
    while (node := _memory_of(node)).op == "call_function":
        size = value_of(node).numel()
        alike = [one for one in node.all_input_nodes if value_of(one).numel() == size]
        pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
        if not (pointwise and len(alike) == 1 and len(alike[0].users) == 1):
            break
        node = alike[0]
    return node


def _is_like_view(node: fx.Node) -> bool:
    return is_view(node.target) or node.target is _ATEN.reshape.default


def _last_use(node: fx.Node, order: dict[fx.Node, int]) -> int:
    last = order[node]
    for user in node.users:
        last = max(last, _last_use(user, order) if _is_like_view(user) else order[user])
    return last


def _add(alive: list[int], first: int, last: int, size: int) -> None:
    for i in range(first, last + 1):
        alive[i] += size
