"""What callbacks build upon: some that cost most steps nothing, some that undo what they change.

A callback that says how seldom it needs the hooks around a batch is called that seldom on CSX;
elsewhere Lightning calls it on every batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import lightning.pytorch as pl
import torch
import torch.utils._pytree as pytree
from torch import Tensor

from fulgurite.backends.csx import StaticGraph

_AROUND_BATCHES = ("on_train_batch_start", "on_train_batch_end")


class SparseCallback(pl.Callback):
    """A callback with something to do around some batches only."""

    def every_n_steps(self, trainer: pl.Trainer) -> int:
        """On which steps CSX calls ``on_train_batch_start`` and ``on_train_batch_end``.

        Asked when an epoch begins. They are also called around the first batch of an epoch, and may
        be called around more, so they look themselves whether there is something to do. A subclass
        that overrides one of them and not this method is called around every batch.

        Returns:
            Multiples of this number; 1 for every batch, 0 for none.
        """
        return 1


class Undoing(pl.Callback):
    """A callback that changes something of a run, until it ends or fails.

    Attributes:
        undo: closing it takes the changes back.
    """

    def __init__(self) -> None:
        super().__init__()
        self.undo = ExitStack()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Take the changes back."""
        self.undo.close()

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Take the changes back."""
        self.undo.close()


def period(callback: SparseCallback, trainer: pl.Trainer) -> int:
    """``every_n_steps``; 1 where a subclass overrides the hooks around batches, and not it."""
    # the nearest to the object counts: a subclass with a hook of its own may need it on every batch
    for owner in (callback, *type(callback).__mro__):
        if "every_n_steps" in vars(owner):
            break
        if not vars(owner).keys().isdisjoint(_AROUND_BATCHES):
            return 1
    return callback.every_n_steps(trainer)


def log_steps(trainer: pl.Trainer) -> int:
    """Every how many optimizer steps values go to the loggers."""
    every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
    return every


def is_log_step(trainer: pl.Trainer) -> bool:
    """Whether the values of the training step that runs, or has just run, go to the loggers."""
    loop, every = trainer.fit_loop, log_steps(trainer)
    if not every or (loop.epoch_loop._batches_that_stepped + 1) % every:
        return False
    return not loop._should_accumulate()


def is_static(trainer: pl.Trainer) -> bool:
    """Whether the trainer's steps are programs: hooks inside them run once, while traced."""
    return isinstance(trainer.strategy, StaticGraph)


def only_builds(trainer: pl.Trainer) -> bool:
    """Whether the trainer's run builds its programs, and does nothing else."""
    return isinstance(trainer.strategy, StaticGraph) and trainer.strategy.only_builds


def logs_in_step(trainer: pl.Trainer) -> bool:
    """Whether a hook inside the step should log: a program always does, eager code when it is due.

    Lightning's ``self.log`` costs 350 µs (measured); a program's 1 µs.
    """
    return is_static(trainer) or is_log_step(trainer)


def log_values(trainer: pl.Trainer, values: Mapping[str, float]) -> None:
    """Send numbers of the host to the loggers, as the values of the step that runs or has just run.

    Past ``self.log``, as Lightning's own monitors do: each value there costs 350 µs, and 30 µs more
    when an epoch ends (measured, Lightning 2.6.6). Files of CSVLogger have a row of their own for
    them.
    """
    tensors = torch.tensor(list(values.values()), dtype=torch.float32).unbind()
    named = dict(zip(values, tensors, strict=True))
    connector = trainer._logger_connector
    connector._callback_metrics.update(named)
    connector._logged_metrics.update(named)
    for logger in trainer.loggers:
        logger.log_metrics(dict(values), step=trainer.fit_loop.epoch_loop._batches_that_stepped)


def samples_in(batch: Any) -> int | None:
    """The first dimension of the first tensor of a batch; None where there is none."""
    leaves = batch if type(batch) in (tuple, list) else pytree.tree_iter(batch)
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            if leaf.ndim:
                return leaf.shape[0]
        # the batch was taken for a flat one, without pytree's walk through it
        elif leaves is batch and isinstance(leaf, (tuple, list, dict)):
            return next(filter(None, map(samples_in, batch)), None)
    return None


def batches_ready(trainer: pl.Trainer) -> int:
    """How many training batches the loader has given, over all epochs and resumed runs."""
    return trainer.fit_loop.epoch_loop.batch_progress.total.ready


def same_size(trainer: pl.Trainer) -> bool:
    """Whether all training batches have as many samples: one program takes them all."""
    strategy = trainer.strategy
    return isinstance(strategy, StaticGraph) and strategy.backend.max_programs == 1
