"""What bounds a step, computed by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from graphs import graph_of
from torch import Tensor

from fulgurite.backends.csx.compile.host.library import has
from fulgurite.backends.csx.compile.programs.kernels import one_by_one
from fulgurite.backends.csx.costs.machine import Machine
from fulgurite.backends.csx.costs.roofline import Bound, Work, roofline, work_of
from fulgurite.backends.csx.graph.graph import Kind
from fulgurite.backends.csx.graph.products import products_of

HERE = Machine(name="here", flops_per_s=100.0, bytes_per_s=10.0, number_bytes=4)
WAFER = Machine(name="wafer", flops_per_s=1000.0, bytes_per_s=100.0, weights_bytes_per_s=4.0)
WORK = Work(flops=1000, state_bytes=40, other_bytes=80, parameters=10, number_bytes=4, batch_size=2)


def rows(work: Work = WORK, **options: tuple[int, ...]) -> list[Bound]:
    return list(roofline(work, HERE, (WAFER,), **options))


def test_this_machine_moves_its_state_and_streams_nothing() -> None:
    [first, second] = rows(batches=(1, 4), systems=())
    assert first == Bound(
        system="here",
        systems=1,
        batch_size=2,
        compute_s=10.0,
        memory_s=12.0,
        weights_s=0.0,
        bound="memory",
    )
    assert second == replace(first, batch_size=8, compute_s=40.0, memory_s=36.0, bound="compute")


def test_weights_come_and_gradients_go_whatever_the_batch() -> None:
    _, _, first, second = rows(batches=(1, 64), systems=(1,))
    assert first == Bound(
        system="wafer",
        systems=1,
        batch_size=2,
        compute_s=1.0,
        memory_s=0.4,  # 80 bytes in numbers of half the size
        weights_s=15.0,  # 10 numbers of 2 bytes, in twice and out
        bound="weight streaming",
    )
    assert second == replace(first, batch_size=128, compute_s=64.0, memory_s=25.6, bound="compute")


def test_systems_share_a_batch_but_not_the_weights() -> None:
    found = {(one.systems, one.batch_size): one for one in rows(batches=(1, 4), systems=(1, 2, 4))}
    assert (4, 2) not in found, "no system without a sample"
    assert found[4, 8].compute_s == pytest.approx(found[1, 2].compute_s)
    assert found[2, 8].memory_s == pytest.approx(2 * found[1, 2].memory_s)
    assert {one.weights_s for one in found.values() if one.system == "wafer"} == {15.0}


def test_the_work_of_a_step_is_its_products_its_state_and_the_rest() -> None:
    def step(weight: Tensor, x: Tensor) -> Tensor:
        y = x @ weight
        weight.copy_(weight * 0.5)
        return y.sum()

    graph = graph_of(step, torch.ones(8, 16), torch.ones(4, 8))
    batch = replace(graph.inputs[1], kind=Kind.BATCH)
    graph = replace(graph, inputs=(graph.inputs[0], batch))
    kernels, weight = one_by_one(graph, has), 8 * 16 * 4
    work = work_of(graph, kernels, products_of(graph), weight, batch_size=4)
    assert work == Work(
        flops=2 * 4 * 8 * 16,
        state_bytes=2 * weight,  # read, and written
        other_bytes=work.other_bytes,
        parameters=8 * 16,
        number_bytes=4,
        batch_size=4,
    )
    # x, the product written and read again, the sum; the weight a second time, its half twice
    assert work.other_bytes == 4 * (4 * 8 + 2 * 4 * 16 + 1) + 3 * weight
