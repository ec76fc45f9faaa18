"""``eval_frequency``: validation after so many optimizer steps, and at the end of the training."""

from __future__ import annotations

import math
from typing import Any

import lightning.pytorch as pl

from fulgurite.callbacks.sparse import SparseCallback
from fulgurite.loops.resuming import BATCH_END, VALIDATION

_NEVER = 2**62
ARGUMENTS: dict[str, Any] = {"val_check_interval": _NEVER, "check_val_every_n_epoch": None}
"""The Trainer's arguments beside ``EvalFrequency``: it sets ``trainer.val_check_batch`` itself."""


class EvalFrequency(SparseCallback):
    """Validates after every so many optimizer steps, and after the last.

    Steps are counted from the training's beginning, so that a run that goes on validates where one
    without a break would have. Between validations it costs nothing: Lightning compares the count
    of batches, which is set here from one validation to the next.

    Args:
        frequency: steps, or a fraction of the training: of all its steps, rounded up.
        begin: the step that ``frequency`` counts from.
        steps_per_epoch: steps of an epoch that the file asks for; the loader has to have as many.
    """

    def __init__(
        self, frequency: int | float | None, begin: int = 0, steps_per_epoch: int | None = None
    ) -> None:
        self.frequency, self.begin, self.steps_per_epoch = frequency, begin, steps_per_epoch
        self._interval: int | None = None
        self._end: float = math.inf
        self._goes_on = False  # whether the next batch is the first of a run that goes on

    def every_n_steps(self, trainer: pl.Trainer) -> int:
        """0: the hooks around a batch are needed for the first batch of a run alone."""
        return 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Find out how long the training is."""
        self._check_epoch(trainer)
        if not self._validates(trainer):
            return
        frequency = self.frequency or 0
        counted, end = pl_module.automatic_optimization, trainer.estimated_stepping_batches
        self._end = end if counted and end > 0 else math.inf
        if isinstance(frequency, int) and counted:
            self._interval = frequency
        elif self._end < math.inf:
            self._interval = math.ceil(frequency * (self._end - self.begin))
        elif frequency != 1.0 or trainer.max_epochs in (None, -1):
            raise ValueError(_unknown_length(frequency, counted))
        self._plan(trainer)
        self._go_on(trainer)

    def _go_on(self, trainer: pl.Trainer) -> None:
        """Let the validation of the checkpoint's step be due, if it was not finished.

        On CSX it is run. Elsewhere Lightning repeats one that was interrupted; one that never began
        it does not run, but it draws the random numbers that begin it.
        """
        loop, step = trainer.fit_loop.epoch_loop, trainer.global_step - self.begin
        moment = getattr(trainer.fit_loop, "resumed", None)
        self._goes_on = False
        goes_on = moment is not None or loop.restarting
        if self._interval and step > 0 and goes_on and not loop._should_accumulate():
            due = step % self._interval == 0 or trainer.global_step == self._end
            if moment is None:
                done = loop.restarted_on_last and not loop.val_loop.restarted_mid_evaluation
            else:
                done = moment not in (BATCH_END, VALIDATION)
            self._goes_on = due and not done
        if self._goes_on:
            # by its comparison of counts Lightning then finds it due at once
            trainer.val_check_batch = loop.batch_progress.total.ready

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Find the batch of this epoch after which to validate."""
        if self._validates(trainer) and not self._goes_on:
            self._plan(trainer, done=0)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Find the next validation of a run that goes on."""
        if self._goes_on:
            self._goes_on = False
            self._plan(trainer)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Find the batch of the next validation."""
        if self.frequency and trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._goes_on = False
            self._plan(trainer)

    def _validates(self, trainer: pl.Trainer) -> bool:
        return bool(self.frequency) and sum(trainer.num_val_batches) > 0

    def _plan(self, trainer: pl.Trainer, done: int | None = None) -> None:
        """Set the count of batches at which Lightning validates next (checked against 2.6.6)."""
        if self._interval is None:  # once, at the end
            last = trainer.current_epoch + 1 == trainer.max_epochs
            trainer.val_check_batch = math.inf if last else _NEVER
            return
        # Lightning validates when a count of batches is reached, so the next step that is due is
        # turned into batches: that step is a multiple of the interval, or the end of the training
        step = trainer.global_step
        count = (max(step, self.begin) - self.begin) // self._interval + 1
        steps = min(self.begin + count * self._interval, self._end) - step
        progress = trainer.fit_loop.epoch_loop.batch_progress
        current: Any = progress.current
        length, accumulate = trainer.num_training_batches, trainer.accumulate_grad_batches
        if done is None:
            done = current.processed % max(length, 1)
        left = length - done  # the last batch of an epoch makes a step
        window = done % accumulate  # batches since the last step
        batches = min(steps * accumulate - window, left)
        # a step of a later epoch is planned when that epoch begins
        within = left == math.inf or steps <= math.ceil((left + window) / accumulate)
        planned = 0 < steps < math.inf and within
        # compared are batches of all epochs, and one counts as ready before it is processed
        ready = progress.total.ready - current.ready + current.processed
        trainer.val_check_batch = ready + int(batches) if planned else _NEVER

    def _check_epoch(self, trainer: pl.Trainer) -> None:
        if self.steps_per_epoch is None:
            return
        wanted = self.steps_per_epoch * trainer.accumulate_grad_batches
        if trainer.num_training_batches < wanted:
            raise ValueError(
                f"steps_per_epoch={self.steps_per_epoch} needs {wanted} batches of the training"
                f" loader, which has {trainer.num_training_batches}. Give a lower number, or leave"
                " it out for all of them."
            )


def _unknown_length(frequency: float, counted: bool) -> str:
    if not counted:
        return (
            f"eval_frequency={frequency} counts optimizer steps, which this module makes itself"
            " (automatic_optimization = False). Give val_check_interval, a number of batches,"
            " beside loop instead; eval_frequency: 1.0 validates at the end of the last epoch."
        )
    return (
        f"eval_frequency={frequency} is a fraction of the training, and nothing says how long that"
        " is: the training loader has no length. Give loop.max_steps, or eval_frequency as a number"
        " of steps."
    )
