"""What it costs to know a step: the first steps of a fit, here and in stock Lightning.

    python tests/benchmarks/first_steps.py [mlp deep gru conv ...] [--rounds 3]

Each fit has a process of its own, on one thread, with an empty cache; ours and stock's take turns.
Prints CPU milliseconds of that thread's process as a Markdown table, medians of the rounds:

    first, second    the first two steps: the second is the first audit
    later            a step after them
    fit              all 20 of them, with what surrounds them
    stock            the same of stock Lightning

The models are those of the issue that asks for them: an MLP, 60 blocks of Linear, LayerNorm and
GELU, a GRU over 30 steps, and a net of convolutions with BatchNorm and dropout, under AdamW.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from statistics import median
from time import process_time
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, which reads it once
import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import fulgurite

STEPS, ROWS, CLASSES = 20, 32, 10


class Recurrent(nn.Module):
    """Tokens [B, 30] -> logits [B, CLASSES]."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.gru = nn.Embedding(100, 32), nn.GRU(32, 32, batch_first=True)
        self.head = nn.Linear(32, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.gru(self.embedding(tokens))[0][:, -1])
        return out


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU())


def conv() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(0.2), nn.Linear(256, CLASSES)),
    )


NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (
        lambda: nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, CLASSES)),
        (64,),
    ),
    "deep": (
        lambda: nn.Sequential(*(block() for _ in range(60)), nn.Linear(64, CLASSES)),
        (64,),
    ),
    "gru": (Recurrent, ()),
    "conv": (conv, (1, 8, 8)),
}


class Module(pl.LightningModule):
    """A net under cross-entropy and AdamW."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-3)


class Clock(pl.Callback):
    """CPU seconds of each step."""

    def __init__(self) -> None:
        self.began, self.took = 0.0, list[float]()

    def on_train_batch_start(self, *args: object) -> None:
        self.began = process_time()

    def on_train_batch_end(self, *args: object) -> None:
        self.took.append(process_time() - self.began)


def measure(name: str, who: str) -> None:
    """Fit once and print what it took, in milliseconds, as a line of JSON."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    made, shape = NETS[name]
    rows = STEPS * ROWS
    x = torch.randn(rows, *shape) if shape else torch.randint(0, 100, (rows, 30))
    data = TensorDataset(x, torch.randint(0, CLASSES, (rows,)))
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    clock = Clock()
    options: dict[str, Any] = {**dict.fromkeys(quiet, False), "max_epochs": 1, "callbacks": [clock]}
    trainer: pl.Trainer = (
        pl.Trainer(accelerator="cpu", **options)
        if who == "stock"
        else fulgurite.Trainer(device="CSX", **options)
    )
    module, began = Module(made()), process_time()
    trainer.fit(module, DataLoader(data, batch_size=ROWS))
    took = {"first": clock.took[0], "second": clock.took[1], "later": median(clock.took[2:])}
    took["fit"] = process_time() - began
    print(json.dumps({key: 1e3 * value for key, value in took.items()}))


def measured(name: str, who: str) -> dict[str, float]:
    """The same in a process of its own, whose cache is empty."""
    command = [sys.executable, __file__, name, "--who", who]
    with tempfile.TemporaryDirectory() as cache:
        env = {**os.environ, "XDG_CACHE_HOME": cache}
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("names", nargs="*", default=[*NETS], metavar="NAME")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--who", choices=("ours", "stock"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.who:
        measure(given.names[0], given.who)
        return
    columns = ("first", "second", "later", "fit")
    print("| model | " + " | ".join(f"{one} | stock" for one in columns) + " |")
    print("|---" * (1 + 2 * len(columns)) + "|")
    for name in given.names:
        rounds = [{w: measured(name, w) for w in ("ours", "stock")} for _ in range(given.rounds)]
        cells = [median(r[w][one] for r in rounds) for one in columns for w in ("ours", "stock")]
        print(f"| {name} | " + " | ".join(f"{cell:,.1f}" for cell in cells) + " |", flush=True)


if __name__ == "__main__":
    main()
