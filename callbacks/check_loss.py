"""Ends a run whose loss is no number."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from fulgurite.callbacks.sparse import SparseCallback, batches_ready, is_log_step, log_steps

STATE = "_losses_until_bad"
"""The module's attribute: state of its program, in no checkpoint."""


class NonFiniteLoss(ArithmeticError):
    """The loss became NaN or infinite.

    Attributes:
        batch: the number of training batches of this run that were well before it.
    """

    def __init__(self, message: str, batch: int) -> None:
        super().__init__(message)
        self.batch = batch


def describe(is_inf: bool, where: str, trainer: pl.Trainer) -> str:
    """What happened to a loss, and what may help."""
    return (
        f"The loss became {'infinite' if is_inf else 'NaN'} {where}; it is now"
        f" {trainer.global_step}. Try a smaller learning rate, Trainer(gradient_clip_val=1.0) or a"
        " longer warm-up, and look at that batch."
    )


class CheckLoss(SparseCallback):
    """Raises ``NonFiniteLoss`` when the loss of training is NaN or infinite.

    Each loss that is differentiated is checked, inside the step: the device keeps one integer, the
    number of losses before the first bad one, and the host reads it on log steps, before a
    checkpoint is written, before validation, and when an epoch ends; in eager steps on the CPU on
    every step. So the error comes at most ``log_every_n_steps - 1`` steps late, names the batch and
    step that it happened in, and no checkpoint holds what came of it. A step that a dynamic loss
    scale skips counts too where its loss was bad; gradients that overflow from a finite loss do
    not.
    """

    def __init__(self) -> None:
        self._batches = self._epochs_batch = self._epochs_step = 0  # counted where they began

    def every_n_steps(self, trainer: pl.Trainer) -> int:
        """The loss is looked at on log steps: reading it waits for the device."""
        return log_steps(trainer)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begin to count losses that are finite."""
        self._batches = batches_ready(trainer)
        self.on_train_epoch_start(trainer, pl_module)
        vars(pl_module)[STATE] = torch.zeros((), dtype=torch.int64, device=pl_module.device)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Windows of accumulation begin anew: the last one of an epoch may be smaller."""
        self._epochs_batch = batches_ready(trainer) - self._batches
        self._epochs_step = trainer.global_step

    def on_before_backward(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor
    ) -> None:
        """Count on while losses are finite; at the first bad one turn negative, and stay."""
        count = getattr(pl_module, STATE)
        with torch.no_grad():
            value = loss.detach().sum()  # a loss of no dimension: itself
            bad = torch.where(value.isnan(), -2 * count - 1, -2 * count - 2)
            count.copy_(
                torch.where(count < 0, count, torch.where(value.isfinite(), count + 1, bad))
            )

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any
    ) -> None:
        """Look at the count on log steps; on every step where reading waits for no device."""
        if pl_module.device.type == "cpu" or is_log_step(trainer):
            self._check(trainer, pl_module)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Look at the count before validation."""
        self._check(trainer, pl_module)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Look at the count when an epoch ends."""
        self._check(trainer, pl_module)

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Look at the count before a checkpoint is written."""
        self._check(trainer, pl_module)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Take the counter off the module again."""
        vars(pl_module).pop(STATE, None)

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Take the counter off the module again: it may be looked at after the exception."""
        vars(pl_module).pop(STATE, None)

    def _check(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        count = vars(module).get(STATE)
        if count is None or (code := int(count)) >= 0:
            return
        before, is_inf = divmod(-code - 1, 2)
        if module.automatic_optimization:
            windows = (before - self._epochs_batch) // trainer.accumulate_grad_batches
            step = self._epochs_step + windows + 1
            where = f"in training batch {before + 1} of this run, which is in optimizer step {step}"
        else:
            where = f"at backward number {before + 1} of this run"
        raise NonFiniteLoss(
            f"{describe(bool(is_inf), where, trainer)} To see it at once: log_every_n_steps=1. To"
            " train on: leave CheckLoss out.",
            before,
        )
