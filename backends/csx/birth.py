"""Optimizer state before the first step.

A program's state must exist before it is traced, and torch's optimizers make theirs in their first
``step``. So that step is run once on zero gradients, each state tensor is kept with the value it
had *at birth*, and everything else is put back. (Running the step and zeroing the state instead
gives wrong weights: NAdam 2 %, Adagrad 8 %, Rprop 36 %; measured, torch 2.13.)
"""

from __future__ import annotations

import inspect
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import LBFGS, SGD, Optimizer, SparseAdam

from fulgurite.backends.csx.errors import UnsupportedState
from fulgurite.backends.csx.lines import UserLine


class _Births(dict[Any, Any]):
    """A state dict that remembers each value as it was when its key was first set."""

    happening: ClassVar[bool] = False

    def __init__(self, state: dict[Any, Any]) -> None:
        super().__init__(state)
        self.born = {key: _copy(value) for key, value in state.items()}

    def __setitem__(self, key: Any, value: Any) -> None:
        self.born.setdefault(key, _copy(value))
        super().__setitem__(key, value)


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def giving_birth() -> bool:
    """Whether an optimizer is run only to make its state."""
    return _Births.happening


def check_optimizer(optimizer: Optimizer, line: UserLine | None = None) -> None:
    """Refuse optimizers that no static program can hold, or that are not supported yet.

    Raises:
        UnsupportedState: LBFGS, SparseAdam, or SGD with dampening.
    """
    name = type(optimizer).__name__
    if isinstance(optimizer, LBFGS):
        raise UnsupportedState(
            f"{name} evaluates the step again and again, as often as values decide.",
            line=line,
            remedy="an optimizer with one update per step, such as torch.optim.AdamW",
        )
    if isinstance(optimizer, SparseAdam):
        raise UnsupportedState(
            f"{name} takes sparse gradients, whose shape depends on values.",
            line=line,
            remedy="nn.Embedding(sparse=False) and torch.optim.Adam",
        )
    for group in optimizer.param_groups if isinstance(optimizer, SGD) else ():
        if group["momentum"] and group["dampening"]:
            raise UnsupportedState(
                "SGD with dampening takes its buffer from the first gradient, which CSX does not"
                " support yet.",
                line=line,
                remedy="dampening=0",
            )


def give_birth(optimizer: Optimizer, line: UserLine | None = None) -> list[Tensor]:
    """Make the state of every parameter that has none; returns those parameters.

    Raises:
        UnsupportedState: the optimizer keeps a Python number in its state, which one trace would
            freeze, or makes a state from the first gradient.
    """
    newborn = [
        p
        for group in optimizer.param_groups
        for p in group["params"]
        if p.requires_grad and not optimizer.state.get(p)
    ]
    if not newborn:
        return []
    born = _births(optimizer, newborn, gradient=0.0)
    other = born if type(optimizer) is SGD else _births(optimizer, newborn, gradient=1.0)
    name = type(optimizer).__name__
    for p, values in born.items():
        for key, value in values.items():
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                raise UnsupportedState(
                    f"{name} keeps state['{key}'] as a Python number ({value!r}); the program would"
                    " freeze it.",
                    line=line,
                    remedy=f"state['{key}'] = torch.tensor({float(value)!r}), changed in place",
                )
            if isinstance(value, Tensor) and not torch.equal(value, other[p][key]):
                raise UnsupportedState(
                    f"{name} makes state['{key}'] from the first gradient, which CSX does not"
                    " support yet.",
                    line=line,
                    remedy=f"state['{key}'] = torch.zeros_like(p), then the usual update",
                )
        if values:
            optimizer.state[p] = values
    return newborn


def _births(
    optimizer: Optimizer, newborn: list[Tensor], gradient: float
) -> dict[Tensor, dict[Any, Any]]:
    """Each state as it was when the optimizer's first step made it; everything else put back."""
    everyone = [p for group in optimizer.param_groups for p in group["params"]]
    weights = [p.detach().clone() for p in newborn]
    gradients = [p.grad for p in everyone]
    state = {p: dict(values) for p, values in optimizer.state.items()}
    groups = [dict(group) for group in optimizer.param_groups]
    wanted = {id(p) for p in newborn}
    _Births.happening = True
    try:
        for p in everyone:
            p.grad = torch.full_like(p, gradient) if id(p) in wanted else None
        for p in newborn:
            optimizer.state[p] = _Births({})
        for group in optimizer.param_groups:
            if "weight_decay" in group:  # SGD's buffer is born of the gradient, decay and all
                group["weight_decay"] = 0.0
        step = inspect.unwrap(type(optimizer).step)  # without hooks and the schedulers' counter
        with torch.no_grad():
            step(optimizer)
        return {p: optimizer.state[p].born for p in newborn}
    finally:
        _Births.happening = False
        optimizer.state.clear()
        optimizer.state.update(state)
        for group, before in zip(optimizer.param_groups, groups, strict=True):
            group.clear()
            group.update(before)
        with torch.no_grad():
            for p, weight in zip(newborn, weights, strict=True):
                p.copy_(weight)
        for p, before_p in zip(everyone, gradients, strict=True):
            p.grad = before_p
