"""What hooks set and Python reads begins another program, until there are too many of them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from harness import assert_close, assert_same_run, both, fit, make_trainer
from models import Classifier, loader, mlp
from torch import Tensor, nn

from fulgurite.backends.csx.program import selection
from fulgurite.backends.csx.program.selection import VALUES

EPOCHS = 3


class Reads(Classifier):
    """A step that computes its loss with ``how``; ``then(self)`` runs before each epoch."""

    def __init__(self, how: Callable[..., Tensor], value: Any, then: Callable[[Any], Any]) -> None:
        super().__init__(mlp(0.1))
        self.how, self.then = how, then
        self.value: Any
        if isinstance(value, Tensor):
            self.register_buffer("value", value.clone())
        else:
            self.value = value

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = self.how(self.value, self.net(x), y)
        self.log("loss", loss)
        return loss

    def on_train_epoch_start(self) -> None:
        self.then(self)


def of_epoch(*values: Any) -> Callable[[Any], None]:
    """Sets the epoch's value; after the last one the first again."""

    def then(module: Reads) -> None:
        module.value = values[module.current_epoch % len(values)]

    return then


def again(value: int, out: Tensor, y: Tensor) -> Tensor:
    for _ in range(value):
        out = out * 1.5
    return nn.functional.cross_entropy(out, y)


CE, MARGIN = nn.functional.cross_entropy, nn.functional.multi_margin_loss
KINDS: dict[str, tuple[Callable[..., Tensor], Any, Callable[[Any], Any]]] = {
    "a weight": (lambda v, out, y: CE(out, y) + v * out.square().mean(), 0.0, of_epoch(0.0, 0.5)),
    "an argument": (lambda v, out, y: CE(out, y, label_smoothing=v), 0.0, of_epoch(0.0, 0.1, 0.2)),
    "a string": (
        lambda v, out, y: (CE if v == "ce" else MARGIN)(out, y),
        "ce",
        of_epoch("m", "ce"),
    ),
    "of numpy": (
        lambda v, out, y: CE(out, y) * v,
        np.float64(1),
        of_epoch(*np.linspace(0.1, 1, 3)),
    ),
    "turns of a loop": (again, 1, of_epoch(1, 3, 0)),
    "a condition": (lambda v, out, y: CE(out, y) if v == 0 else CE(out, y) * v, 0, of_epoch(0, 2)),
    "a flag in a buffer": (
        lambda v, out, y: CE(out, y) * (2 if v else 1),
        torch.tensor(False),
        lambda module: module.value.logical_not_(),
    ),
    "a dropout's": (
        lambda v, out, y: CE(out, y),
        None,
        lambda module: setattr(module.net[2], "p", 0.1 + 0.2 * module.current_epoch),
    ),
}


@pytest.mark.numbers
@pytest.mark.parametrize("name", KINDS)
def test_each_kind_of_value_trains_as_in_stock(name: str) -> None:
    make = lambda: Reads(*KINDS[name])  # noqa: E731
    ours, stock = both(make, lambda: (loader(48),), max_epochs=EPOCHS)
    assert_same_run(ours, stock)


def programs(run: Any) -> list[str]:
    """Why there are the programs of a fit's training."""
    return [one.reason for one in run.trainer.strategy.step_functions["training"].programs]


@pytest.mark.fits
def test_a_value_that_comes_back_has_its_program() -> None:
    run = fit(lambda: Reads(*KINDS["a string"]), lambda: (loader(48),), static=True, max_epochs=6)
    assert programs(run) == ["", "number 2, since self.value was 'm', and now is 'ce'"]


@pytest.mark.numbers
@pytest.mark.parametrize(
    ("values", "how"),
    [
        ((1, 1.0, True), lambda v, out, y: CE(out, y) * (2 if type(v) is float else 1)),
        ((0.0, -0.0), lambda v, out, y: CE(out, y) * np.copysign(1, v)),
        (((1, 0.5), (1.0, 0.5)), lambda v, out, y: CE(out, y) * (3 if type(v[0]) is int else 1)),
    ],
    ids=["types", "signs", "tuples"],
)
def test_what_is_equal_and_yet_another_value_has_a_program(values: Any, how: Any) -> None:
    make = lambda: Reads(how, values[0], of_epoch(*values))  # noqa: E731
    ours, stock = both(make, lambda: (loader(48),), max_epochs=2 * len(values))
    assert_same_run(ours, stock)
    assert len(programs(ours)) == len(values)


@pytest.mark.numbers
def test_an_attribute_that_a_hook_makes_is_found() -> None:
    def second(module: Any) -> None:
        if module.current_epoch == 1:
            module.later = 2.0

    class Later(Reads):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step(batch, batch_idx) * getattr(self, "later", 1.0)

    ours, stock = both(
        lambda: Later(*KINDS["a weight"][:2], second), lambda: (loader(48),), max_epochs=EPOCHS
    )
    assert_same_run(ours, stock)


@pytest.mark.numbers
def test_of_more_values_steps_are_lightnings_own(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(selection, "say", lambda trainer, line: told.append(line))

    class Counts(Reads):
        def on_train_batch_end(self, *args: Any) -> None:
            self.value += 1

    make = lambda: Counts(lambda v, out, y: CE(out, y) * (1 + v), 0, lambda module: None)  # noqa: E731
    ours, stock = both(make, lambda: (loader(16 * (VALUES + 3)),), max_epochs=1)
    assert_same_run(ours, stock)
    assert len(programs(ours)) == VALUES
    assert len(told) == 1
    assert told[0].startswith(f"CSX: self.value was 0, and now is {VALUES}: the training step has")
    assert 'Faster: self.register_buffer("value", torch.tensor(0)) in __init__' in told[0]


@pytest.mark.numbers
def test_shapes_of_batches_are_counted_for_each_value() -> None:
    made = lambda: (loader(44),)  # noqa: E731
    ours, stock = both(lambda: Reads(*KINDS["a weight"]), made, max_epochs=EPOCHS)
    assert_same_run(ours, stock)
    assert len(programs(ours)) == 4
    assert all(a != b for a, b in pairwise(programs(ours)))


@pytest.mark.numbers
def test_an_evaluation_follows_too() -> None:
    class Validates(Classifier):
        scale = 1.0

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("v", self.net(batch[0]).mean() * self.scale)

        def on_validation_epoch_end(self) -> None:
            self.seen = [*getattr(self, "seen", []), float(self.trainer.callback_metrics["v"])]
            self.scale += 0.5

    ours, stock = both(
        lambda: Validates(mlp()), lambda: (loader(48), loader(32)), max_epochs=EPOCHS, fresh=True
    )
    assert_same_run(ours, stock)
    assert ours.module.seen == pytest.approx(stock.module.seen, rel=1e-5)


class Turns(pl.Callback):
    """Has its own schedule of the module's value."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        module.value = 1.0 if batch_idx % 2 else 0.5


@pytest.mark.numbers
def test_with_a_window_of_batches_both_entry_points_follow() -> None:
    make = lambda: Reads(lambda v, out, y: CE(out, y) * v, 0.0, lambda module: None)  # noqa: E731
    options: dict[str, Any] = {"accumulate_grad_batches": 2, "callbacks": (Turns(),)}
    assert_same_run(*both(make, lambda: (loader(80),), max_epochs=1, **options))


class OfClass(Classifier):
    """Its loader or its schedule sets a value while no hook runs."""

    scale = 1.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]) / self.scale, batch[1])


class BySchedule(OfClass):
    def configure_optimizers(self) -> Any:
        def factor(step: int) -> float:
            self.scale = 1.0 if step < 4 else 3.0
            return 1.0

        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def by_loader(module: OfClass) -> Any:
    """A loader whose seventh batch and all later ones change the module."""
    batches = loader(96)
    collate, made = batches.collate_fn, []

    def collates(rows: Any) -> Any:
        made.append(len(rows))
        if len(made) >= 7:
            module.scale = 3.0
        return collate(rows)

    batches.collate_fn = collates
    return batches


@pytest.mark.numbers
@pytest.mark.parametrize("kind", [OfClass, BySchedule])
def test_what_loaders_and_schedules_set_is_found_at_the_next_step(kind: type[OfClass]) -> None:
    """Without hooks: nothing else is compared between batches."""
    found = []
    for static in (True, False):
        torch.manual_seed(0)
        module = kind(mlp())
        batches = by_loader(module) if kind is OfClass else loader(96)
        make_trainer(static, max_epochs=2).fit(module, batches)
        found.append(module.net.state_dict())
    assert_close(*found)
