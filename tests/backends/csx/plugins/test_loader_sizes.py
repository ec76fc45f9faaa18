"""A few batches are looked at before anything is compiled, and nobody notices."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from harness import both, make_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from fulgurite.backends.csx.diagnostics.trace_errors import InputChanged
from fulgurite.backends.csx.plugins import loader_sizes

pytestmark = pytest.mark.fits

WAITS: dict[str, Any] = {"backend": {"background": False}, "max_epochs": 1}


class Lengths(Dataset[Tensor]):
    """Rows of other lengths, with random numbers and a count in each."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths, self.seen = lengths, 0
        self.own = np.random.default_rng(3)
        self.asked: list[int] = []

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, i: int) -> Tensor:
        self.seen += 1
        self.asked.append(i)
        drawn = torch.rand(()) + random.random() + np.random.rand() + self.own.random()
        return torch.ones(self.lengths[i]) * drawn + self.seen


class Mean(pl.LightningModule):
    """A step for rows of any length."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def training_step(self, batch: Any) -> Tensor:
        return (batch * self.scale).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class PadsOnTransfer(Mean):
    """Brings batches to one size as they are transferred."""

    def on_after_batch_transfer(self, batch: Tensor, dataloader_idx: int) -> Tensor:
        return nn.functional.pad(batch, (0, 64 - batch.shape[1]))


def ordered(dataset: Any, **options: Any) -> DataLoader[Any]:
    return DataLoader(dataset, **{"batch_size": 2, **options})


MANY = [n for length in range(10, 30) for n in (length, length)]
FEW = [n for length in (10, 12) * 5 for n in (length, length)]


def padded(rows: list[Tensor]) -> Tensor:
    return nn.utils.rnn.pad_sequence(rows, batch_first=True)


@pytest.mark.parametrize("options", [{"background": False}, {"validate_only": True}])
@pytest.mark.parametrize("shuffle", [False, True])
def test_batches_of_more_sizes_than_were_allowed_are_refused_before_the_first_step(
    options: dict[str, Any], shuffle: bool
) -> None:
    loader = ordered(Lengths(MANY), shuffle=shuffle, collate_fn=padded)
    options = {**options, "max_programs": 5}
    with pytest.raises(InputChanged, match=r"batch, dimension 1: 10, .* seen"):
        make_trainer(True, backend=options, max_epochs=1).fit(Mean(), loader)


def test_where_nothing_was_said_a_check_tells_of_many_sizes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    monkeypatch.setattr(loader_sizes, "rank_zero_info", said.append)
    loader = ordered(Lengths(MANY), collate_fn=padded)
    make_trainer(True, backend={"validate_only": True}, max_epochs=1).fit(Mean(), loader)
    assert "training batches have more than 4 shapes (batch, dimension 1: 10, 1" in said[0]


@pytest.mark.numbers
@pytest.mark.parametrize("lengths", [[8] * 20, FEW])
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_run_draws_and_counts_as_without_the_look(lengths: list[int], wrapped: bool) -> None:
    made: list[Lengths] = []

    def loaders() -> tuple[DataLoader[Any]]:
        random.seed(1)
        np.random.seed(1)
        made.append(Lengths(lengths))
        return (ordered(Subset(made[-1], range(20)) if wrapped else made[-1]),)

    ours, stock = both(Mean, loaders, fresh=True, **{**WAITS, "max_epochs": 2})
    assert ours.losses == pytest.approx(stock.losses, rel=1e-6)
    assert (made[0].seen, made[0].asked) == (made[1].seen, made[1].asked)


def test_a_dataset_that_fails_fails_in_the_run() -> None:
    class Fails(Lengths):
        def __getitem__(self, i: int) -> Tensor:
            if i > 10:
                raise OSError("no such picture")
            return super().__getitem__(i)

    with pytest.raises(OSError, match="no such picture"):
        make_trainer(True, **WAITS).fit(Mean(), ordered(Fails([8] * 20)))


def test_sizes_that_a_hook_makes_equal_are_fine() -> None:
    lengths = [n for length in range(10, 16) for n in (length, length)]
    make_trainer(True, **WAITS).fit(PadsOnTransfer(), ordered(Lengths(lengths)))


def test_a_stream_is_not_looked_at() -> None:
    class Stream(IterableDataset[Tensor]):
        drawn = 0

        def __iter__(self) -> Iterator[Tensor]:
            for _ in range(6):
                self.drawn += 1
                yield torch.ones(4)

    stream = Stream()
    make_trainer(True, **WAITS).fit(Mean(), ordered(stream))
    assert stream.drawn == 6
