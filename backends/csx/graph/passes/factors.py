"""Write the factor of a sum as a product: ``add(x, a @ b, alpha=k)`` as ``add(x, k * (a @ b))``.

Inductor makes one operation of a matrix product and the sum around it, and loses ``alpha`` there
(torch 2.13: the patterns ``addmm`` and ``mm_plus_mm`` of ``fx_passes/post_grad.py``, and that of a
scaled softmax, match whatever the keyword is). Elsewhere its kernels have this product already, so
numbers stay as they are. Only for compiled programs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from fulgurite.backends.csx.graph.graph import Graph

_PRODUCT = torch.ops.aten.mul.Tensor
_SUMS = (torch.ops.aten.add.Tensor, torch.ops.aten.sub.Tensor)


def write_factors_out(graph: Graph) -> Graph:
    """Give each sum with an ``alpha`` other than 1 a product, where that keeps its dtype."""
    fresh = graph.copied()
    for target in _SUMS:
        for node in list(fresh.find_nodes(op="call_function", target=target)):
            x, y = node.args
            alpha: Any = node.kwargs.get("alpha", 1)
            if alpha == 1 or not isinstance(y, fx.Node):
                continue
            value: Tensor = y.meta["val"]
            if value.dtype is node.meta["val"].dtype:
                with fresh.inserting_before(node), graph.mode:
                    product = fresh.call_function(_PRODUCT, (y, alpha))
                    product.meta = {"val": _PRODUCT(value, alpha)}
                node.args, node.kwargs = (x, product), {}
    return graph.with_operations(fresh)
