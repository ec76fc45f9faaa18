"""What is kept of a trace's operations, to compare a later one with it (see ``comparison``).

Graphs are recorded as they were captured, before any pass: each operation by its function and
arguments (other operations by number, inputs by name, Python's numbers by value), the tensors that
it read from outside, and where its results went.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, fx

from fulgurite.backends.csx.capture.logs import Accumulator
from fulgurite.backends.csx.capture.outputs import Outputs
from fulgurite.backends.csx.capture.updates import Update
from fulgurite.backends.csx.contract.constants import Source
from fulgurite.backends.csx.contract.frozen_scalars import Access
from fulgurite.backends.csx.contract.replay import Reads
from fulgurite.backends.csx.diagnostics.user_lines import UserLine, line_of
from fulgurite.backends.csx.graph.graph import Input, Kind
from fulgurite.backends.csx.graph.op_schema import is_mutable, is_random
from fulgurite.backends.csx.graph.passes.rename import RENAMES
from fulgurite.backends.csx.state.first_update import DeferredState
from fulgurite.backends.csx.state.places import Place

CONSTANT, OUTPUTS = "a constant", "the outputs"


class Operand(NamedTuple):
    """What an operation reads: an input by kind and name, or the result of an operation."""

    kind: Any
    which: Any


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation: ``target`` is its function, or CONSTANT or OUTPUTS."""

    target: Any
    arguments: Any
    line: UserLine | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """What is kept of a trace, to compare a later one with it.

    Args:
        operations: in order; the last one is OUTPUTS.
        own: how many of them the step's code made; the rest brings results to their places.
        constants: sources of the tensors that were read from outside.
        outputs: where results go.
        deferred: optimizer state that waited for the first gradient.
        states: each optimizer's state, and what was in it.
        filled: attributes that the program fills, and what was in them before, or MISSING.
        kept: other places where the step left tensors, what was in them before, and what it left.
        changes: scalars of modules that the step's code changed.
        lists: lists of Python values that it changed, and what was in them.
        reads: the frozen values that it read.
        places: of the state, by name.
        was_none: parameters whose gradient was None.
        outline: the same with each optimizer's update as one operation, if that is possible.
        is_outline: whether it is one.
    """

    operations: list[Operation]
    own: int
    constants: list[Source | Accumulator]
    outputs: Outputs
    deferred: list[DeferredState]
    states: Sequence[tuple[dict[Any, Any], dict[Any, Any]]]
    filled: list[tuple[Place, Any]]
    kept: list[tuple[Place, Any, Any]]
    changes: tuple[Access, ...]
    lists: list[tuple[list[Any], list[Any]]]
    reads: Reads
    places: frozenset[str]
    was_none: frozenset[str]
    outline: Recording | None = None
    is_outline: bool = False


def record_operations(
    module: fx.GraphModule, inputs: Sequence[Input], last: fx.Node, updates: Sequence[Update] = ()
) -> tuple[list[Operation], int, list[Tensor]]:
    """What a captured graph computes, each of ``updates`` as one operation.

    Returns the operations, how many of them the step's own code made (up to the node ``last``), and
    the tensors that were read from outside, each once.
    """
    operands: dict[fx.Node, Operand] = {}
    constants: dict[int, Tensor] = {}
    operations: list[Operation] = []
    own = None
    names, live = iter(inputs), _live(module.graph, updates)
    inside, coming = _inside(updates), list(updates)
    for node in module.graph.nodes:
        while coming and node not in coming[0].before:
            operations.append(_update(coming.pop(0), operands))
        if node.op == "placeholder":
            item = next(names)
            operands[node] = Operand(item.kind, item.name)
        elif node in inside:
            written = node.args[0] if is_mutable(node.target) else None
            if isinstance(written, fx.Node) and written in operands:
                operands[node] = operands[written]  # which is what later operations read
        elif node in live and node.target in RENAMES:
            operands[node] = operands[node.args[0]]
        elif node in live:
            operands[node] = Operand("operation", len(operations))
            operations.append(_operation(module, node, operands, constants))
        if node is last:
            operations += [_update(update, operands) for update in coming]
            coming, own = [], len(operations)
    return operations, len(operations) if own is None else own, list(constants.values())


def can_leave_out(graph: fx.Graph, updates: Sequence[Update]) -> bool:
    """Whether the rest of a graph reads nothing of updates but what they wrote in place."""
    live, inside = _live(graph, updates), _inside(updates)
    read = live.union(*(node.all_input_nodes for node in live))
    return all(_is_written(node, inside) for node in read & inside)


def _inside(updates: Sequence[Update]) -> frozenset[fx.Node]:
    return frozenset().union(*(update.inside for update in updates))


def _is_written(node: fx.Node, inside: frozenset[fx.Node]) -> bool:
    """Whether a node of an update is what it wrote into something that was there before."""
    while node in inside:
        if not is_mutable(node.target) or not isinstance(node.args[0], fx.Node):
            return False
        node = node.args[0]
    return True


def _update(update: Update, operands: dict[fx.Node, Operand]) -> Operation:
    gradients = [None if one is None else operands[one] for one in update.gradients]
    return Operation(update.name, ((*gradients,), ()), None)


def _live(graph: fx.Graph, updates: Sequence[Update]) -> set[fx.Node]:
    """The nodes that a result or a state depends on, and those that move the random state.

    Not those of updates, but the gradients that they read, and what they write into for others.
    """
    live: set[fx.Node] = {one for update in updates for one in update.gradients if one is not None}
    inside, read = _inside(updates), set[fx.Node]()
    for node in reversed(graph.nodes):
        if node in inside:
            into = node.args[0] if is_mutable(node.target) else None
            if isinstance(into, fx.Node) and (node in read or not live.isdisjoint(node.users)):
                (read if into in inside else live).add(into)
            continue
        acts = is_mutable(node.target) or is_random(node.target)
        if node.op == "output" or acts or not live.isdisjoint(node.users):
            live.add(node)
    return live


def _operation(
    module: fx.GraphModule,
    node: fx.Node,
    operands: dict[fx.Node, Operand],
    constants: dict[int, Tensor],
) -> Operation:
    if node.op == "output":
        return Operation(OUTPUTS, _key(node.args, operands), None)
    if node.op != "get_attr":
        arguments = _key((node.args, node.kwargs), operands)
        return Operation(node.target, arguments, _line_of_user(node, operands) or line_of(node))
    value = getattr(module, str(node.target))
    line = next((line_of(user) for user in node.users), None)
    if not isinstance(value, Tensor):
        return Operation("a graph", getattr(value, "code", value), line)
    constants.setdefault(id(value), value)
    return Operation(CONSTANT, list(constants).index(id(value)), line)


def _line_of_user(node: fx.Node, operands: dict[fx.Node, Operand]) -> UserLine | None:
    """The line that uses a number of a param group: it is taken before the step's code runs."""
    takes_number = any(operands[arg].kind is Kind.NUMBERS for arg in node.all_input_nodes)
    user = next(iter(node.users), None)
    return line_of(user) if takes_number and user is not None else None


def _key(value: Any, operands: dict[fx.Node, Operand]) -> Any:
    """Arguments in a form whose ``==`` tells types apart, and finds NaN equal to NaN."""
    if isinstance(value, fx.Node):
        return operands[value]
    if isinstance(value, (list, tuple)):
        return tuple([_key(item, operands) for item in value])
    if isinstance(value, dict):
        return tuple([(key, _key(item, operands)) for key, item in value.items()])
    if isinstance(value, slice):
        return Number(slice, repr(value))
    if isinstance(value, (bool, int, float, complex)):
        return Number(type(value), repr(value))
    return value


class Number(NamedTuple):
    """A number of Python's among the arguments of an operation."""

    kind: type
    text: str
