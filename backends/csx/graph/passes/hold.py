"""State stays as it was once a step has gone wrong: where a guard is negative after the step, or
where the processes that train together find that they run different steps (``graph.votes``).

The guard is a number that the step keeps (``callbacks.check_loss`` has one). In compiled programs
the choice is part of the loop that writes the state; what it costs is in docs/callbacks.md.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from fulgurite.backends.csx.graph.graph import Graph, Kind
from fulgurite.backends.csx.graph.votes import AGREED, apart

GUARD = "_losses_until_bad"
"""Name of the module's attribute that is the guard, an integer; it is written all the same."""

_GUARD = f"self.{GUARD}"
_NOT_HELD = "loss_scale["  # it shrinks where a step went wrong
_COPY = torch.ops.aten.copy_.default


def hold_state(graph: Graph) -> Graph:
    """Let each state be written with the value that it has, where the step has gone wrong.

    Sums and counts of an epoch's logged values, which are read from outside, are state too.
    Gradients between steps are written all the same, and numbers that the host keeps.
    """
    if not is_held(graph) and all(node.target is not AGREED for node in graph.operations()):
        return graph
    names = _names(graph)
    fresh = graph.copied()
    states = list(fresh.find_nodes(op="placeholder"))
    writes = {node.args[0]: node for node in fresh.find_nodes(op="call_function", target=_COPY)}
    signs = [_apart(graph, node) for node in fresh.find_nodes(op="call_function", target=AGREED)]
    guard = writes.get(states[names.index(_GUARD)]) if _GUARD in names else None
    if guard is not None:
        now = guard.args[1]
        assert isinstance(now, fx.Node)
        with fresh.inserting_after(now):
            signs.append(_made(graph, now, torch.ops.aten.lt.Scalar, (now, 0)))
    if not signs:
        return graph
    bad = _any_of(graph, signs)
    order = {node: i for i, node in enumerate(fresh.nodes)}
    for state, name in zip(states, names, strict=True):
        write = writes.get(state)
        if not name or name == _GUARD or name.startswith(_NOT_HELD) or write is None:
            continue
        # whether the step went wrong is not known there yet: the write waits until the end
        if order[write] < order[bad]:  # as that of BatchNorm's statistics
            if any(order[user] > order[write] for user in state.users) or write.users:
                continue  # it is read after it was written
            fresh.output_node().prepend(write)
        with fresh.inserting_before(write):
            value = write.args[1]
            assert isinstance(value, fx.Node)
            before, after = state.meta["val"], value.meta["val"]
            if before.dtype != after.dtype:
                to = torch.ops.prims.convert_element_type.default
                value = _made(graph, write, to, (value, before.dtype))
            held = _made(graph, write, torch.ops.aten.where.self, (bad, state, value))
        write.update_arg(1, held)
    fresh.lint()
    return graph.with_operations(fresh)


def _apart(graph: Graph, agreed: fx.Node) -> fx.Node:
    """Whether processes do not run the same, as a value; what they have said stays as it is."""
    shares, count = agreed.args
    assert isinstance(shares, fx.Node)
    with graph.mode, torch.no_grad():
        asked = make_fx(lambda x: apart(x, count), tracing_mode="fake")(shares.meta["val"])  # type: ignore[arg-type]
    new: dict[fx.Node, fx.Node] = {}
    with agreed.graph.inserting_before(agreed):
        for node in asked.graph.nodes:
            if node.op == "placeholder":
                new[node] = shares
            elif node.op == "call_function":
                new[node] = agreed.graph.node_copy(node, new.__getitem__)
                new[node].meta = {**agreed.meta, "val": node.meta["val"]}
    agreed.replace_all_uses_with(shares)
    agreed.graph.erase_node(agreed)
    return list(new.values())[-1]


def _any_of(graph: Graph, signs: list[fx.Node]) -> fx.Node:
    """Whether one of some is so, right after the last of them."""
    order = {node: i for i, node in enumerate(signs[0].graph.nodes)}
    found, *others = sorted(signs, key=order.__getitem__, reverse=True)
    with found.graph.inserting_after(found):
        for other in others:
            found = _made(graph, found, torch.ops.aten.logical_or.default, (found, other))
    return found


def holds(graph: Graph, fresh: fx.Graph) -> list[fx.Node]:
    """Where the operations of a graph ask whether its guard is negative."""
    pairs = zip(_names(graph), fresh.find_nodes(op="placeholder"), strict=True)
    guards = [node for name, node in pairs if name == _GUARD]
    copies = fresh.find_nodes(op="call_function", target=_COPY)
    now = {node.args[1] for node in copies if node.args[0] in guards}
    asked = fresh.find_nodes(op="call_function", target=torch.ops.aten.lt.Scalar)
    return [node for node in asked if node.args[0] in now]


def held_inputs(graph: Graph) -> tuple[int, list[int]] | None:
    """The input that is the guard, and those that it holds; None where there is none."""
    names = _names(graph)
    if _GUARD not in names:
        return None
    guard, written = names.index(_GUARD), graph.written()
    held = [i for i in sorted(written) if names[i] and not names[i].startswith(_NOT_HELD)]
    return guard, [i for i in held if i != guard]


def is_held(graph: Graph) -> bool:
    """Whether a step has a guard."""
    return _GUARD in _names(graph)


def _names(graph: Graph) -> list[str]:
    kinds = (Kind.STATE, Kind.CONSTANT)
    return [item.name if item.kind in kinds else "" for item in graph.inputs]


def _made(graph: Graph, like: fx.Node, operation: object, args: tuple[object, ...]) -> fx.Node:
    """A new operation, with the user's line of another."""
    node = like.graph.call_function(operation, args)  # type: ignore[arg-type]
    values = [arg.meta["val"] if isinstance(arg, fx.Node) else arg for arg in args]
    with graph.mode, torch.no_grad():
        value: Tensor = operation(*values)  # type: ignore[operator]
    node.meta = {**like.meta, "val": value}
    return node
