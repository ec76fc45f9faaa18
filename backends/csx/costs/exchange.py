"""What goes between processes in a step: the messages, as ``backends/report/scaling.py`` has them.

Of a process that trains alone the messages are those of its gradients, were there several: filled
into buckets as in ``distributed/reduction``, a parameter's when the last operation of its module's
backward pass is done.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import fx

from fulgurite.backends.csx.costs.graph_values import is_backward, module_name
from fulgurite.backends.csx.graph.collectives import (
    BUCKET_BYTES,
    FIRST_BUCKET_BYTES,
    has_collectives,
    is_collective,
    is_wait,
)
from fulgurite.backends.csx.graph.graph import Graph, Role
from fulgurite.backends.csx.graph.op_schema import operation_name
from fulgurite.backends.csx.graph.products import flops_of
from fulgurite.backends.report.scaling import SENT, Message


def kind_of(node: fx.Node) -> str:
    """``all_reduce``, in place or not; empty for what is no collective, or waits for one."""
    if not is_collective(node.target) or is_wait(node.target):
        return ""
    return operation_name(node.target).removesuffix("_")


def sent_bytes(nodes: Sequence[fx.Node], processes: int) -> int:
    """What a process sends for the collectives among some operations, and receives as well."""
    return round(
        sum(_size(node) * SENT[kind](processes) for node in nodes if (kind := kind_of(node)))
    )


def messages(graph: Graph) -> tuple[Message, ...]:
    """The messages of a step, in order; of one process those that its gradients would be."""
    nodes = list(graph.runs.operations())
    done = [0]  # FLOPs of the backward pass before each operation, and at the end
    for node in nodes:
        done.append(done[-1] + (flops_of(node) or 0 if is_backward(node) else 0))
    if has_collectives(graph.runs):
        return tuple(_collectives(nodes, done))
    return tuple(_buckets(graph, nodes, done))


def _collectives(nodes: list[fx.Node], done: list[int]) -> Iterator[Message]:
    position = {node: i for i, node in enumerate(nodes)}
    for i, node in enumerate(nodes):
        if kind := kind_of(node):
            waits = [position[user] for user in node.users if is_wait(user.target)]
            hides = done[min(waits, default=i)] > done[i]
            # nothing is computed between it and its wait: it hides behind nothing
            begins = done[i] / done[-1] if hides else 1.0
            yield Message(kind=kind, size_bytes=_size(node), begins=begins)


def _buckets(graph: Graph, nodes: list[fx.Node], done: list[int]) -> Iterator[Message]:
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
            share = done[at + 1] / done[-1] if done[-1] else 1.0
            yield Message(size_bytes=size_bytes, begins=share)
            size_bytes, full = 0, BUCKET_BYTES
    if size_bytes:
        yield Message(size_bytes=size_bytes, begins=1.0)


def _size(node: fx.Node) -> int:
    """The bytes that this process puts into a collective."""
    size: int = node.all_input_nodes[0].meta["val"].nbytes
    return size
