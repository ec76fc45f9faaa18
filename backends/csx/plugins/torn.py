"""No checkpoint is written of a state that a step has written a part of, and then ended."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import lightning.pytorch as pl

from fulgurite.backends.checkpoints.plugin import files_of


def refuse_torn(trainer: pl.Trainer, path: str | Path) -> None:
    """Say that a checkpoint is not written, and which was written last.

    In ``on_exception`` by a warning, for the error of the step is the one to be seen.

    Raises:
        RuntimeError: anywhere else.
    """
    last = _last(trainer)
    told = (
        f"{path} was not written: a step failed or was interrupted in the middle of its updates, so"
        " weights, optimizer and buffers are not those after any step. "
        + (f"Go on from {last}." if last else "This run has no checkpoint from before it.")
    )
    if trainer.lightning_module._current_fx_name != "on_exception":
        raise RuntimeError(told)
    warnings.warn(told, stacklevel=2)


def _last(trainer: pl.Trainer) -> str | None:
    """The checkpoint that callbacks of the trainer wrote last, of those that are there."""
    files = files_of(trainer)
    if files is not None:
        files.wait()
    callbacks = trainer.checkpoint_callbacks
    saved = [getattr(one, "_last_checkpoint_saved", "") for one in callbacks]  # Lightning 2.6.6
    return max(filter(os.path.isfile, saved), key=os.path.getmtime, default=None)
