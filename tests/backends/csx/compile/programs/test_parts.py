"""A graph in parts gives what it gives as a whole; equal parts are one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cutting import in_pieces, run
from graphs import graph_of
from harness import assert_same_run, fit
from models import Classifier, loader
from torch import Tensor, nn

from fulgurite.backends.csx.compile.inductor import generate as inductor
from fulgurite.backends.csx.compile.programs import parts
from fulgurite.backends.csx.compile.programs.item_order import ItemOrder
from fulgurite.backends.csx.compile.programs.parts import Call, Division, ViewBetween, divided
from fulgurite.backends.csx.graph.graph import Graph

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def all_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs of tests are divided as large ones are."""
    monkeypatch.setattr(parts, "SMALL", 0)


def layer(x: Tensor, weight: Tensor) -> Tensor:
    """Twelve operations, some of them views, and one with two results."""
    a, b = (x @ weight.T).chunk(2, 1)
    y = (a.sin() * b.cos() + 1).sigmoid()
    spread, mean = torch.var_mean(y, 1, correction=0, keepdim=True)
    y = (y - mean) / (spread + 1e-5).sqrt()
    return x + torch.cat([y, y], 1).exp().tanh() * 0.1


def deep(x: Tensor, *weights: Tensor) -> list[Tensor]:
    """Layers, then an update of each weight."""
    first = x
    for weight in weights:
        x = layer(x, weight)
    for weight in weights:
        gradient = (x.mT @ first) * weight.abs().sqrt()
        aten.copy_(weight, weight * 0.99 - gradient * 0.1 + weight.square().exp().log() * 0.01)
    return [x.sum(), x.mean(0)]


def tensors(count: int, size: int = 8) -> list[Tensor]:
    """x [4, size], and ``count`` weights [size, size]."""
    torch.manual_seed(0)
    return [torch.randn(4, size), *(torch.randn(size, size) for _ in range(count))]


def same(graph: Graph, division: Division | None, inputs: list[Tensor]) -> None:
    """Assert that a division gives and changes, to the bit, what the graph does."""
    assert division is not None
    whole, ours = [[x.clone() for x in inputs] for _ in range(2)]
    wanted = graph.module(*whole)
    for a, b in zip([*wanted, *whole], [*run(division, ours), *ours], strict=True):
        assert torch.equal(a, b)


def calls(division: Division | None) -> list[int]:
    assert division is not None
    return [call.part for call in division.calls if isinstance(call, Call)]


def test_equal_layers_and_their_updates_are_one_part_each() -> None:
    inputs = tensors(12)
    graph = graph_of(deep, *inputs)
    division = divided(graph)
    assert division is not None
    counts = sorted(calls(division).count(i) for i in range(len(division.parts)))
    assert counts[-1] >= 6
    operations = sum(len(part.module.graph.nodes) for part in division.parts)
    assert operations < len(graph.module.graph.nodes) / 2
    same(graph, division, inputs)


def test_more_layers_are_no_more_parts() -> None:
    few, many = (divided(graph_of(deep, *tensors(count))) for count in (12, 36))
    assert few is not None
    assert many is not None
    assert sum(len(part.text) for part in many.parts) < 2 * sum(len(p.text) for p in few.parts)


@pytest.mark.parametrize("length", [1, 3, 8, 20])
def test_a_graph_cut_anywhere_gives_the_same(length: int) -> None:
    inputs = tensors(4)
    graph = graph_of(deep, *inputs)
    same(graph, in_pieces(graph, length), inputs)


def recurrent(x: Tensor, weight: Tensor) -> list[Tensor]:
    state = torch.zeros(len(x), 8)
    for t in range(x.shape[1]):
        state = (x[:, t] @ weight + state.sin()).tanh() * state.cos() + state.sigmoid().exp().log()
    return [state]


def test_time_steps_are_one_part_that_is_given_its_step() -> None:
    inputs = [torch.randn(4, 60, 8), torch.randn(8, 8)]
    graph = graph_of(recurrent, *inputs)
    division = divided(graph)
    assert division is not None
    assert sum(isinstance(call, ViewBetween) for call in division.calls) >= 50
    assert sum(len(part.module.graph.nodes) for part in division.parts) < 300
    same(graph, division, inputs)


def target_network(online: Tensor, target: Tensor, x: Tensor) -> list[Tensor]:
    """The target takes the online weights before they are updated."""
    loss = (x @ online - x @ target).square().sum()
    fresh = online - 0.1 * (x.mT @ (x @ online))
    aten.copy_(target, online)
    aten.copy_(online, fresh)
    return [loss]


def old_value(state: Tensor, x: Tensor) -> list[Tensor]:
    """A copy of a state is read after the state was written."""
    before = state.clone()
    y, z = (x @ state).sin().cos(), before.exp()
    aten.copy_(state, state + x.sum())
    return [y, z, before]


def views(state: Tensor, x: Tensor) -> list[Tensor]:
    """What is returned is a view; a view of a state is read late."""
    turned = state.mT[1:]
    y = x.sin().cos().exp()
    fresh = y @ state
    z, flat, first = (turned.abs() + 1).log().sum(), y.reshape(-1), y[0]
    aten.copy_(state, fresh)
    return [flat, z, first]


@pytest.mark.parametrize("length", [1, 2, 3])
@pytest.mark.parametrize("step", [target_network, old_value, views])
def test_states_are_written_when_nobody_reads_their_old_values(
    step: Callable[..., list[Tensor]], length: int
) -> None:
    torch.manual_seed(0)
    count = 3 if step is target_network else 2
    inputs = [torch.randn(4, 4) for _ in range(count)]
    graph = graph_of(step, *inputs)
    same(graph, in_pieces(graph, length), inputs)


def writes_a_result(x: Tensor) -> list[Tensor]:
    y = x.sin()
    y.add_(1)
    return [y.cos()]


def reads_what_it_wrote(x: Tensor) -> list[Tensor]:
    aten.copy_(x, x.sin())
    return [x.cos()]


@pytest.mark.parametrize("step", [writes_a_result, reads_what_it_wrote])
def test_what_writes_elsewhere_than_at_the_end_is_one_part(
    step: Callable[..., list[Tensor]],
) -> None:
    assert ItemOrder.of(graph_of(step, torch.randn(3))) is None


def test_a_small_graph_and_one_without_repetition_are_one_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inputs = tensors(12)
    graph = graph_of(deep, *inputs)
    monkeypatch.setattr(parts, "SMALL", 10_000)
    assert divided(graph) is None
    monkeypatch.setattr(parts, "SMALL", 0)

    def different(x: Tensor) -> list[Tensor]:
        for i in range(1, 60):
            x = (x * i).sin()
        return [x]

    assert divided(graph_of(different, torch.randn(3))) is None


class Tower(nn.Module):
    """Equal layers with BatchNorm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(8, 16)
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.Linear(16, 16, bias=False), nn.BatchNorm1d(16), nn.GELU(), nn.Dropout(0.2)
            )
            for _ in range(8)
        )
        self.out = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        for one in self.layers:
            x = x + one(x)
        return self.out(x)


def tower(static: bool, folder: Path | None = None) -> Any:
    """A fit, compiled if static."""
    return fit(
        lambda: Classifier(Tower()),
        lambda: (loader(128, 16),),
        static=static,
        policy="default",
        backend={"compile_dir": folder},
        enable_model_summary=False,
    )


class OldValues(Classifier):
    """Each layer writes a buffer, and reads what was in it before: all of it, and a slice.

    In the first step, which is compared with torch's kernels anyway, old and new are equal.
    """

    def __init__(self) -> None:
        super().__init__(nn.ModuleList(nn.Linear(8, 8) for _ in range(10)))
        self.out = nn.Linear(8, 4)
        for i in range(len(self.net)):
            self.register_buffer(f"state_{i}", torch.zeros(16, 8))
        self.register_buffer("weight", torch.tensor(0.0))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        h = batch[0]
        before = h.detach()
        for i, layer in enumerate(self.net):
            state = getattr(self, f"state_{i}")
            old = state.clone()
            state += self.weight * before
            state[:, 1:4] += self.weight * old[:, 4:7].cos()
            h = torch.tanh(layer(h)) + old[:, 2:3] * 0.1
            before = old + h.detach()
        self.weight.add_(0.1)
        loss = nn.functional.cross_entropy(self.out(h), batch[1])
        self.log("loss", loss)
        return loss


@pytest.mark.long
@pytest.mark.numbers
@pytest.mark.compiler
@pytest.mark.parametrize("length", [0, 5, 30])
def test_compiled_in_parts_a_step_reads_old_values_of_what_it_writes(
    length: int, programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if length:
        monkeypatch.setattr(inductor, "divided", lambda graph: in_pieces(graph, length))
    ours, stock = (
        fit(
            OldValues,
            lambda: (loader(96, 16),),
            static=static,
            policy="default",
            backend={"compile_dir": programs / str(length)},
        )
        for static in (True, False)
    )
    [executable] = ours.trainer.strategy.step_functions["training"].executables()
    assert executable.loaded.compiled
    assert_same_run(ours, stock)


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("programs")


@pytest.mark.long
@pytest.mark.numbers
@pytest.mark.compiler
def test_compiled_in_parts_layers_give_stocks_numbers(programs: Path) -> None:
    """With the same masks, and running statistics of each layer its own."""
    ours, stock = tower(True, programs), tower(False)
    [executable] = ours.trainer.strategy.step_functions["training"].executables()
    assert executable.loaded.compiled
    division = divided(executable.loaded.graph)
    assert division is not None
    assert max(calls(division).count(i) for i in range(len(division.parts))) >= 4
    assert_same_run(ours, stock)
