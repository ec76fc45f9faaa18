"""``num_workers_per_csx``: loaders without workers get some, for the time of a run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from harness import QUIET
from models import Classifier, mlp, rows
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

import fulgurite

ROWS = 64


class Known(Dataset[Any]):
    """Rows with the process that fetched them."""

    def __init__(self) -> None:
        self.rows = rows(ROWS)

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> Any:
        return *self.rows[index], os.getpid()


class Streamed(IterableDataset[Any]):
    """The same as a stream."""

    def __iter__(self) -> Iterator[Any]:
        return (Known()[index] for index in range(ROWS))


class Fetched(Classifier):
    """Notes the processes that fetched its batches."""

    def __init__(self) -> None:
        super().__init__(mlp())
        self.fetched_by: set[int] = set()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.fetched_by |= set(batch[2].tolist())


def trained(data: Dataset[Any], workers: int, **options: Any) -> tuple[Fetched, DataLoader[Any]]:
    """(module, loader) of an epoch."""
    cluster = {"num_workers_per_csx": workers}
    backend = fulgurite.backend("CSX", autogen_policy="disabled", cluster_config=cluster)
    made = DataLoader(data, batch_size=8, **options)
    pl.seed_everything(3, verbose=False)
    module = Fetched()
    fulgurite.Trainer(backend=backend, **QUIET, max_epochs=1).fit(module, made)
    return module, made


@pytest.mark.numbers
@pytest.mark.process
def test_a_loader_without_workers_has_some_in_a_run_and_gives_the_same_batches() -> None:
    with_workers, loader = trained(Known(), 2, shuffle=True)
    assert len(with_workers.fetched_by) == 2
    assert os.getpid() not in with_workers.fetched_by
    assert (loader.num_workers, loader.prefetch_factor) == (0, None)
    pl.seed_everything(3, verbose=False)
    alone = Fetched()
    pl.Trainer(accelerator="cpu", **QUIET, max_epochs=1).fit(alone, loader)
    assert alone.fetched_by == {os.getpid()}
    same: list[tuple[Tensor, Tensor]] = [
        *zip(alone.parameters(), with_workers.parameters(), strict=True)
    ]
    assert all(torch.equal(*pair) for pair in same)


@pytest.mark.fits
@pytest.mark.process
@pytest.mark.parametrize(("data", "own"), [(Streamed(), 0), (Known(), 1)])
def test_a_stream_and_a_loader_with_workers_keep_their_number(data: Dataset[Any], own: int) -> None:
    module, loader = trained(data, 2, num_workers=own)
    assert len(module.fetched_by) == 1
    assert (os.getpid() in module.fetched_by) is (own == 0)
    assert loader.num_workers == own
