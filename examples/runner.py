"""A runner script: a model, two loaders, and run(). All numbers are in the parameter file.

    python examples/runner.py --params examples/runner.yaml --mode train_and_eval
    python examples/runner.py CPU --params examples/runner.yaml --mode train --num_epochs 1

Scripts of this form run as they are, but for the line that imports run (docs/runners.md).

Shapes: B pictures of a batch, C classes; pictures [B, 64], logits [B, C].
"""

from __future__ import annotations

from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fulgurite.runners import run

CLASSES = 10


class DigitsModel(nn.Module):
    """One hidden layer; the forward of a batch returns its loss."""

    def __init__(self, params: dict[str, Any]) -> None:
        super().__init__()
        size = params["model"]["hidden_size"]
        self.net = nn.Sequential(
            nn.Linear(64, size),
            nn.ReLU(),
            nn.Dropout(params["model"]["dropout"]),
            nn.Linear(size, CLASSES),
        )
        self.loss_fn = nn.CrossEntropyLoss()

    def forward(self, data: list[Tensor]) -> Tensor:
        pictures, labels = data
        loss: Tensor = self.loss_fn(self.net(pictures), labels)
        return loss


def pictures(first: int, last: int) -> TensorDataset:
    """Some of the 1797 handwritten digits of scikit-learn, in an order that is always the same."""
    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    part = order[first:last]
    return TensorDataset(
        torch.tensor(data.data, dtype=torch.float32)[part] / 16, torch.tensor(data.target)[part]
    )


def train_data(params: dict[str, Any]) -> DataLoader[Any]:
    """1280 pictures."""
    section = params["train_input"]
    return DataLoader(
        pictures(0, 1280), section["batch_size"], shuffle=section["shuffle"], drop_last=True
    )


def eval_data(params: dict[str, Any]) -> DataLoader[Any]:
    """512 others."""
    return DataLoader(pictures(1280, 1792), params["eval_input"]["batch_size"], drop_last=True)


if __name__ == "__main__":
    run(DigitsModel, train_data, eval_data)
