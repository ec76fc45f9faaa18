"""Who is told that ``Checkpoint`` writes a checkpoint."""

from __future__ import annotations

from pathlib import Path

import lightning.pytorch as pl


class SaveObserver:
    """A callback that ``Checkpoint`` tells of each checkpoint it writes; a mixin."""

    def before_checkpoint(self, trainer: pl.Trainer, path: Path) -> None:
        """A checkpoint is about to be written."""

    def after_checkpoint(self, trainer: pl.Trainer, path: Path) -> None:
        """A checkpoint was written."""


class SaveAnnouncer:
    """A callback that tells every ``SaveObserver`` what it writes; a mixin of ``Checkpoint``."""


def check_saved(observer: pl.Callback, trainer: pl.Trainer, stage: str) -> None:
    """Raise a ValueError where nobody tells an observer of checkpoints."""
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    if stage == "fit" and not any(isinstance(callback, SaveAnnouncer) for callback in callbacks):
        raise ValueError(
            f"{type(observer).__name__} follows fulgurite.callbacks.Checkpoint, and the trainer has"
            " none. Add Checkpoint(steps=1000) to its callbacks."
        )
