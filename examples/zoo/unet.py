"""A U-Net (Ronneberger et al. 2015, arXiv:1505.04597) that finds discs in noise.

Shapes: B pictures of a batch; pictures and masks [B, 1, 32, 32].
"""

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fulgurite import Trainer

SIZE = 32


def block(inputs, outputs):
    """Two convolutions with BatchNorm."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
        nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
    )


class UNet(pl.LightningModule):
    """Two levels down, two up, and what each level saw beside it."""

    def __init__(self, width=16):
        super().__init__()
        self.down1, self.down2 = block(1, width), block(width, 2 * width)
        self.bottom = block(2 * width, 4 * width)
        self.grow2 = nn.ConvTranspose2d(4 * width, 2 * width, 2, stride=2)
        self.up2 = block(4 * width, 2 * width)
        self.grow1 = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.up1 = block(2 * width, width)
        self.head = nn.Conv2d(width, 1, 1)
        self.pool = nn.MaxPool2d(2)

    def forward(self, x):
        level1 = self.down1(x)
        level2 = self.down2(self.pool(level1))
        x = self.grow2(self.bottom(self.pool(level2)))
        x = self.grow1(self.up2(torch.cat([level2, x], dim=1)))
        return self.head(self.up1(torch.cat([level1, x], dim=1)))

    def training_step(self, batch, batch_idx):
        pictures, masks = batch
        logits = self(pictures)
        inside = logits.sigmoid()
        dice = 1 - 2 * (inside * masks).sum() / (inside.sum() + masks.sum())
        loss = nn.functional.binary_cross_entropy_with_logits(logits, masks) + dice
        self.log_dict({"loss": loss, "dice": dice}, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def loader():
    """512 pictures of a disc each, and where it is."""
    draw = torch.Generator().manual_seed(0)
    x, y, radius = torch.rand(3, 512, 1, 1, 1, generator=draw)
    along = torch.linspace(0, 1, SIZE)
    far = (along - x).square() + (along[:, None] - y).square()
    masks = (far < (0.1 + 0.2 * radius).square()).float()
    pictures = masks + 0.5 * torch.randn(masks.shape, generator=draw)
    return DataLoader(TensorDataset(pictures, masks), batch_size=16, shuffle=True)


if __name__ == "__main__":
    Trainer(device="CSX", max_epochs=5).fit(UNet(), loader())
