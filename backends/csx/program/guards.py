"""Guards: what makes a step need another program (a recompilation), and why, in words.

A program fits as long as the conditions that it was built on hold, the batch has its shapes, and
all that its Python read on the host is as it was read. Host code may change param groups whenever
it runs, so every step asks; what it asks first is whether there still are the same objects.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter, is_
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from fulgurite.backends.csx.capture import CapturedStep, NumberCall, Scope, answers_hold
from fulgurite.backends.csx.contract import FrozenScalars, HostChange
from fulgurite.backends.csx.diagnostics.trace_errors import InputChanged, StateChanged
from fulgurite.backends.csx.graph.graph import Kind, used_numbers
from fulgurite.backends.csx.hyperparams.counts import CountSlot, Held
from fulgurite.backends.csx.hyperparams.scheduled_numbers import ShownNumbers, depends_on_computed
from fulgurite.backends.csx.hyperparams.slots import (
    NumberSlot,
    are_fixed,
    as_vector,
    group_options,
    read_numbers,
    unused_guards,
)
from fulgurite.backends.csx.hyperparams.traced_float import NumberGuard
from fulgurite.backends.csx.state import gradient_mismatch
from fulgurite.backends.patches import MISSING
from fulgurite.backends.program_scheduler import ProgramScheduler

_SETTINGS = (
    *("accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm"),
    "fit_loop.epoch_loop.automatic_optimization._skip_backward",
)
settings_of = attrgetter(*_SETTINGS)
"""The attributes of a Trainer that a training program is built on."""


class Conditions(NamedTuple):
    """What every step compares first: where it differs, another program is needed."""

    requires_grad: tuple[bool, ...]
    training: tuple[bool, ...]
    tracking: tuple[bool, ...]  # of normalizations: whether they keep running statistics
    group_sizes: tuple[int, ...]
    options: tuple[Any, ...]  # of param groups, that are no numbers
    states: tuple[int, ...]  # identity of each optimizer's state
    settings: tuple[Any, ...]  # accumulation window, gradient clipping, no backward pass

    def difference(self, now: Conditions, modules: list[nn.Module], parameters: list[str]) -> str:
        """In words, what no longer is as it was.

        Args:
            now: the conditions now.
            modules: all of the model's, in the order of ``training``.
            parameters: their names, in the order of ``requires_grad``.

        Raises:
            StateChanged: an optimizer's state was lost, which no other program may answer.
        """
        if self.states != now.states:
            raise StateChanged(
                "The state of an optimizer was replaced (load_state_dict) or cleared while the"
                " program works on it.",
                remedy="load it before the first step, or by fit(ckpt_path=...)",
            )
        if self.training != now.training:
            first, *others = now.in_other_modes(self, modules)
            more = f", as are {len(others)} more modules" if others else ""
            return f"{type(first).__name__} is in {mode_of(first)} mode now{more}"
        if self.tracking != now.tracking:
            return "track_running_stats of a normalization changed"
        if (count := len(now.requires_grad)) != (had := len(self.requires_grad)):
            return f"the model has {count} parameters now, and had {had}"
        if self.requires_grad != now.requires_grad:
            triples = zip(parameters, self.requires_grad, now.requires_grad, strict=True)
            names = [name for name, was, is_now in triples if was != is_now]
            return f"requires_grad of {names[0]} changed ({len(names)} parameters in all)"
        if self.group_sizes != now.group_sizes:
            return (
                f"the param groups had {list(self.group_sizes)} parameters, and now have"
                f" {list(now.group_sizes)}"
            )
        if self.options != now.options:
            return f"the param groups' options were {self.options}, and now are {now.options}"
        names = [name.rpartition(".")[2].lstrip("_") for name in _SETTINGS]
        settings = zip(names, self.settings, now.settings, strict=True)
        return "; ".join(f"{name} was {a!r}, and now is {b!r}" for name, a, b in settings if a != b)

    def in_other_modes(self, before: Conditions, modules: list[nn.Module]) -> list[nn.Module]:
        """Those of all the model's modules that were in another mode before."""
        triples = zip(modules, before.training, self.training, strict=True)
        return [module for module, was, is_now in triples if was != is_now]


def mode_of(module: nn.Module) -> str:
    """The mode of a module, in a word."""
    return "train" if module.training else "eval"


class Misfit(NamedTuple):
    """Why a program does not fit, in words; ``error`` is what to raise where no other may be built.

    Another *phase* is a state of model and trainer that the user asked for, as by a callback that
    unfreezes layers or ends weight decay: there are as many programs as phases. Other reasons, such
    as shapes of batches or values that hooks set, may come at every step, and are limited.
    """

    error: type[InputChanged | StateChanged]
    why: str
    is_phase: bool = False
    is_of_run: bool = False  # a phase of which a counter of the run decides
    change: HostChange | None = None  # a phase that a hook began, of a value that Python reads
    # a batch is compared before the numbers, by which another phase may have begun since
    is_of_earlier_phase: Callable[[], bool] = lambda: False
    held: int = 0  # how many kinds of conditions held before it


class Guards:
    """What one program relies on; ``captured`` are its entry points."""

    def __init__(
        self,
        captured: Sequence[CapturedStep],
        conditions: Conditions,
        scope: Scope,
        groups: ParamGroups,
    ) -> None:
        self._scope, self._groups = scope, groups
        self._conditions = conditions
        self._modules = list(scope.module.modules())
        self.batch = captured[0].sources.batch  # all entry points take the same
        for one in captured:
            self.batch.read |= one.sources.batch.read
        read = [one.assumptions for one in captured]
        self._answers = {place: value for one in read for place, value in one.answers.items()}
        flags = {(id(f.container), f.key) for one in scope.born for f, _, _ in one.flags}
        reads = [access for one in read for access in one.scalars]
        asked = flags & {(id(one.container), one.name) for one in reads}
        reads = [one for one in reads if (id(one.container), one.name) not in asked]
        # whether a normalization tracks is one of the conditions: another value is another program
        self._scalars = FrozenScalars(
            one
            for one in reads
            if one.name != "track_running_stats" or not isinstance(one.module, _NormBase)
        )
        self._tables = [one.tables for one in read if one.tables]
        handovers = [one.sources.gradients for one in captured]
        self._gradients = [one for one in handovers if one.none_matters]
        self.numbers = _number_guards(captured, scope)
        first = {id(one.captured) for each in captured for one in each.births}
        self._run = [guard for one in captured if not one.births for guard in one.assumptions.run]
        self._run_later = [
            g for one in captured if id(one) not in first for g in one.assumptions.run
        ]
        # the places of state that first steps make, this program's own and those of others
        self._made = [first.is_due for one in captured for first in one.births]
        items = [item for one in captured for item in one.graph.inputs]
        names = {item.name for item in items if item.kind is Kind.STATE}
        written = {i for one in captured for i in _state_written(one)}
        self._updates, self._names = written, names
        # of what was there, it has what it asks for
        self._found = {key for one in scope.born if not one() for key in one.made}
        self._names |= {name for first in self._made for _, name in first.made}
        self._needed = [one for one in scope.born if one.holds(names) or one.is_told_by(asked)]

    def accept(self, now: Conditions, batch: Any) -> list[Tensor] | Misfit | None:
        """The tensors of a batch as the program takes them, or why it does not fit.

        None if the program was built for another state of the Trainer (sanity check, validation).

        Raises:
            TraceError: no other program may be built for this reason either.
        """
        if self._answers and not answers_hold(self._answers, self._scope.trainer):
            return None
        if self._conditions != now:
            names = [name for name, _ in self._scope.module.named_parameters()]
            why = self._conditions.difference(now, self._modules, names)
            return Misfit(StateChanged, why, is_phase=True)
        if self.is_emptied():
            why = "there is not all of the state that a first step makes"
            return Misfit(StateChanged, why, is_phase=True, held=1)
        if (self._run or self._run_later) and (other := self._answered_otherwise()):
            return Misfit(StateChanged, other, is_phase=True, is_of_run=True, held=2)
        if (change := self._scalars.changed_by_now()) is not None:
            return Misfit(StateChanged, change.what, is_phase=True, change=change, held=3)
        tensors = self.batch.accept(batch)
        if tensors is None:
            earlier = functools.partial(self._groups.begins_phase, self.numbers)
            why = self.batch.difference(batch)
            return Misfit(InputChanged, why, is_of_earlier_phase=earlier, held=4)
        broken = self._gradients and gradient_mismatch(self._gradients)
        if broken:
            return Misfit(StateChanged, broken, is_phase=True, is_of_run=True, held=5)
        answer = self._groups.update(self.numbers)
        return tensors if answer is None else Misfit(StateChanged, *answer, held=6)

    def is_emptied(self) -> bool:
        """Whether there is not all of the state, so that another program makes it."""
        if any(one.is_in_part for one in self._made):
            return True
        if not any(is_empty() for is_empty in self._needed):
            return False
        return not any(is_empty() for is_empty in self._made)

    def overlooks(self, made: Iterable[tuple[int, str]]) -> bool:
        """Whether the program updates a parameter, and does not know of what is in its state now.

        Args:
            made: the identity of the parameter, and the name of the place, of what was made.
        """
        new = (one for one in made if one not in self._found and one[0] in self._updates)
        return any(name not in self._names for _, name in new)

    def knows_counts_of(self, other: Guards) -> bool:
        """Whether the program takes all numbers of optimizers that another one does."""
        return all(slot in self.numbers.counts for slot in other.numbers.counts)

    def _answered_otherwise(self) -> str | None:
        """What Python saw of counters of the run and would not see now; None: nothing."""
        now = read_numbers(self.numbers.slots, self._scope.optimizers)
        asked = self._run if any(is_due() for is_due in self._made) else self._run_later
        return next((why for guard in asked if (why := guard.broken(now))), None)

    def check(self, conditions: Callable[[], Conditions]) -> None:
        """Compare what only code on the host changes.

        Raises:
            StateChanged: a table that the step made is another, if the program is for
                ``conditions()``.
        """
        self._scalars.changed()
        try:
            for tables in self._tables:
                tables.check()
        except StateChanged:
            if self._conditions == conditions():  # else it is checked again before it may run
                raise


def _state_written(captured: CapturedStep) -> Iterator[int]:
    """The identity of the tensors of the state that a step writes."""
    written = captured.graph.written()
    for i, item in enumerate(captured.graph.inputs):
        if item.kind is Kind.STATE and i in written:
            yield from (id(held.tensor) for held in captured.sources.state[item.index].tensors)


def _number_guards(captured: Sequence[CapturedStep], scope: Scope) -> NumberGuards:
    # those with more have some that steps make, after those of all
    slots = max((one.sources.numbers for one in captured), key=len)
    now = read_numbers(slots, scope.optimizers)
    there = [1.0 if math.isnan(one) else one for one in now]
    used = frozenset().union(*(used_numbers(one.graph) for one in captured))
    guards = [guard for one in captured for guard in one.assumptions.numbers]
    counts = tuple(slot for slot in slots if isinstance(slot, CountSlot))
    first = {id(one.captured) for each in captured for one in each.births if counts}
    of_firsts = [one for one in captured if id(one) in first]
    firsts = {id(guard) for one in of_firsts for guard in one.assumptions.numbers}
    follow = [one for one in captured if one.births and counts]
    later = {id(guard) for one in follow for guard in one.assumptions.numbers}
    calls = [call for one in captured for call in one.outputs.calls]
    by_step = [call.sets for call in calls if isinstance(call, NumberCall)]
    idle = frozenset.intersection(*(one.assumptions.idle for one in captured))
    unused = unused_guards(slots, used, now, scope.optimizers, by_step, idle)
    return NumberGuards(
        slots=slots,
        counts=counts,
        guards=(*(guard for guard in guards if id(guard) not in firsts | later), *unused),
        firsts=tuple(guard for guard in guards if id(guard) in firsts),
        later=tuple(guard for guard in guards if id(guard) in later),
        are_asked=tuple(slot.optimizer is not None for slot in slots),
        computed=tuple(guard for guard in guards if depends_on_computed(guard, there)),
    )


@dataclass(slots=True, kw_only=True)
class NumberGuards:
    """The numbers that a program takes, and what its Python saw of them."""

    slots: tuple[NumberSlot | CountSlot, ...]
    counts: tuple[CountSlot, ...]  # those of them outside of param groups
    guards: tuple[NumberGuard, ...]  # asked when a number is another one
    firsts: tuple[NumberGuard, ...]  # those of first steps, while counts are not there
    later: tuple[NumberGuard, ...]  # those of steps that follow one, since they are
    are_asked: tuple[bool, ...]  # whether a slot is no module's
    computed: tuple[NumberGuard, ...]  # of numbers that the program computes: asked on every step
    held_for: list[float] | None = None  # the latest numbers for which all of them held
    held: list[float] | None = None  # those of them that guards are about

    def asked(self, now: list[float]) -> list[float]:
        """The numbers but for those of modules, which are asked in every step, as counters are."""
        return [number for number, is_asked in zip(now, self.are_asked, strict=True) if is_asked]

    def broken(self, now: list[float]) -> Iterator[tuple[NumberGuard, str]]:
        """The guards that do not hold for these numbers, each with what no longer holds."""
        asked: tuple[NumberGuard, ...] = ()
        if self.counts:
            pairs = zip(self.slots, now, strict=False)
            are_new = any(math.isnan(n) for slot, n in pairs if slot.optimizer is not None)
            asked = self.firsts if are_new else self.later
        for guard in (*self.guards, *asked):
            if why := guard.broken(now):
                yield guard, why


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
        self._counts: list[Held] = []  # numbers elsewhere
        self._counted: list[Any] = []  # what they were last

    def begin(self, schedulers: list[ProgramScheduler], program: NumberGuards) -> None:
        """Read the numbers for a new program; ``schedulers`` compute the others."""
        self._schedulers, self.vector = schedulers, None
        self._counts = [held for slot in self._scope.counts.slots for held in slot.held]
        self._counted = [MISSING] * len(self._counts)
        self.update(program)

    def read(self) -> list[dict[str, Any]]:
        """The groups; their options are read again where an object in them is another one."""
        groups = [group for o in self._scope.optimizers for group in o.param_groups]
        values = [value for group in groups for value in group.values()]
        if self._schedulers:
            if self._shown is None or self._shown.length != len(values):
                self._shown = ShownNumbers(self._schedulers, groups)
            self._shown.leave_out(values)
        if self._counts:  # which may change in every step
            counted = [container.get(key) for container, key in self._counts]
            if not all(map(is_, counted, self._counted)):
                self._counted, self._numbers_are_read = counted, False
        if len(values) != len(self._values) or not all(map(is_, values, self._values)):
            # another object somewhere: a scheduler's new number, or an option
            # a list in a group may change and stay the same object: then options are read at every
            # step
            self._values = values if are_fixed(groups) else []
            self.options = tuple(group_options(self._scope.optimizers))
            self._numbers_are_read = False
        return groups

    def begins_phase(self, program: NumberGuards) -> bool:
        """Whether a guard of a program does not hold whose number begins another phase."""
        now = read_numbers(program.slots, self._scope.optimizers)
        return any(guard.is_of_phase for guard, _ in program.broken(now))

    def update(self, program: NumberGuards) -> tuple[str, bool] | None:
        """Bring ``vector`` up to date for a program.

        Returns:
            Which guard does not hold, in words, and whether that is another phase.
        """
        for guard in program.computed:
            broken = guard.broken(self._numbers)
            if broken is not None:
                return broken, guard.is_of_phase
        if not program.slots:
            return None
        # the list is made anew where a number changes, so that its identity stands for its values
        if self._numbers_are_read and self.vector is not None and program.held_for is self._numbers:
            return None
        if (slot := next((one for one in program.counts if one.is_torn()), None)) is not None:
            return f"{slot} was one number for all parameters, and now is not", True
        now = read_numbers(program.slots, self._scope.optimizers)
        if program.held_for != now and (asked := program.asked(now)) != program.held:
            for guard, why in program.broken(now):
                return why, guard.is_of_phase
            program.held = asked
        if self.vector is None or self._numbers != now:
            self._numbers, self.vector = now, as_vector(now)
        program.held_for, self._numbers_are_read = self._numbers, True
        return None
