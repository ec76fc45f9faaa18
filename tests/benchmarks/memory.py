"""The peak memory of programs, predicted and measured.

    python tests/benchmarks/memory.py [--compiled] [names ...]

Three models of the other benchmarks and more, operation by operation or compiled. What is measured
says ``tests/support/measured_memory.py``. Ends with an error where a prediction is 10 % off.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, which reads it once
sys.path.append(str(Path(__file__).parents[1] / "support"))
sys.path.append(str(Path(__file__).parents[2] / "examples"))
import large
import lightning.pytorch as pl
import measured_memory
import models
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import fulgurite
from fulgurite.backends import reset_backend

OFF = 0.1
QUIET: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
Case = tuple[Callable[[], pl.LightningModule], list[Any], dict[str, Any]]
"""A module, its batches, options of the Trainer."""


class Encoder(nn.Module):
    """Tokens [B, T] -> logits [B, 32]: two of torch's encoder layers with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 64)
        layer = nn.TransformerEncoderLayer(64, 4, 256, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(64, 32)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(tokens_BT)).mean(1))


class Sequences(nn.Module):
    """x [B, T, 32] -> logits [B, 10] by an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(32, 64, 2, batch_first=True), nn.Linear(64, 10)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.head(self.lstm(x_BTD)[0][:, -1])


class GAN(pl.LightningModule):
    """A generator and a critic, optimized by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 64))
        self.critic = nn.Sequential(nn.Linear(64, 256), nn.LeakyReLU(0.2), nn.Linear(256, 1))

    def training_step(self, batch: Any) -> None:
        first, second = self.optimizers()
        noise = torch.randn(len(batch[0]), 32)
        loss = nn.functional.softplus(-self.critic(self.generator(noise))).mean()
        first.zero_grad()
        self.manual_backward(loss)
        first.step()
        real, made = self.critic(batch[0]), self.critic(self.generator(noise).detach())
        loss = (nn.functional.softplus(-real) + nn.functional.softplus(made)).mean()
        second.zero_grad()
        self.manual_backward(loss)
        second.step()

    def configure_optimizers(self) -> Any:
        parts = (self.generator, self.critic)
        return [torch.optim.Adam(part.parameters(), lr=1e-3) for part in parts]


def net(make: Callable[[], nn.Module], x: Callable[[], Tensor], classes: int) -> Case:
    """A net as a classifier of random batches."""
    batches = [(x(), torch.randint(0, classes, (len(x()),))) for _ in range(4)]
    return (lambda: models.Classifier(make(), classes, models.LOSS)), batches, {}


def model(made: models.Model, **options: Any) -> Case:
    """A model of the other benchmarks."""
    return made.module, made.batches, options


def autoencoder() -> nn.Module:
    """Pictures [B, 3, 32, 32]: convolutions down, transposed ones up."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 4, 2, 1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 4, 2, 1),
        nn.ReLU(),
        nn.ConvTranspose2d(64, 32, 4, 2, 1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    )


CASES: dict[str, Callable[[], Case]] = {
    "mlp": lambda: model(models.mlp()),
    "convnet": lambda: model(models.convnet()),
    "gpt": lambda: model(models.gpt()),
    "gpt, bf16-mixed": lambda: model(models.gpt(), precision="bf16-mixed"),
    "gru, unrolled": lambda: model(large.gru(20)),
    "resnet18": lambda: model(large.resnet18()),
    "unet": lambda: model(large.unet()),
    "transformer": lambda: net(Encoder, lambda: torch.randint(0, 100, (16, 32)), 32),
    "lstm": lambda: net(Sequences, lambda: torch.randn(16, 20, 32), 10),
    "accumulation": lambda: model(models.mlp(), accumulate_grad_batches=2),
    "gan": lambda: (GAN, [(torch.randn(64, 64),) for _ in range(4)], {}),
    "mlp, batch 8192": lambda: net(models.mlp_net, lambda: torch.randn(8192, 64), 10),
    "autoencoder": lambda: net(autoencoder, lambda: torch.randn(16, 3, 32, 32), 10),
}


def rows(name: str, compiled: bool) -> Iterator[measured_memory.Measured]:
    """Measure a model's entry points."""
    torch.manual_seed(0)
    make, batches, options = CASES[name]()
    reset_backend()
    policy = "default" if compiled else "disabled"
    backend = fulgurite.backend("CSX", background=False, audit=False, autogen_policy=policy)
    trainer = fulgurite.Trainer(
        backend=backend, max_epochs=9, limit_train_batches=4, max_steps=16, **QUIET, **options
    )
    loader = DataLoader(batches, batch_size=None)  # type: ignore[arg-type]
    yield from measured_memory.measured(lambda: trainer.fit(make(), loader))


def main() -> int:
    """Print the table; returns how many predictions are off."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("names", nargs="*", default=list(CASES))
    parser.add_argument("--compiled", action="store_true")
    arguments, off = parser.parse_args(), 0
    warnings.simplefilter("ignore")
    head = "| model | resident | kept | intermediates | peak, measured | predicted | ratio |"
    lines = [head, "| --- " * 7 + "|"]
    for name in arguments.names:
        for row in rows(name, arguments.compiled):
            sizes = (row.resident_bytes, row.kept_bytes, row.run_bytes, row.peak_bytes)
            cells = [f"{size:,}" for size in (*sizes, row.predicted.peak_bytes)]
            ratios = f"{row.ratio:.3f} ({row.ratio_of_intermediates:.3f} of intermediates)"
            lines.append(f"| {name} | {' | '.join(cells)} | {ratios} |")
            print(lines[-1], row.predicted.at_peak[:2], flush=True)
            off += abs(row.ratio - 1) > OFF
    print("\n".join(["", *lines]))
    return off


if __name__ == "__main__":
    sys.exit(main())
