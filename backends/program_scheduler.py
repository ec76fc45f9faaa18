"""Numbers of param groups that follow from a count of steps, computed where the step runs.

A ``ProgramScheduler`` counts in a tensor. Eagerly ``step()`` counts one on and puts the new numbers
into the param groups, as torch's schedulers do. In a traced step the count is state of the program,
and what is put there are tensors computed from it, so no step waits for the host; between steps the
host's ``param_groups`` show the numbers of the next one.
"""

from __future__ import annotations

import contextlib
import math
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from numbers import Real
from typing import Any, Protocol

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from fulgurite.backends.step_context import step_context

Number = float | Tensor
AHEAD = 256  # steps that the host looks ahead


class Traced(Protocol):
    """What a trace does with schedulers that run in it."""

    def count(self, count: Tensor) -> Tensor:
        """The count of a scheduler, as its formula takes it."""

    def place(self, scheduler: ProgramScheduler, group: int, number: Tensor) -> None:
        """Put the number of a param group where the step finds it."""

    def stepped(self, scheduler: ProgramScheduler) -> None:
        """A scheduler is counted on: what the host shows is from now on an earlier number."""

    def in_double(self) -> AbstractContextManager[None]:
        """Let formulas compute in float64."""


class ProgramScheduler(LRScheduler):
    """A scheduler whose numbers a program can compute itself; the base of ``fulgurite.optim``'s.

    Args:
        optimizer: whose param groups it sets.
        key: which of their numbers: "lr", "weight_decay", ...
        param_group_tags: sets only groups with one of these in ``group["tags"]``; None among them
            means groups without tags. Without this argument all groups are set.

    Attributes:
        resident: the tensors that it counts in: state of the program, part of ``state_dict``.
        initial: the groups' numbers before any scheduler of this key set them.
        numbers: those that the host's groups show, by the groups' indices.
        follows_count_alone: ``value`` depends on nothing that changes: the host may look ahead.

    Raises:
        ValueError: no group has such a tag, or one has no such number; a number is not finite.
    """

    follows_count_alone = False

    def __init__(
        self,
        optimizer: Optimizer,
        key: str,
        param_group_tags: str | Iterable[str | None] | None = None,
    ) -> None:
        # not torch's __init__, which keeps learning rates and counts in Python
        self.optimizer, self.key = optimizer, key
        groups = optimizer.param_groups
        self.groups = tuple(tagged(groups, param_group_tags))
        without = [i for i in self.groups if not _is_number(groups[i].get(key))]
        if without or not self.groups:
            found, has = "no param group", f"tags {[group.get('tags') for group in groups]}"
            if without:
                found = f"param_groups{without} without a number {key!r}"
                has = f"keys {sorted(groups[0])}"
            raise ValueError(
                f"{type(self).__name__}(param_group_tags={param_group_tags!r}) found {found} in"
                f" {type(optimizer).__name__}, whose groups have the {has}."
            )
        for i in self.groups:  # as torch does: a second scheduler finds what the first one found
            groups[i].setdefault(f"initial_{key}", float(groups[i][key]))
            if any(groups[i][key] is other.get(key) for other in groups if other is not groups[i]):
                groups[i][key] = _own(groups[i][key])
        self.initial = [float(group.get(f"initial_{key}", 0.0)) for group in groups]
        self.resident: dict[str, Tensor] = {"count": torch.zeros((), dtype=torch.int64)}
        self._counted = 0  # what the host knows of the count: reading the tensor takes longer
        self._shown = -1  # the count whose numbers are in the groups
        self._ahead: list[tuple[float, ...]] = []  # numbers of all groups, for the next counts
        self._ahead_from = 0
        self.numbers: dict[int, float] = {}
        self.show()

    @abstractmethod
    def value(self, count: Number, group: int) -> Number:
        """The number of a param group at a count of steps.

        Args:
            count: a number of steps: Python's own, or float64 of any shape: [] in a traced step.
            group: index of the param group.
        """

    def advance(self, count: Number) -> None:  # most have no more than the count
        """Bring other tensors in ``resident`` to this count, in place, one step on."""

    def step(self, epoch: int | None = None) -> None:
        """Count one step, and set the numbers of the next."""
        if epoch is not None:
            raise ValueError(f"{type(self).__name__}.step() counts by itself; got epoch={epoch}.")
        trace: Traced | None = step_context.get().schedules
        with torch.no_grad(), contextlib.nullcontext() if trace is None else trace.in_double():
            self.resident["count"].add_(1)
            self.advance(self._count())
        if trace is not None:
            trace.stepped(self)
        else:
            # in a trace it is the program that counts, and says so (``count_on``)
            self._counted += 1
        self.show()

    def count_on(self, steps: int) -> None:
        """A program has counted so many steps."""
        self._counted += steps

    def _count(self) -> Number:
        count, trace = self.resident["count"], step_context.get().schedules
        return int(count) if trace is None else trace.count(count)

    def show(self) -> None:
        """Put the numbers of the next step into the param groups.

        Hosts ask for it on every step, so it does little.
        """
        trace, count = step_context.get().schedules, self._counted
        if trace is not None:
            self._place(trace)
        elif count != self._shown:
            self._shown, at = count, count - self._ahead_from
            if not 0 <= at < len(self._ahead):
                self._look_ahead(count)
                at = 0
            key, numbers, groups = self.key, self.numbers, self.optimizer.param_groups
            for i, value in zip(self.groups, self._ahead[at], strict=True):
                if not math.isfinite(value):
                    self._refuse(value, count, i)
                numbers[i], group = value, groups[i]
                if isinstance(group[key], Tensor):
                    # in place: whoever was given the tensor reads the number in it
                    group[key].fill_(value)
                else:
                    group[key] = value

    def _look_ahead(self, count: int) -> None:
        """Compute the numbers from a count on, many at once.

        One at a time, between two steps, a formula takes 4 µs: its code is in no cache by then.
        """
        self._ahead_from = count
        if self.follows_count_alone:
            counts = torch.arange(count, count + AHEAD, dtype=torch.float64)
            found = [
                torch.as_tensor(self.value(counts, i), dtype=counts.dtype) for i in self.groups
            ]
            columns = (numbers.expand(AHEAD).tolist() for numbers in found)
            self._ahead = list(zip(*columns, strict=True))
        else:
            self._ahead = [tuple(float(self.value(count, i)) for i in self.groups)]

    def _refuse(self, value: float, count: int, group: int) -> None:
        raise ValueError(
            f"{type(self).__name__} has param_groups[{group}][{self.key!r}] = {value} for step"
            f" {count}; the first step is 0, where t ** -0.5 is infinite. Give a finite number:"
            " (t + 1) ** -0.5, torch.clamp(t, min=1) ** -0.5."
        )

    @torch.no_grad()
    def _place(self, trace: Traced) -> None:
        count = self._count()
        for i in self.groups:
            with trace.in_double():
                number = torch.as_tensor(self.value(count, i), dtype=torch.float64).reshape(())
            trace.place(self, i, number)

    def show_again(self) -> None:
        """``show``, whatever somebody has put there meanwhile, or an interrupt left uncounted."""
        self._shown, self._counted = -1, self.last_epoch
        self.show()

    def begin_from(self, initial: list[float]) -> None:
        """Take other numbers for those that the groups had before any scheduler set them."""
        self.initial, self._ahead = initial, []

    @property
    def last_epoch(self) -> int:
        """How many steps were counted; torch's name for it."""
        return int(self.resident["count"])

    @last_epoch.setter
    def last_epoch(self, count: int) -> None:
        raise AttributeError(
            f"{type(self).__name__} counts steps itself; its last_epoch cannot be set. Torch's"
            " SequentialLR and ChainedScheduler do so: use those of fulgurite.optim.lr_scheduler."
        )

    def get_last_lr(self) -> list[float | Tensor]:
        """The numbers of all param groups as they are now."""
        return [group[self.key] for group in self.optimizer.param_groups]

    def get_lr(self) -> list[float | Tensor]:
        """The same."""
        return self.get_last_lr()

    def state_dict(self) -> dict[str, Any]:
        """The count and the initial numbers under torch's names, and what else is resident."""
        others = {name: t.item() for name, t in self.resident.items() if name != "count"}
        own = {"last_epoch": self.last_epoch, "base_lrs": list(self.initial)}
        return {**own, "_last_lr": self.get_last_lr(), **others}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take count and initial numbers from a state, also torch's of the same class."""
        self.resident["count"].fill_(state_dict["last_epoch"])
        initial = state_dict.get("base_lrs", self.initial)
        if len(initial) == len(self.initial):
            self.begin_from([float(number) for number in initial])
        for name in self.resident.keys() & state_dict.keys():
            self.resident[name].fill_(state_dict[name])
        self.show_again()


def tagged(groups: list[dict[str, Any]], tags: str | Iterable[str | None] | None) -> Iterator[int]:
    """Indices of the param groups that have one of the tags."""
    wanted = None if tags is None else {tags} if isinstance(tags, str) else set(tags)
    for i, group in enumerate(groups):
        own = group.get("tags") or {None}
        if wanted is None or wanted & ({own} if isinstance(own, str) else set(own)):
            yield i


def _is_number(value: object) -> bool:
    return isinstance(value, Real) or (isinstance(value, Tensor) and value.numel() == 1)


def _own(number: Any) -> Any:
    """A tensor of one group's own: torch gives all groups the same one, and each is filled."""
    return number.clone() if isinstance(number, Tensor) else number


def program_schedulers(schedulers: Iterable[Any]) -> list[ProgramScheduler]:
    """Those whose numbers a program can compute."""
    return [one for one in schedulers if isinstance(one, ProgramScheduler)]


def check_schedulers(configs: list[LRSchedulerConfig]) -> None:
    """Let Lightning step those that count steps after every optimizer step.

    Raises:
        ValueError: two schedulers set the same number, one of them in the step: torch's alone do
            so in their order.
        MisconfigurationException: one that counts steps shall be stepped otherwise.
    """
    owners: dict[tuple[int, int, str], Any] = {}
    for config in configs:
        scheduler: Any = config.scheduler
        name, optimizer = type(scheduler).__name__, scheduler.optimizer
        key: str = "lr"
        groups: Sequence[int] = range(len(optimizer.param_groups))
        if isinstance(scheduler, ProgramScheduler):
            key, groups = scheduler.key, scheduler.groups
            if config.frequency != 1 or config.reduce_on_plateau:
                raise MisconfigurationException(
                    f"{name} counts every optimizer step; it was given frequency="
                    f"{config.frequency}, reduce_on_plateau={config.reduce_on_plateau}. Leave both"
                    " out."
                )
            config.interval = "step"
        for i in groups:
            other = owners.setdefault((id(optimizer), i, key), scheduler)
            if other is not scheduler and program_schedulers((other, scheduler)):
                raise ValueError(both_set(type(other), type(scheduler), i, key, type(optimizer)))


def both_set(one: type, other: type, group: int, key: str, optimizer: type) -> str:
    """What is said of two schedulers that set the same number of a param group."""
    return (
        f"{one.__name__} and {other.__name__} both set param_groups[{group}]['{key}'] of"
        f" {optimizer.__name__}. Use SequentialLR for one after the other, ChainedScheduler for"
        " their product, or param_group_tags for one of them."
    )
