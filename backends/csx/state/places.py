"""Places on the host, and what goes there after every step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import FakeTensor

from fulgurite.backends.csx.graph.graph import storage_of
from fulgurite.backends.csx.state.storage import StateTensor

Place = tuple[Any, Any]
"""A container (a dict, or ``leaves.Inside``) and a key of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewPlace:
    """A place inside a tree where the step left tensors, and was none of their shape before."""

    name: str
    place: Place
    before: Any
    grows: bool = False  # the place holds a list, and the tensors were added to it


@dataclass(slots=True)
class SideEffects:
    """Where values go after every step."""

    writes: list[tuple[list[Place], Any]] = field(default_factory=list)
    lists: list[Place] = field(default_factory=list)
    list_values: list[Any] = field(default_factory=list)
    rebound: list[StateTensor] = field(default_factory=list)
    new_places: list[NewPlace] = field(default_factory=list)

    def set_after(self, places: list[Place], value: Any) -> None:
        """Every ``container[key]`` of ``places`` is ``value`` after every step; they share it."""
        self.writes.append((places, value))

    def written(self, order: Callable[[Place], Any]) -> tuple[list[Place], list[Any]]:
        """The places that are set after every step, sorted by ``order``, and their values.

        What several calls of ``set_after`` were given gets memory of its own for each.
        """
        places: list[Place] = []
        values: list[Any] = []
        taken: set[int] = set()

        def own(leaf: Any) -> Any:
            traced = isinstance(leaf, FakeTensor)
            return leaf.clone() if traced and storage_of(leaf) in taken else leaf

        for several, value in sorted(self.writes, key=lambda write: order(write[0][0])):
            mine = pytree.tree_map(own, value)
            leaves = pytree.tree_leaves(value)
            taken.update(storage_of(leaf) for leaf in leaves if isinstance(leaf, FakeTensor))
            places += several
            values += [mine] * len(several)
        return places, values
