"""The numbers of an optimizer's param groups, which are an input of the program.

Inside a trace ``group["lr"]`` is a ``TracedNumber``, so schedulers on the host may change any of
them between steps. A program holds only as long as all guards would come out the same.
"""

from __future__ import annotations

import contextlib
import copy
import operator
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer, Rprop
from torch.optim.optimizer import register_optimizer_step_post_hook

from fulgurite.backends.csx.diagnostics.trace_errors import (
    FrozenNumber,
    StateChanged,
    UnsupportedState,
)
from fulgurite.backends.csx.diagnostics.user_lines import UserLine, user_line
from fulgurite.backends.csx.hyperparams.counts import Counts, CountSlot, TracedCounts
from fulgurite.backends.csx.hyperparams.run_numbers import KEPT
from fulgurite.backends.csx.hyperparams.traced_float import (
    NumberGuard,
    Numbers,
    TracedNumber,
    number_where,
)
from fulgurite.backends.patches import MISSING
from fulgurite.backends.program_scheduler import ProgramScheduler


@dataclass(frozen=True, slots=True)
class NumberSlot:
    """One number of one param group: ``group[key]``, or ``group[key][index]`` in a sequence."""

    optimizer: int
    group: int
    key: str
    index: int | None
    owner: str  # the optimizer in messages

    def read(self, optimizers: list[Optimizer]) -> float:
        """Its value now."""
        value = self.value(optimizers)
        if type(value) is float:
            return value
        if not is_number(value):
            raise StateChanged(
                f"{self} was a number when the program was built, and now is {value!r}.",
                remedy="keep it a number",
            )
        return float(value)

    def value(self, optimizers: list[Optimizer]) -> Any:
        """What is in its place now; None where there is no place."""
        value: Any = optimizers[self.optimizer].param_groups[self.group].get(self.key)
        if self.index is None:
            return value
        inside = isinstance(value, (list, tuple)) and self.index < len(value)
        return value[self.index] if inside else None

    def __str__(self) -> str:
        part = "" if self.index is None else f"[{self.index}]"
        return f"{self.owner}.param_groups[{self.group}]['{self.key}']{part}"


def is_number(value: object) -> bool:
    """Whether a param group's value is an input of the program: a real number, not a bool."""
    return isinstance(value, Real) and not isinstance(value, bool)


_NAMES = ("params", "param_names")
_SIMPLE = frozenset({bool, str, type(None)})
_NUMBERS = frozenset({float, int})


def group_options(optimizers: list[Optimizer]) -> list[Any]:
    """Everything in the param groups that is neither number nor tensor, in a fixed order.

    Every step asks for it, so what groups mostly hold comes first.
    """
    options: list[Any] = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for key, value in group.items():
                kind = type(value)
                if kind in _SIMPLE:
                    options.append(value)
                elif kind is tuple and _NUMBERS.issuperset(map(type, value)):
                    options.append(len(value))
                elif kind not in _NUMBERS and key not in _NAMES and not is_number(value):
                    options.append(_option(value))
    return options


def are_fixed(groups: list[dict[str, Any]]) -> bool:
    """Whether nothing in these groups can change but by becoming another object."""
    return all(
        type(value) in _SIMPLE
        or type(value) in _NUMBERS
        or isinstance(value, Tensor)
        or (type(value) is tuple and _NUMBERS.issuperset(map(type, value)))
        for group in groups
        for key, value in group.items()
        if key not in _NAMES
    )


def _option(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [type(value), *(None if is_number(item) else _frozen(item) for item in value)]
    return _frozen(value)


def _frozen(value: Any) -> Any:
    """A value that tells by ``==`` later whether it has changed."""
    if isinstance(value, Tensor):
        return Tensor
    if isinstance(value, (list, tuple)):
        return [type(value), *map(_frozen, value)]
    if isinstance(value, dict):
        return {key: _frozen(item) for key, item in value.items()}
    return copy.copy(value) if isinstance(value, set) else value


def number_slots(
    optimizers: dict[str, Optimizer], schedulers: Sequence[ProgramScheduler], counts: Counts
) -> list[NumberSlot | CountSlot]:
    """All numbers that the host sets, of groups alone or in a list or tuple, in a fixed order.

    Args:
        optimizers: by the names that messages have for them.
        schedulers: those whose numbers the program computes.
        counts: further numbers of the optimizers; those in a group that steps have made, too.
    """
    computed = {(id(s.optimizer.param_groups[i]), s.key) for s in schedulers for i in s.groups}
    counts.find(optimizers)
    groups: dict[int, tuple[int, int, str, dict[str, Any]]] = {}
    for o, (owner, optimizer) in enumerate(optimizers.items()):
        for g, group in enumerate(optimizer.param_groups):
            groups.setdefault(id(group), (o, g, owner, group))  # one inside another has its groups
    of_groups = [
        NumberSlot(o, g, key, index, owner)
        for o, g, owner, group in groups.values()
        for key, value in group.items()
        if key not in _NAMES and (id(group), key) not in computed
        if not counts.holds(group, key)
        for index, item in _items(value)
        if is_number(item)
    ]
    return [*of_groups, *counts.slots]


def _items(value: Any) -> Any:
    return enumerate(value) if isinstance(value, (list, tuple)) else [(None, value)]


def install(
    slots: Sequence[NumberSlot | CountSlot],
    vector: Tensor,
    optimizers: list[Optimizer],
    of_module: Callable[[CountSlot, float, Tensor, int], TracedNumber],
) -> tuple[list[NumberGuard], TracedCounts]:
    """Put traced numbers into the param groups, and where counts are.

    Args:
        slots: of the numbers, in the order of ``vector``.
        vector: their values in the program, float64.
        optimizers: which have them.
        of_module: makes the number of a module's slot from its value, its tensor and its place.

    Returns:
        The list that guards are recorded in, and the counts.
    """
    guards: list[NumberGuard] = []
    counts: list[tuple[CountSlot, TracedNumber | bool]] = []
    for i, slot in enumerate(slots):
        value = slot.value(optimizers)
        if isinstance(slot, CountSlot) and slot.optimizer is None:
            if type(value) in (int, float):
                counts.append((slot, of_module(slot, value, vector[i], i)))
            continue
        if value is MISSING:
            continue
        if isinstance(slot, CountSlot) and type(value) is bool:  # the vector has 0 or 1
            guards.append(NumberGuard(str(slot), operator.itemgetter(i), value))
            counts.append((slot, value))
            continue
        value = int(value) if isinstance(value, int) else float(value)
        number = TracedNumber(value, vector[i], guards, operator.itemgetter(i), str(slot))
        if isinstance(slot, CountSlot):
            counts.append((slot, number))
            continue
        group = optimizers[slot.optimizer].param_groups[slot.group]
        if slot.index is None:
            group[slot.key] = number
        else:
            before = group[slot.key]
            items = [*before[: slot.index], number, *before[slot.index + 1 :]]
            group[slot.key] = items if isinstance(before, list) else tuple(items)
    return guards, TracedCounts(counts)


class TracedGroup(dict[str, Any]):
    """A param group while it is traced: it knows the user's line that set each key.

    Args:
        group: as it is.
        optimizer: whose group it is, and at which place.
        place: in messages.

    Attributes:
        own: the group that it stands for.
        read: keys that the step asked it for.
        asked_by_step: those that ``optimizer.step()`` did, of an optimizer that is known.
    """

    def __init__(
        self,
        group: dict[str, Any],
        optimizer: Optimizer,
        index: int,
        place: str,
    ) -> None:
        super().__init__(group)
        self.own, self.optimizer, self.index, self.place = group, optimizer, index, place
        self.installed, self._computed = dict(group), set[str]()
        self.lines: dict[str, UserLine | None] = {}
        self.scheduled_at: UserLine | None = None  # where the step called a scheduler of the host
        self.read, self.asked_by_step = set[str](), set[str]()
        homes = {kind.__module__ for kind in type(optimizer).__mro__}
        self._homes = homes if is_known(optimizer) else frozenset[str]()

    def _note(self, keys: Iterable[str]) -> None:
        by_step = sys._getframe(2).f_globals.get("__name__") in self._homes
        (self.asked_by_step if by_step else self.read).update(keys)

    def __getitem__(self, key: str) -> Any:
        self._note([key])
        if key == "lr" and self.scheduled_at is not None:
            raise FrozenNumber(
                "The step read a learning rate after scheduler.step(), at"
                f" {self.scheduled_at.place}: that scheduler runs after the program, which would"
                " go on with the rate from before it.",
                line=user_line(),
                remedy="scheduler.step() as the last thing of training_step, after every"
                " optimizer.step() and whatever else reads the rate; under automatic optimization,"
                " in on_train_batch_start, which runs on the host before each step",
            )
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        """What is there; it is noted, as by ``[]``."""
        self._note([key])
        return super().get(key, default)

    def items(self) -> Any:
        """All of it, which is noted."""
        self._note(self)
        return super().items()

    def __setitem__(self, key: str, value: Any) -> None:
        self.lines[key] = user_line()
        super().__setitem__(key, value)

    def schedule(self, key: str, number: TracedNumber) -> None:
        """Set what a scheduler inside the program computes."""
        dict.__setitem__(self, key, number)
        self.installed[key] = number
        self._computed.add(key)

    def changed(self) -> list[str]:
        """The keys that the step set to something else."""
        keys = {**self.installed, **self}
        return [k for k in keys if dict.get(self, k) is not self.installed.get(k) and k != "params"]

    def follows(self, key: str) -> bool:
        """Whether a changed number was computed from those that the program is given."""
        given, now = self.installed.get(key), dict.get(self, key)
        both = isinstance(given, TracedNumber) and isinstance(now, TracedNumber)
        return both and key not in self._computed

    def take_where(self, skipped: Tensor, before: dict[str, Any]) -> None:
        """Let numbers that were set since be those from before, on steps that are skipped."""
        for key, was in before.items():
            dict.__setitem__(self, key, number_where(skipped, was, dict.get(self, key)))


def set_numbers(
    groups: list[TracedGroup], line: UserLine | None
) -> Iterator[tuple[TracedGroup, str, float]]:
    """The numbers of groups that the step set, which the host is to set after every step.

    Those that were not there are left out: see ``new_numbers``.

    Args:
        groups: all of them, after the step.
        line: the user's that is to blame where none is known.

    Raises:
        FrozenNumber: one would stay as it was set in the trace.
    """
    for group in groups:
        for key in group.changed():
            # group["step"] += 1: the host can set what follows from numbers that the program
            # returns
            if group.follows(key):
                yield group, key, group[key]
                continue
            value: Any = group.get(key)  # None: the step took it away
            if key not in group.installed and is_number(value):
                continue
            kinds = (int, float, bool) if type(group.installed.get(key)) is bool else (int, float)
            at = group.lines.get(key) or line
            kept = at is not None and (at.file, at.function) in KEPT  # a counter's value
            if type(value) in kinds and not kept:
                yield group, key, value
                continue
            tensor = isinstance(value, Tensor)
            raise FrozenNumber(
                f"The step set param_groups['{key}'], which the host sets between steps, to"
                f" {'a tensor' if tensor else repr(value)}: the program would keep what it was set"
                " to.",
                line=at,
                remedy=f"let it be a tensor from the start ({key}=torch.tensor(...) in"
                f" configure_optimizers), and here group[{key!r}].copy_(...)"
                if tensor
                else "arithmetic with counters alone, without float() or int(); or the host between"
                " steps:\n"
                "      def on_train_batch_start(self, batch, batch_idx):\n"
                f"          self.trainer.{group.place}[{key!r}] = ...",
            )


def refuse_set_numbers(groups: list[TracedGroup], line: UserLine | None) -> None:
    """Raise where an evaluation has set something in a group; ``line`` is as in ``set_numbers``.

    Raises:
        FrozenNumber: it has.
    """
    for group in groups:
        for key in group.changed():
            at = group.lines.get(key) or line
            raise FrozenNumber(
                f"{'The step' if at is None else at.function} set param_groups[{key!r}] of an"
                " optimizer, which happened once, when it was traced.",
                line=at,
                remedy="in a hook after it, which runs on the host for every batch, such as"
                f" on_validation_batch_end: self.trainer.{group.place}[{key!r}] = ...",
            )


def new_numbers(groups: list[TracedGroup]) -> Iterator[tuple[TracedGroup, str]]:
    """The numbers that the step has put into groups, and that were not there."""
    for group in groups:
        for key in group.changed():
            if key not in group.installed and is_number(group[key]):
                yield group, key


@contextlib.contextmanager
def traced_groups(named: dict[str, Optimizer]) -> Iterator[list[TracedGroup]]:
    """Let optimizers have traced param groups; afterwards theirs are as they were before."""
    optimizers = [*named.values()]
    before = [list(optimizer.param_groups) for optimizer in optimizers]
    by_own: dict[int, TracedGroup] = {}
    for (name, optimizer), groups in zip(named.items(), before, strict=True):
        for i, group in enumerate(groups):
            place = f"{name}.param_groups[{i}]"
            by_own.setdefault(id(group), TracedGroup(group, optimizer, i, place))
    traced = [[by_own[id(group)] for group in groups] for groups in before]
    try:
        for optimizer, now in zip(optimizers, traced, strict=True):
            optimizer.param_groups[:] = now
        yield [*by_own.values()]
        # not where the step has failed: its own error is the one to be seen
        for optimizer, now in zip(optimizers, traced, strict=True):
            if len(optimizer.param_groups) != len(now):
                raise UnsupportedState(
                    f"The step changed how many param groups {type(optimizer).__name__} has.",
                    remedy="optimizer.add_param_group(...) in on_train_epoch_start",
                )
    finally:
        for optimizer, own in zip(optimizers, before, strict=True):
            optimizer.param_groups[:] = own


def read_numbers(slots: Sequence[NumberSlot | CountSlot], optimizers: list[Optimizer]) -> Numbers:
    """The values now, in the order of ``slots``."""
    return [slot.read(optimizers) for slot in slots]


def as_vector(numbers: Numbers) -> Tensor:
    """The program's input: float64 [number of slots]."""
    return torch.tensor(numbers, dtype=torch.float64)


_OF_SCHEDULERS = {
    *("initial_lr", "swa_lr", "min_lr", "max_lr"),
    *("base_momentum", "max_momentum"),
}
"""Keys of param groups that schedulers of torch's keep there for themselves."""


@contextlib.contextmanager
def used_with_gradients(unseen: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """In the block, what known optimizers ask a group for counts where they find a gradient.

    Args:
        unseen: lets ``p.grad`` be looked at.
    """

    def note(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            if isinstance(group, TracedGroup):
                with unseen():
                    if any(p.grad is not None for p in group["params"]):
                        group.read |= group.asked_by_step

    handle = register_optimizer_step_post_hook(note)
    try:
        yield
    finally:
        handle.remove()


def unused_guards(
    slots: Sequence[NumberSlot | CountSlot],
    used: frozenset[int],
    now: Numbers,
    optimizers: list[Optimizer],
    set_by_step: Collection[Any],
    idle: Collection[Any],
) -> list[NumberGuard]:
    """Guards for numbers that no operation uses: they may have been read where nothing sees it.

    A C function that takes a float takes its value without asking it. (Rprop reads ``lr`` only for
    the making of its state.) None for groups of frozen parameters, which torch's and this package's
    optimizers pass by, for what the step sets each time (an optimizer, a group, a key): those
    are for others to read, as ``group["scheduled_lr"]`` of ScheduleFree; for what may count, so
    that another step moves it; and for what is ``idle`` (an optimizer's place, a group's, a key).
    """
    return [
        NumberGuard(str(slot), operator.itemgetter(i), now[i], slot.key in _OF_SCHEDULERS)
        for i, slot in enumerate(slots)
        if i not in used
        and isinstance(slot, NumberSlot)
        and (slot.optimizer, slot.group, slot.key) not in idle
        and not _may_count(slot, optimizers)
        and not (slot.key == "lr" and isinstance(optimizers[slot.optimizer], Rprop))
        and not _is_frozen(optimizers[slot.optimizer], slot.group)
        and (optimizers[slot.optimizer], slot.group, slot.key) not in set_by_step
    ]


def _may_count(slot: NumberSlot, optimizers: list[Optimizer]) -> bool:
    """Whether another step may move it: a whole number, which code in C asks for its value."""
    return not is_known(optimizers[slot.optimizer]) and type(slot.value(optimizers)) is int


def _is_frozen(optimizer: Optimizer, group: int) -> bool:
    """Whether a group's parameters all are frozen, and so known to be left alone."""
    return is_known(optimizer) and not any(
        p.requires_grad for p in optimizer.param_groups[group]["params"]
    )


def is_known(optimizer: Optimizer) -> bool:
    """Whether it is one of torch's or of this package."""
    return type(optimizer).__module__.partition(".")[0] in ("torch", "fulgurite")
