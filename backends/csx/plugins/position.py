"""What a checkpoint of ours holds beside Lightning's: where the run is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import lightning.pytorch as pl

from fulgurite.backends.csx.graph import rng

Progress = Callable[[pl.Trainer, dict[str, Any]], None]
"""Adds to a position what the loops know of it."""


class Positioned(Protocol):
    """What is asked of a strategy."""

    data_position: dict[str, Any]

    @property
    def lightning_module(self) -> pl.LightningModule | None: ...


def position_of(strategy: Positioned, progress: Progress | None) -> dict[str, Any]:
    """Random states, data position, and what ``progress`` adds, in tensors and plain values.

    Args:
        strategy: whose run it is.
        progress: None where no run can go on from the checkpoint.
    """
    assert strategy.lightning_module is not None
    trainer = strategy.lightning_module.trainer
    loader = trainer.fit_loop._combined_loader
    found = {
        **rng.portable(rng.collect_with(loader.flattened if loader is not None else [])),
        **{moment: rng.portable(states) for moment, states in strategy.data_position.items()},
    }
    if progress is not None:
        progress(trainer, found)
    return found
