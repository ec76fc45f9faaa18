"""Numbers of param groups that follow from a count of steps, computed where the step runs.

A ``ProgramScheduler`` counts in a tensor. Eagerly ``step()`` counts one on and puts the new numbers
into the param groups, as torch's schedulers do. In a traced step the count is state of the program,
and what is put there are tensors computed from it, so no step waits for the host; between steps the
host's ``param_groups`` show the numbers of the next one.
"""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

Number = float | Tensor
Place = Callable[["ProgramScheduler", int, Tensor], None]
"""Puts the tensor of a group's number, by the group's index, where a traced step finds it."""

_place: ContextVar[Place | None] = ContextVar("place", default=None)


class ProgramScheduler(LRScheduler):
    """A scheduler whose numbers a program can compute itself; the base of ``fulgurite.optim``'s.

    Args:
        optimizer: whose param groups it sets.
        key: which of their numbers: "lr", "weight_decay", ...
        param_group_tags: sets only groups with one of these in ``group["tags"]``; None among them
            means groups without tags. Without this argument all groups are set.

    Attributes:
        resident: the tensors that it counts in: state of the program, part of ``state_dict``.
        initial: the groups' numbers when it was made.

    Raises:
        ValueError: no group has such a tag, or one has no such number.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        key: str,
        param_group_tags: str | Iterable[str | None] | None = None,
    ) -> None:
        # not torch's __init__, which keeps learning rates and counts in Python
        self.optimizer, self.key = optimizer, key
        groups = optimizer.param_groups
        self.groups = tuple(_tagged(groups, param_group_tags))
        without = [i for i in self.groups if key not in groups[i]]
        if without or not self.groups:
            missing = f"param_groups{without} without {key!r}" if without else "no param group"
            raise ValueError(
                f"{type(self).__name__}(param_group_tags={param_group_tags!r}) found {missing} in"
                f" {type(optimizer).__name__}, whose groups have the keys {sorted(groups[0])} and"
                f" the tags {[sorted(map(str, group.get('tags', ()))) for group in groups]}."
            )
        self.initial = [float(group.get(key, 0.0)) for group in groups]
        self.resident: dict[str, Tensor] = {"count": torch.zeros((), dtype=torch.int64)}
        self._shown = -1  # the count whose numbers are in the groups
        self._values: dict[int, float] = {}
        self.show()

    @abstractmethod
    def value(self, count: Number, group: int) -> Number:
        """The number of a param group at a count of steps.

        Args:
            count: a number of steps: Python's own on the host, float64 [] in a traced step.
            group: index of the param group.
        """

    def advance(self, count: Number) -> None:  # most have no more than the count
        """Bring other tensors in ``resident`` to this count, in place, one step on."""

    def step(self, epoch: int | None = None) -> None:
        """Count one step, and set the numbers of the next."""
        if epoch is not None:
            raise ValueError(f"{type(self).__name__}.step() counts by itself; got epoch={epoch}.")
        with torch.no_grad():
            self.resident["count"].add_(1)
            self.advance(self._count())
        self.show()

    def _count(self) -> Number:
        count = self.resident["count"]
        return int(count) if _place.get() is None else count.to(torch.float64)

    @torch.no_grad()
    def show(self) -> None:
        """Put the numbers of the next step into the param groups."""
        count, place = self._count(), _place.get()
        if place is not None:
            for i in self.groups:
                place(self, i, torch.as_tensor(self.value(count, i), dtype=torch.float64))
        elif count != self._shown:
            self._values = {i: float(self.value(count, i)) for i in self.groups}
            self._shown = int(count)
            for i, value in self._values.items():
                self._set(i, value)

    def _set(self, i: int, value: float) -> None:
        group = self.optimizer.param_groups[i]
        if isinstance(group[self.key], Tensor):
            group[self.key].fill_(value)
        else:
            group[self.key] = value

    def shown(self, group: int) -> float:
        """The number of a param group that ``show`` put there."""
        return self._values[group]

    @property
    def last_epoch(self) -> int:  # type: ignore[override]
        """How many steps were counted; torch's name for it."""
        return int(self.resident["count"])

    def get_last_lr(self) -> list[float | Tensor]:
        """The numbers of all param groups as they are now."""
        return [group[self.key] for group in self.optimizer.param_groups]

    def get_lr(self) -> list[float | Tensor]:
        """The same."""
        return self.get_last_lr()

    def state_dict(self) -> dict[str, Any]:
        """The count, under torch's name for it, and what else is resident, as numbers."""
        others = {name: t.item() for name, t in self.resident.items() if name != "count"}
        return {"last_epoch": self.last_epoch, "_last_lr": self.get_last_lr(), **others}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the count from a state; one of torch's scheduler of the same name will do."""
        self.resident["count"].fill_(state_dict["last_epoch"])
        for name in self.resident.keys() & state_dict.keys():
            self.resident[name].fill_(state_dict[name])
        self._shown = -1
        self.show()


def _tagged(groups: list[dict[str, Any]], tags: str | Iterable[str | None] | None) -> Iterator[int]:
    """Indices of the param groups that have one of the tags."""
    wanted = None if tags is None else {tags} if isinstance(tags, str) else set(tags)
    for i, group in enumerate(groups):
        own = group.get("tags") or {None}
        if wanted is None or wanted & ({own} if isinstance(own, str) else set(own)):
            yield i


@contextlib.contextmanager
def placed_by(place: Place) -> Iterator[None]:
    """Let schedulers hand the tensors of their numbers to ``place`` while the block runs."""
    token = _place.set(place)
    try:
        yield
    finally:
        _place.reset(token)
