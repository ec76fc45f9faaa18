"""What each pass does, on a graph of a few operations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from graphs import graph_of, operations
from torch import Tensor

from fulgurite.backends.csx.graph.graph import Graph, Kind
from fulgurite.backends.csx.graph.passes.cbfloat16 import to_cbfloat16
from fulgurite.backends.csx.graph.passes.cumulative import cast_before_sums
from fulgurite.backends.csx.graph.passes.draws import functional_draws
from fulgurite.backends.csx.graph.passes.factors import write_factors_out
from fulgurite.backends.csx.graph.passes.fold import fold_zeros
from fulgurite.backends.csx.graph.passes.functionalize import functionalize
from fulgurite.backends.csx.graph.passes.prune import prune
from fulgurite.backends.csx.graph.passes.realize import realize_scalars
from fulgurite.backends.csx.graph.passes.recompose import use_kernels
from fulgurite.backends.csx.graph.passes.rename import drop_renames
from fulgurite.backends.csx.graph.passes.simplify import simplify
from fulgurite.backends.csx.graph.verify import verify

X = torch.ones(4)


def run(graph: Graph, *inputs: Tensor) -> list[Tensor]:
    """What a graph returns."""
    outputs: list[Tensor] = graph.module(*inputs)
    return outputs


def test_drop_renames_leaves_no_operation_that_only_renames() -> None:
    graph = drop_renames(graph_of(lambda x: x.detach() + 1, X))
    verify(graph)
    assert operations(graph) == ["aten.add.Tensor"]


def test_functional_draws_draw_what_was_drawn_in_place() -> None:
    graph = functional_draws(graph_of(lambda x: torch.empty_like(x).bernoulli_(0.5), X))
    verify(graph)
    assert "fulgurite.bernoulli.float" in operations(graph)
    assert not any("bernoulli_" in name for name in operations(graph))
    torch.manual_seed(3)
    expected = torch.empty(4).bernoulli_(0.5)
    torch.manual_seed(3)
    assert torch.equal(run(graph, X)[0], expected)


def test_functionalize_writes_each_state_once_at_the_end() -> None:
    def step(x: Tensor) -> Tensor:
        x.add_(1)
        x.mul_(2)
        return x.sum()

    graph = functionalize(graph_of(step, X))
    verify(graph)
    *pure, write = operations(graph)
    assert write == "aten.copy_.default"
    assert not any(name.partition(".")[2].partition(".")[0].endswith("_") for name in pure)
    assert graph.written() == {0}


def test_write_factors_out_gives_a_sum_a_product_of_its_dtype() -> None:
    def step(x: Tensor, y: Tensor, n: Tensor) -> Any:
        return x.add(y, alpha=0.5), x.sub(y, alpha=2), x.add(y), x.half().add(n, alpha=0.5)

    inputs = X, torch.arange(4.0), torch.arange(4)
    graph = graph_of(step, *inputs)
    written = write_factors_out(graph)
    verify(written)
    assert operations(written).count("aten.mul.Tensor") == 2
    sums = written.module.graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor)
    assert [dict(node.kwargs) for node in sums] == [{}, {}, {"alpha": 0.5}]
    pairs = zip(run(written, *inputs), run(graph, *inputs), strict=True)
    assert all(torch.equal(a, b) and a.dtype is b.dtype for a, b in pairs)


def test_cast_before_sums_keeps_the_dtype_that_the_compiler_loses() -> None:
    def step(x: Tensor) -> Any:
        halves = torch.full((4,), 0.5)
        return x.cumsum(0, dtype=torch.int64), halves.cumsum(0, dtype=torch.int64), x.cumsum(0)

    graph = graph_of(step, X)
    written = cast_before_sums(graph)
    verify(written)
    sums = written.module.graph.find_nodes(op="call_function", target=torch.ops.aten.cumsum.default)
    assert [dict(node.kwargs) for node in sums] == [{}, {}, {}]
    pairs = zip(run(written, X), run(graph, X), strict=True)
    assert all(torch.equal(a, b) and a.dtype is b.dtype for a, b in pairs)


def test_fold_zeros_leaves_out_the_zero_a_gradient_is() -> None:
    graph = graph_of(lambda zero, x: zero + x * 2, torch.zeros(4), X)
    zero = replace(graph.inputs[0], kind=Kind.GRADIENT, zero=True)
    folded = fold_zeros(replace(graph, inputs=(zero, graph.inputs[1])))
    verify(folded)
    assert operations(folded) == ["aten.mul.Tensor"]
    assert fold_zeros(graph) is graph


def test_simplify_merges_what_is_computed_twice_but_no_draws() -> None:
    def step(x: Tensor) -> Any:
        (x * 5).sum()  # nobody reads it
        return x.exp() + x.exp(), torch.rand_like(x) + torch.rand_like(x)

    graph = simplify(graph_of(step, X))
    verify(graph)
    names = operations(graph)
    assert [names.count(f"aten.{name}.default") for name in ("exp", "rand_like")] == [1, 2]
    assert "aten.mul.Tensor" not in names


def test_prune_drops_inputs_without_a_reader() -> None:
    graph = prune(graph_of(lambda x, unread: x + 1, X, torch.ones(2)))
    verify(graph)
    assert [item.name for item in graph.inputs] == ["input 0"]


def test_realize_puts_a_barrier_between_a_scalar_and_its_loops() -> None:
    graph = realize_scalars(graph_of(lambda x, s: x * s.exp(), X, torch.tensor(2.0)))
    verify(graph)
    assert operations(graph) == [
        "aten.exp.default",
        "fulgurite.realize.default",
        "aten.mul.Tensor",
    ]


def test_to_cbfloat16_computes_in_float32_and_rounds_once() -> None:
    graph = to_cbfloat16(graph_of(lambda x: (x.bfloat16() * 3).float(), X))
    verify(graph)
    assert operations(graph)[:3] == [
        "fulgurite.cbfloat16.default",
        "aten.mul.Tensor",
        "fulgurite.cbfloat16.default",
    ]
    third = torch.full((4,), 1 / 3)
    assert run(graph, third)[0].tolist() == [1.0] * 4


def test_use_kernels_converts_and_pools_by_one_operation_each() -> None:
    x = torch.arange(2.0 * 3 * 8 * 8).sin().reshape(2, 3, 8, 8)

    def step(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        values, indices = torch.nn.functional.max_pool2d(x, 3, 2, 1, return_indices=True)
        return values, indices, values.to(torch.float64).to(torch.bfloat16)

    decomposed = functionalize(graph_of(step, x))
    graph = use_kernels(decomposed)
    verify(graph)
    assert "prims.convert_element_type.default" in operations(decomposed)
    assert not any(name.startswith("prims.") for name in operations(graph))
    assert "aten.max_pool2d_with_indices.default" in operations(graph)
    assert all(map(torch.equal, run(graph, x), step(x)))


def test_use_kernels_pools_where_nobody_asks_for_indices() -> None:
    x = torch.arange(64.0).sin().reshape(1, 1, 8, 8)
    graph = use_kernels(functionalize(graph_of(lambda x: torch.nn.functional.max_pool2d(x, 2), x)))
    verify(graph)
    assert not any(name.startswith("prims.") for name in operations(graph))
    assert torch.equal(run(graph, x)[0], torch.nn.functional.max_pool2d(x, 2))
