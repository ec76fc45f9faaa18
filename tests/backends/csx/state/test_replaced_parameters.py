"""A parameter in whose place another one is put while a program trains it: never in silence."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from harness import assert_same_run, both, fit
from models import Classifier, loader, mlp
from torch import Tensor, nn

from fulgurite.backends.csx.diagnostics.trace_errors import StateChanged, UnsupportedState

FEW: dict[str, Any] = {"limit_train_batches": 2, "max_epochs": 3}


def replace(module: Any) -> None:
    module.net[0].weight = nn.Parameter(module.net[0].weight.detach() * 0.5)


def replacing(hook: str) -> Any:
    """Something with a hook that replaces a parameter after two steps."""

    def act(trainer: pl.Trainer, module: Any, *args: Any) -> None:
        if trainer.global_step == 2:
            replace(module)

    return type("Replaces", (pl.Callback,), {hook: lambda self, *args: act(*args)})()


@pytest.mark.fits
@pytest.mark.parametrize(
    "hook", ["on_train_batch_start", "on_train_batch_end", "on_train_epoch_start"]
)
def test_a_parameter_that_the_host_replaces_is_an_error_at_the_next_step(hook: str) -> None:
    make = lambda: Classifier(mlp())  # noqa: E731
    with pytest.raises(StateChanged, match=r"self\.net\.0\.weight was replaced .* optimizer") as e:
        fit(make, lambda: (loader(),), static=True, callbacks=(replacing(hook),), **FEW)
    assert "Remedy: with torch.no_grad(): self.net.0.weight.copy_(value)" in str(e.value)


@pytest.mark.fits
def test_a_parameter_that_the_step_replaces_is_an_error_at_its_line() -> None:
    class Replaces(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            replace(self)
            return loss

    with pytest.raises(UnsupportedState, match=r"self\.net\.0\.weight was replaced") as caught:
        fit(lambda: Replaces(mlp()), lambda: (loader(),), static=True, **FEW)
    assert caught.value.line is not None
    assert caught.value.line.line == replace.__code__.co_firstlineno + 1
    assert caught.value.line.file == __file__


class Teacher(Classifier):
    """A frozen net beside the trained one, which the host exchanges."""

    def __init__(self) -> None:
        super().__init__(mlp())
        self.teacher = mlp().requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        wanted = self.teacher(batch[0]).softmax(1)
        return nn.functional.cross_entropy(self.net(batch[0]), wanted)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.net.parameters(), lr=1e-2)

    def on_train_epoch_start(self) -> None:
        weight = self.teacher[0].weight
        self.teacher[0].weight = nn.Parameter(weight * 0.5, requires_grad=False)


@pytest.mark.numbers
def test_a_parameter_that_no_optimizer_holds_may_be_replaced() -> None:
    assert_same_run(*both(Teacher, lambda: (loader(),), **FEW))


@pytest.mark.numbers
def test_one_that_the_step_puts_back_may_be_exchanged_for_a_while() -> None:
    class Exchanges(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            layer: Any = self.net[0]
            kept = layer.weight
            layer.weight = nn.Parameter(torch.ones(16, 8))
            before = self.net(batch[0]).detach().mean()
            layer.weight = kept
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1]) + before

    assert_same_run(*both(lambda: Exchanges(mlp()), lambda: (loader(),), **FEW))
