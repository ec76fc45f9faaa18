"""StopIteration of the user's code is an error with its line; stock loops end without a word."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
from harness import fit, make_trainer
from models import Classifier, loader, mlp
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset


class InStep(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        next(iter(()))  # training_step
        return super().training_step(batch, batch_idx)


class ByHand(InStep):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.automatic_optimization = False


class InHook(Classifier):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        next(iter(()))  # on_before_optimizer_step


class Before(Classifier):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            next(iter(()))  # on_train_batch_start


class Evaluated(Classifier):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        next(iter(()))  # validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> None:
        next(iter(()))  # predict_step


def message(hook: str) -> str:
    return (
        rf"{hook} raised StopIteration.*\n  at .*test_stop_iteration.py:\d+ in {hook}\n .*# {hook}"
    )


@pytest.mark.numbers
@pytest.mark.parametrize(
    ("make", "hook"),
    [
        (InStep, "training_step"),
        (ByHand, "training_step"),
        (InHook, "on_before_optimizer_step"),
        (Before, "on_train_batch_start"),
    ],
)
def test_stop_iteration_while_training_is_an_error(
    make: Callable[[Any], pl.LightningModule], hook: str
) -> None:
    with pytest.raises(RuntimeError, match=message(hook)):
        fit(lambda: make(mlp()), lambda: (loader(64),), static=True)
    fit(lambda: make(mlp()), lambda: (loader(64),), static=False)  # Lightning says nothing


@pytest.mark.parametrize("name", ["validation", "predict"])
def test_stop_iteration_in_evaluation_is_an_error(name: str) -> None:
    run = {"validation": "validate"}.get(name, name)
    with pytest.raises(RuntimeError, match=message(f"{name}_step")):
        getattr(make_trainer(True), run)(Evaluated(mlp()), loader(64))


class Stream(IterableDataset[Any]):
    """A user's own iterator, which ends by its own StopIteration."""

    def __iter__(self) -> Stream:
        self._rows = iter(loader(64))
        return self

    def __next__(self) -> Any:
        row = next(self._rows, None)
        if row is None:
            raise StopIteration
        return row


@pytest.mark.fits
@pytest.mark.parametrize("wrapped", [False, True])
def test_the_end_of_data_of_the_users_own_is_the_end_of_the_epoch(wrapped: bool) -> None:
    data: Any = DataLoader(Stream(), batch_size=None) if wrapped else Stream()
    run = fit(lambda: Classifier(mlp()), lambda: (data,), static=True, max_epochs=2)
    assert len(run.losses) == 8
