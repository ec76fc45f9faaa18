"""How long each call of a program takes, predicted from what it computes and what it moves.

A call takes what being called takes, and then the longer of two: its arithmetic, or moving what it
reads and writes. Memory is as fast as the cache that the call's own bytes fit into.
"""

from __future__ import annotations

from torch import Tensor, fx

from fulgurite.backends.csx.compile.programs.kernels import KernelCall, Kernels, Maker
from fulgurite.backends.csx.costs.machine import NARROW, Machine, Measured
from fulgurite.backends.csx.costs.traffic import traffic
from fulgurite.backends.csx.graph.graph import Graph
from fulgurite.backends.csx.graph.op_schema import is_view, operation_name
from fulgurite.backends.csx.graph.products import flops_of
from fulgurite.backends.csx.graph.update import FORMULAS

_LIKE = {
    "exp": ("exp", "exp2", "sigmoid", "_softmax", "_log_softmax", "silu"),
    "tanh": ("tanh", "erf", "log", "log1p", "expm1", "sin", "cos", "gelu", "atan2"),
}
_LIKE_IN_TORCH = {
    "where": ("where", "le", "lt", "ge", "gt", "eq", "ne", "masked_fill", "gather", "scatter"),
    "var_mean": (
        *("var_mean", "native_batch_norm", "native_layer_norm", "var", "std"),
        *("amax", "amin", "max", "min", "argmax", "cumsum"),
    ),
    "max_pool": ("max_pool2d_with_indices", "_low_memory_max_pool_with_offsets", "sort", "topk"),
}
"""Operations by the function that is measured and whose elements take as long as theirs (assumed):
in all kernels, and in torch's own alone. Elements of all others are as fast as memory."""


_INTO_MEMORY = ("mm", "addmm", "bmm", "baddbmm")
"""Products that a compiled program lets write into memory that is there."""


def predicted_s(graph: Graph, kernels: Kernels, machine: Machine) -> list[float]:
    """Seconds of each of ``kernels.calls``; their sum is the step's.

    Operations that only look at memory are in no call. Where operations run one by one they take
    time too, which is counted for the call before them.

    Args:
        graph: what is computed.
        kernels: what runs it.
        machine: what it runs on; others than this machine take as long as the roofline says.
    """
    nodes, measured = list(graph.operations()), machine.measured
    owners = _owners(nodes, kernels)
    found: list[float] = []
    for number, moved in enumerate(traffic(graph, kernels)):
        call = kernels.calls[number]
        operations = [nodes[i] for i in call.operations if owners.get(nodes[i], number) == number]
        moved_bytes = moved.read_bytes + moved.written_bytes
        if call.maker is not Maker.GENERATED and len(operations) < len(call.operations):
            seconds = 0.0  # another result of a call before
        elif measured is None:
            flops = sum(flops_of(node) or 0 for node in operations)
            seconds = max(flops / machine.flops_per_s, moved_bytes / machine.bytes_per_s)
        else:
            work_s = _work_s(operations, call.maker, measured)
            called_s = _called_s(call, operations, bool(kernels.program), measured)
            seconds = called_s + max(work_s, measured.memory.seconds(moved_bytes))
        found.append(seconds)
    if measured is not None and found and not kernels.program:
        _add_views(found, nodes, kernels, measured.view_s)
    return found


def _owners(nodes: list[fx.Node], kernels: Kernels) -> dict[fx.Node, int]:
    """The call that computes each product: the first of a library's, or else the first."""
    found: dict[fx.Node, int] = {}
    # generated kernels are told with what makes their operands: a library's call counts first
    order = sorted(
        range(len(kernels.calls)), key=lambda i: kernels.calls[i].maker is Maker.GENERATED
    )
    for number in order:
        for i in kernels.calls[number].operations:
            if flops_of(nodes[i]) is not None:
                found.setdefault(nodes[i], number)
    return found


def _called_s(
    call: KernelCall, operations: list[fx.Node], compiled: bool, measured: Measured
) -> float:
    """The seconds that calling takes, without the work.

    An operation of an optimizer's formula on lists takes half of another's (measured).
    """
    if call.maker is Maker.GENERATED:
        return measured.generated_s
    if compiled and any(operation_name(node.target) in _INTO_MEMORY for node in operations):
        return measured.library_s
    formulas = [one for node in operations for one in node.meta.get(FORMULAS, ())]
    inside: float = sum(node.op == "call_function" for one in formulas for node in one.graph.nodes)
    return max(1, inside / 2) * measured.operation_s


def _work_s(operations: list[fx.Node], maker: Maker, measured: Measured) -> float:
    """The arithmetic of a call.

    With a product of the library the compiler notes what its operands are made of, too: of such a
    call the products alone count.
    """
    products = [node for node in operations if flops_of(node) is not None]
    if products and maker is not Maker.GENERATED:
        return sum(_product_s(node, measured) for node in products)
    known = _LIKE if maker is Maker.GENERATED else _LIKE | _LIKE_IN_TORCH
    seconds = sum(_product_s(node, measured) for node in products)
    for node in operations:
        name = operation_name(node.target)
        like = next((function for function, names in known.items() if name in names), None)
        if like is not None:
            seconds += measured.elements_s[like] * _most_elements(node)
    return seconds


def _product_s(node: fx.Node, measured: Measured) -> float:
    name, flops = operation_name(node.target), flops_of(node)
    assert flops is not None
    kind = next((kind for kind in ("convolution", "attention") if kind in name), None)
    if kind is not None:
        return measured.products[kind + "_backward" * name.endswith("backward")].seconds(flops)
    matrices = [t for t in _operands(node) if t.dim() > 1][-2:]
    batch = matrices[0].shape[0] if matrices[0].dim() > 2 else 1
    sides = [side for matrix in matrices for side in matrix.shape[-2:]]
    curve = measured.products["narrow" if min(sides) < NARROW else "mm"]
    return batch * curve.seconds(flops / batch)


def _add_views(seconds: list[float], nodes: list[fx.Node], kernels: Kernels, view_s: float) -> None:
    calls = {i: number for number, call in enumerate(kernels.calls) for i in call.operations}
    last = 0
    for i, node in enumerate(nodes):
        last = calls.get(i, last)
        if i not in calls and is_view(node.target):
            seconds[last] += view_s


def _operands(node: fx.Node) -> list[Tensor]:
    values = (one.meta.get("val") for one in node.all_input_nodes)
    return [value for value in values if isinstance(value, Tensor)]


def _most_elements(node: fx.Node) -> int:
    result = node.meta.get("val")
    results = result if isinstance(result, (tuple, list)) else [result]
    tensors = [*_operands(node), *(one for one in results if isinstance(one, Tensor))]
    return max((tensor.numel() for tensor in tensors), default=0)
