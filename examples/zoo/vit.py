"""transformers' Vision Transformer, tiny and untrained, on scikit-learn's digits.

Shapes: B pictures of a batch; pictures [B, 1, 8, 8], each 16 patches of 2 x 2.
"""

import lightning.pytorch as pl
import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset
from transformers import ViTConfig, ViTForImageClassification

from fulgurite import Trainer


class ViT(pl.LightningModule):
    """Two layers of width 64."""

    def __init__(self):
        super().__init__()
        self.model = ViTForImageClassification(
            ViTConfig(
                image_size=8,
                patch_size=2,
                num_channels=1,
                hidden_size=64,
                num_hidden_layers=2,
                num_attention_heads=4,
                intermediate_size=128,
                hidden_dropout_prob=0.1,
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
    """1,797 pictures and what they show."""
    data = load_digits()
    pictures = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(data.target)
    return DataLoader(TensorDataset(pictures, labels), batch_size=32, shuffle=True, drop_last=True)


if __name__ == "__main__":
    Trainer(device="CSX", max_epochs=5).fit(ViT(), loader())
