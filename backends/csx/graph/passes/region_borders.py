"""Keep fused regions apart from what is around them, so that each can be one kernel.

The compiler computes a value where it is read: what a region is given would be computed inside it,
and what it gives elsewhere. ``realize`` at its borders keeps both from moving. Only for compiled
programs.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from fulgurite.backends.csx.diagnostics.regions import Region, region_of
from fulgurite.backends.csx.graph.graph import Graph
from fulgurite.backends.csx.graph.op_schema import is_mutable, is_view
from fulgurite.backends.csx.graph.passes.realize import realize

MARK = "region"
"""In a node's ``meta["custom"]``, which the compiler's own passes carry along."""


def separate_regions(graph: Graph) -> Graph:
    """Mark the operations of each region, and make what crosses its border a tensor."""
    members = regions_of(graph.module.graph)
    if not members:
        return graph
    fresh = graph.copied()
    same = dict(zip(graph.module.graph.nodes, list(fresh.nodes), strict=True))
    of = {same[node]: region for node, region in members.items()}
    for node, region in of.items():
        node.meta["custom"] = {**node.meta.get("custom", {}), MARK: str(region)}
    for node in list(fresh.nodes):
        # an input lies in memory already, and a view is no value of its own
        if not _is_value(node) or not _computes(_behind(node)):
            continue
        own = of.get(_behind(node))
        strangers = [user for user in node.users if {of.get(one) for one in _readers(user)} - {own}]
        if not strangers:
            continue
        with fresh.inserting_after(node):
            barrier = fresh.call_function(realize(), (node,))
        barrier.meta = dict(node.meta)
        if own is not None:
            barrier.meta["custom"] = {MARK: str(own)}
        for user in strangers:
            user.replace_input_with(node, barrier)
    return graph.with_operations(fresh)


def regions_of(operations: fx.Graph) -> dict[fx.Node, Region]:
    """The region of each operation that computes in one.

    What lies between two operations of a region, computed from the one for the other, is in it too.
    """
    members: dict[fx.Node, Region] = {}
    for node in operations.nodes:
        region = region_of(node)
        if region is not None and _computes(node):
            members[node] = region
    for region in dict.fromkeys(members.values()):
        after, before = set[fx.Node](), set[fx.Node]()
        for node in operations.nodes:
            if members.get(node) == region or not after.isdisjoint(node.all_input_nodes):
                after.add(node)
        for node in reversed(operations.nodes):
            if members.get(node) == region or not before.isdisjoint(node.users):
                before.add(node)
        for node in after & before:
            if _computes(node):
                members.setdefault(node, region)
    return members


def _computes(node: fx.Node) -> bool:
    """Whether an operation has operands, and is more than a look at them."""
    if node.op != "call_function" or not node.all_input_nodes:
        return False
    return not (is_view(node.target) or is_mutable(node.target))


def _is_value(node: fx.Node) -> bool:
    """Whether a node is a tensor, and no view of another one."""
    if not isinstance(node.meta.get("val"), torch.Tensor):
        return False
    return node.target is operator.getitem or not is_view(node.target)


def _behind(node: fx.Node) -> fx.Node:
    """The operation that computed what a view looks at."""
    while node.op == "call_function" and is_view(node.target) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def _readers(user: fx.Node) -> list[fx.Node]:
    """Who reads, where the user is a view."""
    if user.op == "call_function" and is_view(user.target):
        return [reader for one in user.users for reader in _readers(one)]
    return [user]
