"""A float that hooks set is a number of the second program, unless Python takes its value."""

from __future__ import annotations

import math
from collections.abc import Callable
from math import floor
from typing import Any

import numpy as np
import pytest
import torch
from harness import Run, assert_same_run, both
from models import Classifier, loader, mlp
from torch import Tensor, nn

from fulgurite.backends.csx.program.selection import VALUES

CE, drop = nn.functional.cross_entropy, nn.functional.dropout
BATCHES = VALUES + 2


class Annealed(Classifier):
    """Its loss has a weight, which a hook sets before each batch."""

    def __init__(self, how: Callable[..., Tensor], values: Callable[[int], Any]) -> None:
        super().__init__(mlp())
        self.how, self.values = how, values
        self.w: Any = values(0)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = self.how(self, self.net(x), y)
        self.log("loss", loss)
        return loss

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.w = self.values(self.global_step)


def rising(step: int) -> float:
    return 0.07 * (step + 1)


def trained(how: Callable[..., Tensor], values: Callable[[int], Any] = rising) -> Run:
    """Our run, which equals stock Lightning's."""
    ours, stock = both(lambda: Annealed(how, values), lambda: (loader(16 * BATCHES),), max_epochs=2)
    assert_same_run(ours, stock)
    return ours


def programs(run: Run) -> int:
    return len(run.trainer.strategy.step_functions["training"].programs)


def logged(self: Any, out: Tensor, y: Tensor) -> Tensor:
    self.log_dict({"w": self.w, "twice": self.w * 2})
    return CE(out, y)


def in_layer(self: Any, out: Tensor, y: Tensor) -> Tensor:
    return CE(nn.functional.gumbel_softmax(out, tau=0.5 + self.w), y)


ONE_PROGRAM: dict[str, Callable[..., Tensor]] = {
    "a weight": lambda self, out, y: CE(out, y) + self.w * out.square().mean(),
    "an average": lambda self, out, y: CE(self.w * out + (1 - self.w) * out.detach(), y),
    "a temperature": lambda self, out, y: CE(out / self.w, y),
    "what divides": lambda self, out, y: CE(self.w / (out.abs() + 1), y),
    "Python's math": lambda self, out, y: CE(out, y) * math.exp(-self.w) + self.w,
    "noise": lambda self, out, y: CE(out + self.w * torch.randn_like(out), y),
    "a table": lambda self, out, y: CE(out, y, weight=torch.tensor([self.w] * out.shape[1])),
    "a draw": lambda self, out, y: CE(out * (torch.rand(len(out), 1) < self.w), y),
    "logged": logged,
    "an argument": in_layer,
}
OF_EACH_VALUE: dict[str, Callable[..., Tensor]] = {
    "numpy": lambda self, out, y: CE(out, y) * float(np.exp(self.w)) + self.w,
    "its text": lambda self, out, y: CE(out, y) * (self.w + (f"{self.w:.2f}" > "0.5")),
    "its hash": lambda self, out, y: CE(out, y) * (self.w + {rising(3): 2}.get(self.w, 0)),
    "a probability": lambda self, out, y: CE(drop(out, self.w / 2), y) * self.w,
    "rounded": lambda self, out, y: CE(out, y) * (self.w + round(self.w, 2)),
    "only rounded": lambda self, out, y: CE(out, y) * (1 + floor(self.w * 20)),
}


@pytest.mark.numbers
@pytest.mark.parametrize("name", ONE_PROGRAM)
def test_with_any_value_one_program_runs(name: str) -> None:
    assert programs(trained(ONE_PROGRAM[name])) == 2  # the first has its value as a constant


@pytest.mark.numbers
@pytest.mark.parametrize("name", OF_EACH_VALUE)
def test_where_python_takes_the_value_each_has_a_program(name: str) -> None:
    assert VALUES - 1 <= programs(trained(OF_EACH_VALUE[name])) <= VALUES + 2


@pytest.mark.numbers
def test_a_condition_has_a_program_for_each_answer() -> None:
    run = trained(lambda self, out, y: CE(out, y) * (self.w if self.w > 0.4 else -self.w))
    assert programs(run) == 3


@pytest.mark.numbers
@pytest.mark.parametrize(
    "values", [[0.5, 0.25, 1, 2, None, 0.75], [0.5, 0.25, True, 0.75]], ids=["an int", "a bool"]
)
def test_what_is_no_float_any_more_has_a_program_of_its_own(values: list[Any]) -> None:
    trained(
        lambda self, out, y: CE(out, y) * (3 if self.w is None else self.w),
        lambda step: values[step % len(values)],
    )


@pytest.mark.numbers
def test_one_that_is_taken_away_is_found() -> None:
    class Gone(Annealed):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            super().on_train_batch_start(batch, batch_idx)
            if self.global_step == 5:
                del self.w

    ours, stock = both(
        lambda: Gone(lambda self, out, y: CE(out, y) * getattr(self, "w", 3.0), rising),
        lambda: (loader(16 * BATCHES),),
        max_epochs=1,
    )
    assert_same_run(ours, stock)


class Head(nn.Module):
    """A linear layer with a temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature, self.linear = 1.0, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) / self.temperature


@pytest.mark.numbers
@pytest.mark.parametrize("windows", [1, 2])
def test_those_of_other_modules_and_in_windows(windows: int) -> None:
    class Cools(Classifier):
        def __init__(self) -> None:
            super().__init__(mlp())
            self.head = Head()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            loss = CE(self.head(self.net(x)[:, :4]), y.clamp(max=3))
            self.log("loss", loss)
            return loss

        def on_train_epoch_start(self) -> None:
            self.head.temperature = 1 / (1 + self.current_epoch)

    ours, stock = both(Cools, lambda: (loader(64),), max_epochs=5, accumulate_grad_batches=windows)
    assert_same_run(ours, stock)
    assert programs(ours) == 2
