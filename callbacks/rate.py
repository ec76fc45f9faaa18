"""Steps per second."""

from __future__ import annotations

import time
from typing import Any

import lightning.pytorch as pl


class StepRate(pl.Callback):
    """Measures training steps per second, without the first step of a run, which builds programs.

    ``steps_per_s`` counts whole batches from the first one's end to the last one's end, validation
    and checkpoints left out.
    """

    def __init__(self) -> None:
        self._steps = 0
        self._seconds = 0.0
        self._since: float | None = None

    @property
    def steps_per_s(self) -> float:
        """Training steps per second of the last fit; 0 before its second step."""
        return self._steps / self._seconds if self._seconds else 0.0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begin anew."""
        self._steps, self._seconds, self._since = 0, 0.0, None

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any
    ) -> None:
        """Count a step."""
        now = time.perf_counter()
        if self._since is not None:
            self._steps += 1
            self._seconds += now - self._since
        self._since = now

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Leave validation out."""
        self._since = None

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Leave the end of an epoch out."""
        self._since = None
