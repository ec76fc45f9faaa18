"""Make every in-place draw of random numbers an operation that returns what it drew.

``x.bernoulli_(p)`` and its kin draw in the order of their tensor's memory. Functionalized by torch
they lose its strides: the masks of a transposed tensor (``nn.TransformerEncoderLayer`` has one)
were others than eager's. As mutations they also rest on the compiler's order of reads and writes,
which was wrong (docs/backends.md). Here each becomes ``fulgurite::<name>(size, stride, dtype,
...)``, which makes a tensor of that layout, lets the in-place operation draw into it, and returns
it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from fulgurite.backends.csx.graph.graph import Graph, like

_aten: Any = torch.ops.aten
_IN_PLACE = (
    *(_aten.bernoulli_, _aten.uniform_, _aten.normal_, _aten.exponential_, _aten.random_),
    *(_aten.geometric_, _aten.cauchy_, _aten.log_normal_),
)
_EMPTY = (_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty)
_LIKE: dict[object, tuple[OpOverload, Callable[..., tuple[Any, ...]]]] = {
    _aten.rand_like.default: (_aten.uniform_.default, lambda x: (0.0, 1.0)),
    _aten.randn_like.default: (_aten.normal_.default, lambda x: (0.0, 1.0)),
    _aten.randint_like.default: (_aten.random_.to, lambda x, high: (high,)),
    _aten.bernoulli.p: (_aten.bernoulli_.float, lambda x, p: (p,)),
    _aten.bernoulli.default: (_aten.bernoulli_.Tensor, lambda p: (p,)),
}
"""Operations that torch computes by drawing into a new tensor: which draw, with what of their
arguments."""

_NORMALS = (_aten.normal.Tensor_Tensor, _aten.normal.Tensor_float, _aten.normal.float_Tensor)
"""``torch.normal(mean, std)``: drawn with 0 and 1, multiplied, added, as torch's own kernel does.
Left to the compiler it draws in the order of a deviation's strides where that was expanded."""

NAMESPACE = "fulgurite"


@functools.cache
def drawing(operation: OpOverload) -> OpOverload:
    """``fulgurite::<name>``: a new tensor into which an in-place operation of aten drew."""
    base, overload = operation._schema.name.partition("::")[2], operation._schema.overload_name
    name = base.removesuffix("_") + f".{overload}" * bool(overload)
    # by number: uniform_'s lower bound is called "from"
    more = "".join(f", {a.type} number_{i}" for i, a in enumerate(_arguments(operation)))
    make_library: Any = torch.library.Library
    library = make_library(NAMESPACE, "FRAGMENT")
    library.define(
        f"{name}(int[] size, int[] stride, ScalarType dtype{more}) -> Tensor",
        tags=(torch.Tag.nondeterministic_seeded,),
    )

    def draw(size: list[int], stride: list[int], dtype: torch.dtype, *args: Any) -> Tensor:
        drawn: Tensor = operation(torch.empty_strided(size, stride, dtype=dtype), *args)
        return drawn

    def fake(size: list[int], stride: list[int], dtype: torch.dtype, *args: Any) -> Tensor:
        return torch.empty_strided(size, stride, dtype=dtype)

    library.impl(name, draw, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=library)
    _LIBRARIES.append(library)
    packet = getattr(torch.ops.fulgurite, base.removesuffix("_"))
    return getattr(packet, overload or "default")  # type: ignore[no-any-return]


_LIBRARIES: list[Any] = []  # they must outlive the call that makes them


def functional_draws(graph: Graph) -> Graph:
    """Replace in-place draws, and draws like another tensor, by draws into tensors of their own."""
    drawing_operations = {*_LIKE, *_NORMALS}
    if not any(
        n.target in drawing_operations or draws_in_place(n.target) for n in graph.operations()
    ):
        return graph
    fresh = graph.copied()
    for node in list(fresh.nodes):
        if node.target in _LIKE:
            operation, arguments = _LIKE[node.target]
            _replace(node, _drawn(fresh, node, operation, arguments(*node.args)))
        elif node.target in _NORMALS:
            _replace(node, _normal(fresh, node))
        elif draws_in_place(node.target):
            target = node.args[0]
            given = tuple(node.args[1:]) + tuple(
                node.kwargs.get(argument.name, argument.default_value)
                for argument in _arguments(node.target)[len(node.args) - 1 :]
            )
            new = _drawn(fresh, node, node.target, given)
            # torch.empty(...).uniform_(): the tensor was made for the draw, so the draw takes its
            # place
            if _is_untouched(target, before=node):
                _replace(node, new)
                _replace(target, new)
            else:
                with graph.mode:
                    # the draw lies in memory of its own: by the fake that both would share, later
                    # passes would take it for the tensor that it is copied into
                    new.meta["val"] = like(new.meta["val"])
                with fresh.inserting_before(node):
                    written = fresh.call_function(_aten.copy_.default, (target, new))
                written.meta = dict(node.meta)
                _replace(node, written)
    return graph.with_operations(fresh)


def draws_in_place(target: object) -> bool:
    """Whether an operation fills its first argument, whatever was in it, with random numbers."""
    return getattr(target, "overloadpacket", None) in _IN_PLACE


def _arguments(operation: Any) -> list[Any]:
    """What an in-place operation takes besides its tensor and the generator."""
    return [a for a in operation._schema.arguments[1:] if a.name != "generator"]


def _drawn(
    graph: fx.Graph, node: fx.Node, operation: OpOverload, arguments: tuple[Any, ...]
) -> fx.Node:
    value = node.meta["val"]
    layout = (list(value.shape), list(value.stride()), value.dtype)
    with graph.inserting_before(node):
        new = graph.call_function(drawing(operation), (*layout, *arguments))
    new.meta = dict(node.meta)
    return new


def _normal(graph: fx.Graph, node: fx.Node) -> fx.Node:
    mean, std = node.args[:2]
    result = _drawn(graph, node, _aten.normal_.default, (0.0, 1.0))
    for operation, operand in ((_aten.mul, std), (_aten.add, mean)):
        overload = operation.Tensor if isinstance(operand, fx.Node) else operation.Scalar
        with graph.inserting_before(node):
            result = graph.call_function(overload, (result, operand))
        result.meta = dict(node.meta)
    return result


def _is_untouched(target: fx.Node, before: fx.Node) -> bool:
    """Whether a tensor is new and empty, and ``before`` is the first that has to do with it."""
    made_empty = getattr(target.target, "overloadpacket", None) in _EMPTY
    return made_empty and min(target.users) is before


def _replace(node: fx.Node, new: fx.Node) -> None:
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)
