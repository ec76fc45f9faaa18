"""Write the dtype of a cumulative sum as a cast: ``cumsum(x, 0, dtype=d)``, ``cumsum(x.to(d), 0)``.

Inductor replaces the cumulative sum of a constant tensor by a range, and there loses ``dtype``, of
the numbers and of the result (torch 2.13 to 2.15: ``pointless_cumsum_replacement`` in
``fx_passes/post_grad.py``): sums of 0.5 as integers were 0.5, 1.0, 1.5 instead of zeros. The
operation is defined as the cast and then the sum, so numbers stay as they are. Only for compiled
programs.
"""

from __future__ import annotations

import torch
from torch import fx

from fulgurite.backends.csx.graph.graph import Graph

_SUM, _CAST = torch.ops.aten.cumsum.default, torch.ops.aten._to_copy.default


def cast_before_sums(graph: Graph) -> Graph:
    """Give each cumulative sum in another dtype a cast."""
    fresh = graph.copied()
    for node in list(fresh.find_nodes(op="call_function", target=_SUM)):
        x, dtype = node.args[0], node.kwargs.get("dtype")
        assert isinstance(x, fx.Node)
        value = x.meta["val"]
        if dtype is None or dtype is value.dtype:
            continue
        with fresh.inserting_before(node), graph.mode:
            cast = fresh.call_function(_CAST, (x,), {"dtype": dtype})
            cast.meta = {"val": _CAST(value, dtype=dtype)}
        node.args, node.kwargs = (cast, *node.args[1:]), {}
    return graph.with_operations(fresh)
