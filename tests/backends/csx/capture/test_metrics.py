"""torchmetrics in a step: every metric equals stock's, and what no program can compute is said."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from document_metrics import PAGE, page
from harness import assert_same_run, both, fit
from metric_table import ENTRIES, KINDS, WAYS, epochs, noted
from models import CLASSES, Classifier, loader, mlp
from torch import Tensor, nn
from torchmetrics import CatMetric, Metric, MetricCollection, MinMaxMetric
from torchmetrics.aggregation import RunningMean
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassHingeLoss
from torchmetrics.wrappers import Running

from fulgurite.backends.csx.diagnostics.trace_errors import TraceError, UnsupportedState

SAMPLE = ("R2Score", "PearsonCorrCoef", "SpearmanCorrCoef", "MeanSquaredError")
MANY = 10
"""Metrics of a kind that take long: 4 to 11 s of CPU for 18 to 36 of them (measured)."""


def assert_equal(ours: Any, stock: Any) -> None:
    """Not a number is equal to itself: torchmetrics says so where a class is missing."""
    torch.testing.assert_close(ours, stock, rtol=1e-5, atol=1e-6, equal_nan=True)


def rows() -> list[Any]:
    """Each kind in both ways; of those that take long one is in the core."""
    every = [(kind, way) for kind in KINDS for way in WAYS]
    long = {(kind, way) for kind, way in every if len(KINDS[kind]) > MANY}
    long.remove(("multiclass", "update"))
    return [pytest.param(*row, marks=[pytest.mark.long] * (row in long)) for row in every]


@pytest.mark.parametrize(("kind", "way"), rows())
@pytest.mark.filterwarnings("ignore::UserWarning")  # torchmetrics', of small batches
def test_every_metric_equals_stock(kind: str, way: str) -> None:
    assert_equal(epochs(KINDS[kind], way, True), epochs(KINDS[kind], way, False))


@pytest.mark.long
@pytest.mark.compiler
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_metrics_equal_stock_in_compiled_programs() -> None:
    entries = [entry for entry in ENTRIES if entry.id in SAMPLE]
    assert_equal(
        epochs(entries, "forward", True, policy="default"), epochs(entries, "forward", False)
    )


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_page_says_which_metrics_need_the_host() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python tests/tools/document_metrics.py"


class Curve(Classifier):
    """Calls a metric whose batch value depends on shapes that are values."""

    def __init__(self) -> None:
        super().__init__(mlp())
        self.metric = MulticlassAUROC(CLASSES, thresholds=5)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.net(batch[0])
        value = self.metric(logits.softmax(1), batch[1])
        loss = nn.functional.cross_entropy(logits, batch[1])
        return self.used(loss, value)

    def used(self, loss: Tensor, value: Any) -> Any:
        self.log("metric", self.metric, on_step=True, on_epoch=True)
        return loss


@pytest.mark.numbers
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_value_of_each_batch_is_logged() -> None:
    ours, stock = both(Curve, lambda: (loader(80),), max_epochs=2)
    assert_same_run(ours, stock)
    assert len({metrics["metric_step"] for metrics in stock.metrics}) > 2


@pytest.mark.fits
@pytest.mark.parametrize(
    "use",
    [
        lambda self, loss, value: loss + value,
        lambda self, loss, value: value * loss,
        lambda self, loss, value: torch.stack([loss, value]).sum(),
        lambda self, loss, value: loss if value > 0.5 else loss * 2,
        lambda self, loss, value: loss * value.detach(),
        lambda self, loss, value: {"loss": loss, "metric": value},
    ],
    ids=["added", "multiplied", "stacked", "compared", "detached", "returned"],
)
def test_a_batch_value_that_is_used_is_an_error(use: Callable[..., Any]) -> None:
    class Uses(Curve):
        def used(self, loss: Tensor, value: Any) -> Any:
            return use(self, loss, value)

    with pytest.raises(UnsupportedState, match=r"MulticlassAUROC returned(.|\n)*metric\.update"):
        fit(Uses, lambda: (loader(80),), static=True)


class Logs(Curve):
    """Logs the batch values of both stages, in each way that there is."""

    def __init__(self) -> None:
        super().__init__()
        self.both = MetricCollection([MulticlassAUROC(CLASSES), MulticlassHingeLoss(CLASSES)])

    def used(self, loss: Tensor, value: Any) -> Any:
        self.log("step", value)
        self.log("epoch", value, on_step=False, on_epoch=True)
        self.log("two", value, on_step=True, on_epoch=True, prog_bar=True)
        self.log("most", value, on_epoch=True, reduce_fx="max", batch_size=3)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log_dict(self.both(self.net(batch[0]).softmax(1), batch[1]))


@pytest.mark.long
@pytest.mark.numbers
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_batch_value_is_logged() -> None:
    ours, stock = both(Logs, lambda: (loader(40), loader(40)), max_epochs=2)  # the last one smaller
    assert_same_run(ours, stock)
    assert len({metrics["two_step"] for metrics in stock.metrics}) > 2
    assert {"most_epoch", "MulticlassAUROC", "MulticlassHingeLoss"} <= stock.final.keys()


@pytest.mark.fits
def test_a_batch_value_that_is_no_number_is_not_logged() -> None:
    with pytest.raises(ValueError, match=r"log\('metric', \.\.\.\) takes one number, and MinMax"):
        fit(lambda: Measured(MinMaxMetric(accuracy()), logged), lambda: (loader(48),), static=True)


class Middle(Metric):
    """Changes its state in place before it does what no program can."""

    full_state_update = True
    total: Tensor

    def __init__(self, updates_on_host: bool) -> None:
        super().__init__()
        self.updates_on_host = updates_on_host
        self.add_state("total", torch.zeros(()), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros(()), dist_reduce_fx="sum")

    def update(self, x: Tensor) -> None:
        self.total += x.sum()
        if not self.updates_on_host or x.sum() > 0:
            self.count += 1

    def compute(self) -> Tensor:
        return self.total / self.count if self.total > 0 else -self.total


@pytest.mark.numbers
@pytest.mark.parametrize("updates_on_host", [False, True])
def test_what_was_tried_in_place_is_not_counted_twice(updates_on_host: bool) -> None:
    class Counts(Classifier):
        def __init__(self) -> None:
            super().__init__(mlp())
            self.metric = Middle(updates_on_host)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.metric(batch[0])
            self.log("metric", self.metric, on_step=True, on_epoch=True)
            return super().training_step(batch, batch_idx)

    with noted() as on_host:
        ours, stock = both(Counts, lambda: (loader(80),), max_epochs=2)
    assert bool(on_host.updates) is updates_on_host
    assert on_host.values
    assert_same_run(ours, stock)
    assert ours.module.metric._update_count == stock.module.metric._update_count


class Measured(Classifier):
    """Measures in the step, by a function of module, probabilities, targets and loss."""

    def __init__(self, metric: Metric, measure: Callable[..., Any]) -> None:
        super().__init__(mlp())
        self.metric, self.measure = metric, measure

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.net(batch[0])
        loss = nn.functional.cross_entropy(logits, batch[1])
        self.measure(self, logits.softmax(1), batch[1], loss.detach())
        return loss


class OnHost(Measured):
    """Computes what it has measured so far after each step, as the remedy says."""

    def on_train_batch_end(self, *args: Any) -> None:
        value = self.metric.compute()
        named = value if isinstance(value, dict) else {"metric": value}
        self.log_dict({f"{name}_": one.mean() for name, one in named.items()}, on_step=True)


def accuracy() -> Metric:
    return MulticlassAccuracy(CLASSES)


def updated(self: Any, p: Tensor, y: Tensor, loss: Tensor) -> None:
    self.metric.update(p, y)


def computed(self: Any, p: Tensor, y: Tensor, loss: Tensor) -> None:
    self.metric.update(p, y)
    self.metric.compute()


def called(self: Any, p: Tensor, y: Tensor, loss: Tensor) -> None:
    self.metric(p, y)
    self.log("metric", self.metric, on_step=True, on_epoch=True)


def logged(self: Any, p: Tensor, y: Tensor, loss: Tensor) -> None:
    self.log("metric", self.metric(p, y), on_step=True, on_epoch=True)


HINGE = lambda: MulticlassHingeLoss(CLASSES)  # noqa: E731
"""The host updates it."""


@pytest.mark.numbers
@pytest.mark.parametrize(
    "make",
    [
        lambda: OnHost(accuracy(), updated),
        lambda: OnHost(MinMaxMetric(accuracy()), updated),
        lambda: OnHost(HINGE(), updated),
        lambda: OnHost(MulticlassAUROC(CLASSES), updated),
        lambda: OnHost(Running(accuracy(), 3), updated),
        lambda: OnHost(Running(HINGE(), 3), called),
        lambda: OnHost(RunningMean(3), lambda self, p, y, loss: self.metric.update(loss)),
        lambda: OnHost(CatMetric(), lambda self, p, y, loss: self.metric.update(loss)),
        lambda: Measured(Running(accuracy(), 3), called),
        lambda: Measured(Running(accuracy(), 3), logged),
        lambda: Measured(HINGE(), called),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_remedies_say_gives_the_numbers_of_stock(make: Callable[[], Measured]) -> None:
    ours, stock = both(make, lambda: (loader(48, 8),), max_epochs=2)
    assert_same_run(ours, stock)
    assert stock.final


@pytest.mark.numbers
def test_a_metric_that_the_step_resets_may_keep_all_batches() -> None:
    def anew(self: Any, p: Tensor, y: Tensor, loss: Tensor) -> None:
        self.metric.reset()
        self.metric.update(p)
        self.log("metric", self.metric.compute().std())

    audited = {"audit": True}
    ours, stock = both(
        lambda: Measured(CatMetric(), anew), lambda: (loader(48, 8),), fresh=True, backend=audited
    )
    assert_same_run(ours, stock)
    assert ours.module.metric._update_count == stock.module.metric._update_count == 1


@pytest.mark.fits
@pytest.mark.parametrize(
    ("metric", "measure", "why"),
    [
        (HINGE, computed, r"\.compute\(\), but .* the host does it"),
        (
            HINGE,
            lambda self, p, y, loss: (self.metric(p, y), self.metric.reset()),
            r"\.reset\(\), but .* the host does it",
        ),
        (lambda: Running(accuracy(), 3), computed, "the host does it"),
        (lambda: MulticlassAUROC(CLASSES), computed, "more in every step"),
        (lambda: MinMaxMetric(accuracy()), computed, "as a Python condition inside torchmetrics"),
        (lambda: Running(HINGE(), 3), logged, "uses what Running returned"),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_would_be_computed_too_early_is_an_error(
    metric: Callable[[], Metric], measure: Callable[..., Any], why: str
) -> None:
    with pytest.raises(TraceError, match=rf"{why}(.|\n)*compute\(\) in on_train_batch_end\(\)"):
        fit(lambda: Measured(metric(), measure), lambda: (loader(48, 8),), static=True)
