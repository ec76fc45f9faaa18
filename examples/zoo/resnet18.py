"""timm's ResNet-18, untrained, on scikit-learn's digits.

Shapes: B pictures of a batch; pictures [B, 1, 48, 48].
"""

import lightning.pytorch as pl
import timm
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fulgurite import Trainer


class ResNet18(pl.LightningModule):
    """All of its 11 million weights; SGD with momentum and weight decay, as in the paper."""

    def __init__(self):
        super().__init__()
        self.model = timm.create_model("resnet18", in_chans=1, num_classes=10)

    def training_step(self, batch, batch_idx):
        pictures, labels = batch
        loss = nn.functional.cross_entropy(self.model(pictures), labels)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.002, momentum=0.9, weight_decay=1e-4)


def loader():
    """1,797 pictures with noise, six times as large as they are, and what they show."""
    data = load_digits()
    pictures = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    pictures = nn.functional.interpolate(pictures, size=48, mode="bilinear")
    pictures += 0.1 * torch.randn(pictures.shape, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor(data.target)
    return DataLoader(TensorDataset(pictures, labels), batch_size=32, shuffle=True, drop_last=True)


if __name__ == "__main__":
    Trainer(device="CSX", max_epochs=1).fit(ResNet18(), loader())
