"""Schedulers of schedulers: one after another, multiplied, or scaled for each param group.

The inner ones are never stepped: the outer one counts, and asks them for their numbers. What they
keep besides a count is state of the outer one too, under a name with their index.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from fulgurite.backends.program_scheduler import Number
from fulgurite.optim.scheduler import dual
from fulgurite.optim.scheduler.base import Scheduler, check, increasing


class _Combined(Scheduler):
    """Made of others, of the same optimizer, number and param groups."""

    def __init__(
        self,
        optimizer: Optimizer,
        schedulers: Sequence[Scheduler],
        param_group_tags: str | Sequence[str | None] | None = None,
    ) -> None:
        super().__init__(optimizer, param_group_tags)
        self._inner = list(schedulers)
        for i, scheduler in enumerate(schedulers):
            check(
                scheduler.groups == self.groups,
                self,
                "schedulers of the same param groups: give all the same param_group_tags",
                groups=self.groups,
                **{f"schedulers[{i}].groups": scheduler.groups},
            )
            # in two places it would count its products on twice a step
            if scheduler.outer is not None:
                raise ValueError(
                    f"{type(self).__name__} was given schedulers[{i}]"
                    f" ({type(scheduler).__name__}), which is already part of"
                    f" {type(scheduler.outer[0]).__name__}. Make another one."
                )
            # a program knows the state of the outer one alone
            self.resident |= {f"{i}.{name}": scheduler.kept(name) for name in _products(scheduler)}
            scheduler.outer = self, str(i)

    def begin_from(self, initial: list[float]) -> None:
        """Take other numbers for those that the groups had before any scheduler set them."""
        super().begin_from(initial)
        for scheduler in self._inner:
            scheduler.begin_from(initial)

    def _members(
        self, schedulers: Sequence[Scheduler], optimizer: Optimizer | None = None
    ) -> list[Scheduler]:
        """The schedulers, checked; before the base's constructor asks for their numbers."""
        check(len(schedulers) > 0, self, "at least one scheduler", schedulers=schedulers)
        for i, scheduler in enumerate(schedulers):
            given, name = type(scheduler), type(self).__name__
            if not isinstance(scheduler, Scheduler):
                raise TypeError(
                    f"{name} needs schedulers of fulgurite.optim, which a program can compute; got"
                    f" schedulers[{i}] of {given.__module__}.{given.__name__}. Import it from"
                    f" fulgurite.optim: from fulgurite.optim.lr_scheduler import {given.__name__};"
                    f" or leave all to the host: torch.optim.lr_scheduler.{name}."
                )
            optimizer = scheduler.optimizer if optimizer is None else optimizer
            if scheduler.optimizer is not optimizer:
                raise ValueError(
                    f"{name} needs schedulers of one optimizer; that of schedulers[{i}]"
                    f" ({given.__name__}) is another."
                )
            if scheduler.key != self.param_group_key:
                raise ValueError(
                    f"{name} sets {self.param_group_key!r}, but schedulers[{i}]"
                    f" ({given.__name__}) sets {scheduler.key!r}."
                )
        self.follows_count_alone = all(one.follows_count_alone for one in schedulers)
        return list(schedulers)


def _products(scheduler: Scheduler) -> list[str]:
    """Names of what a scheduler keeps besides its count."""
    return [name for name in scheduler.resident if name != "count"]


def _advance(scheduler: Scheduler, count: Number) -> None:
    """Advance an inner scheduler if its own count is 1 or more."""
    if not isinstance(count, Tensor):
        if count >= 1:
            scheduler.advance(count)
        return
    # a program does not branch on its count: all is advanced, and put back where it was too early
    products = [scheduler.kept(name) for name in _products(scheduler)]
    before_all = [product.clone() for product in products]
    scheduler.advance(count)
    for product, before in zip(products, before_all, strict=True):
        product.copy_(torch.where(count >= 1, product, before))


class SequentialScheduler(_Combined):
    """One scheduler after another, each counting from its own milestone.

    Args:
        milestones: the count at which each but the first begins; None: when those before have
            arrived, by their ``total_iters`` (``T_max``, ``total_steps``).
        last_epoch: begins after this count; -1 is the beginning.

    Raises:
        TypeError: one of torch's is among them.
        ValueError: schedulers of different optimizers, numbers or param groups, milestones that do
            not increase, or not one fewer than schedulers.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        schedulers: Sequence[Scheduler],
        milestones: Sequence[int] | None = None,
        last_epoch: int = -1,
        param_group_tags: str | Sequence[str | None] | None = None,
    ) -> None:
        self.schedulers = self._members(schedulers, optimizer)
        self.milestones = increasing(self, self._lengths() if milestones is None else milestones)
        check(
            len(self.milestones) == len(schedulers) - 1,
            self,
            "one milestone fewer than schedulers",
            schedulers=len(schedulers),
            milestones=milestones,
        )
        self._starts = [0, *self.milestones]
        last = self.schedulers[-1].total_iters
        self.total_iters = None if last is None else self._starts[-1] + last
        super().__init__(optimizer, schedulers, param_group_tags)
        if last_epoch != -1:
            self.load_state_dict({"last_epoch": last_epoch + 1})

    def _lengths(self) -> list[int]:
        lengths = []
        for i, scheduler in enumerate(self.schedulers[:-1]):
            if scheduler.total_iters is None:
                raise ValueError(
                    f"{type(self).__name__} was given no milestones, and schedulers[{i}]"
                    f" ({type(scheduler).__name__}) does not say when it ends. Give"
                    " milestones=[...]: the count at which each but the first begins."
                )
            lengths.append(scheduler.total_iters)
        return list(accumulate(lengths))

    def value(self, count: Number, group: int) -> Number:
        """The number of the scheduler whose stretch this is, at its own count."""
        if not isinstance(count, Tensor):
            i = bisect_right(self.milestones, count)
            return self.schedulers[i].value(count - self._starts[i], group)
        own = zip(self.schedulers, self._starts, strict=True)
        numbers = [scheduler.value(count - start, group) for scheduler, start in own]
        return dual.piecewise(count, self.milestones, numbers)

    def advance(self, count: Number) -> None:
        """Advance those that have begun."""
        for scheduler, start in zip(self.schedulers, self._starts, strict=True):
            _advance(scheduler, count - start)


class ChainedScheduler(_Combined):
    """The number of the first, times each other's number divided by its initial one.

    Raises:
        TypeError: one of torch's is among them.
        ValueError: schedulers of different optimizers, numbers or param groups, or one of the
            others begins at 0.
    """

    def __init__(
        self,
        schedulers: Sequence[Scheduler],
        param_group_tags: str | Sequence[str | None] | None = None,
    ) -> None:
        self.schedulers = self._members(schedulers)
        lengths = [scheduler.total_iters for scheduler in self.schedulers]
        known = [length for length in lengths if length is not None]
        self.total_iters = max(known) if len(known) == len(lengths) else None
        self._units = self._find_units()
        for i, scheduler in enumerate(self.schedulers[1:], 1):
            starts = list(self._units[i].values())
            name = f"schedulers[{i}] ({type(scheduler).__name__}) begins at"
            check(0.0 not in starts, self, "the one that begins at 0 first", **{name: starts})
        super().__init__(self.schedulers[0].optimizer, schedulers, param_group_tags)

    def _find_units(self) -> list[dict[int, float]]:
        """The number of each scheduler that counts as 1, by group: asked for once, on the host."""
        return [{g: one.start(g) for g in one.groups} for one in self.schedulers]

    def begin_from(self, initial: list[float]) -> None:
        """Take other numbers for those that the groups had before any scheduler set them."""
        super().begin_from(initial)
        self._units = self._find_units()

    def start(self, group: int) -> float:
        """That of the first."""
        return self.schedulers[0].start(group)

    def value(self, count: Number, group: int) -> Number:
        """The product above."""
        value = self.schedulers[0].value(count, group)
        for scheduler, units in zip(self.schedulers[1:], self._units[1:], strict=True):
            # the base's constructor asks before other groups than the schedulers' are refused
            value = value * (scheduler.value(count, group) / units.get(group, 1.0))
        return value

    def advance(self, count: Number) -> None:
        """Advance them all."""
        for scheduler in self.schedulers:
            scheduler.advance(count)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the count from a state; torch's has it in those of its schedulers."""
        inner = state_dict.get("_schedulers", [{}])[0]
        super().load_state_dict({**inner, **state_dict})


class ScalePerParamScheduler(_Combined):
    """A scheduler's number times a factor that each param group has, 1 where it has none.

    Attributes:
        adjust_keys: names of the factor in a param group; the first that is there is taken.
    """

    adjust_keys: ClassVar[tuple[str, ...]] = ("adjust_val",)

    def __init__(
        self,
        optimizer: Optimizer,
        scheduler: Scheduler,
        param_group_tags: str | Sequence[str | None] | None = None,
    ) -> None:
        [self.scheduler] = self._members([scheduler], optimizer)
        self.total_iters = scheduler.total_iters
        self.factors = [self._factor(group) for group in optimizer.param_groups]
        super().__init__(optimizer, [scheduler], param_group_tags)

    def _factor(self, group: dict[str, Any]) -> float:
        return next((float(group[key]) for key in self.adjust_keys if key in group), 1.0)

    def start(self, group: int) -> float:
        """The scheduler's, scaled."""
        return self.scheduler.start(group) * self.factors[group]

    def value(self, count: Number, group: int) -> Number:
        """The scheduler's, scaled."""
        return self.scheduler.value(count, group) * self.factors[group]

    def advance(self, count: Number) -> None:
        """Advance the scheduler."""
        self.scheduler.advance(count)
