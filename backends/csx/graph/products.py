"""Products of matrices in a traced step: how many floating-point operations each one is.

The counting rule is that of ``torch.utils.flop_counter``, whose formulas are used: matrix products,
convolutions and attention count, an addition and a multiplication each; nothing else counts. They
are counted before the passes, which write small products as sums.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import fx
from torch.utils.flop_counter import flop_registry

from fulgurite.backends.csx.diagnostics.user_lines import line_of, module_of, split_backward
from fulgurite.backends.csx.graph.graph import Graph
from fulgurite.backends.csx.graph.lstm import LAYER, LAYER_BACKWARD, flops_of_layer
from fulgurite.backends.torch_versions import FORMULAS_OF_OTHERS

_LAYERS = {LAYER: (0, 1), LAYER_BACKWARD: (3, 2)}
"""An LSTM's layer: where its input stands, and how often its products are computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """An operation that multiplies matrices.

    Args:
        operation: its name: ``aten.mm.default``.
        module: as ``module_of`` says: ``net.0 (Linear)``, or ``the backward pass of`` it; empty
            where none ran.
        line: the user's line that it comes from; empty where none is known.
        flops: floating-point operations; a multiplication and an addition are two.
    """

    operation: str
    module: str
    line: str
    flops: int


def products_of(graph: Graph) -> tuple[Product, ...]:
    """The products of a graph, in order; those of a step where no pass has changed it."""
    found = []
    for node in graph.operations():
        flops = flops_of(node)
        if flops is not None:
            line = line_of(node)
            found.append(
                Product(
                    operation=str(node.target),
                    module=module_of(node),
                    line="" if line is None else str(line),
                    flops=flops,
                )
            )
    return tuple(found)


def flops_of(node: fx.Node) -> int | None:
    """The floating-point operations of an operation; None of one that is no product."""
    packet: Any = getattr(node.target, "overloadpacket", node.target)
    if node.target in _LAYERS:
        at, times = _LAYERS[node.target]
        operands: Any = node.args[at : at + 3]
        return times * flops_of_layer(*(one.meta["val"] for one in operands))
    formula = _formula(packet)
    if formula is None:
        return None
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda arg: arg.meta.get("val", arg))
    return int(formula(*args, **kwargs, out_val=node.meta["val"]))


def is_product(target: Any) -> bool:
    """Whether an operation calls a library that multiplies matrices, and does little else."""
    return target in _LAYERS or _formula(getattr(target, "overloadpacket", target)) is not None


def _formula(packet: Any) -> Any:
    return flop_registry.get(packet) or flop_registry.get(FORMULAS_OF_OTHERS.get(packet))


def by_module(products: Iterable[Product]) -> dict[str, int]:
    """FLOPs of each module's forward and backward pass together: ``{"net.0 (Linear)": 65536}``.

    Products outside of modules, such as an optimizer's, are under the empty name.
    """
    found: dict[str, int] = {}
    for product in products:
        name, _ = split_backward(product.module)
        found[name] = found.get(name, 0) + product.flops
    return found
