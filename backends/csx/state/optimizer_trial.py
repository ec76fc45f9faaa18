"""A step of an optimizer on trial, with made-up gradients: the state it makes, what it does."""

from __future__ import annotations

import contextlib
import inspect
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from fulgurite.backends.csx.state.python_objects import remember
from fulgurite.backends.step_context import running


class _InitialValues(dict[Any, Any]):
    """A state dict that remembers each value as it was when its key was first set."""

    def __init__(self, state: dict[Any, Any] | None = None) -> None:
        super().__init__()
        self.initial: dict[Any, Any] = {}
        self.update(state or {})

    def __setitem__(self, key: Any, value: Any) -> None:
        self.initial.setdefault(key, copied(value))
        super().__setitem__(key, value)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def update(self, *others: Any, **values: Any) -> None:
        for key, value in dict(*others, **values).items():
            self[key] = value


class _States(defaultdict[Any, Any]):
    """``optimizer.state`` during a trial: what is made in it keeps its initial values."""

    def __init__(self, states: dict[Any, Any]) -> None:
        super().__init__(_InitialValues)
        self.update(states)
        self.given: dict[Any, Any] = {}

    def __setitem__(self, key: Any, value: Any) -> None:
        self.given.setdefault(key, copied(value))
        super().__setitem__(key, value)

    def initial(self, known: dict[Any, Any]) -> tuple[dict[Any, Any], bool]:
        """Initial values of new states, and whether all were seen; others are as they are now."""
        values: dict[Any, Any] = {}
        seen = True
        for key, now in self.items():
            if key in known:
                continue
            initial = now.initial if isinstance(now, _InitialValues) else self.given[key]
            if isinstance(now, dict):
                seen = seen and initial.keys() >= now.keys()
                initial = {name: initial.get(name, value) for name, value in now.items()}
            values[key] = initial
        return values, seen


def copied(value: Any) -> Any:
    """A copy of a tensor, or of dicts of them; another value itself."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    plain = type(value) in (dict, _InitialValues)
    return {key: copied(item) for key, item in value.items()} if plain else value


class Trial(NamedTuple):
    """What a step of an optimizer did."""

    initial: dict[Any, Any]  # new states as they were when the step made them
    seen: bool  # whether all of them were (``_States.initial``)
    after: list[Any]  # the parameters, all state, and what is in the groups
    groups: list[dict[str, Any]]


def begin_counts(optimizer: Optimizer, known: dict[Any, Any], first: Trial) -> Trial:
    """Let counts that the first step puts into the groups begin before it, where it is the same.

    Published optimizers have ``group["step"] = 1`` on the first step and ``+= 1`` on later ones.
    """
    groups = optimizer.param_groups
    born = [
        (group, key, value - 1)
        for group, after in zip(groups, first.groups, strict=True)
        for key, value in after.items()
        if key not in group and type(value) is int
    ]
    for group, key, value in born:
        group[key] = value
    if born and not equal([*first], [*trial(optimizer, known, seed=1)]):
        for group, key, _ in born:
            del group[key]
    return first


def trial(optimizer: Optimizer, known: dict[Any, Any], seed: int) -> Trial:
    """A step of an optimizer whose state is ``known``; everything is put back."""
    everyone = [p for group in optimizer.param_groups for p in group["params"]]
    gradients = [p.grad for p in everyone]
    restore = remember(optimizer)
    generator = torch.Generator().manual_seed(seed)
    try:
        for p in everyone:
            made_up = torch.randn(p.shape, generator=generator)
            p.grad = torch.empty_like(p).copy_(made_up).detach() if p.requires_grad else None
        optimizer.state = states = _States(known)
        step = inspect.unwrap(type(optimizer).step)  # without hooks and the schedulers' counter
        alone = torch.random.fork_rng(devices=[])
        with alone, running(initializes=True), torch.no_grad(), plain_options([optimizer]):
            step(optimizer, closure=lambda: torch.zeros(()))
        groups = [
            {key: value for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ]
        after = [*map(copied, everyone), copied(dict(states)), copied(groups)]
        return Trial(*states.initial(known), after, groups)
    finally:
        restore()
        for p, gradient in zip(everyone, gradients, strict=True):
            p.grad = gradient


def equal(a: Any, b: Any) -> bool:
    """Whether two states hold the same: tensors bit by bit, NaN equal to NaN."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        same = a.shape == b.shape and a.dtype == b.dtype
        return same and bool(torch.eq(a, b).logical_or(a.ne(a) & b.ne(b)).all())
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    return type(a) is type(b) and bool(a == b)


@contextlib.contextmanager
def plain_options(optimizers: list[Optimizer]) -> Iterator[None]:
    """Let torch's optimizers take their plain loop over parameters, on any device.

    The fused and foreach variants compute the same, and do not trace; capturable ones insist on a
    device that CSX does not look at.
    """
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    flags = ("foreach", "fused", "capturable")
    before = [(group, key, group[key]) for group in groups for key in flags if key in group]
    try:
        for group, key, value in before:
            group[key] = False if value else value
            if key == "foreach":
                group[key] = False  # None chooses by device
        yield
    finally:
        for group, key, value in before:
            group[key] = value
