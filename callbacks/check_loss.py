"""Ends a run whose loss is no number, or leaves such steps out."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.optim import Optimizer

from fulgurite.backends.csx import GUARD
from fulgurite.callbacks.sparse import (
    SparseCallback,
    batches_ready,
    is_log_step,
    is_static,
    log_steps,
)

_NAN, _INFINITE, _GRADIENT = range(3)
_WHAT = (
    "The loss became NaN",
    "The loss became infinite",
    "A gradient became NaN or infinite",
)


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
    return _described(_INFINITE if is_inf else _NAN, where, trainer)


def _described(kind: int, where: str, trainer: pl.Trainer) -> str:
    return (
        f"{_WHAT[kind]} {where}; it is now {trainer.global_step}. Try a smaller learning rate,"
        " Trainer(gradient_clip_val=1.0) or a longer warm-up, and look at that batch."
    )


class CheckLoss(SparseCallback):
    """Raises ``NonFiniteLoss`` when the loss of training is NaN or infinite.

    Each loss that is differentiated is checked inside the step, which keeps one integer: the number
    of losses before the first bad one. On CSX the step with the bad loss changes neither weights
    nor any other state of the program, nor does a later one, and the host looks at the integer
    after every step: so the error names the batch, and the operation and module whose result was
    not finite first. In eager steps the host looks on every step on the CPU, elsewhere on log
    steps, before a checkpoint is written, before validation, and when an epoch ends; the weights
    have been updated then. No checkpoint holds what came of a bad loss.

    Gradients that overflow under a dynamic loss scale do not count: it skips those steps itself.

    Args:
        gradients: whether gradients are checked too, where an optimizer is about to use them.
        max_consecutive_skips: steps in a row whose loss or gradients are not finite that are left
            out rather than end the run: weights and optimizer state stay as they were. 0: none.

    Attributes:
        skipped: how many steps were left out, over all resumed runs.
    """

    def __init__(self, gradients: bool = False, max_consecutive_skips: int = 0) -> None:
        if max_consecutive_skips < 0:
            raise ValueError(
                f"CheckLoss(max_consecutive_skips={max_consecutive_skips}): give a number of steps,"
                " 0 to end the run at the first"
            )
        self._gradients = gradients or max_consecutive_skips > 0
        self._max_skips, self._in_a_row, self._last_skipped = max_consecutive_skips, 0, -1
        self.skipped = 0
        self._batches = self._epochs_batch = self._epochs_step = 0  # counted where they began

    def state_dict(self) -> dict[str, Any]:
        """How many steps were left out."""
        return {"skipped": self.skipped}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Count on."""
        self.skipped = state_dict["skipped"]

    def every_n_steps(self, trainer: pl.Trainer) -> int:
        """The loss is looked at on log steps: reading it waits for the device."""
        return log_steps(trainer)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begin to count losses that are finite."""
        self._batches = batches_ready(trainer)
        self.on_train_epoch_start(trainer, pl_module)
        # a plain attribute, and so in no state_dict
        vars(pl_module)[GUARD] = torch.zeros((), dtype=torch.int64, device=pl_module.device)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Windows of accumulation begin anew: the last one of an epoch may be smaller."""
        self._epochs_batch = batches_ready(trainer) - self._batches
        self._epochs_step = trainer.global_step

    def on_before_backward(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor
    ) -> None:
        """Count on while losses are finite; at the first bad one turn negative, and stay."""
        count = getattr(pl_module, GUARD)
        with torch.no_grad():
            value = loss.detach().sum()  # a loss of no dimension: itself
            bad = torch.where(value.isnan(), _code(count, _NAN), _code(count, _INFINITE))
            count.copy_(
                # negative once and for all: by this number the program holds its state
                # (graph/passes/hold)
                torch.where(count < 0, count, torch.where(value.isfinite(), count + 1, bad))
            )

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Look at gradients; in an eager step, take those away that are not to be used."""
        if not self._gradients:
            return
        count = getattr(pl_module, GUARD)
        used = [p for group in optimizer.param_groups for p in group["params"]]
        gradients = [p.grad for p in used if p.grad is not None]
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        # a dynamic loss scale has gradients overflow, and skips such steps itself
        if gradients and scaler is None:
            with torch.no_grad():  # only of NaN and infinity is the product with zero not zero
                sums = [(one * 0).sum(dtype=torch.float32) for one in gradients]
                bad = torch.where(torch.stack(sums).sum() == 0, count, _code(count - 1, _GRADIENT))
                count.copy_(torch.where(count < 0, count, bad))
        if self._max_skips and not is_static(trainer) and int(count) < 0:
            for p in used:
                p.grad = None  # torch's optimizers leave such a parameter and its state alone

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any
    ) -> None:
        """Look at the count on log steps; on every step where reading waits for no device."""
        if pl_module.device.type == "cpu" or self._max_skips or is_log_step(trainer):
            self.look(trainer, pl_module)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Look at the count before validation, and when an epoch ends."""
        self.look(trainer, pl_module)

    on_train_epoch_end = on_validation_start

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Look at the count before a checkpoint is written."""
        self.look(trainer, pl_module)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Take the counter off the module again."""
        vars(pl_module).pop(GUARD, None)

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Take the counter off the module again: it may be looked at after the exception."""
        vars(pl_module).pop(GUARD, None)

    def look(
        self,
        trainer: pl.Trainer,
        module: pl.LightningModule,
        origin: Callable[[], str | None] | None = None,
    ) -> None:
        """Look at the count, and end the run, or go on without the step.

        Args:
            trainer: whose run it is.
            module: the module.
            origin: says what was not finite first, in the step that has just run.

        Raises:
            NonFiniteLoss: something was not finite, and the run is to end there.
        """
        count = vars(module).get(GUARD)
        if count is None or (code := int(count)) >= 0:
            return
        # _code, backwards
        before, kind = divmod(-code - 1, 3)
        if self._max_skips and trainer.fit_loop._should_accumulate():
            return  # the window's last batch decides: all of it is left out
        error = NonFiniteLoss(self._what(trainer, module, before, kind), before)
        cause = origin() if origin is not None else None
        if cause is not None:
            error.args = (f"{error}\n{cause}",)
        self._skip_or_raise(trainer, error)
        # state changes again from here on; batches of the window that came after the bad one count
        # too
        count.fill_(max(before + 1, batches_ready(trainer) - self._batches))

    def _skip_or_raise(self, trainer: pl.Trainer, error: NonFiniteLoss) -> None:
        step = batches_ready(trainer)
        # with accumulation whole windows are left out, and the next window is the next in a row
        follows = step - self._last_skipped <= trainer.accumulate_grad_batches
        self._in_a_row = self._in_a_row + 1 if follows else 1
        if self._in_a_row > self._max_skips:
            raise error
        self._last_skipped = step
        self.skipped += 1
        if self.skipped == 1:
            warnings.warn(
                f"{error}\nThe step was left out, with all batches of its window of accumulation:"
                " weights and optimizer state are as before. Later ones are counted in"
                " CheckLoss.skipped.",
                stacklevel=2,
            )

    def _what(self, trainer: pl.Trainer, module: pl.LightningModule, before: int, kind: int) -> str:
        if module.automatic_optimization:
            windows = (before - self._epochs_batch) // trainer.accumulate_grad_batches
            step = self._epochs_step + windows + 1
            where = f"in training batch {before + 1} of this run, which is in optimizer step {step}"
        else:
            where = f"at backward number {before + 1} of this run"
        at_once = "" if is_static(trainer) else " To see it at once: log_every_n_steps=1."
        skips = " To train on without such steps: CheckLoss(max_consecutive_skips=n)."
        return f"{_described(kind, where, trainer)}{at_once}{'' if self._max_skips else skips}"


def _code(count: Tensor, kind: int) -> Tensor:
    """What the count becomes: negative, with the number of losses that were well, and the kind."""
    return -3 * count - kind - 1
