"""An LSTM that forecasts a noisy wave: 24 values in, the next 4 out.

Shapes: B series of a batch; past [B, 24, 1], future [B, 4].
"""

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fulgurite import Trainer

PAST, FUTURE = 24, 4


class Forecaster(pl.LightningModule):
    """One LSTM layer, and a linear one on its last state."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(1, 32, batch_first=True)
        self.head = nn.Linear(32, FUTURE)

    def training_step(self, batch, batch_idx):
        past, future = batch
        states, _ = self.lstm(past)
        loss = nn.functional.mse_loss(self.head(states[:, -1]), future)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def loader():
    """2,048 pieces of two sines with noise."""
    draw = torch.Generator().manual_seed(0)
    time = torch.arange(2048 + PAST + FUTURE)
    wave = torch.sin(time / 5) + 0.5 * torch.sin(time / 17)
    wave += 0.1 * torch.randn(len(time), generator=draw)
    pieces = wave.unfold(0, PAST + FUTURE, 1)[:2048]
    data = TensorDataset(pieces[:, :PAST, None], pieces[:, PAST:])
    return DataLoader(data, batch_size=32, shuffle=True)


if __name__ == "__main__":
    Trainer(device="CSX", max_epochs=5).fit(Forecaster(), loader())
