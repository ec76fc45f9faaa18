"""Numbers from the user's own functions, of a count as a float64 tensor [].

On the host and in a program the function gets a tensor, so it is tensor code:
``torch.clamp(t / 100, max=1)``, not ``min(t / 100, 1)``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from fulgurite.backends.schedules import Number
from fulgurite.optim.scheduler import dual
from fulgurite.optim.scheduler.base import InitialScheduler, check


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
