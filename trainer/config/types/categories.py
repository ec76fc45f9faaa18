"""The kinds of class that a file names: their bases, and where their short names live."""

from __future__ import annotations

from dataclasses import dataclass

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch import callbacks
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.loggers import Logger
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.plugins import LayerSync
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.strategies import Strategy
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torchmetrics import Metric
from torchmetrics.aggregation import BaseAggregator

from fulgurite.optim import AdamBase, Optimizer


@dataclass(frozen=True, kw_only=True, slots=True)
class Category:
    """A kind of class: what messages call it, its base classes, and where short names live.

    Args:
        title: as in "no optimizer is named".
        bases: the base classes.
        homes: modules whose classes are known by their short names; an earlier one counts more.
            They are imported when a name is looked up: some take long.
        functions: whether a function that makes one does as well.
        no_choices: classes of the homes that are bases themselves; a file cannot name them.
        base_is_choice: whether a file can name a base class: where an argument asks for one.
        makes_batches: whether it is what loaders are made of; there is no base class of those.
        anything: whether any value does: where an argument has no type.
    """

    title: str
    bases: tuple[type, ...]
    homes: tuple[str, ...] = ()
    functions: bool = False
    no_choices: tuple[type, ...] = ()
    base_is_choice: bool = False
    makes_batches: bool = False
    anything: bool = False


_METRICS = (
    *("classification", "regression", "aggregation", "retrieval", "clustering", "nominal"),
    *("segmentation", "text", "image", "detection", "audio", "wrappers"),
)

CATEGORIES = {
    "model": Category(
        title="model",
        bases=(nn.Module,),
        functions=True,
        no_choices=(pl.LightningModule,),
    ),
    "data": Category(title="data processor", bases=(), functions=True, makes_batches=True),
    "optimizer": Category(
        title="optimizer",
        bases=(torch.optim.Optimizer,),
        homes=("fulgurite.optim", "torch.optim"),
        no_choices=(Optimizer, AdamBase),
    ),
    "scheduler": Category(
        title="scheduler",
        bases=(LRScheduler,),
        homes=(
            *("fulgurite.optim.lr_scheduler", "fulgurite.optim.weight_decay_scheduler"),
            "torch.optim.lr_scheduler",
        ),
    ),
    "callback": Category(
        title="callback",
        bases=(pl.Callback,),
        homes=("fulgurite.callbacks", "lightning.pytorch.callbacks"),
        no_choices=(
            *(callbacks.Checkpoint, callbacks.ProgressBar),
            *(callbacks.BaseFinetuning, callbacks.BasePredictionWriter),
        ),
    ),
    "logger": Category(
        title="logger",
        bases=(Logger,),
        homes=("fulgurite.config.types.loggers", "lightning.pytorch.loggers"),
        no_choices=(DummyLogger,),
    ),
    "metric": Category(
        title="metric",
        bases=(Metric,),
        homes=(*(f"torchmetrics.{name}" for name in _METRICS), "torchmetrics"),
        no_choices=(BaseAggregator,),
    ),
    "profiler": Category(
        title="profiler",
        bases=(Profiler,),
        homes=("lightning.pytorch.profilers",),
    ),
    "strategy": Category(
        title="strategy",
        bases=(Strategy,),
        homes=("lightning.pytorch.strategies",),
    ),
    "accelerator": Category(
        title="accelerator",
        bases=(Accelerator,),
        homes=("lightning.pytorch.accelerators",),
    ),
    "plugin": Category(
        title="plugin",
        bases=(Precision, CheckpointIO, ClusterEnvironment, LayerSync),
        homes=("lightning.pytorch.plugins", "lightning.pytorch.plugins.environments"),
    ),
    "module": Category(
        title="module",
        bases=(nn.Module,),
        homes=("torch.nn",),
        no_choices=(nn.Container, nn.NLLLoss2d, nn.RNNBase, nn.RNNCellBase),
    ),
}

ANY_CLASS = Category(
    title="class", bases=(object,), functions=True, base_is_choice=True, anything=True
)
"""What ``class_path`` may name where an argument has no type."""
