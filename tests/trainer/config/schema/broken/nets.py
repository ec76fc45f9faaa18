"""What the files of this folder name: a module and a loader."""

from __future__ import annotations

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import Metric


class Net(LightningModule):
    """A linear layer, with arguments of many types."""

    def __init__(
        self,
        width: int = 4,
        rate: float = 0.1,
        bias: bool = True,
        activation: nn.Module | None = None,
        metrics: dict[str, Metric] | None = None,
        layers: list[int] | None = None,
    ) -> None:
        super().__init__()
        self.layer = nn.Linear(4, width, bias=bias)

    def training_step(self, batch: list[Tensor]) -> Tensor:
        """The mean square."""
        loss: Tensor = self.layer(batch[0]).square().mean()
        return loss


def loader(batch_size: int, count: int = 8) -> DataLoader[tuple[Tensor, ...]]:
    """Zeros."""
    return DataLoader(TensorDataset(torch.zeros(count, 4)), batch_size)
