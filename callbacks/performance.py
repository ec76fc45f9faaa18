"""What profilers found, in a file."""

from __future__ import annotations

import json
from pathlib import Path

import lightning.pytorch as pl

from fulgurite.callbacks.profiler import Profiler

FILE = "performance.json"


class SavePerformanceData(pl.Callback):
    """Writes what the run's profilers measured to ``performance.json`` when training ends.

    It lies in the folder of the first logger, or in the trainer's ``default_root_dir``
    (``model_dir``), and holds ``perf_metrics`` of RateProfiler, DurationProfiler, FlopUtilization
    and any other ``Profiler`` among the callbacks: an object of numbers. A run that an exception
    ends writes it too.
    """

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write the file."""
        self._write(trainer)

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Write the file with what was measured so far."""
        if trainer.training:
            self._write(trainer)

    def _write(self, trainer: pl.Trainer) -> None:
        found: dict[str, float] = {}
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, Profiler):
                found |= callback.perf_metrics
        folder = Path(trainer.log_dir or trainer.default_root_dir)
        if trainer.is_global_zero:
            folder.mkdir(parents=True, exist_ok=True)
            text = json.dumps(found, indent=4, sort_keys=True)
            (folder / FILE).write_text(text + "\n", encoding="utf-8")
