"""The order of an epoch's samples, as a checkpoint has it: another process can draw the same."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler

from fulgurite.backends.csx.graph.rng import restore_with

ORDER = "order"
"""The key of an epoch's order, in what a checkpoint holds beside Lightning's."""


@dataclass(frozen=True, slots=True)
class Order:
    """The order of an epoch's samples, and how many of them all processes have taken.

    Attributes:
        taken: samples.
        batches: of each process, until then.
        shuffled: whether it was drawn.
        seed: of a sampler that processes share; None where one process drew from random states.
        by_workers: whether it then had workers, which draw a number before.
        by_generator: whether it then drew from the loader's generator, not from torch's.
        dealt: whether the epoch went on in another number of processes already.
    """

    taken: int
    batches: int
    shuffled: bool
    seed: int | None
    by_workers: bool
    by_generator: bool
    dealt: bool = False

    def samples(self, loader: DataLoader[Any], epoch: int, states: dict[str, Any]) -> list[int]:
        """All of the epoch's samples; torch's random state is another one after that.

        Args:
            loader: of the run that goes on.
            epoch: its number.
            states: random states of the epoch's moments, of the run that began it.
        """
        every = range(len(loader.dataset))  # type: ignore[arg-type]
        if self.seed is not None:
            dataset: Any = every
            sampler = DistributedSampler[int](dataset, 1, 0, self.shuffled, self.seed)
            sampler.set_epoch(epoch)
            return list(sampler)
        if not self.shuffled:
            return list(every)
        generator = loader.generator if self.by_generator else None
        restore_with(states["iterator" if self.by_workers else "first_batch"], [loader])
        if self.by_workers:
            torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
        return list(RandomSampler(every, generator=generator))


def is_order(found: Any) -> bool:
    """Whether a checkpoint has an ``Order`` there."""
    if not isinstance(found, dict) or found.keys() != {one.name for one in fields(Order)}:
        return False
    counts = (found["taken"], found["batches"], 0 if found["seed"] is None else found["seed"])
    return all(isinstance(count, int) and count >= 0 for count in counts)
