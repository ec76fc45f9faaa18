"""How long a run will still take."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping

import lightning.pytorch as pl

from fulgurite.callbacks.profiler import Profiler
from fulgurite.callbacks.sparse import batches_ready


class DurationProfiler(Profiler):
    """Logs the seconds that remain.

    Logged on log steps: ``loop_time_remaining``, of the epoch, at the speed of its batches so far,
    and ``time_remaining``, of the whole run, at the pace so far with validation, checkpoints and
    the ends of epochs. Where no end is known (``max_epochs=-1`` without ``max_steps``, a loader
    without a length), the one that needs it is left out.
    """

    def __init__(self) -> None:
        super().__init__()
        self._began: tuple[float, int] | None = None  # seconds of the clock on the wall, batches

    @property
    def perf_metrics(self) -> dict[str, float]:
        """Seconds of training, pauses left out."""
        return {"training_time": self.clock.seconds}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Forget what was measured in the run before."""
        super().on_train_start(trainer, pl_module)
        self._began = None

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Leave the end of an epoch out of the speed of batches."""
        super().on_train_epoch_end(trainer, pl_module)
        self._begin(trainer)

    def measured(self, trainer: pl.Trainer) -> Mapping[str, float]:
        """The seconds that remain now."""
        began_s, began_at = self._begin(trainer)
        batch_s = self.clock.seconds / self.clock.batches
        progress = trainer.fit_loop.epoch_loop.batch_progress
        of_epoch = trainer.num_training_batches - progress.current.ready
        of_run = self._batches_left(trainer, of_epoch)
        pace_s = (time.perf_counter() - began_s) / (progress.total.ready - began_at)
        found = {
            "loop_time_remaining": min(of_epoch, of_run) * batch_s,
            "time_remaining": of_run * pace_s,
        }
        return {name: left for name, left in found.items() if math.isfinite(left)}

    def _begin(self, trainer: pl.Trainer) -> tuple[float, int]:
        """What the pace is measured from: when the clock began, seen from the first reading."""
        if self._began is None:
            ready = batches_ready(trainer)
            since = time.perf_counter() - self.clock.seconds
            self._began = since, ready - self.clock.batches
        return self._began

    def _batches_left(self, trainer: pl.Trainer, of_epoch: float) -> float:
        """Batches to the end of the run; infinity where none is known."""
        left, epochs, steps = math.inf, trainer.max_epochs, trainer.max_steps
        if epochs is not None and epochs >= 0:
            left = of_epoch + (epochs - trainer.current_epoch - 1) * trainer.num_training_batches
        if steps >= 0:
            left = min(left, (steps - trainer.global_step) * self._batches_per_step(trainer))
        return max(left, 0)

    def _batches_per_step(self, trainer: pl.Trainer) -> float:
        """The window of accumulation; under manual optimization, what was seen."""
        module = trainer.lightning_module
        if module.automatic_optimization:
            return trainer.accumulate_grad_batches
        batches = batches_ready(trainer)
        return batches / trainer.global_step if trainer.global_step else math.inf
