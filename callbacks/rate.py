"""Samples per second."""

from __future__ import annotations

from collections.abc import Mapping

import lightning.pytorch as pl

from fulgurite.callbacks.profiler import Profiler


class RateProfiler(Profiler):
    """Logs how fast training goes.

    Logged on log steps: ``local_samples_per_sec`` (since the last log step),
    ``avg_samples_per_sec`` (since the run began) and ``avg_steps_per_sec`` (optimizer steps). A
    sample is a row of the first tensor of a batch; with accumulation the samples of all batches of
    a step count. What is left out: see ``Profiler``.
    """

    def __init__(self) -> None:
        super().__init__()
        self._last = (0, 0.0)
        self._window = 1

    @property
    def steps_per_s(self) -> float:
        """Optimizer steps per second of the last fit; 0 before its second batch."""
        return self._per_s(self.clock.batches) / self._window

    @property
    def samples_per_s(self) -> float:
        """Samples per second of the last fit; 0 before its second batch."""
        return self._per_s(self.clock.samples)

    @property
    def perf_metrics(self) -> dict[str, float]:
        """Samples, seconds, and samples per second, under the three names in use for it."""
        rate = self.samples_per_s
        return {
            "total_samples": self.clock.samples,
            "total_time": self.clock.seconds,
            "global_rate": rate,
            "rate": rate,
            "samples_per_sec": rate,
        }

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Forget what was measured in the run before."""
        super().on_train_start(trainer, pl_module)
        self._last, self._window = (0, 0.0), trainer.accumulate_grad_batches

    def measured(self, trainer: pl.Trainer) -> Mapping[str, float]:
        """The rates now."""
        samples, seconds = self._last
        self._last = self.clock.samples, self.clock.seconds
        elapsed_s = self.clock.seconds - seconds
        local = (self.clock.samples - samples) / elapsed_s if elapsed_s else 0.0
        return {
            "local_samples_per_sec": local,
            "avg_samples_per_sec": self.samples_per_s,
            "avg_steps_per_sec": self.steps_per_s,
        }

    def _per_s(self, count: int) -> float:
        return count / self.clock.seconds if self.clock.seconds else 0.0
