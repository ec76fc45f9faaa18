"""Resuming where loaders begin anew in the middle of an epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from models import CLASSES, rows
from resuming import Scenario, differences, run
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset


class Net(pl.LightningModule):
    """Takes whatever the loaders give, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.Linear(8, CLASSES))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        pairs = list(batch.values()) if isinstance(batch, dict) else [batch]
        losses = [nn.functional.cross_entropy(self.net(x), y) for x, y in pairs]
        return torch.stack(losses).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Drawn(IterableDataset[Any]):
    """Its order is drawn when it begins, and nobody knows how long it is."""

    def __iter__(self) -> Iterator[Any]:
        data = rows(160)
        for i in torch.randperm(160).tolist():
            yield data[i]


def plain(batches: int, **options: Any) -> DataLoader[Any]:
    return DataLoader(rows(16 * batches), batch_size=16, shuffle=True, **options)


def owned(batches: int) -> DataLoader[Any]:
    return plain(batches, generator=torch.Generator().manual_seed(4))


def cycled() -> Any:
    return {"a": plain(2), "b": plain(10), "c": plain(3)}


def cycled_otherwise() -> Any:
    return {"a": owned(3), "b": DataLoader(Drawn(), batch_size=16), "c": plain(1)}


def cycled_by_workers() -> Any:
    return {"a": plain(3, num_workers=1), "b": plain(10)}


def shortest() -> CombinedLoader:
    return CombinedLoader({"a": plain(10), "b": plain(12)}, "min_size")


@pytest.mark.fits
@pytest.mark.process
@pytest.mark.parametrize("step", [4, 15])
@pytest.mark.parametrize("loaders", [cycled, cycled_otherwise, cycled_by_workers, shortest])
def test_a_run_goes_on_in_a_later_round(
    tmp_path: Path, loaders: Callable[[], Any], step: int
) -> None:
    scenario = Scenario(make=Net, loaders=lambda: (loaders(),))
    whole = run(scenario, tmp_path)
    path = next(tmp_path.glob(f"*-step={step}.ckpt"))
    rest = run(scenario, tmp_path / "a", path=path, start=50)
    assert differences(whole, rest) == []
    path = next((tmp_path / "a").glob(f"*-step={step + 1}.ckpt"))
    assert differences(rest, run(scenario, tmp_path / "b", path=path, start=60)) == []


@pytest.mark.fits
@pytest.mark.parametrize("change", ["of an earlier version", "of another length"])
def test_a_round_that_cannot_be_begun_again_is_named(tmp_path: Path, change: str) -> None:
    def scenario(batches: int) -> Scenario:
        return Scenario(make=Net, loaders=lambda: ({"a": plain(batches), "b": plain(10)},))

    run(scenario(3), tmp_path)
    path = tmp_path / "epoch=0-step=4.ckpt"
    if change == "of an earlier version":
        checkpoint = torch.load(path, weights_only=True)
        without(checkpoint, "round 0 1")
        torch.save(checkpoint, path)
    told = "1 times .* and 0 times" if "earlier" in change else "0 times .* and 1 times"
    with pytest.warns(UserWarning, match=f"training loader 0 .* begun anew {told} says"):
        run(scenario(5 if "length" in change else 3), tmp_path / "rest", path=path, start=50)


def without(values: Any, name: str) -> None:
    """Remove a key from a dict, or the dicts in it."""
    if isinstance(values, dict):
        values.pop(name, None)
        for value in values.values():
            without(value, name)
