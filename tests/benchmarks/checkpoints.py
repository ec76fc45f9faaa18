"""How long training waits for a checkpoint: beside the steps, and as stock Lightning saves.

    python tests/benchmarks/checkpoints.py

A model with 4.2 million weights and AdamW, so about 50 MB a checkpoint, saved by a ModelCheckpoint
after every 20th step, which takes about 50 ms. Printed is the median of the time from the end of a
step that saves to the begin of the next, less that of steps that do not save.
"""

from __future__ import annotations

import statistics
import tempfile
import time
import warnings
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fulgurite

_EVERY = 20


class Model(pl.LightningModule):
    """Two layers; most of the time is theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 1024))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """The mean of the squares."""
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW: two moments for each weight."""
        return torch.optim.AdamW(self.parameters())


class Pauses(pl.Callback):
    """Seconds from the end of each step to the begin of the next."""

    def __init__(self) -> None:
        self.pauses_s: dict[int, float] = {}
        self._ended = 0.0

    def on_train_batch_end(self, *_: Any) -> None:
        """A step ended; ModelCheckpoint comes after this callback."""
        self._ended = time.perf_counter()

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        """The next one begins."""
        if trainer.global_step:
            self.pauses_s[trainer.global_step] = time.perf_counter() - self._ended


def waited_ms(trainer_class: Any, folder: str, **options: Any) -> float:
    """The median of what the training waits for one checkpoint, in milliseconds."""
    pauses, save = Pauses(), ModelCheckpoint(folder, every_n_train_steps=_EVERY, save_top_k=1)
    trainer = trainer_class(
        max_steps=10 * _EVERY + 1,
        callbacks=[pauses, save],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    data = TensorDataset(torch.randn(32 * 300, 1024))
    trainer.fit(Model(), DataLoader(data, batch_size=32))
    saving = [s for step, s in pauses.pauses_s.items() if step % _EVERY == 0]
    others = [s for step, s in pauses.pauses_s.items() if step % _EVERY]
    return 1e3 * (statistics.median(saving[1:]) - statistics.median(others))


def main() -> None:
    """The command."""
    warnings.simplefilter("ignore")
    runs: dict[str, tuple[Any, dict[str, Any]]] = {
        "stock Lightning": (pl.Trainer, {"accelerator": "cpu"}),
        "fulgurite on CPU": (fulgurite.Trainer, {"device": "CPU"}),
    }
    for _ in range(3):
        for name, (trainer, options) in runs.items():
            with tempfile.TemporaryDirectory() as folder:
                print(f"{name}: {waited_ms(trainer, folder, **options):.0f} ms", flush=True)


if __name__ == "__main__":
    main()
