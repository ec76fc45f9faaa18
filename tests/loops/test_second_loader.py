"""A step that takes batches from an iterator of its own: the remedy trains as stock does."""

from __future__ import annotations

import itertools
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from harness import assert_close, fit
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fulgurite.backends.csx.diagnostics.trace_errors import GraphChanged


def rows(count: int) -> DataLoader[Any]:
    x = torch.randn(count, 4, generator=torch.Generator().manual_seed(count))
    return DataLoader(TensorDataset(x), 8)


class Both(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 1)

    def loss(self, first: Tensor, second: Tensor) -> Tensor:
        return self.net(first).square().mean() + 0.1 * self.net(second).mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch["a"][0], batch["b"][0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Fetches(Both):
    def __init__(self) -> None:
        super().__init__()
        self.unlabelled = itertools.cycle(rows(24))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (second,) = next(self.unlabelled)
        return self.loss(batch[0], second)


def combined() -> Any:
    return (CombinedLoader({"a": rows(48), "b": rows(24)}, "max_size_cycle"),)


@pytest.mark.fits
def test_the_remedy_is_a_loader_for_fit() -> None:
    with pytest.raises(GraphChanged, match=r"CombinedLoader\(\{"):
        fit(Fetches, lambda: (rows(48),), static=True, backend={"audit": True})


@pytest.mark.numbers
def test_taken_literally_it_trains_as_stock_does_without_it() -> None:
    stock = fit(Fetches, lambda: (rows(48),), static=False, max_epochs=2)
    ours = fit(Both, combined, static=True, max_epochs=2)
    assert_close(ours.module.state_dict(), stock.module.state_dict())
