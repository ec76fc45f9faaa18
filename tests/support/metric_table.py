"""Every metric of ``torchmetrics.classification`` and ``torchmetrics.regression``, once.

They run in a validation step on CSX and in stock Lightning: two epochs, the last batch smaller.
Words: the *kind* of a metric says what batches it takes; the *way* is how the step calls it.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import torch
import torchmetrics.classification
import torchmetrics.regression
from harness import make_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import Metric

from fulgurite.backends.csx.capture import metrics

CLASSES = 3
ROWS, BATCH = 20, 8  # the last batch has 4
WAYS = ("forward", "update")

_OPTIONS: dict[str, dict[str, Any]] = {
    "FBetaScore": {"beta": 0.5},
    "PrecisionAtFixedRecall": {"min_recall": 0.5},
    "RecallAtFixedPrecision": {"min_precision": 0.5},
    "SensitivityAtSpecificity": {"min_specificity": 0.5},
    "SpecificityAtSensitivity": {"min_sensitivity": 0.5},
    "Fairness": {"num_groups": 2},
    "GroupStatRates": {"num_groups": 2},
    "CriticalSuccessIndex": {"threshold": 0.5},
    "MinkowskiDistance": {"p": 3.0},
}
"""Arguments that a metric asks for, by the end of its name."""

_COUNTS = {"Multiclass": {"num_classes": CLASSES}, "Multilabel": {"num_labels": CLASSES}}
_KINDS = {
    "CosineSimilarity": "rows",
    "ContinuousRankedProbabilityScore": "ensembles",
    "KLDivergence": "distributions",
    "JensenShannonDivergence": "distributions",
    "BinaryFairness": "groups",
    "BinaryGroupStatRates": "groups",
}
_LIBRARIES = {"classification": torchmetrics.classification, "regression": torchmetrics.regression}


@dataclass(frozen=True)
class Entry:
    """One metric: its class, what it is made with, and what batches it takes."""

    library: str
    name: str
    kind: str
    options: dict[str, Any] = field(default_factory=dict)

    def make(self) -> Metric:
        """A new one."""
        metric: Metric = getattr(_LIBRARIES[self.library], self.name)(**self.options)
        return metric

    @property
    def id(self) -> str:
        """Its name, with the options that change how it keeps its state."""
        return f"{self.name}-thresholds" if "thresholds" in self.options else self.name


def _entries() -> list[Entry]:
    """Classes that pick another by ``task=...`` are left out: what they pick is here itself."""
    found = []
    for library, module in _LIBRARIES.items():
        for name in module.__all__:
            kind = getattr(module, name)
            if "__new__" in vars(kind):
                continue
            task = next((t for t in ("Binary", *_COUNTS) if name.startswith(t)), "")
            options = {**_COUNTS.get(task, {}), **_OPTIONS.get(name.removeprefix(task), {})}
            entry = Entry(library, name, _KINDS.get(name, task.lower() or "numbers"), options)
            found.append(entry)
            if "thresholds" in inspect.signature(kind.__init__).parameters:
                binned = {**options, "thresholds": 5}
                found.append(Entry(library, name, entry.kind, binned))
    return found


def batches(kind: str) -> DataLoader[Any]:
    """Inputs [8], targets, and for groups their numbers: ROWS rows in batches of BATCH."""
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(ROWS, 8, generator=draw)
    labels = torch.randint(0, 2, (ROWS, CLASSES), generator=draw)
    positive = torch.rand(ROWS, CLASSES, generator=draw) + 0.1
    targets = {
        "multiclass": torch.randint(0, CLASSES, (ROWS,), generator=draw),
        "multilabel": labels,
        "rows": positive,
        "distributions": positive / positive.sum(1, keepdim=True),
    }.get(kind, labels[:, 0] if kind in ("binary", "groups") else positive[:, 0])
    return DataLoader(TensorDataset(x, targets, labels[:, 1]), batch_size=BATCH)


def _predictions(kind: str, out: Tensor) -> Tensor:
    """What the metric takes for predictions, of the outputs [rows, CLASSES] of a layer."""
    return {
        "binary": lambda: out[:, 0].sigmoid(),
        "groups": lambda: out[:, 0].sigmoid(),
        "multiclass": lambda: out.softmax(1),
        "multilabel": lambda: out.sigmoid(),
        "rows": lambda: out,
        "ensembles": lambda: out,
        "distributions": lambda: out.softmax(1),
    }.get(kind, lambda: out[:, 0].exp())()


class Scored(pl.LightningModule):
    """A layer whose outputs many metrics score.

    Args:
        entries: the metrics, of one kind.
        way: "forward" calls each, "update" its ``update``.
    """

    def __init__(self, entries: Sequence[Entry], way: str) -> None:
        super().__init__()
        self.kind, self.way = entries[0].kind, way
        self.net = nn.Linear(8, CLASSES)
        self.metrics = nn.ModuleDict({entry.id: entry.make() for entry in entries})
        self.numbers = [entry.id for entry in entries if is_number(entry)]
        self.computed: list[dict[str, Any]] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y, group = batch
        given = (_predictions(self.kind, self.net(x)), y)
        if self.kind == "groups":
            given = (*given, group)
        for name, metric in self.metrics.items():
            if self.way == "forward":
                metric(*given)
            else:
                metric.update(*given)
            if name in self.numbers:
                self.log(name, metric)

    def on_validation_epoch_end(self) -> None:
        self.computed.append({name: one.compute() for name, one in self.metrics.items()})
        for name, metric in self.metrics.items():
            if name not in self.numbers:  # those Lightning resets
                metric.reset()


def epochs(entries: Sequence[Entry], way: str, static: bool, **options: Any) -> list[Any]:
    """Two epochs: what the metrics computed in each, and what Lightning logged."""
    torch.manual_seed(0)
    module, trainer = Scored(entries, way), make_trainer(static, **options)
    loader, logged = batches(module.kind), []
    for _ in range(2):
        trainer.validate(module, loader, verbose=False)
        logged.append(dict(trainer.callback_metrics))
    return list(zip(module.computed, logged, strict=True))


def is_number(entry: Entry) -> bool:
    """Whether what it computes is one number, which is what Lightning logs."""
    metric, (x, y, group) = entry.make(), next(iter(batches(entry.kind)))
    given = (_predictions(entry.kind, x[:, :CLASSES]), y)
    value = metric(*given, *([group] if entry.kind == "groups" else []))
    return isinstance(value, Tensor) and value.numel() == 1


@dataclass
class OnHost:
    """Ids of metrics that the host updates, and of those whose batch values it computes."""

    updates: set[int] = field(default_factory=set)
    values: set[int] = field(default_factory=set)


@contextlib.contextmanager
def noted() -> Iterator[OnHost]:
    """Note what metrics leave to the host while steps are traced."""
    found, update_call, forward = OnHost(), metrics.UpdateCall, metrics._Metrics._forward

    def update_noted(metric: Metric, value: Any) -> Any:
        found.updates.add(id(metric))
        return update_call(metric, value)

    def forward_noted(self: Any, metric: Metric, *given: Any) -> Any:
        value = forward(self, metric, *given)
        if isinstance(value, metrics.BatchValue):
            found.values.add(id(metric))
        return value

    with (
        mock.patch.object(metrics, "UpdateCall", update_noted),
        mock.patch.object(metrics._Metrics, "_forward", forward_noted),
    ):
        yield found


def where(entries: Sequence[Entry]) -> dict[str, tuple[str, str]]:
    """Where each metric of one kind is updated, and computed for a batch: program or host."""
    torch.manual_seed(0)
    module = Scored(entries, "forward")
    with noted() as on_host:
        trainer = make_trainer(True, limit_val_batches=1)
        trainer.validate(module, batches(module.kind), verbose=False)
    return {
        name: (
            "host" if id(metric) in on_host.updates else "program",
            "host" if id(metric) in on_host.values else "program",
        )
        for name, metric in module.metrics.items()
    }


ENTRIES = _entries()
KINDS: dict[str, list[Entry]] = {}
for _entry in ENTRIES:
    KINDS.setdefault(_entry.kind, []).append(_entry)
