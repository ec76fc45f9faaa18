"""A run says at which step its loss was first not finite, once; nothing is read on every step.

The losses of up to ``SAMPLE`` steps are kept and looked at together: 0.3 µs a step (measured).
Where the run has a ``CheckLoss``, which ends it, nothing is said here.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from lightning.pytorch.tuner.lr_finder import _LRCallback
from torch import Tensor

from fulgurite.callbacks.check_loss import CheckLoss, describe

SAMPLE = 64


class Losses:
    """The losses of the last steps.

    Args:
        trainer: whose they are; a ``pl.Trainer``, whose attributes have no types.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._kept: list[Tensor] = []
        self._batches = 0  # of this run, before the first that is kept
        others = (CheckLoss, _LRCallback)  # the learning-rate finder looks for a loss like that
        self._watches = not any(isinstance(one, others) for one in trainer.callbacks)

    def note(self, loss: Any, stepped: bool = True) -> None:
        """Keep a loss; look at all of them from time to time.

        Args:
            loss: of the batch that has just been trained.
            stepped: whether an optimizer step ended with it.
        """
        kept = self._kept
        if not kept:
            self._begin(stepped)
        if self._watches and isinstance(loss, Tensor):
            kept.append(loss)
            if len(kept) == SAMPLE:
                self.look()

    def _begin(self, stepped: bool) -> None:
        self._batch_idx = self._trainer.fit_loop.epoch_loop.batch_progress.current.ready - 1
        self._step = self._trainer.global_step + (not stepped)

    def look(self) -> None:
        """Warn if one of them is not finite; at the end of an epoch, too."""
        kept, self._kept = self._kept, []
        if not kept:
            return
        values = _numbers(kept)
        if not math.isfinite(sum(values)):
            first = next((i for i, one in enumerate(values) if not math.isfinite(one)), None)
            if first is not None:
                self._watches = False
                self._warn(first, math.isinf(values[first]))
        self._batches += len(kept)

    def _warn(self, first: int, is_inf: bool) -> None:
        trainer = self._trainer
        batch_idx = self._batch_idx + first
        where = (
            f"in training batch {self._batches + first + 1} of this run (epoch"
            f" {trainer.current_epoch}, batch_idx {batch_idx})"
        )
        if trainer.lightning_module.automatic_optimization:
            window = trainer.accumulate_grad_batches
            step = self._step + (self._batch_idx % window + first) // window
            where += f", which is in optimizer step {step}"
        warnings.warn(
            f"{describe(is_inf, where, trainer)} To end such a run:"
            " callbacks=[fulgurite.callbacks.CheckLoss()].",
            stacklevel=2,
        )


def _numbers(losses: list[Tensor]) -> list[float]:
    losses = [loss.sum() if loss.ndim else loss for loss in losses]
    if losses[0].is_cpu:
        return [loss.item() for loss in losses]  # 0.1 µs each, 0.3 stacked (measured)
    values: list[float] = torch.stack(losses).tolist()  # a device is waited for once
    return values
