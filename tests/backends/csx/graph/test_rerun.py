"""A graph that is run again changes nothing."""

from __future__ import annotations

import contextlib

import torch
from graphs import graph_of
from torch import Tensor

from fulgurite.backends.csx.graph.verify import on_copies


def step(weight: Tensor, batch: Tensor) -> Tensor:
    weight.add_(batch * torch.rand(3))
    return weight.sum()


def test_inputs_that_are_written_are_copied_and_draws_come_again() -> None:
    inputs = [torch.zeros(3), torch.ones(3)]
    graph = graph_of(step, *inputs)
    states = torch.get_rng_state()
    sums = []
    for _ in range(2):
        with on_copies(graph, inputs) as copies:
            sums.append(graph.module(*copies)[0])
        assert copies[0].sum() == sums[-1] > 0
    assert sums[0] == sums[1]
    assert inputs[0].eq(0).all()
    assert copies[1] is inputs[1]
    assert torch.equal(torch.get_rng_state(), states)


def test_the_random_state_is_put_back_after_an_error() -> None:
    inputs = [torch.zeros(3), torch.ones(3)]
    states = torch.get_rng_state()
    with contextlib.suppress(IndexError), on_copies(graph_of(step, *inputs), inputs):
        torch.rand(3)
        raise IndexError
    assert torch.equal(torch.get_rng_state(), states)
