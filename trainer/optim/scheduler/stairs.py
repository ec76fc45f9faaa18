"""Numbers that are constant between milestones. Below, t is the count of steps."""

from __future__ import annotations

from collections.abc import Sequence

from torch.optim import Optimizer

from fulgurite.backends.schedules import Number
from fulgurite.optim.scheduler import dual
from fulgurite.optim.scheduler.base import (
    InitialScheduler,
    Scheduler,
    check,
    increasing,
    positive_steps,
)


class ConstantScheduler(Scheduler):
    """Always the same number.

    Args:
        total_iters: how long it lasts in a sequence; by itself it never ends.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        val: float,
        total_iters: int | None = None,
        param_group_tags: str | Sequence[str | None] | None = None,
    ) -> None:
        self.val = val
        if total_iters is not None:
            self.total_iters = positive_steps(self, total_iters=total_iters)
        super().__init__(optimizer, param_group_tags)

    def value(self, count: Number, group: int) -> Number:
        """The number."""
        return self.val


class StepScheduler(InitialScheduler):
    """initial * gamma ** floor(t / step_size)."""

    def __init__(
        self,
        optimizer: Optimizer,
        initial_val: float | None = None,
        *,
        step_size: int,
        gamma: float = 0.1,
        param_group_tags: str | Sequence[str | None] | None = None,
    ) -> None:
        self.step_size = positive_steps(self, step_size=step_size)
        self.gamma = gamma
        super().__init__(optimizer, initial_val, param_group_tags)

    def value(self, count: Number, group: int) -> Number:
        """The formula above."""
        return self.start(group) * dual.power(self.gamma, dual.floor(count / self.step_size))


class MultiStepScheduler(InitialScheduler):
    """initial * gamma ** (how many milestones t has reached).

    Args:
        milestones: counts of steps, increasing.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        initial_val: float | None = None,
        *,
        gamma: float = 0.1,
        milestones: Sequence[int],
        param_group_tags: str | Sequence[str | None] | None = None,
    ) -> None:
        self.milestones = increasing(self, milestones)
        self.gamma = gamma
        self._factors = [gamma**i for i in range(len(self.milestones) + 1)]
        super().__init__(optimizer, initial_val, param_group_tags)

    def value(self, count: Number, group: int) -> Number:
        """The formula above."""
        return self.start(group) * dual.piecewise(count, self.milestones, self._factors)


class PiecewiseConstantScheduler(Scheduler):
    """vals[i] once t has reached i milestones.

    Args:
        vals: one more than milestones.
        milestones: counts of steps, increasing.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        vals: Sequence[float],
        milestones: Sequence[int],
        param_group_tags: str | Sequence[str | None] | None = None,
    ) -> None:
        self.milestones, self.vals = increasing(self, milestones), list(vals)
        check(
            len(self.vals) == len(self.milestones) + 1,
            self,
            "one number more than milestones",
            numbers=self.vals,
            milestones=self.milestones,
        )
        super().__init__(optimizer, param_group_tags)

    def value(self, count: Number, group: int) -> Number:
        """The number of this stretch."""
        return dual.piecewise(count, self.milestones, self.vals)
