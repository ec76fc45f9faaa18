"""The hint that the program waits for its loader: once, with the numbers, where it does."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from harness import fit
from lightning.pytorch.utilities import CombinedLoader
from models import Classifier, Measured, loader, mlp, rows
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Subset,
    TensorDataset,
)

from fulgurite.backends.csx.compile.fabric import Loaded
from fulgurite.backends.csx.compile.fabrics import FABRICS
from fulgurite.backends.csx.compile.host.host_fabric import HostFabric
from fulgurite.backends.csx.program import announcements
from fulgurite.loops import fetching
from fulgurite.loops.fetching import FEWEST, SAMPLE, FeedingTimes

PROGRAM_US, BATCH = 100, 16


class Time:
    """A clock that only moves when told to."""

    def __init__(self) -> None:
        self.now_us, self.reads = 0.0, 0

    def __call__(self) -> float:
        self.reads += 1
        return self.now_us / 1e6


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    """On it every program takes PROGRAM_US."""
    fake = Time()

    class SlowFabric(HostFabric):
        def run(self, loaded: Loaded, inputs: list[Tensor]) -> Sequence[Tensor]:
            def slow_call(inputs: list[Tensor]) -> Sequence[Tensor]:
                fake.now_us += PROGRAM_US
                return loaded.call(inputs)

            return super().run(replace(loaded, call=slow_call), inputs)

    monkeypatch.setitem(FABRICS, "auto", SlowFabric)
    monkeypatch.setattr(fetching, "clock", fake)
    return fake


@pytest.fixture
def hints(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """The hints given so far."""
    lines: list[str] = []
    monkeypatch.setattr(announcements, "rank_zero_info", lines.append)
    return lambda: [line for line in lines if "fetching a batch" in line]


class Slow(Dataset[Any]):
    """Samples (x [8], y); a batch of them takes ``batch_us`` to collate."""

    def __init__(self, time: Time, batch_us: float, batches: int = 20) -> None:
        self.time, self.sample_us = time, batch_us / BATCH
        self.data = rows(BATCH * batches)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        self.time.now_us += self.sample_us
        return self.data[index]


def slow(time: Time, batch_us: float, batches: int = 20) -> DataLoader[Any]:
    """A loader over ``Slow``."""
    return DataLoader(Slow(time, batch_us, batches), batch_size=BATCH)


@contextlib.contextmanager
def feeding_times() -> Iterator[list[FeedingTimes]]:
    """What was timed inside."""
    taken: list[FeedingTimes] = []
    hint = fetching.hint

    def note(times: FeedingTimes, loaders: list[Any]) -> str | None:
        taken.append(times)
        return hint(times, loaders)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fetching, "hint", note)
        yield taken


def train(make: Callable[[], Any], module: Any = None, **options: Any) -> pl.Trainer:
    """Fit on CSX."""
    module = module or (lambda: Classifier(mlp()))
    return fit(module, lambda: (make(),), static=True, **options).trainer


@pytest.mark.fits
def test_a_loader_slower_than_the_program_is_told_once_with_the_numbers(
    time: Time, hints: Any
) -> None:
    train(lambda: slow(time, 400), max_epochs=3)
    [hint] = hints()
    assert hint.startswith("DataLoader: fetching a batch took 400 µs, the program 100 µs. ")
    assert hint.endswith(indexed_fetch("SequentialSampler"))


@pytest.mark.fits
def test_a_loader_that_keeps_up_is_not_told(time: Time, hints: Any) -> None:
    train(lambda: slow(time, 90), max_epochs=2)
    assert hints() == []


class SlowToStart(Slow):
    """Its first sample takes a second."""

    def __getitem__(self, index: int) -> Any:
        self.time.now_us += 1e6 * (index == 0)
        return super().__getitem__(index)


@pytest.mark.fits
def test_the_batch_for_which_the_program_is_built_does_not_count(time: Time) -> None:
    with feeding_times() as taken:
        train(lambda: DataLoader(SlowToStart(time, 90, FEWEST + 1), batch_size=BATCH))
    assert len(taken) == 1
    assert taken[0].fetch_s[0] > 1
    assert max(taken[0].fetch_s[1:]) < 1e-3
    assert taken[0].medians_us() == pytest.approx((90, 100))


@pytest.mark.fits
@pytest.mark.parametrize(("batches", "told"), [(FEWEST, 0), (FEWEST + 1, 1)])
def test_few_batches_tell_nothing(time: Time, hints: Any, batches: int, told: int) -> None:
    train(lambda: slow(time, 400, batches))
    assert len(hints()) == told


@pytest.mark.fits
def test_validation_is_neither_timed_nor_told(time: Time, hints: Any) -> None:
    def loaders() -> tuple[Any, Any]:
        return slow(time, 90), slow(time, 5000)

    fit(Measured, loaders, static=True, val_check_interval=2, num_sanity_val_steps=2)
    assert hints() == []


@pytest.mark.fits
def test_evaluation_alone_is_not_told(time: Time, hints: Any) -> None:
    trainer = train(lambda: slow(time, 90))
    trainer.validate(Measured(), slow(time, 5000), verbose=False)
    assert hints() == []


@pytest.mark.fits
def test_after_the_first_epoch_and_after_the_sample_nothing_is_timed(time: Time) -> None:
    reads: list[int] = []

    class Reading(Classifier):
        def on_train_batch_end(self, *args: Any) -> None:
            reads.append(time.reads)

    trainer = train(
        lambda: slow(time, 400, SAMPLE + 5), lambda: Reading(mlp(), torch.optim.SGD), max_epochs=2
    )
    assert reads[SAMPLE - 1] == reads[-1] == 4 * SAMPLE
    assert trainer.strategy.fabric.timer is None


@pytest.mark.fits
def test_a_failed_epoch_leaves_no_timers(time: Time) -> None:
    class Failing(Classifier):
        def on_train_batch_end(self, *args: Any) -> None:
            self.fabric = self.trainer.strategy.fabric
            assert self.fabric.timer is not None
            raise KeyError

    module = Failing(mlp())
    with pytest.raises(KeyError):
        train(lambda: slow(time, 400), lambda: module)
    assert module.fabric.timer is None


def times(fetch_us: float = 400.0) -> FeedingTimes:
    """Of an epoch long enough."""
    taken = FeedingTimes()
    taken.fetch_s = [fetch_us / 1e6] * (FEWEST + 1)
    taken.program_s = [PROGRAM_US / 1e6] * (FEWEST + 1)
    return taken


def indexed_fetch(sampler: str, size: int = BATCH) -> str:
    """The remedy as code."""
    return (
        f"\n    DataLoader(dataset, batch_size=None, sampler=BatchSampler({sampler}(dataset),"
        f" {size}, drop_last=False))"
    )


@pytest.mark.parametrize(
    ("shuffle", "name"), [(True, "RandomSampler"), (False, "SequentialSampler")]
)
def test_a_tensor_dataset_gets_the_indexed_fetch_as_code(shuffle: bool, name: str) -> None:
    hint = fetching.hint(times(), [loader(shuffle=shuffle)])
    assert hint is not None
    assert hint.endswith(indexed_fetch(name))
    assert "num_workers" not in hint


def test_the_code_of_the_remedy_runs_and_gives_the_same_batches() -> None:
    dataset = rows(64)
    hint = fetching.hint(times(), [DataLoader(dataset, batch_size=BATCH, shuffle=True)])
    code = str(hint).splitlines()[-1].strip()
    names = {"DataLoader": DataLoader, "BatchSampler": BatchSampler, "RandomSampler": RandomSampler}
    remedied = eval(code, {**names, "dataset": dataset})
    assert [x.shape for x, _ in remedied] == [(BATCH, 8)] * 4
    seen = torch.cat([x for x, _ in remedied]).sort(0).values
    assert torch.equal(seen, dataset.tensors[0].sort(0).values)


class OwnRows(TensorDataset):
    """Takes one index, for all that is known."""


OTHER = [OwnRows(*rows(64).tensors), Subset(rows(64), range(32))]


@pytest.mark.parametrize("dataset", OTHER, ids=["own", "subset"])
def test_another_map_style_dataset_gets_it_with_its_condition(dataset: Any) -> None:
    hint = str(fetching.hint(times(), [DataLoader(dataset, batch_size=BATCH)]))
    assert "Where dataset[[0, 1]] gives a batch of two, one indexed fetch costs less" in hint
    assert hint.endswith(indexed_fetch("SequentialSampler"))


OWN_WAY = [
    {"batch_size": None},
    {"batch_size": BATCH, "collate_fn": torch.stack},
    {"batch_sampler": BatchSampler(range(64), BATCH, True)},
    {"batch_size": BATCH, "sampler": range(32)},
]


@pytest.mark.parametrize(
    "options", OWN_WAY, ids=["indexed", "collate_fn", "batch_sampler", "sampler"]
)
def test_a_loader_that_does_more_than_collate_gets_no_indexed_fetch(options: Any) -> None:
    one = DataLoader(rows(64), **options)
    assert str(fetching.hint(times(), [one])).endswith(fetching.AHEAD)
    assert str(fetching.hint(times(2000.0), [one])).endswith("fetches beside the program.")


@pytest.mark.parametrize("dataset", [rows(64), *OTHER], ids=["tensors", "own", "subset"])
def test_workers_are_a_remedy_only_where_a_batch_costs_more_than_handing_it_over(
    dataset: Any,
) -> None:
    one = DataLoader(dataset, batch_size=BATCH)
    assert "num_workers=2" not in str(fetching.hint(times(900.0), [one]))
    assert "num_workers=2" in str(fetching.hint(times(1100.0), [one]))


def test_a_loader_with_workers_is_told_otherwise() -> None:
    hint = str(fetching.hint(times(), [loader(num_workers=2)]))
    assert "waits for 2 workers" in hint
    assert "DataLoader(" not in hint


class Stream(IterableDataset[Any]):
    """Endless."""

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield torch.randn(8), torch.tensor(0)


@pytest.mark.parametrize(
    "loaders",
    [[DataLoader(Stream(), batch_size=4)], [[1, 2]], [loader(), loader()]],
    ids=["iterable", "list", "two"],
)
def test_other_loaders_get_a_sentence_without_code(loaders: list[Any]) -> None:
    hint = str(fetching.hint(times(), loaders))
    assert "400 µs" in hint
    assert "(" not in hint


class Pairs(Classifier):
    """Takes batches of two loaders."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch["a"]
        return nn.functional.cross_entropy(self.net(x + batch["b"][0]), y)


@pytest.mark.fits
def test_any_kind_of_loader_trains_and_is_told(time: Time, hints: Any) -> None:
    class SlowStream(Stream):
        def __iter__(self) -> Iterator[Any]:
            for sample in super().__iter__():
                time.now_us += 100
                yield sample

    class Batches(list[Any]):
        def __iter__(self) -> Iterator[Any]:
            for batch in super().__iter__():
                time.now_us += 400
                yield batch

    batches = Batches([list(batch) for batch in loader(BATCH * 20)])
    train(lambda: DataLoader(SlowStream(), batch_size=4), limit_train_batches=20)
    train(lambda: batches)
    train(lambda: CombinedLoader({"a": slow(time, 400), "b": loader()}), lambda: Pairs(mlp()))
    train(lambda: slow(time, 400), overfit_batches=10)
    assert len(hints()) == 4
    assert all("took 400 µs, the program 100 µs" in hint for hint in hints())
