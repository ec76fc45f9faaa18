"""What it costs to know a step: the first steps of a fit, here and in stock Lightning.

    python tests/benchmarks/first_steps.py [mlp deep gru conv gan ...] [--rounds 3]

Each fit has a process of its own, on one thread, with an empty cache; ours and stock's take turns.
Prints CPU milliseconds of that thread's process as a Markdown table, medians of the rounds:

    first, second    the first two steps: the second is the first audit
    later            a step after them
    fit              all of them (20), with what surrounds them
    stock            the same of stock Lightning

The models: an MLP, 60 blocks of Linear, LayerNorm and GELU, a GRU over 30 steps, and a net of
convolutions with BatchNorm and dropout, under AdamW. And fits that need several programs:

    gan        two optimizers by hand, in turns by ``batch_idx % 2``, 12 batches
    answers    a step that asks two counters of the run, which gives five programs, 40 batches
    factors    GradientAccumulationScheduler with factors 1, 2 and 4, four batches each
    lengths    a GRU on 240 batches of 35 lengths

And longer fits: ``deep60`` of 60 batches, ``conv100``, ``conv300``, ``conv1000``; ``resnet``, a
ResNet-26, of 12.
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
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, which reads it once
import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import fulgurite

sys.path.append(str(Path(__file__).parents[2] / "examples"))  # for the other benchmark's models
from large import Residual

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
    "mlp": (lambda: perceptron(), (64,)),
    "deep": (
        lambda: nn.Sequential(*(block() for _ in range(60)), nn.Linear(64, CLASSES)),
        (64,),
    ),
    "gru": (Recurrent, ()),
    "conv": (conv, (1, 8, 8)),
    "resnet": (lambda: resnet(), (3, 32, 32)),
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


def resnet() -> nn.Module:
    """A ResNet-26 (He et al., arXiv:1512.03385, section 4.2) for pictures of 32 x 32."""
    blocks = [
        Residual(before if i == 0 else width, width, 2 if i == 0 and width > 16 else 1)
        for before, width in ((16, 16), (16, 32), (32, 64))
        for i in range(4)
    ]
    stem = (nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, CLASSES))
    return nn.Sequential(*stem, *blocks, *head)


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, CLASSES))


class Turns(Module):
    """Two nets, each with its optimizer, in turns."""

    def __init__(self) -> None:
        super().__init__(perceptron())
        self.other, self.automatic_optimization = perceptron(), False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        first, second = self.optimizers()  # type: ignore[misc]
        optimizer = first if batch_idx % 2 else second
        loss = nn.functional.cross_entropy(self.net(batch[0]) + self.other(batch[0]), batch[1])
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.AdamW(one.parameters(), 1e-3) for one in (self.net, self.other)]


class Asks(Module):
    """A step that asks for counters."""

    def __init__(self) -> None:
        super().__init__(perceptron())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:  # type: ignore[override]
        loss = super().training_step(batch)
        if batch_idx % 4 == 0:
            loss = loss + self.net[0].weight.square().mean()  # type: ignore[index, union-attr]
        elif batch_idx % 4 == 1:
            loss = 0.5 * loss
        if self.global_step > 30:
            loss = 2 * loss
        return loss


def of_lengths() -> list[list[Tensor]]:
    lengths = [5 + i % 35 for i in range(240)]
    return [
        [torch.randint(0, 100, (ROWS, one)), torch.randint(0, CLASSES, (ROWS,))] for one in lengths
    ]


class Batches:
    """A loader of these; a list would be one of several loaders."""

    def __init__(self, batches: list[list[Tensor]]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[Tensor]]:
        return iter(self.batches)


def of_rows(count: int) -> list[list[Tensor]]:
    return [[torch.randn(ROWS, 64), torch.randint(0, CLASSES, (ROWS,))] for _ in range(count)]


FITS: dict[str, Callable[[], tuple[pl.LightningModule, Any, dict[str, Any]]]] = {
    "gan": lambda: (Turns(), of_rows(12), {}),
    "answers": lambda: (Asks(), of_rows(40), {}),
    "factors": lambda: (
        Module(perceptron()),
        of_rows(4),
        {
            "max_epochs": 3,
            "callbacks": [pl.callbacks.GradientAccumulationScheduler({0: 1, 1: 2, 2: 4})],
        },
    ),
    "lengths": lambda: (Module(Recurrent()), of_lengths(), {}),
    "deep60": lambda: (*of_net("deep", 60), {}),
    **{f"conv{n}": lambda n=n: (*of_net("conv", n), {}) for n in (100, 300, 1000)},
    "resnet": lambda: (*of_net("resnet", 12), {}),
}


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
    module, batches, more = FITS[name]() if name in FITS else (*of_net(name), {})
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    clock = Clock()
    options: dict[str, Any] = {**dict.fromkeys(quiet, False), "max_epochs": 1, **more}
    options["callbacks"] = [clock, *options.get("callbacks", ())]
    trainer: pl.Trainer = (
        pl.Trainer(accelerator="cpu", **options)
        if who == "stock"
        else fulgurite.Trainer(device="CSX", **options)
    )
    began = process_time()
    trainer.fit(module, Batches(batches) if isinstance(batches, list) else batches)
    took = {"first": clock.took[0], "second": clock.took[1], "later": median(clock.took[2:])}
    took["fit"] = process_time() - began
    print(json.dumps({key: 1e3 * value for key, value in took.items()}))


def of_net(name: str, steps: int = STEPS) -> tuple[pl.LightningModule, Any]:
    """A module of one of ``NETS``, with its batches."""
    made, shape = NETS[name]
    rows = steps * ROWS
    x = torch.randn(rows, *shape) if shape else torch.randint(0, 100, (rows, 30))
    data = TensorDataset(x, torch.randint(0, CLASSES, (rows,)))
    return Module(made()), DataLoader(data, batch_size=ROWS)


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
    parser.add_argument("names", nargs="*", default=[*{**NETS, **FITS}], metavar="NAME")
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
