"""Numbers of param groups that schedulers compute inside the program.

A ``ProgramScheduler`` counts in a tensor that is state of the program, so what it puts into the
param groups follows from that state alone, and no step waits for the host.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import Tensor

from fulgurite.backends.csx.diagnostics.trace_errors import FrozenNumber, StateChanged
from fulgurite.backends.csx.hyperparams.slots import TracedGroup
from fulgurite.backends.csx.hyperparams.traced_float import (
    NumberGuard,
    Numbers,
    TracedNumber,
    as_number,
)
from fulgurite.backends.csx.state import Place
from fulgurite.backends.program_scheduler import (
    ProgramScheduler,
    check_schedulers,
    program_schedulers,
)


class ScheduledNumber(TracedNumber):
    """A traced number that the program computes.

    Attributes:
        asked: how often guards asked for a value.
    """

    asked: ClassVar[int] = 0
    __hash__ = TracedNumber.__hash__


class ScheduledFactor(ScheduledNumber):
    """A scheduled learning rate or weight decay of torch's own optimizers, which only multiplies.

    ``== 0`` is always False, so that a warm-up from zero is one program: to multiply by zero gives
    what torch's code gives that leaves the term out. That does not hold of a momentum (an optimizer
    without one keeps no average), nor of the code of other optimizers, which is not known.
    """

    def __eq__(self, other: object) -> Any:
        return False if _is_zero(other) else super().__eq__(other)

    def __ne__(self, other: object) -> Any:
        return True if _is_zero(other) else super().__ne__(other)

    def __bool__(self) -> bool:
        return True

    __hash__ = TracedNumber.__hash__


def _is_zero(value: object) -> bool:
    return type(value) in (int, float) and value == 0


def scheduler_places(schedulers: Iterable[ProgramScheduler]) -> Iterator[Place]:
    """What they count in."""
    for scheduler in schedulers:
        for name in scheduler.resident:
            yield Place(scheduler.resident, name, f"{type(scheduler).__name__}.{name}")


class TracedSchedulers:
    """The part of a trace that schedulers see (``schedules.Traced``).

    It gives them their count as a number of the step, and puts what they compute into the param
    groups.

    Args:
        guards: receives what Python sees of their numbers.
        in_double: allows float64 while a block runs.

    Attributes:
        counted: how often the step steps each.
    """

    def __init__(
        self, guards: list[NumberGuard], in_double: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._guards, self.in_double = guards, in_double
        self.counted: Counter[ProgramScheduler] = Counter()

    def count(self, count: Tensor) -> Tensor:
        """The count as a number of the step."""
        return as_number(count.to(torch.float64))

    def stepped(self, scheduler: ProgramScheduler) -> None:
        """Remember it: what Python would see of its numbers is that of the step before."""
        self.counted[scheduler] += 1

    def place(self, scheduler: ProgramScheduler, group: int, number: Tensor) -> None:
        """Put a traced number into a param group; a tensor there takes the value."""
        owner, key = scheduler.optimizer.param_groups[group], scheduler.key
        if isinstance(owner[key], Tensor):
            owner[key].copy_(number)
            return

        text = f"param_groups[{group}]['{key}'] of {type(scheduler).__name__}"
        stepped = scheduler in self.counted

        def compute(numbers: Numbers) -> float:
            if stepped:
                raise FrozenNumber(
                    f"The step looked at {text} in Python after scheduler.step(): that value is"
                    " known in the program alone.",
                    remedy="look at it before scheduler.step(), or compute with it:"
                    " torch.where(torch.as_tensor(group['lr']) > x, a, b)",
                )
            # by this count "depends_on_computed" sees that a guard depends on such a number
            ScheduledNumber.asked += 1
            scheduler.show()
            return scheduler.numbers[group]

        of_torch = type(scheduler.optimizer).__module__.startswith("torch.optim.")
        is_factor = of_torch and key in ("lr", "weight_decay")
        kind = ScheduledFactor if is_factor else ScheduledNumber
        traced = kind(scheduler.numbers[group], number, self._guards, compute, text)
        if isinstance(owner, TracedGroup):
            owner.schedule(key, traced)
        else:
            owner[key] = traced


def depends_on_computed(guard: NumberGuard, numbers: Numbers) -> bool:
    """Whether what a guard saw depends on a number that the program computes."""
    asked = ScheduledNumber.asked
    guard.evaluate(numbers)
    return ScheduledNumber.asked != asked


class RunSchedulers:
    """The schedulers of a run under Lightning.

    Attributes:
        computed: those that the program computes.
        on_host: the configs of those that Lightning steps.
    """

    def __init__(self) -> None:
        self._configs: list[LRSchedulerConfig] = []
        self.computed: list[ProgramScheduler] = []
        self.on_host: list[LRSchedulerConfig] = []

    def sort(self, configs: list[LRSchedulerConfig]) -> None:
        """Take Lightning's, before an epoch: its learning-rate finder replaces them."""
        self._configs = configs
        self.computed = program_schedulers(config.scheduler for config in configs)
        known = set(map(id, self.computed))
        self.on_host = [one for one in configs if id(one.scheduler) not in known]

    def check(self, module: pl.LightningModule | None) -> None:
        """Verify that the program may step those that it computes.

        Raises:
            MisconfigurationException: the module steps them in its own way
                (``lr_scheduler_step``), or Lightning is to step them otherwise.
            ValueError: two set the same number.
        """
        check_schedulers(self._configs)
        if self.computed and module is not None and is_overridden("lr_scheduler_step", module):
            raise MisconfigurationException(
                f"{type(module).__name__} overrides lr_scheduler_step, but"
                f" {type(self.computed[0]).__name__} computes inside the program and is stepped"
                " there. Leave the override out, or use a scheduler of torch.optim.lr_scheduler."
            )

    def step(self) -> None:
        """Count on, in the traced step."""
        for scheduler in self.computed:
            scheduler.step()

    def show(self) -> None:
        """Let the param groups show what the next step uses, before the user's code reads them."""
        for scheduler in self.computed:
            scheduler.show()

    def show_again(self) -> None:
        """The same, after an interrupt too."""
        for scheduler in self.computed:
            scheduler.show_again()


class ShownNumbers:
    """The places of scheduled numbers among the values of all param groups.

    Args:
        schedulers: whose numbers they are.
        groups: the param groups of all optimizers.
    """

    def __init__(self, schedulers: list[ProgramScheduler], groups: list[dict[str, Any]]) -> None:
        starts: dict[int, int] = {}
        length = 0
        for group in groups:
            starts[id(group)] = length
            length += len(group)
        self.length = length  # of the values that these are places in
        self._places = []
        for scheduler in schedulers:
            for i in scheduler.groups:
                group = scheduler.optimizer.param_groups[i]
                if id(group) in starts and not isinstance(group[scheduler.key], Tensor):
                    position = starts[id(group)] + list(group).index(scheduler.key)
                    self._places.append((position, scheduler.numbers, i, scheduler))

    def leave_out(self, values: list[Any]) -> None:
        """Replace them by None.

        Raises:
            StateChanged: somebody else set one.
        """
        for position, numbers, i, scheduler in self._places:
            # by identity: every step asks, and the scheduler itself puts its own objects there
            if values[position] is not numbers[i]:
                raise _set_on_host(scheduler, i, values[position])
            values[position] = None


def show_all(schedulers: Iterable[ProgramScheduler]) -> None:
    """Let the param groups show what the step uses, before it is traced.

    Raises:
        StateChanged: somebody else set a number.
    """
    for scheduler in schedulers:
        scheduler.show()
        for i in scheduler.groups:
            value = scheduler.optimizer.param_groups[i][scheduler.key]
            if not isinstance(value, Tensor) and value != scheduler.numbers[i]:
                raise _set_on_host(scheduler, i, value)
        scheduler.show_again()  # a checkpoint's number is equal, but another object


def _set_on_host(scheduler: ProgramScheduler, group: int, value: object) -> StateChanged:
    name = type(scheduler).__name__
    return StateChanged(
        f"param_groups[{group}]['{scheduler.key}'] was set to {value!r} on the host, but {name}"
        " computes it inside the program.",
        remedy=f"another scheduler than {name}: one of torch.optim.lr_scheduler runs on"
        " the host; or fulgurite.optim.lr_scheduler.LambdaLR with a tensor function",
    )
