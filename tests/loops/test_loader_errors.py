"""Errors of loaders name the worker, the samples and the cause."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from harness import make_trainer
from lightning.pytorch.loops.fetchers import _PrefetchDataFetcher
from lightning.pytorch.utilities import CombinedLoader
from models import Classifier, loader, mlp
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from fulgurite.backends.csx.diagnostics.trace_errors import InputChanged
from fulgurite.loops import loader_errors

ROWS, BATCH, BAD = 48, 4, 21  # the bad one is sample 1 of batch_idx 5


class Rows(Dataset[Any]):
    """Rows (x [8], y); ``fails`` is called where the bad one is asked for, and may return it."""

    def __init__(self, fails: Callable[[Tensor], Any]) -> None:
        self._fails = fails

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> Any:
        x = torch.full((8,), float(index))
        if index == BAD:
            x = self._fails(x)
        return x, torch.tensor(index % 4)


def raises(x: Tensor) -> Any:
    raise KeyError("no such file")


def dies(x: Tensor) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def exits(x: Tensor) -> Any:
    os._exit(3)


def leaves(x: Tensor) -> Any:
    os._exit(0)


def is_shorter(x: Tensor) -> Any:
    return x[:5]


def told_by(error: type[Exception] | tuple[type[Exception], ...], run: Callable[[], Any]) -> str:
    """Text and notes of what is raised."""
    with pytest.raises(error) as caught:
        run()
    return "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])


def notes_of(fails: Any, error: Any, workers: int = 0, **options: Any) -> str:
    """What is told when a loader is read; ``options`` may replace its batch size and order."""
    dataset = options.pop("dataset", None) or Rows(fails)
    data = DataLoader(dataset, **{"batch_size": BATCH, "num_workers": workers, **options})
    return told_by(error, lambda: read(data))


@loader_errors.explained()
def read(data: DataLoader[Any]) -> int:
    """Take all batches of a loader, and count them."""
    return len(list(data))


def step(name: str) -> Callable[[DataLoader[Any]], Any]:
    """Run a stage on a loader."""

    def run(data: DataLoader[Any]) -> Any:
        trainer = make_trainer(True, max_epochs=1, backend={"max_programs": 1})
        model = Example()
        stages = {
            "fit": lambda: trainer.fit(model, data),
            "validate": lambda: trainer.validate(model, data),
            "predict": lambda: trainer.predict(model, data),
        }
        return stages[name]()

    return run


class Example(Classifier):
    """Every stage."""

    def __init__(self) -> None:
        super().__init__(mlp())

    def validation_step(self, batch: Any) -> None:
        self.net(batch[0])

    def predict_step(self, batch: Any) -> Tensor:
        return self.net(batch[0])


@pytest.mark.fits
@pytest.mark.process
@pytest.mark.parametrize("stage", ["fit", "validate", "predict"])
def test_in_every_stage_sample_and_worker_are_named(stage: str) -> None:
    data = DataLoader(Rows(raises), BATCH)
    assert "The sample was dataset[21], of" in told_by(KeyError, lambda: step(stage)(data))
    if stage == "fit":
        data = DataLoader(Rows(exits), BATCH, num_workers=1)
        assert "Worker 0 of the loader (pid " in told_by(DEATH, lambda: step(stage)(data))


@pytest.mark.process
@pytest.mark.parametrize("workers", [0, 2])
def test_a_sample_that_raises_is_named(workers: int) -> None:
    told = notes_of(raises, KeyError, workers)
    assert "no such file" in told
    assert "The sample was dataset[21], of a batch of dataset[[20, 21, 22, 23]]." in told
    assert told.count("The sample was") == 1


def test_one_of_a_subset_is_named_by_the_indices_of_the_subset() -> None:
    subset = Subset(Rows(raises), range(1, ROWS - 3))
    assert "The sample was dataset[20], of a batch" in notes_of(raises, KeyError, dataset=subset)


def test_a_sampler_of_whole_batches_and_a_batch_too_long_to_show() -> None:
    sampler = [list(range(0, 12)), list(range(12, 24))]
    told = notes_of(raises, KeyError, batch_size=1, batch_sampler=sampler)
    assert (
        "dataset[21], of a batch of dataset[[12, 13, 14, 15, 16, 17, 18, 19, ... 4 more]]" in told
    )
    told = notes_of(raises, KeyError, batch_size=None)
    assert "It came from dataset[" in told


@pytest.mark.process
@pytest.mark.parametrize("workers", [0, 2])
def test_a_sample_of_another_shape_is_named_where_the_batch_is_put_together(workers: int) -> None:
    told = notes_of(is_shorter, RuntimeError, workers)
    assert "The samples were put together as a batch of dataset[[20, 21, 22, 23]]." in told
    assert "dataset[21] is (float32[5], int64[]), where most are (float32[8], int64[])." in told


DEATH = (RuntimeError, OSError, EOFError)  # torch's, or a connection's that the worker left
DEATHS = [
    (dies, "was killed by SIGKILL", "when memory runs out"),
    (exits, "exited with code 3", ""),
    (leaves, "exited with code 0", ""),
]


@pytest.mark.process
@pytest.mark.parametrize(("fails", "cause", "hint"), DEATHS, ids=["killed", "exit 3", "exit 0"])
def test_a_worker_that_dies_is_named_with_batch_and_cause(
    fails: Any, cause: str, hint: str
) -> None:
    told = notes_of(fails, DEATH, workers=2)
    assert "Worker 1 of the loader (pid " in told
    assert f"{cause}. It had not delivered batch_idx " in told
    assert "batch_idx 5 (dataset[[20, 21, 22, 23]])" in told
    assert "Worker 0" not in told
    assert hint in told


@pytest.mark.process
def test_so_is_one_of_a_shuffled_persistent_loader_in_a_later_epoch() -> None:
    class Later(Rows):
        calls = 0

        def __getitem__(self, index: int) -> Any:
            self.calls += 1
            if self.calls == ROWS + 10:
                os._exit(5)
            return super().__getitem__(index)

    data = DataLoader(
        Later(lambda x: x), BATCH, shuffle=True, num_workers=1, persistent_workers=True
    )
    read(data)
    told = told_by(DEATH, lambda: read(data))
    assert "Worker 0 of the loader" in told
    assert "exited with code 5. It had not delivered batch_idx " in told
    assert re.search(r"batch_idx 2 \(dataset\[\[\d+, \d+, \d+, \d+\]\]\)", told)


@pytest.mark.process
def test_a_worker_that_is_waited_for_is_named_and_the_run_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loader_errors, "STUCK_S", 0.02)

    def quick(self: Any, timeout: float = 0.01) -> Any:
        return loader_errors._get_data_told(self, 0.01)

    def sleeps(x: Tensor) -> Tensor:
        time.sleep(1.0)
        return x

    data = DataLoader(Rows(sleeps), BATCH, num_workers=2)
    with loader_errors.explained(), monkeypatch.context() as patch:
        patch.setattr(loader_errors._MultiProcessingDataLoaderIter, "_try_get_data", quick)
        with pytest.warns(UserWarning, match="no batch for") as told:
            assert len(list(data)) == ROWS // BATCH
    [text] = [str(one.message) for one in told if "batch_idx 5" in str(one.message)]
    assert "It is worker 1 (pid " in text
    assert ", sleeping) that makes batch_idx 5 (dataset[[20, 21, 22, 23]])." in text


@pytest.mark.process
def test_a_timeout_of_the_users_names_the_worker() -> None:
    def sleeps(x: Tensor) -> Tensor:
        time.sleep(30)
        return x

    told = notes_of(sleeps, RuntimeError, workers=2, timeout=2)
    assert told.startswith("DataLoader timed out after 2 seconds")
    assert "It is worker 1 (pid " in told
    assert "makes batch_idx 5 (dataset[[20, 21, 22, 23]])." in told


@pytest.mark.fits
@pytest.mark.process
def test_a_batch_of_another_shape_is_named() -> None:
    def padded(samples: list[Any]) -> Any:
        width = 6 if any(int(x[0]) == BAD for x, _ in samples) else 8
        return torch.stack([x[:width] for x, _ in samples]), torch.stack([y for _, y in samples])

    for workers in (0, 2):
        data = DataLoader(Rows(lambda x: x), BATCH, num_workers=workers, collate_fn=padded)
        told = told_by(InputChanged, lambda data=data: step("fit")(data))  # type: ignore[misc]
        assert "The batch is batch_idx 5 (dataset[[20, 21, 22, 23]])." in told


class Stream(IterableDataset[Any]):
    """Raises after some samples."""

    def __iter__(self) -> Iterator[Any]:
        for index in range(20):
            yield torch.full((8,), float(index)), torch.tensor(0)
        raise OSError("the network is gone")


@pytest.mark.process
@pytest.mark.parametrize("workers", [0, 1])
def test_streams_and_loaders_that_are_not_torchs_raise_as_ever(workers: int) -> None:
    assert "the network is gone" in notes_of(None, OSError, workers, dataset=Stream())


def test_a_batch_of_another_kind_of_loader_is_named_by_its_number() -> None:
    error, fetcher = ValueError(), _PrefetchDataFetcher()
    fetcher.setup(CombinedLoader([torch.ones(1)] * 3))
    iter(fetcher)
    loader_errors.name_batch(error, fetcher, 2)
    assert error.__notes__ == ["The batch is batch_idx 2."]


@pytest.mark.fits
def test_after_a_run_torchs_classes_are_as_they_were() -> None:
    before = dict(vars(loader_errors._MultiProcessingDataLoaderIter))
    make_trainer(True, max_epochs=1).fit(Classifier(mlp()), loader(BATCH * 2))
    assert dict(vars(loader_errors._MultiProcessingDataLoaderIter)) == before
    assert loader_errors._MapDatasetFetcher.fetch is loader_errors._fetch
