"""What host code does between steps reaches the program, or is refused; nothing is ignored."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from harness import assert_same_run, both, csx, fit
from models import Classifier, loader, mlp
from torch import Tensor, nn

import fulgurite
from fulgurite.backends.csx.contract import frozen_reads as frozen
from fulgurite.errors import (
    FrozenNumber,
    FrozenValueChanged,
    FrozenValueWarning,
    LeakedTensor,
)

FEW: dict[str, Any] = {"limit_train_batches": 6}
FACTOR = torch.ones(())


class Manual(Classifier):
    """Steps by hand and leaves the gradients."""

    def __init__(self) -> None:
        super().__init__(mlp(), torch.optim.SGD, momentum=0.9)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        self.optimizers().step()
        return loss


def by_the_optimizer(module: Any, batch_idx: int) -> None:
    module.optimizers().zero_grad()


def by_the_module_at_times(module: Any, batch_idx: int) -> None:
    if batch_idx % 2:
        module.zero_grad()


@pytest.mark.numbers
@pytest.mark.parametrize("clear", [by_the_optimizer, by_the_module_at_times])
def test_zero_grad_on_the_host_clears_what_the_program_keeps(clear: Any) -> None:
    class Clears(Manual):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            clear(self, batch_idx)

    before = torch.optim.Optimizer.zero_grad, nn.Module.zero_grad
    assert_same_run(*both(Clears, lambda: (loader(),), **FEW))
    assert (torch.optim.Optimizer.zero_grad, nn.Module.zero_grad) == before


def replaces_optimizers(trainer: Any) -> None:
    trainer.strategy.optimizers = [torch.optim.SGD(trainer.lightning_module.parameters(), lr=0.5)]


def sets_them_up_again(trainer: Any) -> None:
    trainer.strategy.setup_optimizers(trainer)


@pytest.mark.numbers
@pytest.mark.parametrize("act", [replaces_optimizers, sets_them_up_again])
def test_other_optimizers_have_a_program_of_their_own(act: Any) -> None:
    class Acts(pl.Callback):
        def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step == 2:
                act(trainer)

    ours, stock = both(lambda: Classifier(mlp()), lambda: (loader(),), callbacks=(Acts(),), **FEW)
    assert_same_run(ours, stock)


class Grows(Classifier):
    """Is given a parameter in the middle of an epoch, with which its step computes from then on."""

    def __init__(self) -> None:
        super().__init__(mlp(), torch.optim.SGD, momentum=0.9)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * self.scale if hasattr(self, "scale") else loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.scale = nn.Parameter(torch.ones(()))
            group = {"params": [self.scale], "lr": 0.2}
            self.trainer.optimizers[0].add_param_group(group)


@pytest.mark.numbers
def test_a_parameter_that_a_hook_adds_is_trained() -> None:
    ours, stock = both(Grows, lambda: (loader(),), **FEW)
    assert_same_run(ours, stock)
    assert len(ours.trainer.strategy.programs) == 2


class SetsInValidation(Classifier):
    def __init__(self) -> None:
        super().__init__(mlp())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.optimizers().param_groups[0]["lr"] *= 0.5


@pytest.mark.fits
def test_a_number_of_an_optimizer_that_an_evaluation_sets_is_an_error() -> None:
    """It was set once for each trace, and not by the batches after it."""
    with pytest.raises(FrozenNumber, match=r"validation_step set param_groups\['lr'\]") as caught:
        fit(SetsInValidation, lambda: (loader(), loader()), static=True, **FEW)
    assert caught.value.line is not None
    assert "on_validation_batch_end" in str(caught.value)


class ByClass(Classifier):
    """Scalars and tensors that the class gives its instances."""

    scale = 1.0
    running = torch.ones(())

    def __init__(self) -> None:
        super().__init__(mlp())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx) * self.running * self.scale
        self.running = self.running * 0.5
        return loss


@pytest.mark.numbers
def test_a_class_s_tensor_is_state_and_its_scalar_may_not_change() -> None:
    assert_same_run(*both(ByClass, lambda: (loader(),), **FEW))

    class Changes(ByClass):
        def on_train_batch_end(self, *args: Any) -> None:
            self.scale = 0.5

    with pytest.raises(FrozenValueChanged, match=r"self\.scale was 1\.0"):
        fit(Changes, lambda: (loader(),), static=True, backend={"max_programs": 1})


@pytest.mark.fits
def test_an_array_in_an_attribute_is_no_scalar_to_compare_and_a_numpy_number_is_one() -> None:
    class Arrays(Classifier):
        def __init__(self) -> None:
            super().__init__(mlp())
            self.table, self.factor = np.ones(3), np.float32(2.0)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            return loss * float(self.table[0]) * float(self.factor)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.table = np.ones(3)
            self.factor = np.float32(2.0 + (batch_idx == 2))

    with pytest.raises(FrozenValueChanged, match=r"self\.factor was np\.float32\(2\.0\)"):
        fit(Arrays, lambda: (loader(),), static=True, backend={"max_programs": 1})


@pytest.mark.fits
def test_arguments_of_traced_hooks_warn_when_they_are_read() -> None:
    class Skips(Classifier):
        def optimizer_step(self, epoch: int, batch_idx: int, *args: Any) -> None:
            if int(batch_idx) % 2 == 0 or epoch < 1:
                super().optimizer_step(epoch, batch_idx, *args)

    frozen.forget_warned_lines()
    with pytest.warns(FrozenValueWarning, match="batch_idx was read"):
        fit(lambda: Skips(mlp()), lambda: (loader(),), static=True, limit_train_batches=2)


@pytest.mark.numbers
def test_a_global_tensor_that_the_host_replaces_is_read_anew() -> None:
    class Reads(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step(batch, batch_idx) * FACTOR

        def on_train_batch_end(self, *args: Any) -> None:
            global FACTOR
            FACTOR = FACTOR * 0.5

    def run(static: bool) -> Any:
        global FACTOR
        FACTOR = torch.ones(())
        return fit(lambda: Reads(mlp()), lambda: (loader(),), static=static, **FEW)

    ours, stock = run(static=True), run(static=False)
    assert_same_run(ours, stock)


@pytest.mark.fits
@pytest.mark.long
def test_a_global_tensor_that_the_step_replaces_is_an_error_on_the_next_step() -> None:
    class Replaces(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            global FACTOR
            loss = super().training_step(batch, batch_idx) * FACTOR
            FACTOR = FACTOR * loss.detach()
            return loss

    global FACTOR
    FACTOR = torch.ones(())
    with pytest.raises(LeakedTensor, match="The result of mul"):
        fit(lambda: Replaces(mlp()), lambda: (loader(),), static=True)
    FACTOR = torch.ones(())


def test_a_traced_function_reads_the_batch_of_an_object_and_sees_its_modules_scalars() -> None:
    csx()
    drop = fulgurite.compile(nn.Dropout(0.0))

    class Learner:
        batch = torch.zeros(2)

        @fulgurite.trace
        def step(self) -> Tensor:
            return drop(self.batch).sum()

    learner = Learner()
    for value in (1.0, 2.0, 3.0):
        learner.batch = torch.full((2,), value)
        assert learner.step().item() == 2 * value
    drop.p = 1.0
    assert learner.step().item() == 0


def test_a_default_argument_may_be_given_or_left() -> None:
    csx()

    @fulgurite.trace
    def scaled(x: Tensor, factor: float = 2.0) -> Tensor:
        return x * factor

    assert scaled(torch.ones(2)).sum() == scaled(torch.ones(2), 2.0).sum() == 4
