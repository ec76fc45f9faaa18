"""Whether all processes have traced the same step: what it computes for others, compared.

Compared are the operations that weights, other state and collectives follow from, as each process
traced them. What one process alone returns or logs is its own affair.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch.distributed as dist
from torch import fx

from fulgurite.backends.csx.capture.captured import Captured
from fulgurite.backends.csx.diagnostics.errors import GraphsDiffer
from fulgurite.backends.csx.diagnostics.user_lines import line_of
from fulgurite.backends.csx.graph.collectives import is_collective
from fulgurite.backends.csx.graph.graph import Graph, Kind
from fulgurite.backends.csx.graph.op_schema import operation_name, written_nodes

_Lines = list[tuple[str, str]]
"""Of each operation: what it is, and the user's line that it comes from."""


def agree(stage: str, captured: Mapping[str, Captured]) -> None:
    """Compare a step with the other processes'; all of them call this.

    Raises:
        GraphsDiffer: on every process, with the first operation that differs and both lines.
    """
    lines = [line for one in captured.values() for line in lines_of(one.graph.runs)]
    digest = hashlib.sha256("\n".join(what for what, _ in lines).encode()).hexdigest()
    digests = gathered(digest)
    if len(set(digests)) == 1:
        return
    everyones: list[_Lines] = gathered(lines)
    other = next(rank for rank, one in enumerate(digests) if one != digests[0])
    raise GraphsDiffer(_difference(stage, everyones[0], everyones[other], other), remedy=_REMEDY)


_REMEDY = (
    "the same Python on all processes: what depends on self.global_rank belongs into data, or into"
    " a hook between steps"
)


def gathered(value: Any) -> list[Any]:
    """A value of each process, in the order of their ranks; all of them call this."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def _difference(stage: str, first: _Lines, other: _Lines, rank: int) -> str:
    nothing = ("nothing", "")
    pairs = itertools.zip_longest(first, other, fillvalue=nothing)
    one, two = next(pair for pair in pairs if pair[0][0] != pair[1][0])
    return (
        f"The {stage} step is another one on rank {rank} than on rank 0.\n"
        f"  rank 0: {one[0]}{one[1]}\n"
        f"  rank {rank}: {two[0]}{two[1]}"
    )


def lines_of(graph: Graph) -> _Lines:
    """The operations that state and collectives follow from, numbered among themselves."""
    wanted = _behind(graph)
    names: dict[fx.Node, str] = {
        node: item.name for node, item in zip(graph.placeholders(), graph.inputs, strict=True)
    }
    lines: _Lines = []
    for node in graph.operations():
        if node not in wanted:
            continue
        names[node] = f"%{len(lines)}"
        args = fx.map_arg((node.args, dict(node.kwargs)), lambda arg: _Name(names.get(arg, "?")))
        value = node.meta.get("val")
        shape = tuple(getattr(value, "shape", ()))
        line = line_of(node)
        place = "" if line is None else f", {line.place}: {line.source}"
        name = operation_name(node.target) or str(node.target)
        lines.append((f"{name}{args[0]}{args[1] or ''} {shape}", place))
    return lines


class _Name(str):
    """A name that is shown without quotes."""

    def __repr__(self) -> str:
        return str(self)


def _behind(graph: Graph) -> set[fx.Node]:
    """The operations that write state or are collectives, and all that they read."""
    kinds = zip(graph.placeholders(), graph.inputs, strict=True)
    inputs = {node for node, item in kinds if item.kind in (Kind.STATE, Kind.GRADIENT)}
    waiting = [node for node in graph.operations() if is_collective(node.target)]
    waiting += [node for node in graph.operations() if inputs & set(_roots(written_nodes(node)))]
    found: set[fx.Node] = set()
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += node.all_input_nodes
    return found


def _roots(nodes: Any) -> Iterator[fx.Node]:
    """What views of it, back to the first one, are made of."""
    for node in nodes:
        while node.op == "call_function" and node.all_input_nodes:
            node = node.all_input_nodes[0]
        yield node
