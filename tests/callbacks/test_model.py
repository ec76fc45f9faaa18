"""Metrics of models that log nothing, and the table of parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import assert_close, both, fit
from models import CLASSES, Classifier, Measured, loader, mlp
from torch import Tensor, nn
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from fulgurite.callbacks import CountParams, ModelEvalMetrics

devices = pytest.mark.parametrize("static", [True, False], ids=["CSX", "stock"])


class PlainNet(nn.Module):
    """Updates metrics whenever it is called, in training too, and returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        self.accuracy = MulticlassAccuracy(CLASSES, average="micro")
        self.others = MetricCollection(
            {"f1": MulticlassF1Score(CLASSES), "recall": MulticlassAccuracy(CLASSES)}
        )
        self.per_class = MulticlassAccuracy(CLASSES, average=None)
        self.never = MeanMetric()

    def forward(self, batch: Any) -> Tensor:
        logits = self.net(batch[0])
        self.accuracy.update(logits, batch[1])
        if not self.training:
            self.others.update(logits, batch[1])
            self.per_class.update(logits, batch[1])
        return nn.functional.cross_entropy(logits, batch[1])


class Wrapped(Classifier):
    """A plain module as a LightningModule that logs nothing."""

    def __init__(self) -> None:
        super().__init__(PlainNet())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.net(batch)


@pytest.mark.numbers
def test_metrics_that_nobody_logs_are_logged_over_the_validation_set() -> None:
    options: dict[str, Any] = {"val_check_interval": 5, "max_epochs": 2}
    loaders = lambda: (loader(160), loader(48, seed=2))  # noqa: E731
    ours, stock = both(Wrapped, loaders, callbacks=(ModelEvalMetrics(),), **options)
    names = ["net.accuracy", "net.others/f1", "net.others/recall"]
    names += [f"net.per_class/{i}" for i in range(CLASSES)]
    assert list(ours.final) == list(stock.final) == names
    assert_close(ours.final, stock.final)
    module = ours.module.eval()
    [batch] = [loader(48, batch_size=48, seed=2).dataset[:]]
    with torch.no_grad():
        right = (module.net.net(batch[0]).argmax(1) == batch[1]).float().mean()
    assert ours.final["net.accuracy"] == pytest.approx(float(right))


@pytest.mark.fits
@devices
def test_what_training_counted_goes_on(static: bool) -> None:
    run = fit(
        Wrapped,
        lambda: (loader(160), loader(48)),
        static=static,
        callbacks=(ModelEvalMetrics(),),
        val_check_interval=5,
    )
    metric = run.module.net.accuracy
    assert int(metric.tp + metric.fn) == 160
    assert metric._update_count == 10


@pytest.mark.fits
@devices
def test_metrics_that_a_module_logs_are_its_own(static: bool) -> None:
    loaders = lambda: (loader(160), loader(48))  # noqa: E731
    with_it = fit(Measured, loaders, static=static, callbacks=(ModelEvalMetrics(),))
    without = fit(Measured, loaders, static=static)
    assert with_it.final == without.final


@pytest.mark.fits
@devices
def test_a_module_with_a_hook_around_validation_looks_after_its_metrics(static: bool) -> None:
    class Own(Wrapped):
        def on_validation_epoch_end(self) -> None:
            self.log("mine", self.net.accuracy.compute())
            self.net.accuracy.reset()

    run = fit(
        Own, lambda: (loader(160), loader(48)), static=static, callbacks=(ModelEvalMetrics(),)
    )
    assert list(run.final) == ["mine"]


class Blocks(nn.Module):
    """Two layers, one frozen, a buffer, and a lazy layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.layers[0].weight.requires_grad_(False)
        self.register_buffer("mask", torch.zeros(8))
        self.lazy = nn.LazyLinear(3)


def lines(table: str) -> list[list[str]]:
    return [line.split("  ") for line in table.splitlines()]


def test_the_table_has_a_row_for_each_tensor_and_totals() -> None:
    table = CountParams().table(Blocks())
    rows = [" ".join(line.split()) for line in table.splitlines()]
    assert rows[0] == "Type Name Dtype Shape # Elements Size % of Total Trainable"
    assert rows[2] == "parameter layers.0.weight float32 (4, 4) 16 64 B 33.33 no"
    assert rows[3] == "parameter layers.0.bias float32 (4,) 4 16 B 8.33 yes"
    assert rows[6] == "parameter lazy.weight - - 0 0 B 0.00 yes"
    assert rows[8] == "buffer mask float32 (8,) 8 32 B 16.67 no"
    assert rows[-2:] == [
        "Total: 48 elements, 192 B, buffers included.",
        "Trainable: 24 elements, 96 B.",
    ]


def test_names_become_groups_and_columns_order_the_rows() -> None:
    count = CountParams(
        search_and_replace=[(r"layers[.]\d+[.]", "layers.*.")],
        order_by="# Elements",
        descending=True,
    )
    rows = [" ".join(line.split()) for line in count.table(Blocks()).splitlines()[2:5]]
    assert rows == [
        "group layers.*.weight - - 32 128 B 66.67 in part",
        "group layers.*.bias - - 8 32 B 16.67 yes",
        "buffer mask float32 (8,) 8 32 B 16.67 no",
    ]
    by_two = CountParams(order_by=["Type", "Name"]).table(Blocks()).splitlines()
    assert by_two[2].startswith("buffer")


@pytest.mark.fits
@devices
def test_it_is_printed_before_training(static: bool, capsys: pytest.CaptureFixture[str]) -> None:
    fit(lambda: Classifier(mlp()), lambda: (loader(32),), static=static, callbacks=(CountParams(),))
    assert "Total: 212 elements" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"order_by": "Elements"}, "no column 'Elements'.*Type, Name, Dtype"),
        ({"search_and_replace": [["("]]}, r"pairs of a regular expression.*got \['\('\]"),
        ({"search_and_replace": [["(", "x"]]}, "pairs of a regular expression"),
    ],
)
def test_bad_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CountParams(**options)
