"""The optimizers of torch: numbers equal eager's, whatever moves between steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import assert_close, assert_same_run, both, fit
from models import Classifier, loader, mlp
from optimizers import TORCH, Alternating, Moving, assert_equals_stock
from torch import nn
from torch.optim import Optimizer

from fulgurite.backends.csx.diagnostics.trace_errors import UnsupportedState

pytestmark = pytest.mark.numbers


@pytest.mark.parametrize(("optimizer", "options"), TORCH)
def test_an_optimizer_of_torch_equals_stock(optimizer: Any, options: dict[str, Any]) -> None:
    assert_equals_stock(optimizer, options)


def test_every_optimizer_of_torch_is_tested() -> None:
    everyone = {
        value
        for value in vars(torch.optim).values()
        if isinstance(value, type) and issubclass(value, Optimizer) and value is not Optimizer
    }
    refused = {torch.optim.LBFGS, torch.optim.SparseAdam}
    assert everyone - refused == {optimizer for optimizer, _ in TORCH} | {torch.optim.Muon}


def test_muon_equals_stock() -> None:
    """It rounds to bfloat16 inside: a noise of 1e-9 in a gradient may show as one of 4e-3."""

    class Hidden(Classifier):
        def configure_optimizers(self) -> Any:
            return torch.optim.Muon([self.net[0].weight], lr=0.02, momentum=0.9)

    ours, stock = both(
        lambda: Hidden(mlp()), lambda: (loader(160),), callbacks=(Moving(),), max_steps=10
    )
    assert_close(ours.losses, stock.losses, 1e-3)
    moved = (stock.module.net[0].weight - Hidden(mlp()).net[0].weight).abs().mean()
    error = (ours.module.net[0].weight - stock.module.net[0].weight).abs().mean()
    assert error < 2e-2 * moved


def test_capturable_runs_where_eager_refuses_the_cpu() -> None:
    """torch's capturable optimizers insist on an accelerator; their numbers are the plain ones."""
    with pytest.raises(AssertionError, match="capturable=True"):
        fit(
            lambda: Classifier(mlp(), torch.optim.Adam, capturable=True),
            lambda: (loader(32),),
            static=False,
        )
    for optimizer in (torch.optim.Adam, torch.optim.RAdam):
        runs = [
            fit(
                lambda o=optimizer, c=c: Classifier(mlp(), o, capturable=c),
                lambda: (loader(160),),
                static=c,
            )
            for c in (True, False)
        ]
        assert_close(runs[0].losses, runs[1].losses)


def test_param_groups_with_options_of_their_own_equal_stock() -> None:
    class Grouped(Classifier):
        def configure_optimizers(self) -> Any:
            first, second = self.net[0], self.net[3]
            groups = [
                {"params": first.parameters(), "lr": 0.05, "weight_decay": 0.1},
                {"params": [second.weight], "betas": (0.8, 0.9), "amsgrad": True},
                {"params": [second.bias], "maximize": True, "lr": 1e-4, "fused": True},
            ]
            return torch.optim.AdamW(groups, lr=0.01)

    ours, stock = both(
        lambda: Grouped(mlp()), lambda: (loader(160),), callbacks=(Moving(),), max_steps=10
    )
    assert_same_run(ours, stock)


@pytest.mark.compiler
@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (torch.optim.RAdam, {}),
        (torch.optim.ASGD, {"t0": 3.0}),
        (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.5}),
    ],
)
def test_compiled_optimizers_equal_stock(optimizer: Any, options: dict[str, Any]) -> None:
    assert_equals_stock(optimizer, options, policy="default")


def test_two_optimizers_that_share_parameters_equal_stock() -> None:
    def optimizers(net: nn.Module) -> list[Optimizer]:
        dampened = {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}
        both_layers = torch.optim.Adam(net.parameters(), lr=0.01)
        return [both_layers, torch.optim.SGD(net[0].parameters(), **dampened)]

    ours, stock = both(
        lambda: Alternating(optimizers), lambda: (loader(160),), callbacks=(Moving(),)
    )
    assert_same_run(ours, stock)


@pytest.mark.fits
@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (torch.optim.LBFGS, "LBFGS evaluates the step again"),
        (torch.optim.SparseAdam, "SparseAdam takes sparse gradients"),
    ],
)
def test_optimizers_that_cannot_be_static_are_refused(optimizer: Any, message: str) -> None:
    with pytest.raises(UnsupportedState, match=message):
        fit(lambda: Classifier(mlp(), optimizer), lambda: (loader(),), static=True)
