"""Turn bfloat16, with which a step of a cbfloat16 run is traced, into cbfloat16.

Every result of the stand-in's type is computed in float32 from float32 arguments and rounded once.
The results of *exact* operations are on the grid already: those that move data, and those that
choose among their arguments. The pass comes before decomposition, so that the results are those of
the operations which the step called: inside a softmax, a norm or an attention all is float32.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.fx.node import map_aggregate

from fulgurite.backends.csx.diagnostics.trace_errors import UnsupportedDtype
from fulgurite.backends.csx.diagnostics.user_lines import line_of
from fulgurite.backends.csx.graph import dtypes as fmt
from fulgurite.backends.csx.graph.dtypes import NARROW, STAND_IN, Facts, representable
from fulgurite.backends.csx.graph.graph import Graph, Kind, like
from fulgurite.backends.csx.graph.op_schema import (
    arguments_of,
    is_alias,
    operation_name,
    written_nodes,
)

_aten: Any = torch.ops.aten

_CHOOSE = frozenset(
    (
        *("clone", "copy", "_to_copy", "cat", "stack", "flip", "roll", "repeat", "_unsafe_view"),
        *("constant_pad_nd", "slice_backward", "select_backward", "slice_scatter"),
        *("select_scatter", "tril", "triu", "where", "masked_fill", "fill", "zero"),
        *("zeros", "zeros_like", "new_zeros", "ones", "ones_like", "new_ones", "full"),
        *("full_like", "new_full", "empty", "empty_like", "new_empty", "empty_strided"),
        *("relu", "threshold_backward", "neg", "abs", "sign", "maximum", "minimum", "max", "min"),
        *("amax", "amin", "clamp", "clamp_min", "clamp_max", "hardtanh", "sort", "topk"),
        *("max_pool2d_with_indices", "bernoulli"),
    )
)
_INDEX = frozenset(
    ("gather", "index", "_unsafe_index", "index_select", "embedding", "index_put", "scatter")
)
"""Exact operations by name, without overload and final underscore; those of the second may have
arguments of integers, which they do not turn into results. One that is left out is only rounded in
vain: what is on the grid stays where it is."""

EXACT = _CHOOSE | _INDEX
_DECIDE = ("bernoulli", "threshold_backward")  # whose numbers are compared with, no results
_NUMBERS = ("number", "float", "Optional[number]", "Optional[float]")
_BELOW_ONE = 1 - 2.0**-10  # rounded, one draw in 2048 would be the 1 that eagerly none is


@functools.cache
def rounding() -> Any:
    """``fulgurite::cbfloat16``: ``cbfloat16.rounded`` as one operation of a graph."""
    make_library: Any = torch.library.Library
    library = make_library("fulgurite", "FRAGMENT")
    library.define("cbfloat16(Tensor x) -> Tensor")
    library.impl("cbfloat16", fmt.rounded, "CompositeExplicitAutograd")
    rounding.library = library  # type: ignore[attr-defined]  # it must outlive this call
    return torch.ops.fulgurite.cbfloat16.default


def to_cbfloat16(graph: Graph) -> Graph:
    """Compute the stand-in's results in float32, each rounded once to cbfloat16.

    Raises:
        UnsupportedDtype: an input is of a 16-bit type, or an operation looks at the bits of one.
    """
    _check_inputs(graph)
    fresh = graph.copied()
    for node in list(fresh.nodes):
        if node.op == "call_function":
            _replace(fresh, node)
    # only now: what became of an operation above was decided by the types that were noted of its
    # operands
    with graph.mode:
        for node in fresh.nodes:
            if node.op == "call_function" and "val" in node.meta:
                node.meta["val"] = pytree.tree_map_only(Tensor, _held, node.meta["val"])
    return graph.with_operations(fresh)


def _held(x: Tensor) -> Tensor:
    """What the graph notes of a value: the stand-in's type is held in float32."""
    return like(x, torch.float32) if x.dtype is STAND_IN else x


def _check_inputs(graph: Graph) -> None:
    for item, node in zip(graph.inputs, graph.placeholders(), strict=True):
        if item.example.dtype in NARROW and node.users:
            constant = item.kind is Kind.CONSTANT
            name = "A tensor that no module holds" if constant else item.name
            dtype = str(item.example.dtype).removeprefix("torch.")
            raise UnsupportedDtype(
                f"{name} is {dtype}. In a cbfloat16 run what the step is given is float32, and"
                " rounded where the step computes in cbfloat16.",
                line=next((line for user in node.users if (line := line_of(user))), None),
                remedy="x.float(), in the dataset or where the module makes it",
            )


def _replace(graph: fx.Graph, node: fx.Node) -> None:
    """Let one operation compute in float32, and round what it makes."""
    _check_operation(node)
    exact, result = _is_exact(node), _is_narrow(node) and not _is_alias(node)
    if result and _is_cast(node):
        node.target, node.kwargs = rounding(), {}
        return
    if operation_name(node.target) == "nan_to_num" and _is_narrow(node):
        node.args = _with_limits(*node.args)
    node.args, node.kwargs = map_aggregate((node.args, node.kwargs), _widened)
    if exact:
        return
    with graph.inserting_before(node.next):
        for written in filter(_is_narrow, written_nodes(node)):
            _call(graph, _aten.copy_.default, (written, _rounded(graph, written, node)), node)
        if result:
            # before the rounding, which is about to be one of them
            users = list(node.users)
            once = _rounded(graph, node, node)
            for user in users:
                user.replace_input_with(node, once)


def _call(graph: fx.Graph, target: Any, args: tuple[Any, ...], source: fx.Node) -> fx.Node:
    """A new operation with the line and the type of an old one."""
    node = graph.call_function(target, args)
    node.meta = dict(source.meta)
    return node


def _rounded(graph: fx.Graph, value: fx.Node, source: fx.Node) -> fx.Node:
    once = _call(graph, rounding(), (value,), source)
    name = operation_name(source.target)
    if name == "rand" or (name == "uniform" and source.args[-1] == 1):
        once = _call(graph, _aten.clamp_max.default, (once, _BELOW_ONE), source)
    return once


def _with_limits(x: Any, nan: Any = None, above: Any = None, below: Any = None) -> tuple[Any, ...]:
    """Arguments of ``nan_to_num``: what stands for infinity is the type's largest number."""
    facts = Facts()
    return x, nan, facts.max if above is None else above, facts.min if below is None else below


def _is_cast(node: fx.Node) -> bool:
    """Whether a node turns float32 into another type, and no more."""
    more = node.kwargs.keys() - {"dtype", "layout", "device"}  # one device, one layout
    cast = node.target is _aten._to_copy.default and not more
    return cast and node.all_input_nodes[0].meta["val"].dtype is torch.float32


def _widened(leaf: Any) -> Any:
    return torch.float32 if leaf is STAND_IN else leaf


def _is_narrow(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.dtype is STAND_IN


def _given(node: fx.Node) -> Iterator[tuple[Any, Any]]:
    """The arguments of an operation: what its schema says of each, and the value."""
    arguments = arguments_of(node.target)
    yield from zip(arguments, node.args, strict=False)
    yield from ((argument, node.kwargs.get(argument.name)) for argument in arguments)


def _part(node: fx.Node) -> tuple[fx.Node, int]:
    """The operation that made a value, and the value's position among its results."""
    if node.target is not operator.getitem:
        return node, 0
    operation, index = node.args
    assert isinstance(operation, fx.Node)
    assert isinstance(index, int)
    return operation, index


def _is_alias(node: fx.Node) -> bool:
    """Whether a result is memory of an argument: a view, or what was changed in place."""
    operation, index = _part(node)
    return is_alias(operation.target, index)


def _is_exact(node: fx.Node) -> bool:
    """Whether what an operation makes of numbers on the grid is on the grid."""
    node, _ = _part(node)
    name = operation_name(node.target)
    # a scatter that reduces and an index_put that accumulates compute sums, which leave the grid
    adds = "reduce" in str(node.target) or (name == "index_put" and node.args[3:] == (True,))
    if name not in EXACT or adds:
        return False
    dtypes = {n.meta["val"].dtype for n in node.all_input_nodes}
    if not dtypes <= {STAND_IN, torch.bool, *((torch.int64, torch.int32) * (name in _INDEX))}:
        return False
    numbers = [value for argument, value in _given(node) if str(argument.type) in _NUMBERS]
    return name in _DECIDE or all(representable(n) for n in numbers if n is not None)


def _check_operation(node: fx.Node) -> None:
    """Refuse operations that would not do in float32 what they do with 16 bits."""
    if node.target is _aten.view.dtype:
        done = "A view gave the bits of a cbfloat16 another type"
    elif not isinstance(node.target, OpOverload) and node.target is not operator.getitem:
        done = f"{node.target} computed with cbfloat16"
    else:
        return
    if any(map(_is_narrow, (node, *node.all_input_nodes))):
        raise UnsupportedDtype(
            f"{done}, which the program has only as float32.",
            line=line_of(node),
            remedy="float32: x.float()",
        )
