"""A run says, once, at which step its loss was first not finite."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from harness import make_trainer
from idioms.base import Example, Manual
from models import CLASSES
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from fulgurite.callbacks import CheckLoss
from fulgurite.callbacks.check_loss import NonFiniteLoss

pytestmark = pytest.mark.fits


def bad_at(batch: int, value: float = float("nan"), batches: int = 150) -> DataLoader[Any]:
    """Batches of 4, one of which has a value that is not finite."""
    x = torch.randn(4 * batches, 8, generator=torch.Generator().manual_seed(1))
    x[4 * batch] = value
    return DataLoader(TensorDataset(x, torch.arange(len(x)) % CLASSES), batch_size=4)


def told(module: Any, data: Any, **options: Any) -> list[str]:
    """What the warnings of a fit say of its loss."""
    trainer = make_trainer(True, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, data)
    return [text for text in (str(one.message) for one in caught) if "The loss became" in text]


@pytest.mark.parametrize("batch", [0, 5, 63, 64, 149])
def test_the_step_is_named_once(batch: int) -> None:
    [text] = told(Example(), bad_at(batch), max_epochs=2)
    assert f"NaN in training batch {batch + 1} of this run (epoch 0, batch_idx {batch})" in text
    assert f"in optimizer step {batch + 1};" in text
    assert "Try a smaller learning rate" in text


class Recovers(Example):
    """A loss that is infinite once, and no gradient is."""

    def loss(self, x: Any, y: Tensor) -> Tensor:
        kept = torch.where(x.isfinite(), x, 0)
        return super().loss(kept, y) + torch.where(x.isinf().any(), torch.inf, 0)


def test_a_loss_that_recovers_is_told_too() -> None:
    [text] = told(Recovers(), bad_at(70, float("inf")), max_epochs=1)
    assert "infinite in training batch 71 of" in text


def test_a_later_epoch_and_a_window_of_accumulation_count() -> None:
    class Later(Example):
        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 1:
                self.net[0].weight.data.fill_(torch.nan)

    data = bad_at(0, 0.0, batches=10)
    [text] = told(Later(), data, max_epochs=2, accumulate_grad_batches=4)
    assert "training batch 11 of this run (epoch 1, batch_idx 0), which" in text
    assert "in optimizer step 4;" in text
    [text] = told(Example(), bad_at(6, batches=10), max_epochs=1, accumulate_grad_batches=4)
    assert "in optimizer step 2;" in text


class Silent(Manual):
    """A manual step that returns nothing."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.update(self.loss(*batch))


class Returns(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": self.update(self.loss(*batch))}


@pytest.mark.parametrize("make", [Silent, Returns])
def test_under_manual_optimization_it_is_told(make: Any) -> None:
    [text] = told(make(), bad_at(7), max_epochs=1)
    assert "NaN in training batch 8 of this run (epoch 0, batch_idx 7);" in text


def test_nothing_is_said_of_finite_losses_and_skipped_steps() -> None:
    assert told(Example(), bad_at(3, 0.0), max_epochs=1) == []
    assert told(Example(), bad_at(3, 1e4, batches=20), max_epochs=1, precision="16-mixed") == []


def test_check_loss_says_it_alone() -> None:
    trainer = make_trainer(True, max_epochs=1, callbacks=[CheckLoss()])
    with pytest.raises(NonFiniteLoss, match="NaN in training batch 6 of this run, which"):
        trainer.fit(Example(), bad_at(5))
