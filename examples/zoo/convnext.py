"""transformers' ConvNeXt, tiny and untrained, on scikit-learn's digits.

Shapes: B pictures of a batch; pictures [B, 1, 16, 16].
"""

import lightning.pytorch as pl
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import ConvNextConfig, ConvNextForImageClassification

from fulgurite import Trainer


class ConvNeXt(pl.LightningModule):
    """Two stages, of width 32 and 64, of two blocks each."""

    def __init__(self):
        super().__init__()
        self.model = ConvNextForImageClassification(
            ConvNextConfig(
                image_size=16,
                num_channels=1,
                patch_size=2,
                num_stages=2,
                hidden_sizes=[32, 64],
                depths=[2, 2],
                drop_path_rate=0.0,
                num_labels=10,
            )
        )

    def training_step(self, batch, batch_idx):
        pictures, labels = batch
        loss = self.model(pixel_values=pictures, labels=labels).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def loader():
    """1,797 pictures, twice as large as they are, and what they show."""
    data = load_digits()
    pictures = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    pictures = nn.functional.interpolate(pictures, size=16, mode="bilinear")
    labels = torch.tensor(data.target)
    return DataLoader(TensorDataset(pictures, labels), batch_size=32, shuffle=True, drop_last=True)


if __name__ == "__main__":
    Trainer(device="CSX", max_epochs=5).fit(ConvNeXt(), loader())
