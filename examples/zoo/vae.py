"""A variational autoencoder (Kingma and Welling 2013, arXiv:1312.6114) on scikit-learn's digits.

Shapes: B pictures of a batch; pictures [B, 64], codes [B, 8].
"""

import lightning.pytorch as pl
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from fulgurite import Trainer

CODE = 8


class VAE(pl.LightningModule):
    """Encoder and decoder with one hidden layer each."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 2 * CODE))
        self.decoder = nn.Sequential(nn.Linear(CODE, 128), nn.ReLU(), nn.Linear(128, 64))

    def training_step(self, pictures, batch_idx):
        mean, log_var = self.encoder(pictures).chunk(2, dim=1)
        code = mean + torch.randn_like(mean) * (log_var / 2).exp()
        rebuilt = F.binary_cross_entropy_with_logits(
            self.decoder(code), pictures, reduction="sum"
        ) / len(pictures)
        divergence = 0.5 * (mean.square() + log_var.exp() - 1 - log_var).sum(dim=1).mean()
        loss = rebuilt + divergence
        self.log_dict({"loss": loss, "divergence": divergence}, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def loader():
    """1,797 pictures of 8 x 8, between 0 and 1."""
    pictures = torch.tensor(load_digits().data, dtype=torch.float32) / 16
    return DataLoader(pictures, batch_size=64, shuffle=True, drop_last=True)


if __name__ == "__main__":
    Trainer(device="CSX", max_epochs=20).fit(VAE(), loader())
