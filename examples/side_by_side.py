"""What the examples share: the record of a fit, and the same fit in stock Lightning beside it."""

from __future__ import annotations

import contextlib
import logging
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from fulgurite.callbacks import RateProfiler


class Record(RateProfiler):
    """Steps per second, the loss of every training step, and the seconds of the whole fit."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Tensor] = []
        self.seconds = 0.0

    def every_n_steps(self, trainer: pl.Trainer) -> int:
        return 1

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "fit":
            self._began = time.perf_counter()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, *rest: Any
    ) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, *rest)
        self.losses.append(outputs["loss"])

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.seconds = time.perf_counter() - self._began


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence what Lightning 2.6 says about every run on a laptop."""
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    level = logger.level
    logger.setLevel(logging.WARNING)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*does not have many workers.*")
        warnings.filterwarnings("ignore", message=".*LeafSpec.*")  # Lightning 2.6 on torch 2.13
        yield
    logger.setLevel(level)


def compare(
    ours: Record, make: Callable[[], pl.LightningModule], *loaders: Any, epochs: int
) -> None:
    """Train the same module with stock Lightning, from the same seed, and print both times."""
    stock = Record()
    pl.seed_everything(0, verbose=False)
    print("\nThe same module in stock Lightning ...")
    with quiet():
        trainer = pl.Trainer(
            accelerator="cpu",
            max_epochs=epochs,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[stock],
        )
        trainer.fit(make(), *loaders)
    difference = (torch.stack(ours.losses) - torch.stack(stock.losses)).abs()
    print(f"{'':16s}{'Fulgurite':>12s}{'Lightning':>12s}")
    print(
        f"{'fit, seconds':16s}{ours.seconds:12.1f}{stock.seconds:12.1f}"
        "   (building programs included)"
    )
    print(f"{'steps per s':16s}{ours.steps_per_s:12.0f}{stock.steps_per_s:12.0f}")
    gained_s = 1 / stock.steps_per_s - 1 / ours.steps_per_s
    extra_s = ours.seconds - stock.seconds + gained_s * len(stock.losses)
    if gained_s > 0:
        print(f"building programs pays after about {extra_s / gained_s:,.0f} steps")
    print(
        f"largest difference in loss: {difference[:100].max():.1e} in the first 100 steps,"
        f" {difference.max():.1e} in all {len(difference)}"
    )
