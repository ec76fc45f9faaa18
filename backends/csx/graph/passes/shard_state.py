"""State of which each process holds a part (weight streaming).

A step is traced as if each process held all of its state. Here the inputs that are sharded become
their flat parts:

- Where the step uses a whole tensor it is gathered, for the forward pass and once more for the
  backward pass: between the two nobody holds it (``gathers``).
- What the step writes there at its end is computed in parts, as far as that goes: element by
  element, which is what optimizers do. Of a sum over all processes, such as that of gradients, each
  then gets its part (a reduce-scatter), and of a sum over all elements, such as that of a norm, its
  summand. What an optimizer needs a whole tensor for is computed of a gathered one, by each.
- The messages that this takes are merged, and moved to where they overlap with computing
  (``overlap``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from fulgurite.backends.csx.diagnostics.trace_errors import UnsupportedState
from fulgurite.backends.csx.diagnostics.user_lines import line_of
from fulgurite.backends.csx.graph.collectives import (
    OWN_PART,
    Processes,
    functional,
    is_gather,
    is_wait,
    length_of_part,
)
from fulgurite.backends.csx.graph.graph import Graph, Input, Kind, Placement, Role
from fulgurite.backends.csx.graph.op_schema import is_random
from fulgurite.backends.csx.graph.passes.gathers import Gathers, Whole, small_bytes
from fulgurite.backends.csx.graph.passes.hold import holds
from fulgurite.backends.csx.graph.passes.overlap import (
    Message,
    Operations,
    merge,
    nbytes_of,
    overlap,
    value_of,
)

_ATEN: Any = torch.ops.aten
_VIEWS = {  # which leave all elements in their order
    *(_ATEN.view.default, _ATEN.reshape.default, _ATEN._unsafe_view.default),
    *(_ATEN.alias.default, _ATEN.detach.default, _ATEN.clone.default),
}
_SUMS = {_ATEN.sum.default, _ATEN.sum.dim_IntList}
_COPY, _COPY_INTO = _ATEN.copy.default, _ATEN.copy_.default
_CONVERT: Any = torch.ops.prims.convert_element_type.default
_ALL_REDUCE: Any = functional.all_reduce.default
_FOR_ALL = {_ALL_REDUCE, functional.broadcast.default}
_COMMON_KINDS = {Kind.NUMBERS, Kind.COUNTER}
_COMMON_ROLES = {Role.PARAMETER, Role.OPTIMIZER}


def sharding(processes: Processes) -> Callable[[Graph], Graph]:
    """The pass that lets these processes hold the sharded inputs of a graph in parts."""

    def shard_state(graph: Graph) -> Graph:
        if all(item.placement is not Placement.SHARDED for item in graph.inputs):
            return graph
        return _Sharding(graph, processes).done()

    return shard_state


class _Sharding(Operations):
    """One graph.

    Attributes:
        parts: the node of each value's part, where there is one.
        in_parts: values whose part can be computed of parts.
        common: values that are the same in all processes: what follows from state and from what
            was exchanged, without a batch.
    """

    def __init__(self, graph: Graph, processes: Processes) -> None:
        super().__init__(graph, processes)
        self._inputs: list[Input] = list(graph.inputs)
        self.parts: dict[fx.Node, fx.Node] = {}
        self.in_parts: set[fx.Node] = set()
        self.common: set[fx.Node] = set()
        self._sums: list[Message] = []
        self._scatters: list[Message] = []

    def done(self) -> Graph:
        """The graph that works on parts."""
        fresh = self.fresh
        copies = fresh.find_nodes(op="call_function", target=_COPY_INTO)
        writes = {node.args[0]: node for node in copies}
        wholes = self._stand_ins(writes)
        for node in holds(self.graph, fresh):
            _agree(self, node)
        self.common = _common(self.fresh, self._inputs, wholes.values(), self.processes.group)
        for node in fresh.nodes:
            if node.op == "call_function" and node not in self.in_parts and self._is_in_parts(node):
                self.in_parts.add(node)
        updated = {part: writes[part].args[1] for part in wholes if part in writes}
        _refuse_own(self, self._inputs, {wholes[part]: new for part, new in updated.items()})
        for part, new in updated.items():
            writes[part].update_arg(1, self._part(new))
            writes[part].meta = {**writes[part].meta, "val": value_of(part)}
        for node in list(fresh.nodes):
            # of a process's own gradients, which others have not added to, each needs all elements
            in_parts = node.args and node.args[0] in self.in_parts & self.common
            if node.target in _SUMS and in_parts and _is_number(node):
                self._sum_parts(node)
        there = self.alive()
        used = [
            Whole(node, _always(part), writes.get(part))
            for part, node in wholes.items()
            if node in there
        ]
        used += [  # what is written is used in this step already
            Whole(new, _always(self.parts[new]), computed=True)
            for new in dict.fromkeys(updated.values())
            if new in there and new in self.in_parts and new not in wholes.values()
        ]
        self._send(used)
        fresh.lint()
        lowered = self.graph.with_operations(fresh)
        return replace(lowered, inputs=tuple(self._inputs))

    def _send(self, used: list[Whole]) -> None:
        """Gather what is used whole, and see that messages are few and on their way early."""
        sizes = [self._sent_bytes(value_of(one.node)) for one in used]
        small = small_bytes(sizes)
        gathers = Gathers(self, used, small)
        there = self.alive()
        scatters = [one for one in self._scatters if one.begun in there]
        few = [one for one in scatters if nbytes_of(one.sent) <= small]
        for messages in (few, [one for one in self._sums if one.begun in there]):
            by_dtype: dict[torch.dtype, list[Message]] = {}
            for one in messages:
                by_dtype.setdefault(value_of(one.sent).dtype, []).append(one)
            for alike in by_dtype.values():
                merge(self, alike)
        large = [one for one in scatters if one not in few]
        needed = [one for one in gathers.messages if one.begun in there]
        overlap(self, needed, large, limit=2 * max(sizes, default=0))

    def _stand_ins(self, writes: dict[Any, fx.Node]) -> dict[fx.Node, fx.Node]:
        """Make sharded inputs parts; returns for each a node that stands for the whole."""
        nodes, wholes = list(self.fresh.find_nodes(op="placeholder")), {}
        for i, (item, node) in enumerate(zip(self._inputs, nodes, strict=True)):
            if item.placement is not Placement.SHARDED:
                continue
            with self.fresh.inserting_after(nodes[-1]):
                whole = self.fresh.call_function(_ATEN.alias.default, (node,))
            whole.meta = dict(node.meta)
            for user in [one for one in node.users if one is not whole]:
                user.replace_input_with(node, whole)
            if node in writes:
                writes[node].update_arg(0, node)
            with self.graph.mode:
                part = torch.empty(self._length(item.example.numel()), dtype=item.example.dtype)
            node.meta = {**node.meta, "val": part}
            self._inputs[i] = replace(item, example=part)
            self.in_parts.add(whole)
            self.parts[whole], wholes[node] = node, whole
        return wholes

    # -- what is computed in parts

    def _length(self, numel: int) -> int:
        return length_of_part(numel, self.processes.count)

    def _sent_bytes(self, whole: Tensor) -> int:
        return self._length(whole.numel()) * self.processes.count * whole.itemsize

    def _is_in_parts(self, node: fx.Node) -> bool:
        if is_wait(node.target):
            begun: Any = node.args[0]
            of_all = "sum", self.processes.group
            is_sum = begun.target is _ALL_REDUCE and begun.args[1:] == of_all
            return is_sum and value_of(node).numel() >= self.processes.count
        if node.target in _VIEWS:
            return node.args[0] in self.in_parts and value_of(node).is_contiguous()
        if node.target is _COPY:
            return node.args[1] in self.in_parts
        pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
        value = node.meta.get("val")
        if not (pointwise or node.target is _CONVERT) or not isinstance(value, Tensor):
            return False
        alike = [one for one in node.all_input_nodes if value_of(one).shape == value.shape]
        others = [one for one in node.all_input_nodes if one not in alike]
        # what is broadcast along a dimension lies otherwise in each part
        numbers = all(value_of(one).ndim == 0 for one in others)
        return numbers and any(one in self.in_parts for one in alike)

    def _part(self, node: Any) -> fx.Node:
        """The node of a value's part, made right after the value."""
        if node not in self.parts:
            with self.fresh.inserting_before(node.next):
                self.parts[node] = self._made(node)
        return self.parts[node]

    def _made(self, node: fx.Node) -> fx.Node:
        if node not in self.in_parts:
            of_all = self.processes.count, self.processes.group
            return self.call(node, OWN_PART, self.flat(node, node), *of_all)
        if is_wait(node.target):
            return self._scattered(node)
        if node.target in _VIEWS:
            return self._part(node.args[0])
        dtype, shape = value_of(node).dtype, value_of(node).shape
        if node.target is _COPY:
            found = self._part(node.args[1])
            if value_of(found).dtype == dtype:
                return found
            with self.fresh.inserting_before(found.next):
                return self.call(node, _CONVERT, found, dtype)

        def own(operand: fx.Node) -> fx.Node:
            return self._part(operand) if value_of(operand).shape == shape else operand

        args, kwargs = fx.map_arg(node.args, own), fx.map_arg(node.kwargs, own)
        with self.fresh.inserting_before(node.next):
            return self.call(node, node.target, *args, **kwargs)

    def _scattered(self, wait: fx.Node) -> fx.Node:
        """Of a sum of all processes, this one's part."""
        begun: Any = wait.args[0]
        with self.fresh.inserting_before(begun):
            flat = self.flat(begun.args[0], begun)
            missing = self._length(flat.meta["val"].numel()) * self.processes.count
            if missing := missing - flat.meta["val"].numel():
                flat = self.call(begun, _ATEN.constant_pad_nd.default, flat, [0, missing])
            to_all = "sum", self.processes.count, self.processes.group
            scattered = self.call(begun, functional.reduce_scatter_tensor.default, flat, *to_all)
        with self.fresh.inserting_before(wait.next):
            done = self.call(wait, wait.target, scattered)
        self._scatters.append(Message(scattered, done))
        return done

    def _sum_parts(self, node: fx.Node) -> None:
        """Add up each part, and these sums."""
        whole: Any = node.args[0]
        part, dtype = self._part(whole), value_of(node).dtype
        with self.fresh.inserting_before(node):
            if (
                value_of(whole).numel() % self.processes.count
            ):  # what fills up the last part is none
                every = [value_of(whole).numel()]
                ones = self.call(node, _ATEN.full.default, every, True, dtype=torch.bool)
                of_all = self.processes.count, self.processes.group
                inside = self.call(node, OWN_PART, ones, *of_all)
                part = self.call(node, _ATEN.where.ScalarOther, inside, part, 0)
            if value_of(part).dtype != dtype:
                part = self.call(node, _CONVERT, part, dtype)
            own = self.call(node, _ATEN.sum.default, part)
            begun = self.call(node, _ALL_REDUCE, own, "sum", self.processes.group)
            total = self.call(node, functional.wait_tensor.default, begun)
            self._sums.append(Message(begun, total))
            total = self.call(node, _ATEN.reshape.default, total, list(value_of(node).shape))
        node.replace_all_uses_with(total)


def _agree(operations: _Sharding, held: fx.Node) -> None:
    """Where one process's step went wrong, all keep their parts as they were."""
    fresh, group, users = operations.fresh, operations.processes.group, list(held.users)
    with fresh.inserting_before(held.next):
        own = operations.call(held, _CONVERT, held, torch.int32)
        begun = operations.call(held, _ALL_REDUCE, own, "sum", group)
        count = operations.call(held, functional.wait_tensor.default, begun)
        any_held = operations.call(held, _ATEN.gt.Scalar, count, 0)
    for user in users:
        user.replace_input_with(held, any_held)


def _common(
    operations: fx.Graph, inputs: list[Input], wholes: Iterable[fx.Node], group: str
) -> set[fx.Node]:
    """Values that are the same in all processes of a group."""
    found = set(wholes)
    placeholders = operations.find_nodes(op="placeholder")
    for item, node in zip(inputs, placeholders, strict=True):
        if item.kind in _COMMON_KINDS or item.role in _COMMON_ROLES:
            found.add(node)
    for node in operations.nodes:
        if node.op != "call_function" or is_random(node.target):
            continue
        if is_wait(node.target):
            begun: Any = node.args[0]
            exchanged = is_gather(begun.target) or begun.target in _FOR_ALL
            is_common = exchanged and begun.args[-1] == group
        else:
            is_common = all(one in found for one in _sources(node))
        if is_common:
            found.add(node)
    return found


def _own(operations: fx.Graph, inputs: list[Input], group: str) -> set[fx.Node]:
    """Values that follow from this process's own batch, and not from a group's exchange of it."""
    placeholders = operations.find_nodes(op="placeholder")
    pairs = zip(inputs, placeholders, strict=True)
    found = {node for item, node in pairs if item.kind is Kind.BATCH}
    for node in operations.nodes:
        exchanged = is_wait(node.target) and node.args[0].args[-1] == group
        if not exchanged and any(one in found for one in _sources(node)):
            found.add(node)
    return found


def _sources(node: fx.Node) -> list[Any]:
    """What a value follows from; of a copy, not what it takes the place of."""
    return [node.args[1]] if node.target is _COPY else node.all_input_nodes


def _refuse_own(
    operations: Operations, inputs: list[Input], updated: dict[fx.Node, fx.Node]
) -> None:
    """See that what is written is the same in all processes, of which each keeps a part.

    Args:
        operations: of the step.
        inputs: its inputs.
        updated: by what stands for a whole tensor, what is written there.
    """
    fresh = operations.fresh
    own = _own(fresh, inputs, operations.processes.group)
    items = dict(zip(fresh.find_nodes(op="placeholder"), inputs, strict=True))
    for whole, new in updated.items():
        if new in own:
            first = [one for one in fresh.nodes if one in own and one in whole.users]
            raise UnsupportedState(
                f"The step writes into {items[whole.all_input_nodes[0]].name} what follows from"
                " this process's own batch, as Embedding(max_norm=...) does: each process has a"
                " part of it, and the others' writes to that part are lost.",
                line=line_of([*first, new][0]),
                remedy="the write between steps, in a hook; or execution='pipeline', where each"
                " process has weights of its own then, as in DDP",
            )


def _always(part: fx.Node) -> Callable[[fx.Node], fx.Node]:
    return lambda before: part


def _is_number(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.numel() == 1
