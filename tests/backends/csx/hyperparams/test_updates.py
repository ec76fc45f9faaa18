"""An optimizer's update as one operation: the numbers of torch's own code, to the bit."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from harness import Run, assert_same_run, both, fit
from models import Classifier, loader, mlp
from torch import Tensor, nn
from torch.optim import (
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    Optimizer,
    RMSprop,
)

from fulgurite.backends.csx.graph import update
from fulgurite.backends.csx.graph.graph import Graph
from fulgurite.backends.csx.graph.update import UPDATE

pytestmark = pytest.mark.numbers

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "Adam": Adam,
    "Adam, L2": functools.partial(Adam, weight_decay=0.1),
    "Adam, amsgrad": functools.partial(Adam, amsgrad=True),
    "AdamW": AdamW,
    "AdamW, uphill": functools.partial(AdamW, lr=1e-4, maximize=True),
    "SGD": functools.partial(SGD, lr=0.1),
    "SGD, momentum": functools.partial(SGD, lr=0.1, momentum=0.9, weight_decay=0.01),
    "SGD, nesterov": functools.partial(SGD, lr=0.1, momentum=0.9, nesterov=True),
    "Adagrad": functools.partial(Adagrad, lr_decay=0.1, weight_decay=0.01),
    "RMSprop": functools.partial(RMSprop, momentum=0.9, centered=True),
    "Adamax": Adamax,
    "NAdam": functools.partial(NAdam, weight_decay=0.1, decoupled_weight_decay=True),
    "Adadelta": Adadelta,
}


AS_TRACED: dict[str, Any] = {"policy": "disabled"}  # where the suite runs compiled, too


class Reads(Classifier):
    """Keeps gradients after the update, which must leave them as they are."""

    def __init__(self, optimizer: Callable[..., Optimizer], reads: bool) -> None:
        super().__init__(mlp(), optimizer)
        self.reads, self.gradients = reads, list[Tensor]()

    def on_before_zero_grad(self, optimizer: Any) -> None:
        if self.reads:
            self.seen = [p.grad.clone() for p in self.parameters() if p.grad is not None]

    def on_train_batch_end(self, *args: Any) -> None:
        if self.reads:
            self.gradients += [p.grad.clone() for p in self.parameters() if p.grad is not None]


def graphs_of(run: Run) -> Iterator[Graph]:
    for one in run.trainer.strategy.training.executables():
        yield one.graph


def updates_in(graph: Graph | None) -> int:
    assert graph is not None
    return sum(node.target is UPDATE for node in graph.operations())


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_it_is_torchs_to_the_bit(optimizer: Callable[..., Optimizer], reads: bool) -> None:
    ours, stock = both(
        lambda: Reads(optimizer, reads), lambda: (loader(96),), fresh=True, policy="disabled"
    )
    graphs = list(graphs_of(ours))
    assert len(graphs) == 1  # a first step that keeps what it read has its program to itself
    assert all((updates_in(one.as_traced), updates_in(one)) == (1, 0) for one in graphs)
    assert ours.losses == stock.losses
    pairs = zip(ours.module.parameters(), stock.module.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert len(ours.module.gradients) == len(stock.module.gradients)
    pairs = zip(ours.module.gradients, stock.module.gradients, strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


class OneNumber(Classifier):
    """Its only parameter that is trained has no dimensions."""

    def __init__(self, optimizer: Callable[..., Optimizer]) -> None:
        super().__init__(mlp().requires_grad_(False))
        self.scale, self.made_by = torch.nn.Parameter(torch.ones(())), optimizer

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step([batch[0] * self.scale, batch[1]], batch_idx)

    def configure_optimizers(self) -> Any:
        return self.made_by([self.scale])


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_it_is_torchs_to_the_bit_where_nothing_has_dimensions(
    optimizer: Callable[..., Optimizer],
) -> None:
    ours, stock = both(
        lambda: OneNumber(optimizer), lambda: (loader(96),), fresh=True, policy="disabled"
    )
    assert ours.losses == stock.losses
    states = [run.trainer.optimizers[0].state_dict()["state"].get(0, {}) for run in (ours, stock)]
    assert states[0].keys() == states[1].keys()
    for key, value in states[1].items():
        assert value is states[0][key] or torch.equal(states[0][key], value), key


class Narrow(Classifier):
    def __init__(self, optimizer: Callable[..., Optimizer]) -> None:
        super().__init__(mlp().to(torch.bfloat16), optimizer)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step([batch[0].to(torch.bfloat16), batch[1]], batch_idx)


def test_what_is_more_than_a_formula_stays_as_it_is() -> None:
    """A kernel rounds 16-bit weights elsewhere."""
    run = fit(lambda: Narrow(functools.partial(SGD, lr=0.1)), lambda: (loader(32),), static=True)
    [graph] = graphs_of(run)
    assert updates_in(graph.as_traced) == 0


def test_groups_are_updates_of_their_own_and_numbers_may_change() -> None:
    """Parameters without dimensions meet numbers in another type: they have their own formula."""

    class Scaled(Classifier):
        def __init__(self) -> None:
            super().__init__(mlp())
            self.scale = torch.nn.Parameter(torch.ones(()))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step([batch[0] * self.scale, batch[1]], batch_idx)

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            for group in self.trainer.optimizers[0].param_groups:
                group["lr"] *= 0.9
                group["weight_decay"] *= 0.5

        def configure_optimizers(self) -> Any:
            groups = [
                {"params": self.net.parameters()},
                {"params": [self.scale], "weight_decay": 0.2},
            ]
            return AdamW(groups, lr=0.01)

    ours, stock = both(Scaled, lambda: (loader(96),), fresh=True, **AS_TRACED)
    [graph] = graphs_of(ours)
    assert updates_in(graph.as_traced) == 2
    assert ours.losses == stock.losses
    assert torch.equal(ours.module.scale, stock.module.scale)


@pytest.mark.parametrize("portion", [1, 20_000])
def test_portions_of_an_update_are_the_whole(portion: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(update, "_PORTION", portion)
    ours, stock = both(
        lambda: Classifier(mlp(), AdamW), lambda: (loader(96),), fresh=True, policy="disabled"
    )
    assert ours.losses == stock.losses


@pytest.mark.parametrize("kind", [AdamW, SGD])
def test_of_two_parameters_in_one_memory_the_second_begins_with_what_the_first_became(
    kind: Any,
) -> None:
    def tied() -> Classifier:
        layers = nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)
        module = Classifier(nn.Sequential(*layers), functools.partial(kind, weight_decay=0.5))
        layers[2].weight.data = layers[0].weight.data
        return module

    ours, stock = both(tied, lambda: (loader(),), limit_train_batches=10)
    assert_same_run(ours, stock)
