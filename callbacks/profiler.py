"""What profilers share: a clock that runs while training does, and values on log steps."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn

from fulgurite.callbacks.saving import SaveObserver
from fulgurite.callbacks.sparse import (
    SparseCallback,
    batches_ready,
    is_log_step,
    log_steps,
    log_values,
    same_size,
    samples_in,
)


class TrainingClock:
    """Counts batches and seconds between readings; stopped, it counts nothing.

    Attributes:
        batches: training batches while it ran.
        samples: in these.
        seconds: how long it ran.
    """

    def __init__(self) -> None:
        self.batches = self.samples = 0
        self.seconds = 0.0
        self.runs = False
        self._size = 0
        self._ready = 0
        self._since = 0.0

    def start(self, trainer: pl.Trainer) -> None:
        """Let the clock run."""
        self._mark(trainer, time.perf_counter())

    def read(self, trainer: pl.Trainer, batch: Any) -> None:
        """Count the batches since the last reading, each as large as this one, and their time."""
        now = time.perf_counter()
        self._size = samples_in(batch) or 0
        if self.runs:
            self._count(trainer, now)
        self._mark(trainer, now)

    def stop(self, trainer: pl.Trainer) -> None:
        """Count up to now, and stop the clock."""
        if self.runs:
            self._count(trainer, time.perf_counter())
        self.runs = False

    def _mark(self, trainer: pl.Trainer, now: float) -> None:
        self.runs, self._ready, self._since = True, batches_ready(trainer), now

    def _count(self, trainer: pl.Trainer, now: float) -> None:
        batches = batches_ready(trainer) - self._ready
        self.batches += batches
        self.samples += batches * self._size
        self.seconds += now - self._since


class Profiler(SparseCallback, SaveObserver):
    """Base of callbacks that measure training and log what they found on log steps.

    The clock leaves out the first batch of an epoch, which builds programs and starts the loader,
    validation, the end of an epoch, and checkpoints of ``fulgurite.callbacks.Checkpoint``.
    """

    def __init__(self) -> None:
        self.clock = TrainingClock()
        self._ran_before_saving = False

    @property
    def perf_metrics(self) -> dict[str, float]:
        """What is known about the run, as ``SavePerformanceData`` writes it."""
        return {}

    def measured(self, trainer: pl.Trainer) -> Mapping[str, float]:
        """The values to log, asked on log steps once the clock has run."""
        raise NotImplementedError

    def every_n_steps(self, trainer: pl.Trainer) -> int:
        """Log steps; every batch where batches may differ in size, so that samples are right."""
        return log_steps(trainer) if same_size(trainer) else 1

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start a new clock."""
        self.clock = TrainingClock()

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Read the clock; on log steps, log."""
        self.clock.read(trainer, batch)
        if self.clock.batches and is_log_step(trainer):
            log_values(trainer, self.measured(trainer))

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop the clock for validation."""
        if trainer.state.fn == TrainerFn.FITTING:
            self.clock.stop(trainer)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Let the clock run again."""
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            self.clock.start(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop the clock for the end of an epoch."""
        self.clock.stop(trainer)

    def before_checkpoint(self, trainer: pl.Trainer, path: Path) -> None:
        """Stop the clock while a checkpoint is written."""
        self._ran_before_saving = self.clock.runs
        self.clock.stop(trainer)

    def after_checkpoint(self, trainer: pl.Trainer, path: Path) -> None:
        """Let the clock run again."""
        if self._ran_before_saving:
            self.clock.start(trainer)
