"""What is trained: three models of growing weight, as one module for every contender.

    mlp      64-128-128-10, batch 32: nearly all of an eager step is Python
    convnet  the net of examples/digits.py on its 8 x 8 pictures, without dropout, batch 32
    gpt      the class of examples/gpt_bytes.py, 4 layers of width 128, batch 8 x 64 tokens

All in float32 with AdamW. Shapes: inputs x [B, ...], targets y [B] (gpt: one per token, [B * T]).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torchmetrics.classification import MulticlassAccuracy

import fulgurite.optim

sys.path.append(str(Path(__file__).parents[2] / "examples"))
from digits import Digits  # examples/ is no package
from gpt_bytes import CONTEXT, GPT, VOCABULARY

BATCHES = 64
NOTHING, LOSS, ACCURACY = "nothing logged", "one self.log", "loss and accuracy"
LEARNING_RATE = 1e-3
WARM_UP, DECAY = 100, 10_000  # steps of the schedule

Batch = tuple[Tensor, Tensor]
Schedule = Callable[[torch.optim.Optimizer], Any]


class Classifier(pl.LightningModule):
    """A net under cross-entropy and AdamW.

    Args:
        net: x -> logits.
        classes: how many.
        logs: what a step logs: NOTHING, LOSS or ACCURACY (which logs the loss too).
        schedule: makes the scheduler that is stepped on every step; None for none.
    """

    def __init__(
        self, net: nn.Module, classes: int, logs: str, schedule: Schedule | None = None
    ) -> None:
        super().__init__()
        self.net, self.logs, self.schedule = net, logs, schedule
        if logs == ACCURACY:
            self.accuracy = MulticlassAccuracy(classes, average="micro")

    def training_step(self, batch: Batch) -> Tensor:
        logits = self.net(batch[0])
        loss = nn.functional.cross_entropy(logits, batch[1])
        if self.logs != NOTHING:
            self.log("loss", loss)
        if self.logs == ACCURACY:
            self.accuracy(logits, batch[1])
            self.log("accuracy", self.accuracy)
        return loss

    def validation_step(self, batch: Batch) -> None:
        self.training_step(batch)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=LEARNING_RATE)
        if self.schedule is None:
            return optimizer
        return [optimizer], [{"scheduler": self.schedule(optimizer), "interval": "step"}]


@dataclass(frozen=True, slots=True)
class Model:
    """One model with its data.

    Args:
        name: in the table.
        net: makes it, with the same weights each time.
        classes: how many.
        batches: preloaded.
        slower: a round has so many times fewer steps than the MLP's.
    """

    name: str
    net: Callable[[], nn.Module]
    classes: int
    batches: list[Batch]
    slower: int = 1

    def module(self, logs: str = NOTHING, schedule: Schedule | None = None) -> Classifier:
        """A fresh module."""
        torch.manual_seed(0)
        return Classifier(self.net(), self.classes, logs, schedule)


def on_host(optimizer: torch.optim.Optimizer) -> Any:
    """Warm-up and cosine by torch's schedulers, on the host after every step."""
    warm_up = lr_scheduler.LinearLR(optimizer, 0.01, 1.0, WARM_UP)
    cosine = lr_scheduler.CosineAnnealingLR(optimizer, DECAY)
    return lr_scheduler.SequentialLR(optimizer, [warm_up, cosine], [WARM_UP])


def in_program(optimizer: torch.optim.Optimizer) -> Any:
    """The same, computed in the program."""
    ours = fulgurite.optim.lr_scheduler
    warm_up = ours.LinearLR(
        optimizer,
        LEARNING_RATE / 100,
        end_learning_rate=LEARNING_RATE,
        total_iters=WARM_UP,
    )
    cosine = ours.CosineDecayLR(optimizer, LEARNING_RATE, end_learning_rate=0.0, total_iters=DECAY)
    return ours.SequentialLR(optimizer, [warm_up, cosine])


def mlp_net() -> nn.Module:
    """64-128-128-10."""
    return nn.Sequential(
        nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)
    )


def convnet_net() -> nn.Module:
    """The example's net without its dropout."""
    return nn.Sequential(*(layer for layer in Digits().net if not isinstance(layer, nn.Dropout)))


def mlp() -> Model:
    """Random rows."""
    generator = torch.Generator().manual_seed(0)
    batches = [
        (
            torch.randn(32, 64, generator=generator),
            torch.randint(0, 10, (32,), generator=generator),
        )
        for _ in range(BATCHES)
    ]
    return Model("mlp", mlp_net, 10, batches)


def convnet() -> Model:
    """scikit-learn's digits."""
    data = load_digits()
    x = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    whole = len(x) // 32 * 32
    y = torch.tensor(data.target)
    batches = list(zip(x[:whole].split(32), y[:whole].split(32), strict=True))
    return Model("convnet", convnet_net, 10, batches, slower=4)


def gpt() -> Model:
    """Random bytes: the time of a step does not depend on them."""
    generator = torch.Generator().manual_seed(0)
    windows = torch.randint(0, VOCABULARY, (BATCHES, 8, CONTEXT + 1), generator=generator)
    batches = [(w[:, :-1].contiguous(), w[:, 1:].flatten()) for w in windows]
    return Model(
        "gpt", lambda: nn.Sequential(GPT(), nn.Flatten(0, 1)), VOCABULARY, batches, slower=20
    )
