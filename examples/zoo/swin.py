"""transformers' Swin Transformer, tiny and untrained, on scikit-learn's digits.

Shapes: B pictures of a batch; pictures [B, 1, 16, 16], each 64 patches of 2 x 2 in windows of 4.
"""

import lightning.pytorch as pl
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import SwinConfig, SwinForImageClassification

from fulgurite import Trainer


class Swin(pl.LightningModule):
    """Two stages, of width 32 and 64, of two blocks each; whole paths are dropped at random."""

    def __init__(self):
        super().__init__()
        self.model = SwinForImageClassification(
            SwinConfig(
                image_size=16,
                patch_size=2,
                num_channels=1,
                embed_dim=32,
                depths=[2, 2],
                num_heads=[2, 4],
                window_size=2,
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
    Trainer(device="CSX", max_epochs=5).fit(Swin(), loader())
