"""Batches whose sizes vary: which dimension of which tensor, and code that makes one size of them.

A program has fixed shapes. Where batches come in a few, each gets a program; where they come in
many, the user has to pad them, or to put those of a size together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from fulgurite.backends.csx.diagnostics.errors import InputChanged

SHAPES = 4
"""How many shapes of batches get a program each, unless the backend was told another number."""

Shapes = Mapping[str, torch.Size]
"""Of the tensors of a batch, by their names."""


def shapes_of(batch: Any, name: Callable[[Any], str]) -> dict[str, torch.Size]:
    """The shapes of a batch's tensors; ``name`` makes a name of a path in it."""
    paths, _ = pytree.tree_flatten_with_path(batch)
    return {name(path): leaf.shape for path, leaf in paths if isinstance(leaf, Tensor)}


class Varying(NamedTuple):
    """A dimension of a tensor that is not the same in all batches."""

    name: str
    dimension: int
    dimensions: int  # of the tensor
    sizes: tuple[int, ...]  # that were seen, ascending

    def __str__(self) -> str:
        *others, last = map(str, self.sizes)
        return f"{self.name}, dimension {self.dimension}: {', '.join(others)} and {last} seen"

    def remedy(self) -> str:
        """Code that pads, and what else there is."""
        size, i = 1 << (self.sizes[-1] - 1).bit_length(), self.dimension
        before = "0, 0, " * (self.dimensions - 1 - i)
        return (
            f"pad to one size, in collate_fn or the dataset ({size} here, and a mask where padding"
            " must not count):\n"
            f"      x = torch.nn.functional.pad(x, ({before}0, {size} - x.shape[{i}]))\n"
            "    or to the next of a few sizes (buckets), each of which gets a program"
        )


def too_many(stage: str, found: list[Varying], most: int) -> InputChanged:
    """The error for batches of more shapes than ``most``, each of which has a program."""
    return InputChanged(
        f"The {stage} step needs another program: {'; '.join(map(str, found))}. Each shape is a"
        f" program of its own, and {most} may be built.",
        remedy=f"{found[0].remedy()}; or backend('CSX', max_programs=n), for n of them",
    )


def varying(batches: Iterable[Shapes]) -> list[Varying]:
    """The dimensions in which tensors of these batches differ."""
    first, *others = batches
    found = []
    for name, shape in first.items():
        shapes = {shape, *(other[name] for other in others if name in other)}
        if len({len(one) for one in shapes}) == 1:
            for i, sizes in enumerate(zip(*shapes, strict=True)):
                if len(set(sizes)) > 1:
                    found.append(Varying(name, i, len(shape), tuple(sorted(set(sizes)))))
    return found
