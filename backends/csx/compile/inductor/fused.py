"""Fused regions by themselves: each as a graph of its own, and a graph that calls them.

Torch's compiler makes a kernel of each (see ``wrapper``). Whether it can is found out here, before
a program is compiled that relies on it. Where nothing else is generated (``autogen_policy`` is
"disabled"), a graph runs operation by operation but for its regions, which are programs.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from fulgurite.backends.csx.compile.fabric import Call
from fulgurite.backends.csx.compile.inductor.program import load as load_program
from fulgurite.backends.csx.compile.programs.parts import Part, as_part, numbered, operations_of
from fulgurite.backends.csx.compile.programs.steps import Extern, Generated, calls
from fulgurite.backends.csx.diagnostics.regions import Region, region_of
from fulgurite.backends.csx.diagnostics.trace_errors import UnfusedLoss
from fulgurite.backends.csx.diagnostics.user_lines import line_of
from fulgurite.backends.csx.graph.graph import Graph
from fulgurite.backends.csx.graph.op_schema import is_view, written_nodes
from fulgurite.backends.csx.graph.passes import INTERPRETER_PASSES, lower
from fulgurite.backends.csx.graph.passes.region_borders import regions_of
from fulgurite.backends.csx.streaming.positions import with_positions
from fulgurite.backends.csx.streaming.residency import residency

_PREFIX = "fused_region_"

Generate = Callable[[Part], Generated]


@dataclass(frozen=True, slots=True)
class Fused:
    """A region as a part of its own.

    ``operations`` are the part's as they are numbered in the whole graph; ``name`` is that of the
    module in the graph that calls it.
    """

    region: Region
    part: Part
    operations: tuple[int, ...]
    name: str


def has_regions(graph: Graph) -> bool:
    """Whether a graph has fused regions."""
    return any(region_of(node) is not None for node in graph.runs.operations())


def taken_out(graph: Graph) -> tuple[fx.GraphModule, list[Fused]]:
    """A graph's operations with a call in place of each region, and the regions.

    Args:
        graph: with numbered operations.
    """
    from torch.fx.passes.utils.fuser_utils import fuse_by_partitions  # few need it

    module = fx.GraphModule(graph.module, writes_last(graph.copied()))
    regions: dict[Region, list[fx.Node]] = {}
    for node, region in regions_of(module.graph).items():
        regions.setdefault(region, []).append(node)
    # all regions before the first takes anything along: what one of them gives is no other's
    inside = [_with_own_views(module.graph, nodes) for nodes in regions.values()]
    taken = {node for nodes in inside for node in nodes}
    partitions = [dict.fromkeys(_with_views(nodes, taken)) for nodes in inside]
    fuse_by_partitions(module, partitions, prefix=_PREFIX, always_return_tuple=True)
    found = []
    for i, region in enumerate(regions):
        name = f"{_PREFIX}{i}"
        inner = getattr(module, name)
        examples = tuple(one.meta["val"] for one in inner.graph.find_nodes(op="placeholder"))
        found.append(Fused(region, as_part(inner, examples), operations_of(inner), name))
    return module, found


def generated(graph: Graph, generate: Generate) -> list[tuple[Fused, Generated]]:
    """The regions of a graph with their kernels.

    Raises:
        UnfusedLoss: one of them cannot be one kernel.
    """
    _, regions = taken_out(graph)
    both = [(fused, generate(fused.part)) for fused in regions]
    nodes = list(graph.operations())
    for fused, code in both:
        called = list(calls(code.program.steps))
        library = [call for call in called if isinstance(call, Extern)]
        if library:
            positions = [fused.operations[i] for call in library for i in call.at]
            raise _unfused(fused.region, library[0].kernel, [nodes[i] for i in positions if i >= 0])
        assert len(called) <= 1, [call.kernel for call in called]
    return both


def writes_last(operations: fx.Graph) -> fx.Graph:
    """Final writes of inputs at the end, so that nothing that is moved reads what they wrote.

    Raises:
        UnfusedLoss: something is to read it.
    """
    written: set[fx.Node] = set()
    for node in list(operations.nodes):
        if node.op == "output" or written.isdisjoint(node.all_input_nodes):
            written.update(one for one in written_nodes(node) if one.op == "placeholder")
        else:
            raise UnfusedLoss(
                "use_autogen=True: the step reads a tensor again that it has written, and so its"
                " operations cannot be put in another order.",
                line=line_of(node),
                remedy="use_autogen=False",
            )
    for node in list(operations.nodes):
        if node.op == "call_function" and written_nodes(node):
            operations.output_node().prepend(node)
    return operations


def _unfused(region: Region, kernel: str, nodes: Sequence[fx.Node]) -> UnfusedLoss:
    operation = str(nodes[0].target) if nodes else kernel
    way = "backward pass" if region.backward else "forward pass"
    return UnfusedLoss(
        f"use_autogen=True: the {way} of {region.name} cannot be one generated kernel:"
        f" {operation} is in the way, which has none.",
        line=line_of(nodes[0]) if nodes else None,
        remedy="compute that outside the loss, and give the loss its result; or use_autogen=False",
    )


def _with_own_views(operations: fx.Graph, nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """Operations with the views between them; readers outside get views of their own.

    A region gives no views: what it gives may lie otherwise than the graph says.
    """
    items = [user for node in nodes for user in node.users if user.target is operator.getitem]
    computed = dict.fromkeys([*nodes, *items])
    # in the graph's order, so that a copy of a view reads the copy before it
    views = sorted({view for node in nodes for view in _views_before(node, computed)})
    copies: dict[fx.Node, fx.Node] = {}
    for view in views:
        # with one view for two regions each waited for the other; and a gradient that two losses
        # share was read past its end, for the second read it as the graph says it lies
        strangers = [user for user in view.users if user not in computed and user not in views]
        with operations.inserting_after(view):
            copy = operations.node_copy(view, lambda one: copies.get(one, one))
        copies[view] = copy
        for user in strangers:
            user.replace_input_with(view, copy)
    for copy in reversed(copies.values()):
        if not copy.users:
            operations.erase_node(copy)
    return [*computed, *views]


def _views_before(node: fx.Node, computed: Container[fx.Node]) -> list[fx.Node]:
    """The views by which an operation reads what others of its region compute."""
    found = []
    for one in node.all_input_nodes:
        views = []
        while one not in computed and one.op == "call_function" and is_view(one.target):
            views.append(one)
            if not one.all_input_nodes:
                break
            one = one.all_input_nodes[0]
        if one in computed:
            found += views
    return found


def _with_views(nodes: Sequence[fx.Node], taken: Container[fx.Node]) -> list[fx.Node]:
    """A region's nodes with the views and constants that only they read and no other region has."""
    inside = dict.fromkeys(nodes)
    while True:
        around = {one for node in inside for one in (*node.all_input_nodes, *node.users)}
        more = [
            node
            for node in around
            if node not in inside and node not in taken and _free(node)
            if node.users and inside.keys() >= {*node.users}
        ]
        if not more:
            return sorted(inside)  # inputs are numbered by it, where one is compiled and loaded
        inside |= dict.fromkeys(more)


def _free(node: fx.Node) -> bool:
    """Whether a node computes nothing from operands."""
    if node.op != "call_function":
        return False
    return is_view(node.target) or not node.all_input_nodes


def not_compiled(graph: Graph, why: str) -> UnfusedLoss:
    """The error of a machine that cannot compile what a loss asks for."""
    [node, *_] = (node for node in graph.operations() if region_of(node) is not None)
    region = region_of(node)
    assert region is not None
    return UnfusedLoss(
        f"use_autogen=True: {region.name} is to be a generated kernel, but nothing can be compiled"
        f" on this machine: {why}.",
        line=line_of(node),
        remedy="install a C++ compiler and Python's headers; or use_autogen=False",
    )


def load(graph: Graph, folder: Path) -> Call:
    """A graph whose fused regions alone are compiled, as a function of its inputs."""
    module, regions = taken_out(lower(numbered(graph), INTERPRETER_PASSES))
    for one in regions:
        setattr(module, one.name, _Call(load_program(folder / one.name)))
    within: Any = contextlib.nullcontext
    if residency.is_open:
        module, uses = with_positions(module, graph, graph.written())
        within = functools.partial(residency.running, uses)

    def run(inputs: list[Tensor]) -> Sequence[Tensor]:
        with within(inputs):
            outputs = module(*inputs)
        return outputs if isinstance(outputs, (list, tuple)) else [outputs]

    return run


class _Call(torch.nn.Module):
    """A compiled region where a module stands."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self._call = call

    def forward(self, *inputs: Tensor) -> Sequence[Tensor]:
        """Run it."""
        return self._call(list(inputs))
