"""float64 of a batch may be moved and cast; nothing is computed in it."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from harness import both, fit
from torch import Tensor, nn
from torch.utils.data import DataLoader

from fulgurite.backends.csx.diagnostics.trace_errors import UnsupportedDtype

DRAWS = torch.Generator().manual_seed(2)
BATCHES = [
    (torch.randn(4, 3, generator=DRAWS), torch.randn(4, 3, generator=DRAWS).double())
    for _ in range(3)
]


def loader() -> tuple[DataLoader[Any]]:
    return (DataLoader(BATCHES, batch_size=None, collate_fn=lambda batch: batch),)  # type: ignore[arg-type]


class Casts(pl.LightningModule):
    """A loss against what ``move`` makes of a float64 target."""

    def __init__(self, move: Any) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer, self.move = nn.Linear(3, 3), move

    def training_step(self, batch: Any) -> Tensor:
        x, y = batch
        return (self.layer(x) - self.move(y)).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.numbers
@pytest.mark.parametrize(
    "move",
    [
        lambda y: y.float(),
        lambda y: torch.cat([y[:2], y[2:]]).float(),
        lambda y: torch.stack([y[:, 0], y[:, 1], y[:, 2]], 1).to(torch.float32),
        lambda y: y.T.reshape(4, 3).flip(0).type(torch.float32),
        lambda y: torch.cat(y.chunk(2)).view(3, 4).t().contiguous().float(),
        lambda y: torch.cat([y, torch.ones(1, 3)])[:4].detach().clone().float(),
        lambda y: y.as_strided((4, 3), (3, 1)).float(),
    ],
    ids=["cast", "cat", "stack", "reshape", "chunk", "promoted", "strided"],
)
def test_float64_that_is_moved_and_cast_is_as_eagerly(move: Any) -> None:
    ours, stock = both(lambda: Casts(move), loader)
    assert ours.losses == pytest.approx(stock.losses, rel=1e-6)


@pytest.mark.fits
@pytest.mark.parametrize(
    "compute",
    [
        lambda y: (y * 2).float(),
        lambda y: y,
        lambda y: y.float().double().float(),
        lambda y: y.sum(),
    ],
    ids=["product", "difference", "cast up", "sum"],
)
def test_float64_that_is_computed_is_an_error(compute: Any) -> None:
    with pytest.raises(UnsupportedDtype, match="float64, and the model"):
        fit(lambda: Casts(compute), loader, static=True)
