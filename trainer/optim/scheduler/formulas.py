"""Numbers by a formula of the count of steps: decays, stairs, and the user's own functions.

Below, t is the count, T ``total_iters``, and initial ``initial_val``: None means each group's own
number, before any scheduler set it. A user's function gets the count as a float64 tensor [], on the
host and in a program, so it is tensor code: ``torch.clamp(t / 100, max=1)``, not
``min(t / 100, 1)``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from fulgurite.backends.program_scheduler import Number
from fulgurite.optim.scheduler import dual
from fulgurite.optim.scheduler.base import (
    InitialScheduler,
    Scheduler,
    check,
    increasing,
    positive_steps,
)


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


class LambdaScheduler(InitialScheduler):
    """initial * val_lambda(t).

    Args:
        val_lambda: one function, or a list with one for each param group of the optimizer.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        initial_val: float | None = None,
        *,
        val_lambda: dual.Function | Sequence[dual.Function],
        param_group_tags: str | Sequence[str | None] | None = None,
    ) -> None:
        self._functions = _per_group(self, val_lambda, optimizer)
        self.follows_count_alone = False
        super().__init__(optimizer, initial_val, param_group_tags)

    def value(self, count: Number, group: int) -> Number:
        """The formula above."""
        return self.start(group) * dual.call(self._functions[group], count)


class MultiplicativeScheduler(InitialScheduler):
    """initial * coefficient ** t; with functions, initial * val_lambda(1) * ... * val_lambda(t).

    Args:
        coefficient: the factor of every step; or
        val_lambda: the factor of step t: a function, or a list with one for each param group.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        initial_val: float | None = None,
        coefficient: float | None = None,
        param_group_tags: str | Sequence[str | None] | None = None,
        val_lambda: dual.Function | Sequence[dual.Function] | None = None,
    ) -> None:
        one_of_two = (coefficient is None) != (val_lambda is None)
        given = {"coefficient": coefficient, "val_lambda": val_lambda}
        check(one_of_two, self, "either a coefficient or a function", **given)
        self.coefficient = coefficient
        self._functions = None if val_lambda is None else _per_group(self, val_lambda, optimizer)
        self.follows_count_alone = val_lambda is None
        super().__init__(optimizer, initial_val, param_group_tags)
        if val_lambda is not None:
            one = torch.ones((), dtype=torch.float64)
            self.resident |= {f"product{group}": one.clone() for group in self.groups}

    def value(self, count: Number, group: int) -> Number:
        """The formula above; the product is one of state, for it has no closed form."""
        if self.coefficient is not None:
            return self.start(group) * dual.power(self.coefficient, count)
        # the base's constructor shows step 0 before there are products
        name = f"product{group}"
        product: Number = self.kept(name) if name in self.resident else 1.0
        return self.start(group) * (product if isinstance(count, Tensor) else float(product))

    def advance(self, count: Number) -> None:
        """Multiply the factor of this step in."""
        if self._functions is not None:
            for group in self.groups:
                self.kept(f"product{group}").mul_(dual.call(self._functions[group], count))


def _per_group(
    scheduler: object, given: dual.Function | Sequence[dual.Function], optimizer: Optimizer
) -> list[dual.Function]:
    """A function for each param group."""
    groups = len(optimizer.param_groups)
    functions = list(given) if isinstance(given, Sequence) else [given] * groups
    ok = len(functions) == groups and all(callable(function) for function in functions)
    expected = f"a function, or one for each of the optimizer's {groups} param groups"
    check(ok, scheduler, expected, functions=given)
    return functions
