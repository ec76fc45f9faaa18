"""The kinds of class that a file names: their bases, and where their short names live."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Category:
    """A kind of class: what messages call it, its base classes, and where short names live.

    Args:
        title: as in "no optimizer is named".
        bases: the base classes; in ``CATEGORIES`` their paths, here and in ``no_choices``.
        homes: modules whose classes are known by their short names; an earlier one counts more.
            They are imported when a name is looked up: some take long.
        functions: whether a function that makes one does as well.
        no_choices: classes of the homes that are bases themselves; a file cannot name them.
        base_is_choice: whether a file can name a base class: where an argument asks for one.
        batches: bases of what loaders are made of; there are others, without a base.
        anything: whether any value does: where an argument has no type.
    """

    title: str
    bases: tuple[Any, ...]
    homes: tuple[str, ...] = ()
    functions: bool = False
    no_choices: tuple[Any, ...] = ()
    base_is_choice: bool = False
    batches: tuple[Any, ...] = ()
    anything: bool = False


_METRICS = (
    *("classification", "regression", "aggregation", "retrieval", "clustering", "nominal"),
    *("segmentation", "text", "image", "detection", "audio", "wrappers"),
)

CATEGORIES = {
    "model": Category(
        title="model",
        bases=("torch.nn.Module",),
        functions=True,
        no_choices=("lightning.pytorch.LightningModule",),
    ),
    "data": Category(
        title="data processor",
        bases=(),
        functions=True,
        batches=("torch.utils.data.Dataset", "lightning.pytorch.LightningDataModule"),
    ),
    "optimizer": Category(
        title="optimizer",
        bases=("torch.optim.Optimizer",),
        homes=("fulgurite.optim", "torch.optim"),
        no_choices=("fulgurite.optim.Optimizer", "fulgurite.optim.AdamBase"),
    ),
    "scheduler": Category(
        title="scheduler",
        bases=("torch.optim.lr_scheduler.LRScheduler",),
        homes=(
            *("fulgurite.optim.lr_scheduler", "fulgurite.optim.weight_decay_scheduler"),
            "torch.optim.lr_scheduler",
        ),
    ),
    "callback": Category(
        title="callback",
        bases=("lightning.pytorch.Callback",),
        homes=("fulgurite.callbacks", "lightning.pytorch.callbacks"),
        no_choices=(
            "lightning.pytorch.callbacks.Checkpoint",
            "lightning.pytorch.callbacks.ProgressBar",
            "lightning.pytorch.callbacks.BaseFinetuning",
            "lightning.pytorch.callbacks.BasePredictionWriter",
        ),
    ),
    "logger": Category(
        title="logger",
        bases=("lightning.pytorch.loggers.Logger",),
        homes=("fulgurite.config.types.loggers", "lightning.pytorch.loggers"),
        no_choices=("lightning.pytorch.loggers.logger.DummyLogger",),
    ),
    "metric": Category(
        title="metric",
        bases=("torchmetrics.Metric",),
        homes=(*(f"torchmetrics.{name}" for name in _METRICS), "torchmetrics"),
        no_choices=("torchmetrics.aggregation.BaseAggregator",),
    ),
    "profiler": Category(
        title="profiler",
        bases=("lightning.pytorch.profilers.Profiler",),
        homes=("lightning.pytorch.profilers",),
    ),
    "strategy": Category(
        title="strategy",
        bases=("lightning.pytorch.strategies.Strategy",),
        homes=("lightning.pytorch.strategies",),
    ),
    "accelerator": Category(
        title="accelerator",
        bases=("lightning.pytorch.accelerators.Accelerator",),
        homes=("lightning.pytorch.accelerators",),
    ),
    "plugin": Category(
        title="plugin",
        bases=(
            "lightning.pytorch.plugins.precision.Precision",
            "lightning.fabric.plugins.CheckpointIO",
            "lightning.fabric.plugins.ClusterEnvironment",
            "lightning.pytorch.plugins.LayerSync",
        ),
        homes=("lightning.pytorch.plugins", "lightning.pytorch.plugins.environments"),
    ),
    "module": Category(
        title="module",
        bases=("torch.nn.Module",),
        homes=("torch.nn",),
        no_choices=(
            *("torch.nn.Container", "torch.nn.NLLLoss2d"),
            *("torch.nn.RNNBase", "torch.nn.RNNCellBase"),
        ),
    ),
}

ANY_CLASS = Category(
    title="class", bases=(object,), functions=True, base_is_choice=True, anything=True
)
"""What ``class_path`` may name where an argument has no type."""
