"""Floats in attributes of modules that hooks set between steps: ``self.kl_weight = ...``.

A step is traced with the value that it finds, for that value alone. Where hooks have set another,
the next program has it as a number, as it has those of param groups; Python that looks at it is a
guard. Code written in C reads a float's value unseen (``numpy.exp(self.kl_weight)``): a step that
computes other things with a value near by keeps it as a constant.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

_NEAR_BY = 2.0**-10


@dataclass(frozen=True, slots=True, eq=False)
class ValueSlot:
    """A float in an attribute of a module, which hooks set: ``self.kl_weight``."""

    container: dict[str, Any]
    key: str
    where: str  # what the user calls it

    @property
    def place(self) -> tuple[int, str]:
        """Which attribute it is."""
        return id(self.container), self.key

    def read(self, optimizers: list[Optimizer]) -> float:
        """Its value now; NaN where it is no float any more, which is compared by itself."""
        return self.container[self.key] if self.is_float else math.nan

    @property
    def is_float(self) -> bool:
        """Whether it still is one."""
        return type(self.container.get(self.key)) is float

    @contextlib.contextmanager
    def moved(self) -> Iterator[None]:
        """Another value, near by, for a while."""
        value = self.container[self.key]
        self.container[self.key] = value * (1 + _NEAR_BY) or _NEAR_BY
        try:
            yield
        finally:
            self.container[self.key] = value

    def __str__(self) -> str:
        return self.where


class FollowedValues:
    """The values of modules that are numbers of the programs of one stage.

    Attributes:
        followed: those that programs built from now on have as numbers.
    """

    def __init__(self) -> None:
        self.followed: list[ValueSlot] = []
        self._kept: set[tuple[int, str]] = set()

    def follow(self, slots: Iterable[ValueSlot | None]) -> None:
        """Hooks have set these."""
        for slot in slots:
            known = self._kept | {one.place for one in self.followed}
            if slot is not None and slot.place not in known:
                self.followed.append(slot)

    def unfollow(self) -> None:
        """The step computes other things with other values: they are constants again."""
        self._kept |= {one.place for one in self.followed}
        self.followed.clear()
