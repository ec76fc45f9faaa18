"""State of which each process holds a part (weight streaming).

A step is traced as if each process held all of its state. Here the inputs that are sharded become
their flat parts:

- Where the step uses a whole tensor it is gathered, before its first use in the forward pass and
  once more before that in the backward pass: between the two nobody holds it. It is on its way
  while the step works with the tensor before it.
- What the step writes there at its end is computed in parts, as far as that goes: element by
  element, which is what optimizers do. Of a sum over all processes, such as that of gradients, each
  then gets its part (a reduce-scatter), and of a sum over all elements, such as that of a norm, its
  summand. What an optimizer needs a whole tensor for is computed of a gathered one, by each.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from fulgurite.backends.csx.diagnostics.user_lines import module_of, split_backward
from fulgurite.backends.csx.graph.collectives import (
    OWN_PART,
    Processes,
    functional,
    is_wait,
    length_of_part,
)
from fulgurite.backends.csx.graph.graph import Graph, Input, Placement
from fulgurite.backends.csx.graph.op_schema import is_random, is_view

_ATEN: Any = torch.ops.aten
_VIEWS = {  # which leave all elements in their order
    *(_ATEN.view.default, _ATEN.reshape.default, _ATEN._unsafe_view.default),
    *(_ATEN.alias.default, _ATEN.detach.default, _ATEN.clone.default),
}
_SUMS = {_ATEN.sum.default, _ATEN.sum.dim_IntList}
_COPY, _COPY_INTO = _ATEN.copy.default, _ATEN.copy_.default
_CONVERT: Any = torch.ops.prims.convert_element_type.default
_ALL_REDUCE: Any = functional.all_reduce.default


def sharding(processes: Processes) -> Callable[[Graph], Graph]:
    """The pass that lets these processes hold the sharded inputs of a graph in parts."""

    def shard_state(graph: Graph) -> Graph:
        if all(item.placement is not Placement.SHARDED for item in graph.inputs):
            return graph
        return _Sharding(graph, processes).done()

    return shard_state


class _Operations:
    """The operations of a graph that becomes another one, and how more are made."""

    def __init__(self, graph: Graph, processes: Processes) -> None:
        self._graph, self._processes = graph, processes
        self._fresh = graph.copied()

    def _length(self, numel: int) -> int:
        return length_of_part(numel, self._processes.count)

    def _flat(self, node: Any, like: fx.Node) -> fx.Node:
        return self._call(like, _ATEN.reshape.default, node, [_value(node).numel()])

    def _call(self, like: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A new operation, of the line and the module of ``like``."""
        node = self._fresh.call_function(target, args, kwargs)
        with self._graph.mode, torch.no_grad():
            value = target(*fx.map_arg(args, _value), **fx.map_arg(kwargs, _value))
        node.meta = {**like.meta, "val": value}
        return node

    def _view_again(self, viewed: fx.Node) -> None:
        """Give backward passes views of their own: one of the forward pass would keep the whole."""
        for view in [one for one in viewed.users if is_view(one.target)]:
            self._view_again(view)
            later = [one for one in view.users if _is_backward(one)]
            if later and not _is_backward(view):
                order = {node: i for i, node in enumerate(self._fresh.nodes)}
                first = min(later, key=order.__getitem__)
                with self._fresh.inserting_before(first):
                    again = self._fresh.node_copy(view)
                again.meta = {**first.meta, "val": view.meta["val"]}
                for user in later:
                    user.replace_input_with(view, again)
                if not view.users:
                    self._fresh.erase_node(view)


class _Sharding(_Operations):
    """One graph.

    Attributes:
        parts: the node of each value's part, where there is one.
        in_parts: values whose part can be computed of parts.
    """

    def __init__(self, graph: Graph, processes: Processes) -> None:
        super().__init__(graph, processes)
        self._inputs: list[Input] = list(graph.inputs)
        self.parts: dict[fx.Node, fx.Node] = {}
        self.in_parts: set[fx.Node] = set()
        self._waits: list[fx.Node] = []  # for tensors that are gathered

    def done(self) -> Graph:
        """The graph that works on parts."""
        fresh = self._fresh
        copies = fresh.find_nodes(op="call_function", target=_COPY_INTO)
        writes = {node.args[0]: node for node in copies}
        wholes = self._stand_ins(writes)
        for node in fresh.nodes:
            if node.op == "call_function" and node not in self.in_parts and self._is_in_parts(node):
                self.in_parts.add(node)
        for part in wholes:
            if part in writes:
                writes[part].update_arg(1, self._part(writes[part].args[1]))
        for node in list(fresh.nodes):
            if node.target in _SUMS and node.args[0] in self.in_parts and _is_number(node):
                self._sum_parts(node)
        fresh.eliminate_dead_code()
        self._gather(wholes, writes)
        fresh.lint()
        lowered = self._graph.with_operations(fresh)
        return replace(lowered, inputs=tuple(self._inputs))

    def _stand_ins(self, writes: dict[Any, fx.Node]) -> dict[fx.Node, fx.Node]:
        """Make sharded inputs parts; returns for each a node that stands for the whole."""
        nodes, wholes = list(self._fresh.find_nodes(op="placeholder")), {}
        for i, (item, node) in enumerate(zip(self._inputs, nodes, strict=True)):
            if item.placement is not Placement.SHARDED:
                continue
            with self._fresh.inserting_after(nodes[-1]):
                whole = self._fresh.call_function(_ATEN.alias.default, (node,))
            whole.meta = dict(node.meta)
            for user in [one for one in node.users if one is not whole]:
                user.replace_input_with(node, whole)
            if node in writes:
                writes[node].update_arg(0, node)
            with self._graph.mode:
                part = torch.empty(self._length(item.example.numel()), dtype=item.example.dtype)
            node.meta = {**node.meta, "val": part}
            self._inputs[i] = replace(item, example=part)
            self.in_parts.add(whole)
            self.parts[whole], wholes[node] = node, whole
        return wholes

    # -- what is computed in parts

    def _is_in_parts(self, node: fx.Node) -> bool:
        if is_wait(node.target):
            begun: Any = node.args[0]
            of_all = "sum", self._processes.group
            is_sum = begun.target is _ALL_REDUCE and begun.args[1:] == of_all
            return is_sum and _value(node).numel() >= self._processes.count
        if node.target in _VIEWS:
            return node.args[0] in self.in_parts and _value(node).is_contiguous()
        if node.target is _COPY:
            return node.args[1] in self.in_parts
        pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
        value = node.meta.get("val")
        if not (pointwise or node.target is _CONVERT) or not isinstance(value, Tensor):
            return False
        if is_random(node.target):  # the numbers of a part are not those of the whole
            return False
        alike = [one for one in node.all_input_nodes if _value(one).shape == value.shape]
        others = [one for one in node.all_input_nodes if one not in alike]
        # what is broadcast along a dimension lies otherwise in each part
        numbers = all(_value(one).ndim == 0 for one in others)
        return numbers and any(one in self.in_parts for one in alike)

    def _part(self, node: Any) -> fx.Node:
        """The node of a value's part, made right after the value."""
        if node not in self.parts:
            with self._fresh.inserting_before(node.next):
                self.parts[node] = self._made(node)
        return self.parts[node]

    def _made(self, node: fx.Node) -> fx.Node:
        if node not in self.in_parts:
            of_all = self._processes.count, self._processes.group
            return self._call(node, OWN_PART, self._flat(node, node), *of_all)
        if is_wait(node.target):
            return self._scattered(node)
        if node.target in _VIEWS:
            return self._part(node.args[0])
        dtype, shape = _value(node).dtype, _value(node).shape
        if node.target is _COPY:
            found = self._part(node.args[1])
            if _value(found).dtype == dtype:
                return found
            with self._fresh.inserting_before(found.next):
                return self._call(node, _CONVERT, found, dtype)

        def own(operand: fx.Node) -> fx.Node:
            return self._part(operand) if _value(operand).shape == shape else operand

        args, kwargs = fx.map_arg(node.args, own), fx.map_arg(node.kwargs, own)
        with self._fresh.inserting_before(node.next):
            return self._call(node, node.target, *args, **kwargs)

    def _scattered(self, wait: fx.Node) -> fx.Node:
        """Of a sum of all processes, this one's part."""
        begun: Any = wait.args[0]
        with self._fresh.inserting_before(begun):
            flat = self._flat(begun.args[0], begun)
            missing = self._length(flat.meta["val"].numel()) * self._processes.count
            if missing := missing - flat.meta["val"].numel():
                flat = self._call(begun, _ATEN.constant_pad_nd.default, flat, [0, missing])
            to_all = "sum", self._processes.count, self._processes.group
            scattered = self._call(begun, functional.reduce_scatter_tensor.default, flat, *to_all)
        with self._fresh.inserting_before(wait.next):
            return self._call(wait, wait.target, scattered)

    def _sum_parts(self, node: fx.Node) -> None:
        """Add up each part, and these sums."""
        whole: Any = node.args[0]
        part, dtype = self._part(whole), _value(node).dtype
        with self._fresh.inserting_before(node):
            if _value(whole).numel() % self._processes.count:  # what fills up the last part is none
                every = [_value(whole).numel()]
                ones = self._call(node, _ATEN.full.default, every, True, dtype=torch.bool)
                of_all = self._processes.count, self._processes.group
                inside = self._call(node, OWN_PART, ones, *of_all)
                part = self._call(node, _ATEN.where.ScalarOther, inside, part, 0)
            if _value(part).dtype != dtype:
                part = self._call(node, _CONVERT, part, dtype)
            own = self._call(node, _ATEN.sum.default, part)
            begun = self._call(node, _ALL_REDUCE, own, "sum", self._processes.group)
            total = self._call(node, functional.wait_tensor.default, begun)
            total = self._call(node, _ATEN.reshape.default, total, list(_value(node).shape))
        node.replace_all_uses_with(total)

    # -- what is gathered

    def _gather(self, wholes: dict[fx.Node, fx.Node], writes: dict[Any, fx.Node]) -> None:
        """Put gathered tensors in the place of the nodes that stand for wholes."""
        there = set(self._fresh.nodes)
        wholes = {part: whole for part, whole in wholes.items() if whole in there}
        for whole in wholes.values():
            self._view_again(whole)
        order = {node: i for i, node in enumerate(self._fresh.nodes)}
        for part, whole in wholes.items():
            users = sorted(whole.users, key=order.__getitem__)
            end = order[writes[part]] if part in writes else len(order)
            # what reads it after it was written reads what was written
            passes: tuple[list[fx.Node], ...] = ([], [], [])
            for user in users:
                passes[2 if order[user] > end else _is_backward(user)].append(user)
            for some in passes:
                self._gather_for(part, whole, some)
            self._fresh.erase_node(whole)
        self._gather_ahead()

    def _gather_for(self, part: fx.Node, whole: fx.Node, users: list[fx.Node]) -> None:
        if users:
            with self._fresh.inserting_before(users[0]):
                gathered = self._gathered(part, _value(whole), users[0])
            for user in users:
                user.replace_input_with(whole, gathered)

    def _gathered(self, part: fx.Node, value: Tensor, user: fx.Node) -> fx.Node:
        to_all = self._processes.count, self._processes.group
        begun = self._call(user, functional.all_gather_into_tensor.default, part, *to_all)
        flat = self._call(user, functional.wait_tensor.default, begun)
        self._waits.append(flat)
        if _value(flat).numel() > value.numel():
            flat = self._call(user, _ATEN.slice.Tensor, flat, 0, 0, value.numel())
        return self._call(user, _ATEN.reshape.default, flat, list(value.shape))

    def _gather_ahead(self) -> None:
        """Begin to gather each tensor when the one before it is waited for."""
        order = {node: i for i, node in enumerate(self._fresh.nodes)}
        for before, wait in itertools.pairwise(sorted(self._waits, key=order.__getitem__)):
            before.prepend(wait.all_input_nodes[0])


def _value(node: fx.Node) -> Any:
    return node.meta["val"]


def _is_backward(node: fx.Node) -> bool:
    return split_backward(module_of(node))[1]


def _is_number(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.numel() == 1
