"""Functions of torch that look at values: what they are in a program equals what torch computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import assert_same_run, both
from models import Classifier, loader, mlp
from torch import Tensor

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
