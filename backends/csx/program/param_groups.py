"""The param groups of a step's optimizers between steps: their options, and a program's numbers.

Host code may change them whenever it runs, so every step asks; what it asks first is whether there
still are the same objects.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import is_
from typing import Any

from torch import Tensor

from fulgurite.backends.csx.capture import Scope
from fulgurite.backends.csx.hyperparams.schedules import ShownNumbers
from fulgurite.backends.csx.hyperparams.slots import (
    NumberSlot,
    are_fixed,
    as_vector,
    group_options,
    read_numbers,
)
from fulgurite.backends.csx.hyperparams.traced_float import NumberGuard
from fulgurite.backends.program_scheduler import ProgramScheduler


@dataclass(slots=True, kw_only=True)
class NumberGuards:
    """The numbers that a program takes, and what its Python saw of them."""

    slots: tuple[NumberSlot, ...]
    guards: tuple[NumberGuard, ...]  # asked when a number is another one
    computed: tuple[NumberGuard, ...]  # of numbers that the program computes: asked on every step
    held_for: list[float] | None = None  # the latest numbers for which all of them held


class ParamGroups:
    """The param groups of the optimizers of a scope."""

    def __init__(self, scope: Scope) -> None:
        self._scope = scope
        self._schedulers: list[ProgramScheduler] = []
        self.options: tuple[Any, ...] = ()  # what is neither a number nor a tensor
        self.vector: Tensor | None = None  # the numbers, as the input of a program
        self._values: list[Any] = []  # of all groups, when they were last read
        self._numbers: list[float] = []
        self._numbers_are_read = False
        self._shown: ShownNumbers | None = None

    def begin(self, schedulers: list[ProgramScheduler], program: NumberGuards) -> None:
        """Read the numbers for a new program; ``schedulers`` compute the others."""
        self._schedulers, self.vector = schedulers, None
        self.update(program)

    def read(self) -> list[dict[str, Any]]:
        """The groups; their options are read again where an object in them is another one."""
        groups = [group for o in self._scope.optimizers for group in o.param_groups]
        values = [value for group in groups for value in group.values()]
        if self._schedulers:
            if self._shown is None or self._shown.length != len(values):
                self._shown = ShownNumbers(self._schedulers, groups)
            self._shown.leave_out(values)
        if len(values) != len(self._values) or not all(map(is_, values, self._values)):
            # another object somewhere: a scheduler's new number, or an option
            self._values = values if are_fixed(groups) else []
            self.options = tuple(group_options(self._scope.optimizers))
            self._numbers_are_read = False
        return groups

    def update(self, program: NumberGuards) -> tuple[str, bool] | None:
        """Bring ``vector`` up to date for a program.

        Returns:
            Which guard does not hold, in words, and whether it asks a question of yes or no.
        """
        for guard in program.computed:
            broken = guard.broken(self._numbers)
            if broken is not None:
                return broken, isinstance(guard.result, bool)
        if not program.slots:
            return None
        if self._numbers_are_read and self.vector is not None and program.held_for is self._numbers:
            return None
        now = read_numbers(program.slots, self._scope.optimizers)
        if program.held_for != now:
            for guard in program.guards:
                broken = guard.broken(now)
                if broken is not None:
                    return broken, isinstance(guard.result, bool)
        if self.vector is None or self._numbers != now:
            self._numbers, self.vector = now, as_vector(now)
        program.held_for, self._numbers_are_read = self._numbers, True
        return None
