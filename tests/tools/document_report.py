"""Take the pictures of docs/report.md: the report of the README's module, in Chromium.

python tests/tools/document_report.py
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import lightning.pytorch as pl
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

sys.path.append(str(Path(__file__).parents[1] / "support"))
from browser import Browser, found

from fulgurite import Trainer, backend

DOCS = Path(__file__).parents[2] / "docs"
PICTURES = {"report_light.png": (1280, 1560, False), "report_dark.png": (390, 1300, True)}
"""Their width and height in pixels, and whether they are dark."""


class Net(pl.LightningModule):
    """The module of the README."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Return the loss, logged."""
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def train(folder: Path) -> None:
    """Write the report of a fit."""
    data = TensorDataset(torch.randn(3200, 64), torch.randint(0, 10, (3200,)))
    options = {"default_root_dir": folder, "logger": False, "enable_checkpointing": False}
    trainer = Trainer(backend=backend("CSX", artifact_dir=folder), max_epochs=3, **options)
    trainer.fit(Net(), DataLoader(data, batch_size=32))


def main() -> None:
    """Train, and take the pictures."""
    path = found()
    if path is None:
        sys.exit("Chromium is not installed: apt-get install chromium")
    with tempfile.TemporaryDirectory() as folder:
        train(Path(folder))
        browser = Browser(path)
        for name, (width, height, dark) in PICTURES.items():
            browser.open(Path(folder) / "report.html", width, dark)
            browser.screenshot(DOCS / name, height)
            # few colours: a palette takes a third of the bytes
            Image.open(DOCS / name).quantize(256).save(DOCS / name, optimize=True)
        browser.close()


if __name__ == "__main__":
    main()
