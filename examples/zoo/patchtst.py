"""transformers' PatchTST, tiny and untrained, that forecasts waves with noise.

Shapes: B series of a batch; past [B, 64, 3], future [B, 16, 3]: times, channels.
"""

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset
from transformers import PatchTSTConfig, PatchTSTForPrediction

from fulgurite import Trainer

PAST, FUTURE, CHANNELS = 64, 16, 3


class PatchTST(pl.LightningModule):
    """Two layers of width 64 over patches of eight times."""

    def __init__(self):
        super().__init__()
        self.model = PatchTSTForPrediction(
            PatchTSTConfig(
                num_input_channels=CHANNELS,
                context_length=PAST,
                prediction_length=FUTURE,
                patch_length=8,
                patch_stride=8,
                d_model=64,
                num_hidden_layers=2,
                num_attention_heads=4,
                ffn_dim=128,
                loss="mse",
            )
        )

    def training_step(self, batch, batch_idx):
        past, future = batch
        loss = self.model(past_values=past, future_values=future).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def loader():
    """1,024 pieces of three sines, each with a period of its own."""
    draw = torch.Generator().manual_seed(0)
    times = torch.arange(PAST + FUTURE)[:, None] + torch.randint(500, (1024, 1, 1), generator=draw)
    waves = torch.sin(times * torch.tensor([0.1, 0.23, 0.4]))
    waves += 0.1 * torch.randn(waves.shape, generator=draw)
    series = TensorDataset(waves[:, :PAST], waves[:, PAST:])
    return DataLoader(series, batch_size=32, shuffle=True, drop_last=True)


if __name__ == "__main__":
    Trainer(device="CSX", max_epochs=5).fit(PatchTST(), loader())
