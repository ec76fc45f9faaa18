"""Functions of torch that look at values: what they are in a program equals what torch computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from harness import assert_same_run, both, make_trainer
from models import Classifier, loader, mlp
from torch import Tensor

from fulgurite.backends.csx.diagnostics.trace_errors import DynamicShape, StateChanged

STATISTICS: dict[str, Callable[[Tensor], Tensor]] = {
    "cov": lambda x: torch.cov(x.T),
    "cov, biased": lambda x: x.T.cov(correction=0),
    "cov of one variable": lambda x: x[:, 0].cov(),
    "cov of one observation": lambda x: torch.cov(x[:1].T, correction=0),
    "corrcoef": lambda x: torch.corrcoef(x.T),
    "corrcoef of one variable": lambda x: torch.corrcoef(x[:, 0]) + x.sum() * 0,
}


@pytest.mark.numbers
@pytest.mark.parametrize("name", STATISTICS)
def test_a_statistic_of_a_batch(name: str) -> None:
    class Penalized(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            logits = self.net(batch[0])
            return (STATISTICS[name](logits) - 1).square().mean() + logits.square().mean()

    assert_same_run(*both(lambda: Penalized(mlp()), lambda: (loader(64),)))


class Chosen(Classifier):
    """Its mask is a buffer that no step writes."""

    def __init__(self) -> None:
        super().__init__(mlp())
        self.register_buffer("mask", torch.arange(8) % 3 != 0)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.chosen(self.net[0](batch[0])).square().mean()  # type: ignore[operator]

    def chosen(self, x: Tensor) -> Tensor:
        raise NotImplementedError


CHOICES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "nonzero": lambda _, x: x[:, torch.nonzero(torch.tensor([1, 0, 1, 1])).squeeze(1)],
    "nonzero of a buffer": lambda m, x: x[:, m.mask.nonzero().squeeze(1)],
    "a buffer as an index": lambda m, x: x[:, : len(m.mask)][:, m.mask],
    "where": lambda _, x: x[:, torch.where(torch.arange(8) % 2 == 0)[0]],
    "unique": lambda _, x: x[:, torch.unique(torch.tensor([3, 1, 3]))],
    "masked_select": lambda _, x: x[:, torch.arange(8).masked_select(torch.arange(8) > 4)],
    "repeats": lambda _, x: x[:, :3].repeat_interleave(torch.tensor([1, 0, 2]), dim=1),
    "repeats of all": lambda _, x: torch.repeat_interleave(x[0, :2], torch.tensor([3, 1])),
    "places": lambda _, x: torch.tensor_split(x, torch.tensor([2, 5]), dim=1)[1],
    "changed afterwards": lambda _, x: x[:, torch.nonzero(torch.tensor([1, 0, 1]))[:, 0].add_(1)],
}


@pytest.mark.numbers
@pytest.mark.parametrize("name", CHOICES)
def test_known_values_may_choose(name: str) -> None:
    def make() -> Chosen:
        module = Chosen()
        module.chosen = lambda x: CHOICES[name](module, x)  # type: ignore[method-assign]
        return module

    assert_same_run(*both(make, lambda: (loader(64),)))


@pytest.mark.fits
@pytest.mark.parametrize("name", ["tensor_split", "repeat_interleave"])
def test_values_of_data_may_not(name: str) -> None:
    module = Chosen()
    numbers = {
        "tensor_split": lambda x: x.tensor_split((x[0, :1] > 0).long())[0],
        "repeat_interleave": lambda x: x.repeat_interleave((x[:, 0] > 0).long(), dim=0),
    }
    module.chosen = numbers[name]  # type: ignore[method-assign]
    with pytest.raises(DynamicShape, match=rf"of {name}\(\) depends on the values") as raised:
        make_trainer(True, max_epochs=1).fit(module, loader(64))
    assert "test_overrides.py" in str(raised.value.line)


@pytest.mark.fits
def test_a_mask_that_the_step_writes_or_the_host_changes_is_told() -> None:
    module = Chosen()

    def writes(x: Tensor) -> Tensor:
        chosen = x[:, module.mask]
        module.mask.logical_not_()
        return chosen

    module.chosen = writes  # type: ignore[method-assign]
    with pytest.raises(DynamicShape, match=r"indexing\(\) depends on the values of self.mask"):
        make_trainer(True, max_epochs=1).fit(module, loader(64))

    class Flips(pl.Callback):
        def on_train_epoch_start(self, trainer: pl.Trainer, *_: Any) -> None:
            if trainer.current_epoch == 1:
                other.mask.logical_not_()

    other = Chosen()
    other.chosen = lambda x: x[:, other.mask]  # type: ignore[method-assign]
    options: dict[str, Any] = {"callbacks": [Flips()], "backend": {"max_programs": 1}}
    with pytest.raises(StateChanged, match=r"self\.mask"):
        make_trainer(True, max_epochs=2, **options).fit(other, loader(64))
