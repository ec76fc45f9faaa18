"""A step as it was traced, and the passes that run when somebody looks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from graphs import graph_of, operations
from harness import assert_same_run, both, fit
from models import CLASSES, Classifier, convnet, loader, mlp, pictures
from torch import Tensor, nn

from fulgurite.backends.csx.compile.store.fingerprint import program_key
from fulgurite.backends.csx.graph.graph import Graph, Kind, LazyGraph
from fulgurite.backends.csx.graph.passes import as_traced, observing_passes
from fulgurite.backends.csx.graph.passes.as_traced import changed_early, lowered


@pytest.fixture(name="never_lowered")
def _never_lowered(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*of: Any) -> Any:
        raise AssertionError("somebody looked at a step's operations")

    monkeypatch.setattr(as_traced, "lower", fail)
    monkeypatch.setattr(as_traced, "are_observed", lambda: False)  # as by ``--verify``


def test_passes_run_once_when_somebody_looks() -> None:
    seen: list[str] = []
    graph = lowered(graph_of(lambda a: a.mul_(2).sum(), torch.ones(3)))
    assert isinstance(graph, LazyGraph)
    assert "aten.mul_.Tensor" in operations(graph.runs)
    module = graph.module
    with observing_passes(lambda name, *_: seen.append(name)):
        assert graph.module is module
        assert operations(graph) == ["aten.mul.Tensor", "aten.sum.default", "aten.copy_.default"]
    assert seen == []
    assert graph.written() == frozenset((0,))


def test_whoever_looks_at_passes_sees_them_at_once() -> None:
    seen: list[str] = []
    with observing_passes(lambda name, *_: seen.append(name)):
        lowered(graph_of(lambda a: a * 2, torch.ones(3)))
    assert seen[0] == "write_updates_out"


def test_what_only_passes_find_to_be_unread_stays_an_input() -> None:
    def zeros(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return torch.zeros_like(a) + b

    graph = lowered(graph_of(zeros, *(torch.ones(3) for _ in range(3)), kind=Kind.BATCH))
    assert [item.name for item in graph.inputs] == ["input 0", "input 1"]  # nothing takes c
    inputs = [torch.rand(3), torch.rand(3)]
    [right], [found] = graph.runs.module(*inputs), graph.module(*inputs)
    assert torch.equal(found, right)
    assert [not node.users for node in graph.placeholders()] == [True, False]


@pytest.mark.parametrize("training", [True, False])
def test_statistics_are_written_in_training(training: bool) -> None:
    def norm(x: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        return torch.native_batch_norm(x, None, None, mean, var, training, 0.1, 1e-5)[0]

    tensors = torch.rand(4, 3), torch.zeros(3), torch.ones(3)
    graph = lowered(graph_of(norm, *tensors))
    assert graph.written() == frozenset((1, 2) if training else ())
    assert graph.written() == Graph.written(graph)  # of the operations that the compiler gets


@pytest.mark.parametrize("writes", [lambda a: a[1:].zero_(), lambda a: a.t().copy_(a)])
def test_a_write_by_a_view_is_one(writes: Any) -> None:
    graph = lowered(graph_of(lambda a: [writes(a).sum()], torch.ones(3, 3)))
    assert graph.written() == Graph.written(graph) == frozenset((0,))


@pytest.mark.parametrize(("looks", "early"), [(False, []), (True, [0])])
def test_a_norm_never_fails_for_values_and_a_lookup_may(looks: bool, early: list[int]) -> None:
    def clipped(a: Tensor, b: Tensor, i: Tensor) -> Tensor:
        a.mul_(2)
        return torch.linalg.vector_norm(b) + (b[i].sum() if looks else 0)

    tensors = torch.ones(3), torch.ones(3), torch.zeros(2, dtype=torch.int64)
    assert changed_early(lowered(graph_of(clipped, *tensors)).runs) == early


@pytest.mark.parametrize("turns", [lambda y: y, lambda y: y.detach()])
def test_what_is_turned_in_place_keeps_its_shape_under_other_names(turns: Any) -> None:
    def step(x: Tensor) -> Any:
        y = x * 2
        name = y.detach()
        turns(y).transpose_(0, 1)
        y.add_(1)
        return name.sum(0), name.detach() * 3, y.detach().exp()

    x = torch.rand(2, 3)
    right = step(x)
    graph = lowered(graph_of(step, torch.rand(2, 3)))
    for module in (graph.runs.module, graph.module):
        for found, wanted in zip(module(x), right, strict=True):
            assert torch.equal(found, wanted)


class Pooled(nn.Module):
    """x [B, F] -> logits [B, C]: its pool turns a mean in place."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.last = nn.Linear(1, 8), nn.LayerNorm(8), nn.Linear(8, CLASSES)
        self.pool = nn.AdaptiveAvgPool1d(1)

    def forward(self, x: Tensor) -> Tensor:
        each = self.norm(self.embed(x.unsqueeze(-1)))
        logits: Tensor = self.last(self.pool(each.transpose(1, 2)).flatten(1))
        return logits


@pytest.mark.fits
@pytest.mark.usefixtures("never_lowered")
@pytest.mark.parametrize("net", [mlp, Pooled])
def test_a_run_that_is_not_compiled_asks_for_no_pass(net: Any) -> None:
    fit(lambda: Classifier(net()), lambda: (loader(48),), static=True)


@pytest.mark.fits
@pytest.mark.usefixtures("never_lowered")
def test_a_step_that_is_to_be_compiled_beside_the_training_asks_for_no_pass(tmp_path: Path) -> None:
    beside = {"background": True, "compile_dir": tmp_path}
    batches = loader(48)
    run = fit(
        lambda: Classifier(mlp()),
        lambda: (batches,),
        static=True,
        policy="default",
        backend=beside,
    )
    [executable] = run.trainer.strategy.training.executables()
    assert executable.loaded.compiling


@pytest.mark.numbers
def test_what_a_pool_turns_has_the_numbers_of_stock() -> None:
    assert_same_run(*both(lambda: Classifier(Pooled()), lambda: (loader(48),)))


@pytest.mark.long
@pytest.mark.fits
@pytest.mark.compiler
def test_a_run_that_finds_its_program_asks_for_no_pass(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    def run() -> Any:
        found = fit(
            lambda: Classifier(convnet()),
            lambda: (pictures(40),),
            static=True,
            policy="default",
            backend={"compile_dir": tmp_path},
        )
        return [one.loaded for one in found.trainer.strategy.training.executables()]

    [first] = run()
    request.getfixturevalue("never_lowered")
    [second] = run()
    assert (first.built, second.built, second.compiled) == (True, False, True)


class Zeros(Classifier):
    """Reads a leaf of the batch that no operation of its program needs."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss: Tensor = nn.functional.cross_entropy(self.net(x), torch.zeros_like(y))
        return loss


@pytest.mark.long
@pytest.mark.numbers
@pytest.mark.compiler
def test_compiled_it_takes_the_same_inputs() -> None:
    assert_same_run(*both(lambda: Zeros(mlp()), lambda: (loader(64),), policy="default"))


@pytest.mark.fits
def test_what_a_formula_was_traced_with_is_in_the_key() -> None:
    """Where weight decay is 0 the formula has no product, and the operation looks the same."""

    def key(**options: Any) -> str:
        run = fit(
            lambda: Classifier(mlp(), torch.optim.SGD, **options),
            lambda: (loader(16),),
            static=True,
        )
        [one] = run.trainer.strategy.training.executables()
        return program_key(one.graph, threads=1)

    keys = [key(), key(weight_decay=0.1), key(momentum=0.5)]
    assert len({*keys, key()}) == 3, keys
    assert key(momentum=0.5, dampening=0.1) == keys[-1]  # a number, which is an input


class Turned(Classifier):
    """A batch norm of what lies turned, whose kernel lays out its result in order.

    While a step is traced, it lies as its operand does: a reshape is then a view, which a write
    goes through; in stock Lightning it is a copy.
    """

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, CLASSES))
        self.norm = nn.BatchNorm1d(4)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        normed = self.norm(x.view(len(x), 2, 4).transpose(1, 2))
        rows = normed.transpose(1, 2).reshape(-1, 4)
        rows.mul_(2.0)
        logits = self.net(rows).view(len(x), 2, -1).sum(1)
        return nn.functional.cross_entropy(logits, y) + normed.square().mean()


@pytest.mark.numbers
@pytest.mark.compiler
@pytest.mark.parametrize("policy", ["disabled", "default"])
def test_what_lies_otherwise_than_traced_is_copied_as_in_stock(policy: str) -> None:
    assert_same_run(*both(Turned, lambda: (loader(96),), policy=policy))
