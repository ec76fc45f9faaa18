"""From one number to another, or towards zero. Below, t is the count of steps, T ``total_iters``.

``initial_val=None`` means each group's own number, before any scheduler set it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch.optim import Optimizer

from fulgurite.backends.schedules import Number
from fulgurite.optim.scheduler import dual
from fulgurite.optim.scheduler.base import InitialScheduler, check, positive_steps


class PolynomialScheduler(InitialScheduler):
    """end + (initial - end) (1 - t/T) ** power, and end from T on.

    Args:
        end_val: the number at ``total_iters``.
        cycle: beyond ``total_iters``, T is the next multiple of it, as in Keras'
            PolynomialDecay: the number jumps up and falls again, each time to ``end_val``.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        initial_val: float | None = None,
        *,
        end_val: float,
        total_iters: int,
        power: float = 1.0,
        cycle: bool = False,
        param_group_tags: str | Sequence[str | None] | None = None,
    ) -> None:
        self.total_iters: int = positive_steps(self, total_iters=total_iters)
        check(power > 0, self, "a positive power", power=power)
        self.end_val, self.power, self.cycle = end_val, power, cycle
        super().__init__(optimizer, initial_val, param_group_tags)

    def value(self, count: Number, group: int) -> Number:
        """The formula above."""
        length: Number = self.total_iters
        if self.cycle:
            length = length * dual.at_least(dual.ceil(count / length), 1)
        else:
            count = dual.at_most(count, self.total_iters)
        left = dual.power(1 - count / length, self.power)
        return self.end_val + (self.start(group) - self.end_val) * left


class LinearScheduler(PolynomialScheduler):
    """A straight line from initial to end: a polynomial with power 1."""

    def __init__(
        self,
        optimizer: Optimizer,
        initial_val: float | None = None,
        *,
        end_val: float,
        total_iters: int,
        cycle: bool = False,
        param_group_tags: str | Sequence[str | None] | None = None,
    ) -> None:
        super().__init__(
            optimizer,
            initial_val,
            end_val=end_val,
            total_iters=total_iters,
            cycle=cycle,
            param_group_tags=param_group_tags,
        )


class ExponentialScheduler(InitialScheduler):
    """initial * decay_rate ** (t/T).

    Args:
        total_iters: steps in which it falls by ``decay_rate`` once.
        staircase: with t/T rounded down.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        initial_val: float | None = None,
        *,
        total_iters: int,
        decay_rate: float,
        staircase: bool = False,
        param_group_tags: str | Sequence[str | None] | None = None,
    ) -> None:
        self.total_iters: int = positive_steps(self, total_iters=total_iters)
        check(decay_rate > 0, self, "a positive decay_rate", decay_rate=decay_rate)
        self.decay_rate, self.staircase = decay_rate, staircase
        super().__init__(optimizer, initial_val, param_group_tags)

    def value(self, count: Number, group: int) -> Number:
        """The formula above."""
        passed = count / self.total_iters
        passed = dual.floor(passed) if self.staircase else passed
        return self.start(group) * dual.power(self.decay_rate, passed)


class InverseExponentialTimeDecayScheduler(InitialScheduler):
    """initial / (1 + decay_rate * t ** step_exponent / T); Keras' InverseTimeDecay at exponent 1.

    Args:
        staircase: with t ** step_exponent / T rounded down.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        initial_val: float | None = None,
        *,
        step_exponent: int,
        total_iters: int,
        decay_rate: float,
        staircase: bool = False,
        param_group_tags: str | Sequence[str | None] | None = None,
    ) -> None:
        self.total_iters: int = positive_steps(self, total_iters=total_iters)
        check(step_exponent > 0, self, "a positive step_exponent", step_exponent=step_exponent)
        check(decay_rate >= 0, self, "a decay_rate of 0 or more", decay_rate=decay_rate)
        self.step_exponent, self.decay_rate = step_exponent, decay_rate
        self.staircase = staircase
        super().__init__(optimizer, initial_val, param_group_tags)

    def value(self, count: Number, group: int) -> Number:
        """The formula above."""
        passed = dual.power(count, self.step_exponent) / self.total_iters
        passed = dual.floor(passed) if self.staircase else passed
        return self.start(group) / (1 + self.decay_rate * passed)


class InverseSquareRootDecayScheduler(InitialScheduler):
    """initial * scale / sqrt(max(t, warmup_steps)): constant at first, then falling."""

    def __init__(
        self,
        optimizer: Optimizer,
        initial_val: float | None = 1.0,
        scale: float = 1.0,
        warmup_steps: int = 1,
        param_group_tags: str | Sequence[str | None] | None = None,
    ) -> None:
        self.warmup_steps = positive_steps(self, warmup_steps=warmup_steps)
        self.scale = scale
        super().__init__(optimizer, initial_val, param_group_tags)

    def value(self, count: Number, group: int) -> Number:
        """The formula above."""
        steps = dual.at_least(count, self.warmup_steps)
        return self.start(group) * self.scale / dual.sqrt(steps)


class CosineDecayScheduler(InitialScheduler):
    """end + (initial - end) (1 + cos(pi t/T)) / 2, and end from T on; Keras' CosineDecay."""

    def __init__(
        self,
        optimizer: Optimizer,
        initial_val: float | None = None,
        *,
        end_val: float,
        total_iters: int,
        param_group_tags: str | Sequence[str | None] | None = None,
    ) -> None:
        self.total_iters: int = positive_steps(self, total_iters=total_iters)
        self.end_val = end_val
        super().__init__(optimizer, initial_val, param_group_tags)

    def value(self, count: Number, group: int) -> Number:
        """The formula above."""
        passed = dual.at_most(count, self.total_iters) / self.total_iters
        left = (1 + dual.cos(math.pi * passed)) / 2
        return self.end_val + (self.start(group) - self.end_val) * left
