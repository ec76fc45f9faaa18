"""Where a run is, as our checkpoints hold it beside Lightning's part: random states, and data.

Several processes write one position each, and as many go on from them, or more, or less: the order
of an epoch's samples is one that another process can draw.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler

from fulgurite.backends.checkpoints.damage import CheckpointError
from fulgurite.backends.csx.graph import rng
from fulgurite.backends.csx.graph.rng import restore_with

Progress = Callable[[pl.Trainer, dict[str, Any]], None]
"""Adds to a position what the loops know of it."""


def position_of(
    trainer: pl.Trainer, moments: dict[str, Any], progress: Progress | None
) -> dict[str, Any]:
    """Random states, data position, and what ``progress`` adds, in tensors and plain values.

    Args:
        trainer: whose run it is.
        moments: random states at moments of the epoch, by name.
        progress: None where no run can go on from the checkpoint.
    """
    loader = trainer.fit_loop._combined_loader
    found = {
        **rng.portable(rng.collect_with(loader.flattened if loader is not None else [])),
        **{moment: rng.portable(states) for moment, states in moments.items()},
    }
    if progress is not None:
        progress(trainer, found)
    return found


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
            # of one process: the whole order, of which several take turns
            sampler = DistributedSampler[int](dataset, 1, 0, self.shuffled, self.seed)
            sampler.set_epoch(epoch)
            return list(sampler)
        if not self.shuffled:
            return list(every)
        generator = loader.generator if self.by_generator else None
        restore_with(states["iterator" if self.by_workers else "first_batch"], [loader])
        if self.by_workers:
            # the seed of the workers, which torch's iterator draws before the sampler draws the
            # order
            torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
        return list(RandomSampler(every, generator=generator))


def is_order(found: Any) -> bool:
    """Whether a checkpoint has an ``Order`` there."""
    if not isinstance(found, dict) or found.keys() != {one.name for one in fields(Order)}:
        return False
    counts = (found["taken"], found["batches"], 0 if found["seed"] is None else found["seed"])
    return all(isinstance(count, int) and count >= 0 for count in counts)


RANKS = "ranks"
"""The key of what each process has, in what a checkpoint holds beside Lightning's."""


SHAPES = "shapes"
"""The key of the whole shapes of gradients, in the progress of a process that holds parts."""


def position_of_rank(
    path: object,
    checkpoint: Mapping[str, Any],
    position: Any,
    rank: int,
    count: int,
    cut: Callable[[Tensor], Tensor] | None = None,
) -> Any:
    """Where a process was, or is to go on where there were more or less of them.

    Args:
        path: of the checkpoint.
        checkpoint: Lightning's part of it.
        position: ours.
        rank: of the process.
        count: of the processes that go on.
        cut: makes of a gradient what this process holds of it; None where it holds all.

    Raises:
        CheckpointError: there were more or less, in the middle of an epoch whose data cannot be
            dealt out anew.
    """
    if position is None:
        return None
    ranks = position.get(RANKS, [position])
    if len(ranks) == count:
        was_cut = SHAPES in ranks[0].get("progress", {})
        is_as_it_was = was_cut == (cut is not None)
        return ranks[rank] if is_as_it_was else _with_window(ranks, ranks[rank], cut)
    if _is_within_epoch(checkpoint) and any(ORDER not in one for one in ranks):
        what = (
            f"was written by {len(ranks)} process{'es' * (len(ranks) > 1)} in the middle of an"
            f" epoch, and {count} would go on with another part of its data each: of samplers of"
            " one's own, streams, several loaders and limit_train_batches it is not known which"
        )
        remedy = f"Go on with {len(ranks)}; or from a checkpoint that an epoch's end wrote."
        raise CheckpointError(str(path), what, remedy)
    return _with_window(ranks, _of_others(ranks, rank), cut)


def _with_window(
    ranks: Sequence[dict[str, Any]], own: dict[str, Any], cut: Callable[[Tensor], Tensor] | None
) -> dict[str, Any]:
    """With the gradients of a window that is not over: what each process held, for another one.

    Each held its own of all, whose mean counts; or a part of the mean.
    """
    if any("progress" not in one for one in ranks):
        return own
    windows = [one["progress"]["gradients"] for one in ranks]
    shapes = own["progress"].get(SHAPES, {})
    gradients: dict[str, Tensor] = {}
    for name in {name for one in windows for name in one}:
        held = [one[name] for one in windows if name in one]
        if name in shapes:
            shape = torch.Size(shapes[name])
            gradient = torch.cat(held)[: shape.numel()].view(shape)
        else:
            gradient = sum(held[1:], start=held[0]) / len(ranks)
        gradients[name] = gradient if cut is None else cut(gradient)
    return {**own, "progress": {**own["progress"], "gradients": gradients}}


def _of_others(ranks: Sequence[dict[str, Any]], rank: int) -> dict[str, Any]:
    """Where a process goes on that more or less of them began.

    The order of an epoch's data is rank 0's. What each has logged and counted in the epoch is left
    out.
    """
    first, own = ranks[0], ranks[rank % len(ranks)]
    found = own | {name: first[name] for name in ("iterator", "first_batch") if name in first}
    if ORDER in first:
        found[ORDER] = {**first[ORDER], "dealt": True}
    if all("progress" in one for one in ranks):
        logged: dict[str, Any] = {**own["progress"]["logged"], "results": {}, "metrics": {}}
        found["progress"] = {**own["progress"], "logged": logged}
    return found


def _is_within_epoch(checkpoint: Mapping[str, Any]) -> bool:
    """Whether a checkpoint was written in the middle of an epoch."""
    loops: Any = checkpoint.get("loops") or {}
    progress = loops.get("fit_loop", {}).get("epoch_loop.batch_progress", {})
    ready = progress.get("current", {}).get("ready", 0)
    return bool(ready) and not progress.get("is_last_batch", False)
