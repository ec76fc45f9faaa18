"""Smaller last batches where Lightning runs in inference mode: its sums are inference tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import make_trainer
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Evaluated(LightningModule):
    """Logs a mean, a largest value and a sum of each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(5, 1)

    def test_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The error."""
        error: Tensor = (self.net(batch[0]) - batch[1]).abs().mean()
        self.log("mean", error)
        self.log("most", error, reduce_fx="max")
        self.log("sum", error, reduce_fx="sum")
        return error

    validation_step = test_step


@pytest.mark.parametrize("stage", ["test", "validate"])
def test_a_smaller_last_batch_logs_into_the_sums_of_the_others(stage: str) -> None:
    x, y = torch.arange(150.0).sin().reshape(30, 5), torch.arange(30.0).cos().reshape(30, 1)
    torch.manual_seed(0)
    module, loader = Evaluated(), DataLoader(TensorDataset(x, y), 8)
    [ours] = getattr(make_trainer(True), stage)(module, loader)
    [stock] = getattr(make_trainer(False), stage)(module, loader)
    assert ours == pytest.approx(stock, rel=1e-6)
