"""What is logged on CSX is what stock Lightning logs: every dict, every row of every logger."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from harness import assert_close, both, fit, make_trainer, numbers
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities import grad_norm
from models import CLASSES, Classifier, Measured, loader, mlp
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

pytestmark = pytest.mark.numbers


class Rows(DummyLogger):
    """Keeps every row that a Trainer logs."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int | None, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append((step, dict(metrics)))


class Reader(pl.Callback):
    """Reads all dicts of metrics wherever a callback may."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, dict[str, Any]]] = []


DICTS = ("callback_metrics", "logged_metrics", "progress_bar_metrics")


def _read(name: str) -> Any:
    def hook(self: Reader, trainer: Any, *args: Any, **kwargs: Any) -> None:
        for kind in DICTS:
            self.seen.append((f"{name}: {kind}", numbers(getattr(trainer, kind))))

    return hook


for _name in (
    "on_train_batch_start",
    "on_train_batch_end",
    "on_train_epoch_end",
    "on_validation_start",
    "on_validation_batch_end",
    "on_validation_epoch_end",
    "on_validation_end",
    "on_train_end",
    "on_exception",
):
    setattr(Reader, _name, _read(_name))


class Talkative(Classifier):
    """Logs in every way there is."""

    def __init__(self) -> None:
        super().__init__(mlp())
        self.accuracy = MulticlassAccuracy(CLASSES, average="micro")
        self.scores = MetricCollection(
            [MulticlassAccuracy(CLASSES), MulticlassF1Score(CLASSES)], prefix="m/"
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.net(batch[0])
        loss = nn.functional.cross_entropy(logits, batch[1])
        self.log("loss", loss, prog_bar=True)
        self.log("both", loss * 2, on_step=True, on_epoch=True)
        self.log("least", loss, on_step=False, on_epoch=True, reduce_fx="min")
        self.log("most", loss, on_step=False, on_epoch=True, reduce_fx=torch.max)
        self.log("least_python", loss, on_step=False, on_epoch=True, reduce_fx=min)
        sometimes_nan = torch.where(loss > 1.4, torch.nan, loss)
        self.log("most_python", sometimes_nan, on_step=False, on_epoch=True, reduce_fx=max)
        self.log("all", loss[None], on_epoch=True, reduce_fx="sum", prog_bar=True)
        self.log("weighted", loss, on_step=False, on_epoch=True, batch_size=3)
        self.log("counted", loss, on_step=False, on_epoch=True, batch_size=batch[1].sum())
        self.log("number", 2.5, on_step=True, on_epoch=True)
        self.log("numpy", np.float32(1.5), on_step=True, on_epoch=True)
        self.log("hits", (logits.argmax(1) == batch[1]).sum().float(), on_epoch=True)
        self.accuracy(logits, batch[1])
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.scores.update(logits, batch[1])
        self.log_dict(self.scores, on_step=False, on_epoch=True)
        self.log_dict({"a": loss.sqrt(), "b": loss + 1}, logger=False)
        self.log("weight", self.net[0].weight[0, 0], on_step=True, on_epoch=True)
        doubled = loss.detach() * 2
        self.log("doubled", doubled, on_step=True, on_epoch=True)
        doubled += 100  # what is logged is what it was then
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_dict(grad_norm(self.net, norm_type=2))
        self.log("inner", self.net[0].weight.grad.norm(), on_epoch=True)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx % 4 == 3:
            self.log("outside", float(batch_idx), on_step=True, on_epoch=True)

    def on_train_epoch_end(self) -> None:
        self.log("epoch_end", float(self.current_epoch))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("val_loss", loss, prog_bar=True)
        self.log("val_most", loss, on_step=True, on_epoch=True, reduce_fx="max")

    def on_validation_epoch_end(self) -> None:
        self.log("val_end", 1.5)


class TwoLoaders(Classifier):
    """Validates on two loaders."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("val_loss", loss * (dataloader_idx + 1), on_step=True, on_epoch=True)
        self.log(f"own_{dataloader_idx}", loss, add_dataloader_idx=False)


def compare(make: Any, loaders: Any, **options: Any) -> list[Any]:
    """Run both, compare every row and every dict that could be read; returns the rows."""
    found = []
    for static in (True, False):
        rows, reader = Rows(), Reader()
        fit(
            make,
            loaders,
            static=static,
            callbacks=(reader,),
            **{**options, "logger": rows},
        )
        found.append((rows.rows, reader.seen))
    (our_rows, our_seen), (stock_rows, stock_seen) = found
    assert [step for step, _ in our_rows] == [step for step, _ in stock_rows]
    assert_close([row for _, row in our_rows], [row for _, row in stock_rows], where="rows")
    assert [where for where, _ in our_seen] == [where for where, _ in stock_seen]
    for (where, ours), (_, stock) in zip(our_seen, stock_seen, strict=True):
        assert_close(ours, stock, where=where)
    return our_rows


@pytest.mark.long
def test_every_way_to_log_equals_stock() -> None:
    rows = compare(
        Talkative,
        lambda: (loader(16 * 10), loader(16 * 3, seed=5)),
        max_epochs=3,
        log_every_n_steps=3,
        val_check_interval=0.5,
    )
    assert len(rows) > 20
    assert {"loss", "both_step", "inner_step", "outside_step"} <= set().union(
        *(row for _, row in rows)
    )


@pytest.mark.long
def test_logging_with_accumulation_equals_stock() -> None:
    compare(
        Talkative,
        lambda: (loader(16 * 9), loader(16)),
        accumulate_grad_batches=4,
        log_every_n_steps=1,
        max_epochs=2,
    )


def test_logging_with_two_validation_loaders_equals_stock() -> None:
    compare(
        lambda: TwoLoaders(mlp()),
        lambda: (loader(16 * 4), [loader(32), loader(64, seed=3)]),
        max_epochs=2,
        log_every_n_steps=2,
    )


@pytest.mark.long
def test_logging_with_two_programs_equals_stock() -> None:
    ours, stock = both(
        Talkative, lambda: (loader(16 * 4 + 5), loader(16)), backend={"max_programs": 2}
    )
    assert_close(ours.final, stock.final, where="final")
    assert len(ours.trainer.strategy.step_functions["training"].programs) == 2


class Stop(pl.Callback):
    """Raises in the middle of an epoch."""

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        if trainer.global_step == 5:
            raise KeyError("stop")


def test_the_last_values_can_be_read_after_an_exception() -> None:
    found = []
    for static in (True, False):
        reader, trainers = Reader(), []

        class Keep(pl.Callback):
            def setup(self, trainer: Any, module: Any, stage: str) -> None:
                trainers.append(trainer)  # noqa: B023

        with pytest.raises(KeyError):
            fit(
                lambda: Classifier(mlp()),
                lambda: (loader(),),
                static=static,
                callbacks=(Keep(), Stop(), reader),
            )
        found.append((reader.seen[-3:], numbers(trainers[0].callback_metrics)))
    (ours, ours_after), (stock, stock_after) = found
    assert ours[0][0] == "on_exception: callback_metrics"
    for (where, mine), (_, theirs) in zip(ours, stock, strict=True):
        assert_close(mine, theirs, where=where)
    assert "loss" in ours_after
    assert_close(ours_after, stock_after)


@pytest.mark.long
def test_fit_validate_and_test_again_with_one_trainer_equal_stock() -> None:
    found = []
    for static in (True, False):
        torch.manual_seed(0)
        module, rows = Measured(), Rows()
        trainer = make_trainer(static, logger=rows, max_epochs=2)
        torch.manual_seed(7)
        first = trainer.validate(module, loader(48, seed=5), verbose=False)
        trainer.fit(module, loader(160), loader(48, seed=5))
        second = trainer.validate(module, loader(48, seed=6), verbose=False)
        trainer.fit_loop.max_epochs = 3
        trainer.fit(module, loader(160), loader(48, seed=5))
        found.append((first, second, numbers(trainer.callback_metrics), [r for _, r in rows.rows]))
    for ours, stock in zip(*found, strict=True):
        assert_close(ours, stock)


def test_after_an_exception_other_stages_show_no_values_of_training() -> None:
    class Evaluated(TwoLoaders):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("test_loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    found = []
    for static in (True, False):
        trainer = make_trainer(static, max_epochs=1, callbacks=[Stop()])
        torch.manual_seed(0)
        module = Evaluated(mlp())
        with pytest.raises(KeyError):
            trainer.fit(module, loader())
        trainer.test(module, loader(48), verbose=False)
        found.append(numbers(trainer.callback_metrics))
        assert list(trainer.logged_metrics) == ["test_loss"]
    assert_close(*found)


@pytest.mark.fits
def test_one_key_with_different_arguments_is_lightning_s_error() -> None:
    class Twice(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.log("twice", loss, on_epoch=True)
            self.log("twice", loss, on_epoch=False, on_step=True)
            return loss

    with pytest.raises(MisconfigurationException, match="twice"):
        fit(lambda: Twice(mlp()), lambda: (loader(),), static=True)


def test_a_tensor_is_logged_as_it_was_then() -> None:
    class Changes(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            kept = loss.detach().clone()
            self.log("kept", kept, on_step=True, on_epoch=True)
            kept.mul_(0)
            return loss

    ours, stock = both(lambda: Changes(mlp()), lambda: (loader(64),))
    assert_close(ours.metrics, stock.metrics)
    assert_close(ours.final, stock.final)


def test_one_key_logged_twice_alike_counts_twice() -> None:
    class Twice(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
            self.log("twice", loss, on_epoch=True)
            self.log("twice", loss * 3, on_epoch=True)
            return loss

    ours, stock = both(lambda: Twice(mlp()), lambda: (loader(160),), max_epochs=2)
    assert_close(ours.metrics, stock.metrics)
    assert_close(ours.final, stock.final)


def test_what_a_module_in_a_list_logs_is_left_out_as_in_stock() -> None:
    class Inner(pl.LightningModule):
        def forward(self, x: Tensor) -> Tensor:
            self.log("hidden", x.mean())  # Lightning gives its trainer to direct children alone
            return x

    class Outer(Classifier):
        def __init__(self) -> None:
            super().__init__(mlp())
            self.parts = nn.ModuleList([Inner()])

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step([self.parts[0](batch[0]), batch[1]], batch_idx)

    ours, stock = both(Outer, lambda: (loader(160),))
    assert_close(ours.metrics, stock.metrics)
    assert "hidden" not in stock.final


class SharesNames(Classifier):
    """Logs one name while it trains and while it validates, and others in one of the two."""

    def __init__(self, on_epoch: bool) -> None:
        super().__init__(mlp())
        self.on_epoch = on_epoch

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, prog_bar=True, on_step=True, on_epoch=self.on_epoch)
        self.log("alone", loss * 2)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, prog_bar=True)
        self.log("validated", loss + 1)


@pytest.mark.core
@pytest.mark.parametrize("on_epoch", [False, True])
@pytest.mark.parametrize(
    "when",
    [
        {},
        {"val_check_interval": 2},
        {"val_check_interval": 3},
        {"check_val_every_n_epoch": 2},
        {"num_sanity_val_steps": 2},
        {"val_check_interval": 5, "check_val_every_n_epoch": None},
        {"accumulate_grad_batches": 3},
    ],
    ids=str,
)
def test_a_name_that_training_and_validation_share_has_the_value_of_who_logged_last(
    when: dict[str, Any], on_epoch: bool
) -> None:
    compare(
        lambda: SharesNames(on_epoch),
        lambda: (loader(64), loader(48, seed=3)),
        max_epochs=4,
        **when,
    )


class CountsRows(pl.LightningModule):
    """Logs the rows of each batch, every way in which they can be reduced."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch[0]).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        for how in ("mean", "min", "max", "sum"):
            self.log(how, batch[0].sum(), reduce_fx=how)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.0)


@pytest.mark.numbers
@pytest.mark.parametrize(
    "entries", [("fit", "validate", "validate"), ("validate", "fit"), ("test", "validate", "test")]
)
def test_a_smaller_last_batch_counts_in_every_entry_point_of_one_trainer(
    entries: tuple[str, ...],
) -> None:
    data = TensorDataset(torch.arange(64.0).reshape(32, 2))
    batches = DataLoader(data, batch_size=12)

    def values(static: bool) -> list[dict[str, float]]:
        trainer, module, found = make_trainer(static, max_epochs=2), CountsRows(), []
        for entry in entries:
            getattr(trainer, entry)(module, *[batches] * (1 + (entry == "fit")))
            found.append({key: float(value) for key, value in trainer.callback_metrics.items()})
        return found

    assert values(static=True) == values(static=False)


class InDouble(pl.LightningModule):
    """float64 under the default precision: epochs' values are float64, too."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(3, dtype=torch.float64))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = (batch @ self.w - 1).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("most", loss, on_step=False, on_epoch=True, reduce_fx=max)
        self.log("all", loss, on_step=False, on_epoch=True, reduce_fx="sum")
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", (batch @ self.w - 1).square().mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def doubles() -> tuple[Any, ...]:
    x = torch.randn(14, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return DataLoader(x, batch_size=4), DataLoader(x, batch_size=4)


def test_values_of_an_epoch_in_float64_stay_in_it() -> None:
    ours, stock = both(InDouble, doubles, max_epochs=3, backend={"max_programs": 2})
    wanted = stock.trainer.callback_metrics
    assert {*wanted} == {"loss", "loss_step", "loss_epoch", "most", "all", "val"}
    for name, value in wanted.items():
        found = ours.trainer.callback_metrics[name]
        assert (name, found.dtype) == (name, value.dtype)
        assert float(found) == pytest.approx(float(value), rel=1e-14), name
