"""Give operations back to torch's kernels that were decomposed for the compiler.

A graph that runs operation by operation takes time for each: ``prims``' own are Python, 0.1 to 2 ms
a call where the kernel takes 10 to 100 µs (measured, torch 2.13, on the digits ConvNet).
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from fulgurite.backends.csx.graph.graph import Graph

_aten = torch.ops.aten
_POOLS = {2: _aten.max_pool2d_with_indices.default, 3: _aten.max_pool3d_with_indices.default}


def use_kernels(graph: Graph) -> Graph:
    """Convert and pool by one operation each, with the same results."""
    fresh = graph.copied()
    for node in list(fresh.nodes):
        name = str(node.target)
        if name == "prims.convert_element_type.default":
            _convert(fresh, node)
        elif name == "prims._low_memory_max_pool_with_offsets.default":
            _pool(fresh, node)
    fresh.eliminate_dead_code()
    return graph.with_operations(fresh)


def _convert(graph: fx.Graph, node: fx.Node) -> None:
    x, dtype = node.args
    with graph.inserting_before(node):
        to = graph.call_function(_aten._to_copy.default, (x,), {"dtype": dtype})
    to.meta = dict(node.meta)
    node.replace_all_uses_with(to)
    graph.erase_node(node)


def _pool(graph: fx.Graph, node: fx.Node) -> None:
    """Values and offsets become values and indices, where offsets are of no other use."""
    parts = {user.args[1]: user for user in node.users if user.target is operator.getitem}
    offsets = list(parts[1].users) if 1 in parts else []
    wanted = "prims._low_memory_max_pool_offsets_to_indices.default"
    if len(parts) != len(node.users) or any(str(user.target) != wanted for user in offsets):
        return
    x, window, *how = node.args
    with graph.inserting_before(node):
        pool = graph.call_function(_POOLS[len(window)], (x, window, *how))  # type: ignore[arg-type]
    value = node.meta["val"][0]
    # where nobody asks for indices, something of their layout is noted for them
    indices = offsets[0].meta["val"] if offsets else value.to(torch.int64)
    pool.meta = {**node.meta, "val": (value, indices)}
    for user in offsets:
        with graph.inserting_before(user):
            found = graph.call_function(operator.getitem, (pool, 1))
        found.meta = dict(user.meta)
        user.replace_all_uses_with(found)
        graph.erase_node(user)
    if 1 in parts:
        graph.erase_node(parts[1])
    if 0 in parts:
        parts[0].replace_input_with(node, pool)
    graph.erase_node(node)
