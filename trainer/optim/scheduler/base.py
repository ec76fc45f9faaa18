"""What all schedulers share: whose number they set, where they begin, how arguments are checked."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from numbers import Integral, Real
from typing import Any, ClassVar

from torch import Tensor
from torch.optim import Optimizer

from fulgurite.backends.program_scheduler import ProgramScheduler


class Scheduler(ProgramScheduler):
    """Sets one number of the param groups from a count of steps.

    Args:
        optimizer: whose param groups it sets.
        param_group_tags: sets only groups with one of these in ``group["tags"]``; None among them
            means groups without tags. Without this argument all groups are set.

    Attributes:
        param_group_key: the number that it sets, "lr" for instance.
        total_iters: steps until it has arrived; None if it never does, or was not told.
    """

    param_group_key: ClassVar[str]
    follows_count_alone = True
    total_iters: int | None = None
    outer: tuple[Scheduler, str] | None = None  # that it is a part of, and its prefix there

    def __init__(
        self, optimizer: Optimizer, param_group_tags: str | Sequence[str | None] | None = None
    ) -> None:
        if not hasattr(self, "param_group_key"):
            name = type(self).__name__
            raise TypeError(
                f"{name} does not say which number of the param groups it sets. Subclass it:"
                f' class My{name}({name}): param_group_key = "momentum"'
            )
        if not type(self).value.__module__.startswith("fulgurite."):
            self.follows_count_alone = False  # a formula of somebody's: nothing says what it reads
        super().__init__(optimizer, self.param_group_key, param_group_tags)

    def start(self, group: int) -> float:
        """The number of this one that counts as 1 in a chain; only the host asks for it."""
        return float(self.value(0, group))

    def kept(self, name: str) -> Tensor:
        """A resident tensor; a part's is the outer scheduler's, the only one a program knows."""
        if self.outer is None:
            return self.resident[name]
        outer, prefix = self.outer
        return outer.kept(f"{prefix}.{name}")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the count from a state; one of torch's scheduler of the same name will do.

        What else is resident and not in the state is computed anew, by counting up to it.
        """
        others = self.resident.keys() - {"count"}
        if others - state_dict.keys():
            for name in others:
                self.resident[name].fill_(1.0)
            # a product of a user's factors has no closed form
            for count in range(1, state_dict["last_epoch"] + 1):
                self.advance(count)
        super().load_state_dict(state_dict)


class InitialScheduler(Scheduler):
    """A scheduler with an initial number.

    Args:
        initial_val: the initial number; None: each group's own, before any scheduler set it.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        initial_val: float | None = None,
        param_group_tags: str | Sequence[str | None] | None = None,
    ) -> None:
        if initial_val is not None and not isinstance(initial_val, Real):
            raise TypeError(
                f"{type(self).__name__}'s second argument is the initial number, a float; got"
                f" {initial_val!r}. Give what torch's has there by its name."
            )
        self.initial_val = initial_val
        super().__init__(optimizer, param_group_tags)

    def start(self, group: int) -> float:
        """The initial number."""
        return self.initial[group] if self.initial_val is None else float(self.initial_val)


def check(ok: bool, scheduler: object, expected: str, **given: Any) -> None:
    """Raise what was given and what was expected, unless ``ok``."""
    if not ok:
        listed = ", ".join(f"{name}={value!r}" for name, value in given.items())
        raise ValueError(f"{type(scheduler).__name__} needs {expected}; got {listed}.")


def positive_steps(scheduler: object, **given: Any) -> int:
    """The one argument given: a positive number of steps."""
    ((name, value),) = given.items()
    whole = isinstance(value, Real) and float(value) >= 1 and float(value).is_integer()
    check(whole, scheduler, f"a positive whole number of steps as {name}", **given)
    return int(value)


def increasing(scheduler: object, milestones: Sequence[int]) -> list[int]:
    """Milestones that increase, from 0 or later."""
    whole = all(isinstance(step, Integral) for step in milestones)
    ok = whole and all(a < b for a, b in pairwise([-1, *milestones]))
    check(ok, scheduler, "milestones that are counts of steps and increase", milestones=milestones)
    return [int(step) for step in milestones]
