"""``zero_grad()`` on the host reaches the gradients that programs keep, for a while."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from fulgurite.backends.csx.plugins.host_optimizers import ZeroGradObserver


class Step:
    """Notes the parameters whose gradients are cleared."""

    def __init__(self) -> None:
        self.cleared: list[set[int]] = []

    def clear_gradients(self, parameters: set[int], set_to_none: bool) -> None:
        self.cleared.append(parameters)


def test_zero_grad_of_modules_and_optimizers_is_told_until_it_is_removed() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD([model.weight], lr=0.1)
    before, step = (nn.Module.zero_grad, torch.optim.Optimizer.zero_grad), Step()
    noted: Any = step
    change = ZeroGradObserver(lambda: noted)
    model.zero_grad()
    optimizer.zero_grad()
    change.remove()
    model.zero_grad()
    assert step.cleared == [{id(model.weight), id(model.bias)}, {id(model.weight)}]
    assert (nn.Module.zero_grad, torch.optim.Optimizer.zero_grad) == before


def test_observers_of_several_fits_end_in_any_order() -> None:
    model, before, steps = nn.Linear(2, 2), nn.Module.zero_grad, (Step(), Step())
    first, second = (ZeroGradObserver(lambda step=step: step) for step in steps)
    first.remove()
    copy.copy(second).remove()  # which was never put anywhere
    model.zero_grad()
    second.remove()
    assert [len(step.cleared) for step in steps] == [0, 1]
    assert nn.Module.zero_grad is before
