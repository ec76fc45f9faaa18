"""A plain nn.Module as a LightningModule; the file's optimizer and schedulers."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.optim import Optimizer

from fulgurite.backends.schedules import ProgramScheduler
from fulgurite.config.schema.class_shapes import SchedulerCall
from fulgurite.config.schema.optimizers import OptimizerCall, Refuse, param_groups
from fulgurite.config.schema.schema import Init
from fulgurite.config.types.report import Call
from fulgurite.config.types.signatures import names_of
from fulgurite.optim.lr_scheduler import ScalePerParamLR

_PREFIX = "model."
_TAGS = "param_group_tags"


class FileModule(pl.LightningModule):
    """A plain nn.Module whose forward takes a batch and returns the loss.

    The loss is a tensor of one element, alone, first of a tuple, or in a dict as "loss". It is
    logged as "loss", "val_loss" and "test_loss"; ``predict`` returns what forward returns.

    In a checkpoint the weights have the names that they have in the module:
    ``net.load_state_dict(torch.load(path)["state_dict"])`` loads them.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Any) -> Any:
        """What the module returns for a batch."""
        return self.model(batch)

    def training_step(self, batch: Any) -> Tensor:
        """Log the loss as "loss", and return it."""
        loss = self._loss(batch)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        """Log the loss as "val_loss", and return it."""
        loss = self._loss(batch)
        self.log("val_loss", loss, prog_bar=True)
        return loss

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        """Log the loss as "test_loss", and return it."""
        loss = self._loss(batch)
        self.log("test_loss", loss, prog_bar=True)
        return loss

    def predict_step(self, batch: Any) -> Any:
        """What the module returns."""
        return self.model(batch)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Give weights the names that they have in the module."""
        state = checkpoint["state_dict"]
        checkpoint["state_dict"] = {k.removeprefix(_PREFIX): v for k, v in state.items()}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take weights by the names that they have in the module."""
        state = checkpoint["state_dict"]
        checkpoint["state_dict"] = {_PREFIX + k: v for k, v in state.items()}

    def _loss(self, batch: Any) -> Tensor:
        output = self.model(batch)
        found = output.get("loss") if isinstance(output, Mapping) else output
        if isinstance(found, (tuple, list)) and found:
            found = found[0]
        if not isinstance(found, Tensor) or found.numel() != 1:
            name = type(self.model).__name__
            raise TypeError(
                f"{name}.forward(batch) has to return the loss, a tensor of one element: alone,"
                f" first of a tuple, or in a dict as 'loss'. It returned {_described(output)}."
                f" Compute the loss in {name}.forward, or write a LightningModule."
            )
        return found.reshape(())


def _described(output: Any) -> str:
    if isinstance(output, Tensor):
        return f"a tensor of shape {list(output.shape)}"
    if isinstance(output, Mapping):
        return f"a dict with {', '.join(map(repr, output)) or 'nothing'}"
    return f"a {type(output).__name__}"


def as_lightning(model: nn.Module) -> pl.LightningModule:
    """The model itself, or a plain module wrapped."""
    return model if isinstance(model, pl.LightningModule) else FileModule(model)


def with_optimizer(module: pl.LightningModule, init: Init, refuse: Refuse) -> None:
    """Make ``configure_optimizers`` give what the file says, if it says anything.

    Args:
        module: the model of the file.
        init: its ``init``.
        refuse: raises what is wrong with a file.

    Raises:
        ParameterFileError: an entry of ``optimizer.params`` has no parameters.
    """
    optimizer = init.optimizer
    if optimizer is None:
        return
    named = module.model if isinstance(module, FileModule) else module
    if not is_overridden("configure_model", module, pl.LightningModule):
        param_groups(optimizer, named, refuse)  # its mistakes now, not when training begins
    scaled = isinstance(optimizer, OptimizerCall) and optimizer.scales
    replaces = is_overridden("configure_optimizers", module, pl.LightningModule)

    def configure_optimizers() -> Any:
        if replaces:
            rank_zero_info(
                f"The file's optimizer, {optimizer.name}, is used;"
                f" {type(module).__name__}.configure_optimizers is not."
            )
        made = optimizer(param_groups(optimizer, named, refuse))
        return [made], scheduler_configs(init.schedulers, made, scaled)

    module.configure_optimizers = configure_optimizers  # type: ignore[method-assign]


def scheduler_configs(
    calls: Sequence[SchedulerCall], optimizer: Optimizer, scaled: bool
) -> list[dict[str, Any]]:
    """What ``configure_optimizers`` returns for the schedulers of a file.

    Args:
        calls: the file's.
        optimizer: whose numbers they set.
        scaled: whether its groups have factors: schedulers of the learning rate then follow them,
            as under ``ScalePerParamLR``.
    """
    return [
        {
            "scheduler": _follow(_made(call, optimizer), call, scaled),
            "interval": "step",
            **call.when,
        }
        for call in calls
    ]


def _made(call: Call, optimizer: Optimizer) -> Any:
    assert call.target is not None

    def make(inner: Call) -> Any:
        return _made(_tagged(inner, call), optimizer)

    nested = {
        name: [make(one) for one in inner] if isinstance(inner, list) else make(inner)
        for name, inner in call.nested.items()
    }
    # a chain takes no optimizer: its schedulers have one
    takes = "optimizer" in inspect.signature(call.target).parameters
    return call(**nested, **({"optimizer": optimizer} if takes else {}))


def _tagged(inner: Call, outer: Call) -> Call:
    """An inner scheduler sets the same groups as the outer one."""
    tags = outer.arguments.get(_TAGS)
    if tags is None or inner.target is None or _TAGS not in names_of(inner.target):
        return inner
    return replace(inner, arguments={_TAGS: tags, **inner.arguments})


def _follow(scheduler: Any, call: Call, scaled: bool) -> Any:
    follows = isinstance(scheduler, ProgramScheduler) and scheduler.key == "lr"
    if not scaled or not follows or isinstance(scheduler, ScalePerParamLR):
        return scheduler
    return ScalePerParamLR(scheduler.optimizer, scheduler, call.arguments.get(_TAGS))
