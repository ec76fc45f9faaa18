"""Schedules on the host, groups that are added and parameters that are unfrozen equal stock."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from harness import assert_close, assert_same_run, both, fit
from models import Classifier, loader, mlp
from optimizers import FirstGradient
from torch import Tensor
from torch.optim import lr_scheduler

from fulgurite.backends.csx.diagnostics.trace_errors import FrozenNumber, StateChanged

pytestmark = pytest.mark.numbers


def scheduled(make: Any, optimizer: Any = torch.optim.AdamW, **options: Any) -> Any:
    """A classifier whose optimizer has a scheduler."""

    class Scheduled(Classifier):
        def configure_optimizers(self) -> Any:
            made = super().configure_optimizers()
            return {"optimizer": made, "lr_scheduler": make(made)}

    return Scheduled(mlp(), optimizer, **options)


def each_step(schedule: Any) -> dict[str, Any]:
    return {"scheduler": schedule, "interval": "step"}


SCHEDULES: list[tuple[Any, Any, dict[str, Any]]] = [
    (lambda o: each_step(lr_scheduler.OneCycleLR(o, 0.02, total_steps=40)), torch.optim.AdamW, {}),
    (
        lambda o: each_step(lr_scheduler.CyclicLR(o, 1e-3, 0.1, step_size_up=4)),
        torch.optim.SGD,
        {"momentum": 0.9, "dampening": 0.1},
    ),
    (
        lambda o: each_step(lr_scheduler.CosineAnnealingWarmRestarts(o, 5)),
        torch.optim.RAdam,
        {"lr": 1},
    ),
    (
        lambda o: each_step(lr_scheduler.LambdaLR(o, lambda step: min(1.0, step / 100))),
        torch.optim.Adafactor,
        {},
    ),
    (lambda o: lr_scheduler.StepLR(o, 1, 0.3), torch.optim.Rprop, {}),
    (lambda o: lr_scheduler.StepLR(o, 1, 0.3), torch.optim.Adam, {"lr": torch.tensor(0.01)}),
    (
        lambda o: {
            "scheduler": lr_scheduler.ReduceLROnPlateau(o, patience=0, threshold=1.0),
            "monitor": "loss_epoch",
        },
        torch.optim.NAdam,
        {},
    ),
]


@pytest.mark.parametrize(("schedule", "optimizer", "options"), SCHEDULES)
def test_scheduler_on_the_host_equals_stock(schedule: Any, optimizer: Any, options: Any) -> None:
    def make() -> Any:
        copies = {k: v.clone() if isinstance(v, Tensor) else v for k, v in options.items()}
        return scheduled(schedule, optimizer, **copies)

    ours, stock = both(make, lambda: (loader(),), max_epochs=3, limit_train_batches=8)
    [group] = ours.trainer.optimizers[0].param_groups
    assert group["lr"] != options.get("lr", 1e-2)
    assert_same_run(ours, stock)


class Unfreeze(pl.Callback):
    """Trains the last layer alone, then all, then the last again."""

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        first = module.net[0]
        first.requires_grad_(trainer.current_epoch == 1)
        groups = trainer.optimizers[0].param_groups
        if trainer.current_epoch == 1 and len(groups) == 1:
            trainer.optimizers[0].add_param_group({"params": list(first.parameters()), "lr": 0.003})


class Head(Classifier):
    def configure_optimizers(self) -> Any:
        return self.optimizer(self.net[3].parameters(), **self.options)


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (torch.optim.AdamW, {}),
        (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.5}),
        (FirstGradient, {}),
    ],
)
def test_a_group_that_is_added_needs_another_program(optimizer: Any, options: Any) -> None:
    def make() -> Any:
        return Head(mlp(), optimizer, **options)

    common: dict[str, Any] = {"callbacks": (Unfreeze(),), "max_epochs": 3}
    ours, stock = both(make, lambda: (loader(64),), **common)
    assert_same_run(ours, stock)
    with pytest.raises(StateChanged, match=r"max_programs=2"):
        fit(make, lambda: (loader(64),), static=True, backend={"max_programs": 1}, **common)


def test_unfreezing_makes_the_state_that_was_missing() -> None:
    class Late(pl.Callback):
        def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
            module.net[0].requires_grad_(trainer.current_epoch == 1)

    ours, stock = both(
        lambda: Classifier(mlp(), torch.optim.ASGD),
        lambda: (loader(64),),
        backend={"max_programs": 2},
        callbacks=(Late(),),
        max_epochs=3,
    )
    assert_same_run(ours, stock)
    assert len(ours.trainer.strategy.programs) == 2


class EverySecond(Classifier):
    """Steps with every second batch; the others' gradients are cleared unused."""

    def __init__(self, logs: bool) -> None:
        super().__init__(mlp())
        self.logs = logs

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.logs:  # one number of the group, which a step that does not update asks for, too
            self.log("lr", self.optimizers().param_groups[0]["lr"])
        return super().training_step(batch, batch_idx)

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        if batch_idx % 2 == 0:
            optimizer.step(closure=optimizer_closure)
        else:
            optimizer_closure()

    def on_train_epoch_start(self) -> None:
        [group] = self.optimizers().param_groups
        group["weight_decay"] = 0.1 * (self.current_epoch == 1)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.1, weight_decay=0.0)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


@pytest.mark.numbers
@pytest.mark.parametrize("logs", [False, True])
def test_numbers_of_an_optimizer_that_a_program_does_not_step_are_none_of_it(logs: bool) -> None:
    ours, stock = both(lambda: EverySecond(logs), lambda: (loader(64),), max_epochs=3)
    assert_same_run(ours, stock)
    assert len(ours.trainer.strategy.programs) == 3  # of two that step, one has no decay


class SteppedByHand(pl.LightningModule):
    """A manual step in which a scheduler of torch's is stepped."""

    def __init__(self, order: str) -> None:
        super().__init__()
        self.automatic_optimization, self.order = False, order
        self.net = mlp()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Once or twice, with the rate logged before or after."""
        optimizer, scheduler = self.optimizers(), self.lr_schedulers()
        for _ in range(2 if self.order == "twice" else 1):
            loss = self.net(batch[0]).square().mean()
            optimizer.zero_grad()
            self.manual_backward(loss)
            if self.order == "before the update":
                scheduler.step()
            optimizer.step()
            if self.order == "last":
                self.log("rate", optimizer.param_groups[0]["lr"])
            if self.order != "before the update":
                scheduler.step()
        if self.order == "before the log":
            self.log("rate", optimizer.param_groups[0]["lr"])
        return loss.detach()

    def configure_optimizers(self) -> Any:
        """A rate that every step changes."""
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)]


@pytest.mark.fits
@pytest.mark.parametrize("order", ["twice", "before the update", "before the log"])
def test_the_rate_that_a_scheduler_of_the_host_will_set_is_not_read(order: str) -> None:
    with pytest.raises(FrozenNumber, match=r"after scheduler\.step\(\)") as caught:
        fit(lambda: SteppedByHand(order), lambda: (loader(64),), static=True)
    assert caught.value.line is not None
    assert caught.value.line.function == "training_step"


class SetByHand(SteppedByHand):
    """Its step sets the rate to a number of Python's, in some programs alone."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 2:
            self.optimizers().param_groups[0]["lr"] = 0.02
        return super().training_step(batch, batch_idx)


@pytest.mark.fits
def test_a_rate_that_the_step_sets_is_set_until_a_scheduler_sets_it() -> None:
    ours, stock = both(lambda: SetByHand("last"), lambda: (loader(64),))
    assert_close(ours.losses, stock.losses)
    assert_close(ours.metrics, stock.metrics)


def test_a_scheduler_of_the_host_that_is_stepped_last_equals_stock() -> None:
    ours, stock = both(lambda: SteppedByHand("last"), lambda: (loader(64),))
    assert_close(ours.losses, stock.losses)
    assert_close(ours.metrics, stock.metrics)


class LoggedInValidation(EverySecond):
    """Its validation step logs two numbers of a group."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        [group] = self.optimizers().param_groups
        self.log("rate", group["lr"])
        self.log("decay", group.get("weight_decay"))
        self.log("both", sum(v for k, v in group.items() if k in ("lr", "weight_decay")))


@pytest.mark.numbers
def test_a_rate_that_an_evaluation_logs_is_that_of_now() -> None:
    def loaders() -> Any:
        return loader(64), loader(16)

    ours, stock = both(lambda: LoggedInValidation(False), loaders, max_epochs=3)
    assert_same_run(ours, stock)
