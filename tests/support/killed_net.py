"""A model and data of a parameter file, for runs whose ranks are killed."""

from __future__ import annotations

import time
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Net(pl.LightningModule):
    """With dropout, and steps that take their time."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 2))

    def training_step(self, batch: list[Tensor]) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def on_train_batch_end(self, *_: Any) -> None:
        time.sleep(0.05)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Wide(Net):
    """With weights whose checkpoint takes its time."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 50_000), nn.ReLU(), nn.Linear(50_000, 2))


def rows(batch_size: int) -> DataLoader[Any]:
    """Twenty batches of 16 for each of two ranks."""
    x = torch.randn(640, 16, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), batch_size, shuffle=True)
