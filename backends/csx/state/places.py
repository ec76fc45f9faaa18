"""Places on the host: where a step finds tensors, and what goes where after every step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch.utils._pytree as pytree
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from fulgurite.backends.csx.graph.graph import storage_of
from fulgurite.backends.patches import MISSING


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """A key of a dict, or of something that is used like one (``leaves.Inside``).

    Places are equal if they are the same key of the same object; ``name`` is how the user calls
    the place, where a message may name it.
    """

    container: Any
    key: Any
    name: str = ""

    def get(self, default: Any = None) -> Any:
        """What is there now."""
        return self.container.get(self.key, default)

    def put(self, value: Any) -> None:
        """Put a value there; MISSING empties the place."""
        if value is MISSING:
            self.container.pop(self.key, None)
        else:
            self.container[self.key] = value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Place) or hash(self) != hash(other):
            return False  # different tensors, which may be keys, are not compared by ==
        return (id(self.container), self.key) == (id(other.container), other.key)

    def __hash__(self) -> int:
        return hash((id(self.container), self.key))


@dataclass(frozen=True, slots=True, eq=False)
class StateTensor:
    """One tensor of a program's state, and all the places that hold it (several: tied)."""

    tensor: Tensor
    places: list[Place] = field(default_factory=list)

    def put(self, tensor: Tensor) -> None:
        """Let all the places hold another tensor."""
        for place in self.places:
            place.put(tensor)


@dataclass(frozen=True, slots=True, kw_only=True)
class NewPlace:
    """A place inside a tree where the step left tensors, and was none of their shape before."""

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
        """Every one of ``places`` holds ``value`` after every step; they share it."""
        self.writes.append((places, value))

    def append_after(self, place: Place, values: list[Any]) -> None:
        """The list in a place is extended by ``values`` after every step."""
        self.lists.append(place)
        self.list_values.append(values)

    def written(self) -> tuple[list[Place], list[Any]]:
        """The places that are set after every step, and their values.

        What several calls of ``set_after`` were given gets memory of its own for each.
        """
        places: list[Place] = []
        values: list[Any] = []
        taken: set[int] = set()

        def own(leaf: Any) -> Any:
            traced = isinstance(leaf, FakeTensor)
            return leaf.clone() if traced and storage_of(leaf) in taken else leaf

        for several, value in self.writes:
            mine = pytree.tree_map(own, value)
            leaves = pytree.tree_leaves(value)
            taken.update(storage_of(leaf) for leaf in leaves if isinstance(leaf, FakeTensor))
            places += several
            values += [mine] * len(several)
        return places, values
