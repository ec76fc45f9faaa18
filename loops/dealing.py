"""An epoch that goes on in another number of processes: what is left of its data, dealt out anew.

Processes take the samples of an epoch's order by turns (``DistributedSampler``), so after some
batches all of them together have taken the order's beginning. A checkpoint has how much that is and
what the order was drawn from: the sampler's seed, or, of a process that was alone, the random
states of the epoch's beginning. Other processes draw the same order and take by turns what is left
of it; every later checkpoint of the epoch says what they took.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.loops.fetchers import _DataFetcher
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from fulgurite.backends.checkpoints.damage import CheckpointError
from fulgurite.backends.csx import ORDER, Order, rng
from fulgurite.loops import data_position


class _Once:
    """A sampler for the rest of one epoch: this process's samples of what is left of it.

    When it is iterated, the loader's own sampler takes its place again, for the epochs that follow.
    """

    def __init__(self, batch_sampler: BatchSampler, left: list[int]) -> None:
        self._of, self._own, self._left = batch_sampler, batch_sampler.sampler, left

    def __len__(self) -> int:
        return len(self._left)

    def __iter__(self) -> Any:
        self._of.sampler = self._own
        return iter(self._left)


def add_order(trainer: Any, found: dict[str, Any]) -> None:
    """Add to a position what other processes need to go on within the epoch, where they can.

    Args:
        trainer: a ``pl.Trainer``, whose attributes have no types.
        found: the position.
    """
    epoch_loop = trainer.fit_loop.epoch_loop
    order = epoch_loop.order or _order_of(trainer)
    if order is None:
        return
    [loader] = trainer.fit_loop._combined_loader.flattened
    seen = epoch_loop.batch_progress.current.ready
    taken = order.taken + (seen - order.batches) * loader.batch_size * trainer.world_size
    found[ORDER] = {**asdict(order), "taken": taken, "batches": seen}


def _order_of(trainer: Any) -> Order | None:
    """That of an epoch which begins; None where it is not known which samples processes take."""
    loaders = trainer.fit_loop._combined_loader.flattened
    if len(loaders) != 1 or not isinstance(loaders[0], DataLoader):
        return None
    [loader] = loaders
    if data_position.has_state(loader) or isinstance(loader.dataset, IterableDataset):
        return None
    # what another kind of batch sampler takes of the order is not known, nor where
    # limit_train_batches cuts it
    if type(loader.batch_sampler) is not BatchSampler or trainer.num_training_batches != len(
        loader
    ):
        return None
    sampler: Any = loader.batch_sampler.sampler
    kind, own = type(sampler), getattr(sampler, "generator", None)
    if kind is DistributedSampler and sampler.num_replicas == trainer.world_size:
        return Order(0, 0, sampler.shuffle, sampler.seed, False, False)
    if trainer.world_size > 1 or own not in (None, loader.generator):
        return None
    draws = kind is RandomSampler
    if draws and (sampler.replacement or sampler.num_samples != len(sampler.data_source)):
        return None
    if not draws and kind is not SequentialSampler:
        return None
    return Order(0, 0, draws, None, loader.num_workers > 0, own is not None)


def deal(epoch_loop: Any, restored: dict[str, Any], fetcher: _DataFetcher, first: bool) -> bool:
    """Make the fetcher's next batches what is left of an epoch, where it is dealt out anew.

    Args:
        epoch_loop: of the run that goes on; gets the order, and its epoch a length of its own.
        restored: a position.
        fetcher: of the training loaders.
        first: it is the first epoch.

    Returns:
        Whether it is; if not, the epoch goes on in as many processes.
    """
    order = Order(**restored[ORDER]) if ORDER in restored else None
    if order is None or not order.dealt or epoch_loop.batch_progress.is_last_batch:
        return False
    trainer = epoch_loop.trainer
    if _order_of(trainer) is None:
        what = "ends within an epoch that other processes began, and this run's loader is another"
        remedy = "Go on with the loader that the run began with, without limit_train_batches."
        raise CheckpointError(str(trainer.ckpt_path), what, remedy)
    [loader] = fetcher.combined_loader.flattened
    samples = order.samples(loader, trainer.current_epoch, restored)
    loader.batch_sampler.sampler = _Once(
        loader.batch_sampler, _own(loader, samples, order, trainer)
    )
    # from here on the loader's length is that of the rest, and this epoch's is another than others'
    epoch_loop.order, batches = order, order.batches + len(loader)
    data_position.make_iterator(fetcher, first)
    rng.restore_with(restored, [loader])
    fetcher.fetched, fetcher.length = order.batches, batches
    _have_batches(trainer, batches)
    return True


def _own(loader: DataLoader[Any], samples: list[int], order: Order, trainer: Any) -> list[int]:
    """This process's turns at what is left; the last ones are filled up as the sampler would."""
    left, count = samples[order.taken :], trainer.world_size
    if getattr(loader.sampler, "drop_last", False):
        left = left[: len(left) // count * count]
    left += samples[: -len(left) % count]
    return left[trainer.global_rank :: count]


def forget(epoch_loop: Any) -> None:
    """Another epoch begins, which has as many batches as all others."""
    if epoch_loop.order is not None:
        epoch_loop.order, trainer = None, epoch_loop.trainer
        _have_batches(trainer, sized_len(trainer.fit_loop._combined_loader))


def _have_batches(trainer: Any, count: Any) -> None:
    trainer.fit_loop.max_batches = count
    if isinstance(trainer.val_check_interval, float) and trainer.val_check_batch is not None:
        trainer.val_check_batch = max(1, int(count * trainer.val_check_interval))
