"""``batch_idx``, ``current_epoch`` and ``global_step`` in a step are followed, as eagerly."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from harness import assert_close, assert_same_run, both, fit
from models import Classifier, loader, mlp
from torch import Tensor, nn

from fulgurite.backends.csx.program import selection
from fulgurite.errors import FrozenValueWarning, StateChanged

pytestmark = pytest.mark.fits


class Counts(Classifier):
    """``factor`` of the module and the batch's number weighs the loss."""

    def __init__(self, factor: Any) -> None:
        super().__init__(mlp())
        self.factor = factor

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss * self.factor(self, batch_idx)


def ramp(module: Any, batch_idx: int) -> Any:
    return min(1.0, module.global_step / 5)


def reversal(module: Any, batch_idx: int) -> Any:
    p = (batch_idx + module.current_epoch * 4) / 12
    return 2.0 / (1.0 + math.exp(-10 * p)) - 0.5


def every_other(module: Any, batch_idx: int) -> Any:
    return 2.0 if batch_idx % 2 == 0 else 0.5


def late(module: Any, batch_idx: int) -> Any:
    last = module.trainer.is_last_batch and module.trainer.current_epoch >= 1
    return 3.0 if last else 1.0


def chained(module: Any, batch_idx: int) -> Any:
    return 1.0 if 1 <= batch_idx < 3 or batch_idx in (0, 7) else -batch_idx / 4 + abs(-1)


def whole(module: Any, batch_idx: int) -> Any:
    k = torch.arange(4) * batch_idx + module.current_epoch // 1
    assert k.dtype is torch.int64
    assert torch.tensor(module.global_step + 1).dtype is torch.int64
    assert (k / (batch_idx + 1)).dtype is torch.float32
    return (k % 3).float().mean() + 1 + divmod(module.global_step, 2)[1]


def taken(module: Any, batch_idx: int) -> Any:
    return [1.0, 2.0, 0.5][-(batch_idx % 3)] * {0: 1.0, 1: 0.5}[1 - module.current_epoch % 2]


def rate(module: Any, batch_idx: int) -> Any:
    return 10 * module.optimizers().param_groups[0]["lr"] * (batch_idx + 1)


FOLLOWED = (ramp, reversal, every_other, late, chained, whole, taken, rate)


@pytest.mark.numbers
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("factor", FOLLOWED)
def test_arithmetic_and_conditions_are_followed(factor: Any, accumulate: int) -> None:
    options = {"max_epochs": 3, "limit_train_batches": 4, "accumulate_grad_batches": accumulate}
    ours, stock = both(lambda: Counts(factor), lambda: (loader(64),), **options)
    assert_same_run(ours, stock)  # and no warning: one would be an error here


class ByHand(Counts):
    """A step that accumulates, steps and schedules by hand, as published code has it."""

    def __init__(self) -> None:
        super().__init__(lambda *_: 1.0)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        optimizer = self.optimizers()
        self.manual_backward(loss / 3)
        if (batch_idx + 1) % 3 == 0 or self.trainer.is_last_batch:
            optimizer.step()
            optimizer.zero_grad()
        if self.trainer.is_last_batch and (self.trainer.current_epoch + 1) % 2 == 0:
            self.lr_schedulers().step()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class InTurns(ByHand):
    """Two optimizers, of which every third batch steps the other."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        optimizer = self.optimizers()[0 if batch_idx % 3 else 1]
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        layers = [layer for layer in self.net if list(layer.parameters())]
        return [torch.optim.Adam(layers[i].parameters(), lr=0.01) for i in (0, -1)]


class WarmUp(Counts):
    """Lightning's warm-up by hand, after the step."""

    def __init__(self) -> None:
        super().__init__(lambda *_: 1.0)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
        optimizer.step(closure=closure)
        scale = min(1.0, (self.trainer.global_step + 1) / 5)
        for group in optimizer.param_groups:
            group["lr"] = scale * 0.05


class Skips(Counts):
    """Every other batch computes gradients, and takes no step."""

    def __init__(self) -> None:
        super().__init__(lambda *_: 1.0)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
        if epoch == 0 or batch_idx % 2 == 0:
            super().optimizer_step(epoch, batch_idx, optimizer, closure)
        else:
            closure()


@pytest.mark.long
@pytest.mark.numbers
@pytest.mark.parametrize("make", [ByHand, InTurns, WarmUp, Skips])
def test_steps_that_depend_on_the_batch_are_programs_of_their_own(make: Any) -> None:
    assert_same_run(*both(make, lambda: (loader(64),), max_epochs=3, limit_train_batches=4))


class Evaluates(Classifier):
    """Its validation looks at the epoch and the batch."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        value = self.net(batch[0]).square().mean()
        self.log("plain", value)
        self.log("batch", batch_idx)
        self.log("epoch", self.current_epoch + 1.0)
        if batch_idx == 0 and self.current_epoch > 0:
            self.log("first", value)


@pytest.mark.long
@pytest.mark.numbers
def test_validation_follows_them_too() -> None:
    ours, stock = both(
        lambda: Evaluates(mlp()), lambda: (loader(64), loader(64)), max_epochs=3, fresh=True
    )
    assert_same_run(ours, stock)
    assert ours.final.keys() >= {"first", "batch", "epoch"}
    assert_close(ours.final, stock.final, 1e-5)


def test_what_a_step_passes_on_is_that_of_each_batch() -> None:
    class Passes(Counts):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            counts = (batch_idx, self.current_epoch, self.global_step)
            return {"loss": loss, "counts": counts}

    run = fit(
        lambda: Passes(lambda *_: 1.0),
        lambda: (loader(64),),
        static=True,
        max_epochs=2,
        limit_train_batches=2,
    )
    found = [outputs["counts"] for outputs in run.outputs]
    assert found == [(0, 0, 0), (1, 0, 1), (0, 1, 2), (1, 1, 3)]
    assert all(type(count) is int for counts in found for count in counts)


@pytest.mark.numbers
def test_a_run_may_be_stopped_under_a_condition_on_them() -> None:
    def stops(module: Any, batch_idx: int) -> float:
        if module.global_step >= 5:
            module.trainer.should_stop = True
        return 1.0

    ours, stock = both(
        lambda: Counts(stops), lambda: (loader(64),), max_epochs=3, limit_train_batches=4
    )
    assert len(ours.losses) == len(stock.losses) == 6


def kept(module: Any, batch_idx: int) -> float:
    return 1.0 + float(np.linspace(0, batch_idx + 1, 2).sum())  # C reads it unseen


def indexed(module: Any, batch_idx: int) -> float:
    return {0: 1.0, 1: 2.0}[module.current_epoch]


@pytest.mark.parametrize("factor", [kept, indexed])
def test_a_value_that_is_taken_is_kept_and_warned_of(factor: Any) -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always", FrozenValueWarning)
        fit(lambda: Counts(factor), lambda: (loader(64),), static=True, limit_train_batches=2)
    [warning] = [one for one in seen if one.category is FrozenValueWarning]
    assert warning.lineno == factor.__code__.co_firstlineno + 1
    assert "Use it in arithmetic and comparisons alone" in str(warning.message)


@pytest.mark.long
def test_there_are_limits_to_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    def each(module: Any, batch_idx: int) -> float:
        return float(sum(1.0 for k in range(40) if k == batch_idx))

    monkeypatch.setattr(selection, "ANSWERS", 2)
    with pytest.raises(
        StateChanged, match=r"batch_idx == 1 was True when traced, and now is False"
    ):
        fit(lambda: Counts(each), lambda: (loader(64),), static=True, limit_train_batches=3)
    with pytest.raises(StateChanged, match="allows 1 per stage"):
        fit(
            lambda: Counts(every_other),
            lambda: (loader(64),),
            static=True,
            backend={"max_programs": 1},
            limit_train_batches=2,
        )


class Annealed(Classifier):
    """Keeps a weight that counts up to a number of Python's."""

    def __init__(self) -> None:
        super().__init__(mlp())
        self.weight: Any = 0.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.weight = min(1.0, self.global_step / 4)
        self.log("weight", self.weight)
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1]) * (1 + self.weight)


@pytest.mark.numbers
def test_a_number_that_an_attribute_keeps_ends_as_one_of_pythons() -> None:
    ours, stock = both(Annealed, lambda: (loader(),), max_epochs=2)
    assert_same_run(ours, stock)
    assert float(ours.module.weight) == stock.module.weight == 1.0
    assert len(ours.trainer.strategy.programs) == 2
