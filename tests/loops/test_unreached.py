"""Gradients of an accumulation window that its last batch does not reach."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from harness import both
from torch import Tensor, nn


class Long(pl.LightningModule):
    """A layer is for long rows alone, or for every second batch."""

    def __init__(self, optimizer: type[torch.optim.Optimizer], by_index: bool = False) -> None:
        super().__init__()
        self.all, self.long, self.never = nn.Linear(1, 2), nn.Linear(1, 2), nn.Linear(1, 2)
        self.optimizer, self.by_index = optimizer, by_index

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        out = self.all(batch).mean()
        if batch_idx % 2 == 0 if self.by_index else len(batch) >= 10:
            out = out + self.long(batch).mean()
        return out.square()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        options: dict[str, Any] = {"weight_decay": 0.1}
        return self.optimizer(self.parameters(), lr=0.1, **options)  # type: ignore[call-arg]


class Rows:
    """Batches of so many rows."""

    def __init__(self, *counts: int) -> None:
        drawn = torch.Generator().manual_seed(1)
        self.batches = [torch.randn(count, 1, generator=drawn) for count in counts]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.batches)


SHORT_LAST, SHORT_FIRST, SEVERAL = (12, 3) * 3, (3, 12) * 3, (3, 3, 12, 3, 3, 12, 3, 3, 12, 12)
MANY = (3, 4, 12, 5, 13, 14, 6, 7, 8, 15, 16, 17, 9, 18)


@pytest.mark.numbers
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize(
    ("counts", "window", "by_index"),
    [
        *((SHORT_LAST, 2, False), (SHORT_FIRST, 2, False), (SEVERAL, 2, False)),
        *((SEVERAL, 3, False), (MANY, 2, False), ((8,) * 6, 2, True)),
    ],
)
def test_what_a_window_has_summed_is_stepped_with(
    optimizer: type[torch.optim.Optimizer], counts: tuple[int, ...], window: int, by_index: bool
) -> None:
    ours, stock = both(
        lambda: Long(optimizer, by_index),
        lambda: (Rows(*counts),),
        fresh=True,
        max_epochs=2,
        accumulate_grad_batches=window,
    )
    assert ours.losses == pytest.approx(stock.losses, rel=1e-5, abs=1e-7)
    for name, p in ours.module.named_parameters():
        assert torch.allclose(p, stock.module.get_parameter(name), atol=1e-7), name
