"""What goes between processes in a step: the messages, as ``backends/report/scaling.py`` has them.

Of a process that trains alone the messages are those of its gradients, were there several: filled
into buckets as in ``distributed/reduction``, a parameter's when the last operation of its module's
backward pass is done. Of tensors that are in parts: how often each is gathered, for how long.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fulgurite.backends.csx.compile.programs.kernels import KernelCall, Maker
from fulgurite.backends.csx.costs.graph_values import is_backward, module_name
from fulgurite.backends.csx.graph.collectives import (
    BUCKET_BYTES,
    FIRST_BUCKET_BYTES,
    has_collectives,
    is_collective,
    is_gather,
    is_wait,
)
from fulgurite.backends.csx.graph.graph import Graph, Placement, Role
from fulgurite.backends.csx.graph.op_schema import is_view, operation_name
from fulgurite.backends.csx.graph.products import flops_of
from fulgurite.backends.report.scaling import PARTS, SENT, Message

_ATEN: Any = torch.ops.aten
_CONVERT: Any = torch.ops.prims.convert_element_type.default
_LIKE_VIEWS = {_ATEN.reshape.default, _ATEN.clone.default}
_ON_ITS_WAY = {_ATEN.cat.default, _CONVERT, _ATEN._to_copy.default, *_LIKE_VIEWS}
"""What a part goes through before it is sent: beside others, in lower precision."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathered:
    """A tensor in parts that a step needs whole.

    Args:
        name: its.
        size_bytes: of the whole.
        gathers: how many messages bring it, in a step.
        held: what brings it stays from the forward pass to the backward pass.
    """

    name: str
    size_bytes: int
    gathers: int
    held: bool


def kind_of(node: fx.Node) -> str:
    """``all_reduce``, in place or not; empty for what is no collective, or waits for one."""
    if not is_collective(node.target) or is_wait(node.target):
        return ""
    return operation_name(node.target).removesuffix("_")


def sent_bytes(nodes: Sequence[fx.Node], calls: Iterable[KernelCall], processes: int) -> list[int]:
    """What a process sends for the collectives in each call, and receives as well."""
    told, found = set[fx.Node](), list[int]()
    for call in calls:
        begun = set[fx.Node]()
        if call.maker is Maker.COLLECTIVE:
            # one whose operand was generated is told with that: here is what waits for it
            own = (nodes[i] for i in call.operations)
            begun = {one.all_input_nodes[0] if is_wait(one.target) else one for one in own} - told
        told |= begun
        sizes = (_size(one) * SENT[kind](processes) for one in begun if (kind := kind_of(one)))
        found.append(round(sum(sizes)))
    return found


def messages(graph: Graph) -> tuple[Message, ...]:
    """The messages of a step, in order; of one process those that its gradients would be."""
    nodes = list(graph.runs.operations())
    done = _done(nodes)
    if has_collectives(graph.runs):
        return tuple(_collectives(graph.runs, nodes, done))
    return tuple(_buckets(graph, nodes, done))


def _done(nodes: list[fx.Node]) -> list[float]:
    """The share of a pass that is done before each operation, and at the end, by FLOPs: of the
    forward pass from -1 to 0, of the backward pass from 0 to 1."""
    passes = [is_backward(node) for node in nodes]
    flops = [flops_of(node) or 0 for node in nodes]
    total = {
        which: sum(one for one, it in zip(flops, passes, strict=True) if it is which)
        for which in (False, True)
    }
    sums, found = {False: 0, True: 0}, list[float]()
    for one, which in zip([*flops, 0], [*passes, False], strict=True):
        forward, backward = (sums[it] / total[it] if total[it] else 0.0 for it in (False, True))
        found.append(backward or forward - bool(total[False]))
        sums[which] += one
    return found


def _collectives(graph: Graph, nodes: list[fx.Node], done: list[float]) -> Iterator[Message]:
    position, of_parts = {node: i for i, node in enumerate(nodes)}, _gathers_of_parts(graph)
    for i, node in enumerate(nodes):
        if kind := kind_of(node):
            waits = [position[user] for user in node.users if is_wait(user.target)]
            kind, size = (
                (PARTS, node.meta["val"].nbytes) if node in of_parts else (kind, _size(node))
            )
            yield Message(
                kind=kind, size_bytes=size, begins=done[i], needed=done[min(waits, default=i)]
            )


def _gathers_of_parts(graph: Graph) -> set[fx.Node]:
    """Gathers of state, and of what is computed from it element by element."""
    inputs = zip(graph.inputs, graph.placeholders(), strict=True)
    parts = {node for item, node in inputs if item.placement is Placement.SHARDED}
    found = set[fx.Node]()
    for node in graph.operations():
        if not any(one in parts for one in node.all_input_nodes):
            continue
        if is_gather(node.target):
            found.add(node)
        elif _is_on_its_way(node) or torch.Tag.pointwise in getattr(node.target, "tags", ()):
            parts.add(node)
    return found


def _buckets(graph: Graph, nodes: list[fx.Node], done: list[float]) -> Iterator[Message]:
    """Gradients of trained parameters, by when they are there."""
    written, last = graph.written(), dict[str, int]()
    for i, node in enumerate(nodes):
        if is_backward(node):
            path = module_name(node).partition(" ")[0]
            while path:  # for its parents too
                last[path] = i
                path = path.rpartition(".")[0]
    end, arrivals = len(nodes), list[tuple[int, int]]()
    for i, item in reversed([*enumerate(graph.inputs)]):  # of a module the bias comes first
        # frozen parameters are read, and have no gradient
        if item.role is Role.PARAMETER and i in written:
            module = item.name.removeprefix("self.").rpartition(".")[0]
            arrivals.append((last.get(module, end - 1), item.example.nbytes))
    size_bytes, full = 0, FIRST_BUCKET_BYTES
    for at, more in sorted(arrivals, key=lambda one: one[0]):
        size_bytes += more
        if size_bytes >= full:
            yield Message(size_bytes=size_bytes, begins=done[at + 1])
            size_bytes, full = 0, BUCKET_BYTES
    if size_bytes:
        yield Message(size_bytes=size_bytes, begins=1.0)


def gathered(graph: Graph, processes: int) -> tuple[Gathered, ...]:
    """The tensors in parts that a step needs whole, in the order of the graph's inputs."""
    runs, found = graph.runs, list[Gathered]()
    for item, node in zip(runs.inputs, runs.placeholders(), strict=True):
        if item.placement is Placement.SHARDED and (messages := _gathers_of(node)):
            size = item.example.nbytes * processes
            held = any(_is_held(one) for one in messages)
            found.append(
                Gathered(name=item.name, size_bytes=size, gathers=len(messages), held=held)
            )
    return tuple(found)


def _gathers_of(part: fx.Node) -> set[fx.Node]:
    found = {user for user in part.users if is_gather(user.target)}
    for user in part.users:
        if _is_on_its_way(user):
            found |= _gathers_of(user)
    return found


def _is_on_its_way(node: fx.Node) -> bool:
    return node.target in _ON_ITS_WAY or is_view(node.target)


def _is_held(message: fx.Node) -> bool:
    """Whether operations of both passes read what it brings."""
    return len({is_backward(reader) for reader in _readers(message)}) > 1


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    for user in node.users:
        if is_wait(user.target) or is_view(user.target) or user.target in _LIKE_VIEWS:
            yield from _readers(user)
        else:
            yield user


def _size(node: fx.Node) -> int:
    """The bytes that this process puts into a collective."""
    size: int = node.all_input_nodes[0].meta["val"].nbytes
    return size
