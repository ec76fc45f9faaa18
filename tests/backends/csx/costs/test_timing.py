"""The predicted time of each call, by figures that are given; benchmarks/predicted.py measures."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from graphs import graph_of, operations
from torch import Tensor

from fulgurite.backends.csx.compile.host.library import has
from fulgurite.backends.csx.compile.programs.kernels import KernelCall, Kernels, Maker, one_by_one
from fulgurite.backends.csx.costs.machine import CS2, Curve, Machine, Measured
from fulgurite.backends.csx.costs.timing import predicted_s

KINDS = ("convolution", "convolution_backward", "attention", "attention_backward")
MEASURED = Measured(
    products={
        "mm": Curve(((1, 1e-9), (1e6, 1e-3))),
        "narrow": Curve(((1, 2e-9), (1e6, 2e-3))),
        **{
            name: Curve(((1, (3 + i) * 1e-9), (1e6, (3 + i) * 1e-3)))
            for i, name in enumerate(KINDS)
        },
    },
    memory=Curve(((1, 1e-10), (1e6, 1e-4))),
    elements_s={"exp": 1e-6, "tanh": 2e-6, "where": 3e-6, "var_mean": 4e-6, "max_pool": 5e-6},
    operation_s=1.0,
    view_s=0.5,
    library_s=0.25,
    generated_s=0.125,
)
HERE = Machine(name="here", flops_per_s=1e9, bytes_per_s=1e10, measured=MEASURED)


def test_a_product_takes_its_call_and_its_flops() -> None:
    graph = graph_of(torch.mm, torch.ones(16, 32), torch.ones(32, 16))
    assert predicted_s(graph, one_by_one(graph, has), HERE) == pytest.approx(
        [1 + 2 * 16**2 * 32e-9]
    )


def test_a_batch_of_products_takes_as_long_as_each_of_them() -> None:
    graph = graph_of(torch.bmm, torch.ones(3, 16, 32), torch.ones(3, 32, 16))
    one_s = MEASURED.products["mm"].seconds(2 * 16**2 * 32)
    assert predicted_s(graph, one_by_one(graph, has), HERE) == pytest.approx([1 + 3 * one_s])


def test_a_narrow_product_is_slower() -> None:
    graph = graph_of(torch.mm, torch.ones(16, 32), torch.ones(32, 4))
    assert predicted_s(graph, one_by_one(graph, has), HERE) == pytest.approx(
        [1 + 2 * 2 * 16 * 32 * 4e-9]
    )


def test_convolutions_and_attention_have_curves_of_their_own() -> None:
    def step(x: Tensor, weight: Tensor, q: Tensor) -> list[Tensor]:
        y, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, q, q)
        gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            y, q, q, q, y, logsumexp, 0.0, False
        )
        return [torch.conv2d(x, weight), *gradients]

    tensors = torch.ones(2, 3, 8, 8), torch.ones(4, 3, 3, 3), torch.ones(1, 2, 8, 4)
    graph = graph_of(step, *tensors)
    found = dict(
        zip(operations_called(graph), predicted_s(graph, no_views(graph), HERE), strict=True)
    )
    convolution, attention = 2 * 2 * 4 * 36 * 27, 2 * 2 * 2 * 8 * 8 * 4
    assert found["aten.convolution.default"] == pytest.approx(1 + 3e-9 * convolution)
    names = "aten._scaled_dot_product_flash_attention_for_cpu{}.default"
    assert found[names.format("")] == pytest.approx(1 + 5e-9 * attention)
    assert found[names.format("_backward")] == pytest.approx(1 + 6e-9 * 2.5 * attention)


def operations_called(graph: object) -> list[str]:
    return [call.kernel for call in one_by_one(graph, has).calls]  # type: ignore[arg-type]


def no_views(graph: object) -> Kernels:
    """What runs a graph one by one, as a program whose views take no time."""
    return replace(one_by_one(graph, has), program="def call")  # type: ignore[arg-type]


def test_an_operation_takes_as_long_as_moving_its_bytes_or_computing_its_elements() -> None:
    graph = graph_of(lambda x: (x + 1, x.exp(), x.tanh()), torch.ones(100))
    moved = 2 * 400e-10
    assert predicted_s(graph, one_by_one(graph, has), HERE) == pytest.approx(
        [1 + moved, 1 + 100e-6, 1 + 200e-6]
    )


def test_a_generated_kernel_is_called_once_and_moves_only_what_leaves_it() -> None:
    x = torch.ones(1000)
    graph = graph_of(lambda x: ((x + 1) * 2).relu(), x)
    call = KernelCall(kernel="kernel_1", maker=Maker.GENERATED, operations=(0, 1, 2))
    kernels = Kernels(calls=(call,), program="def call")
    assert operations(graph)[-1] == "aten.relu.default"
    assert predicted_s(graph, kernels, HERE) == pytest.approx([0.125 + 8000e-10])


def test_what_torch_alone_is_slow_at_is_not_slow_in_a_generated_kernel() -> None:
    graph = graph_of(lambda x: torch.where(x > 0, x, 1.0), torch.ones(100))
    assert "aten.where.self" in operations(graph)
    i = operations(graph).index("aten.where.self")
    by_torch = predicted_s(graph, one_by_one(graph, has), HERE)
    calls = tuple(replace(call, maker=Maker.GENERATED) for call in one_by_one(graph, has).calls)
    generated = predicted_s(graph, Kernels(calls=calls, program="def call"), HERE)
    number = operations_called(graph).index("aten.where.self")
    assert by_torch[number] == pytest.approx(1 + 100 * 3e-6)
    assert generated[number] < 0.126, i


def test_a_librarys_product_writes_into_memory_that_a_compiled_program_has() -> None:
    graph = graph_of(torch.mm, torch.ones(16, 32), torch.ones(32, 16))
    [seconds] = predicted_s(graph, no_views(graph), HERE)
    assert seconds == pytest.approx(0.25 + 2 * 16**2 * 32e-9)


def test_views_take_time_where_operations_run_one_by_one() -> None:
    graph = graph_of(lambda x: (x + 1).view(4, 25).t() * 2, torch.ones(100))
    assert len(operations(graph)) == 4
    first, last = predicted_s(graph, one_by_one(graph, has), HERE)
    assert (first, last) == pytest.approx((2 + 800e-10, 1 + 800e-10))


def test_on_another_machine_a_call_takes_what_the_roofline_says() -> None:
    graph = graph_of(lambda a, b: (a @ b).relu(), torch.ones(16, 32), torch.ones(32, 16))
    wafer = replace(CS2, flops_per_s=1e3, bytes_per_s=1e3)
    kernels = one_by_one(graph, has)
    assert predicted_s(graph, kernels, wafer) == pytest.approx(
        [2 * 16**2 * 32 / 1e3, 2 * 1024 / 1e3]
    )


def test_another_result_of_a_call_takes_no_time() -> None:
    graph = graph_of(torch.mm, torch.ones(16, 32), torch.ones(32, 16))
    [call] = one_by_one(graph, has).calls
    first, second = predicted_s(graph, Kernels(calls=(call, call), program="def call"), HERE)
    assert (first > 0.25, second) == (True, 0.0)


def test_a_product_is_the_librarys_call_even_where_a_kernel_before_names_it() -> None:
    graph = graph_of(lambda a, b: (a @ b).relu(), torch.ones(16, 32), torch.ones(32, 16))
    product, after = one_by_one(graph, has).calls
    kernel = replace(after, maker=Maker.GENERATED, operations=(0, 1))
    kernels = Kernels(calls=(kernel, product, kernel), program="def call")
    first, second, third = predicted_s(graph, kernels, HERE)
    assert second == pytest.approx(0.25 + 2 * 16**2 * 32e-9)
    assert first < 0.126 > third
