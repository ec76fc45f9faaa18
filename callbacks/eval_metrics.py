"""Metrics that a model updates and nobody logs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

_OWN = (
    "on_validation_start",
    "on_validation_epoch_start",
    "on_validation_epoch_end",
    "on_validation_end",
)


class ModelEvalMetrics(pl.Callback):
    """Logs the torchmetrics of a model that only updates them, at the end of validation.

    Every Metric among the submodules that no ``self.log`` took begins anew with validation, and is
    computed and logged at its end, under its name in the module, if validation updated it; then it
    goes on with what it had before. One of several values (a MetricCollection, values per class) is
    logged as ``<name>/<part>``. A module that overrides a hook around validation
    (``on_validation_epoch_end`` and its kin) looks after its metrics itself: nothing happens then.
    """

    def __init__(self) -> None:
        self._before: list[tuple[Metric, dict[str, Any]]] = []

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save the values that metrics hold, and reset them."""
        if not _looks_after_itself(pl_module):
            for _, metric in _unlogged(trainer, pl_module):
                self._before += [(part, _held(part)) for part in _parts(metric)]
                metric.reset()

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log the metrics that validation updated."""
        if not _looks_after_itself(pl_module):
            for name, metric in _unlogged(trainer, pl_module):
                if any(part.update_called for part in _parts(metric)):
                    pl_module.log_dict(dict(_values(name, metric.compute())))

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Give metrics the values back that they held before validation."""
        for metric, held in self._before:
            metric.reset()
            vars(metric).update(held)
        self._before.clear()


def _looks_after_itself(module: pl.LightningModule) -> bool:
    return any(is_overridden(hook, module) for hook in _OWN)


def _parts(metric: Metric | MetricCollection) -> list[Metric]:
    if isinstance(metric, MetricCollection):
        return list(metric.values(copy_state=False))
    return [metric]


def _held(metric: Metric) -> dict[str, Any]:
    names = ["_update_count", "_computed", *metric._defaults]
    return {name: vars(metric)[name] for name in names}


def _unlogged(
    trainer: pl.Trainer, module: pl.LightningModule
) -> Iterator[tuple[str, Metric | MetricCollection]]:
    """The outermost metrics that no result of Lightning's holds, with their names."""
    loops = (trainer.fit_loop.epoch_loop, trainer.fit_loop.epoch_loop.val_loop)
    logged = {
        id(result.value)
        for loop in (*loops, trainer.validate_loop)
        for result in loop._results.values()
        if not result.is_tensor
    }

    def found(inside: nn.Module, prefix: str) -> Iterator[tuple[str, Any]]:
        for name, child in inside.named_children():
            if not isinstance(child, (Metric, MetricCollection)):
                yield from found(child, f"{prefix}{name}.")
            elif logged.isdisjoint(map(id, [child, *_parts(child)])):
                yield f"{prefix}{name}", child

    return found(module, "")


def _values(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, dict):
        for key, one in value.items():
            yield from _values(f"{name}/{key}", one)
    elif isinstance(value, Tensor) and value.ndim:
        for i, one in enumerate(value.flatten()):
            yield f"{name}/{i}", one.float()
    elif isinstance(value, Tensor):
        yield name, value.float()
