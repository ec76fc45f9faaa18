"""Old checkpoints go."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from fulgurite.callbacks.saving import SaveObserver, check_saved


class KeepNCheckpoints(pl.Callback, SaveObserver):
    """Deletes old checkpoints: of those that ``Checkpoint`` wrote, only the newest n stay.

    A run that is resumed in the same folder goes on with the files of the run it resumes; other
    files are left alone, and so are those of SaveCheckpointState.

    Args:
        n: how many stay; None for all.
    """

    def __init__(self, n: int | None = None) -> None:
        if n is not None and (type(n) is not int or n < 1):
            raise ValueError(
                f"KeepNCheckpoints: n is a number of checkpoints of at least 1; got {n!r}. Leave it"
                " out to keep all."
            )
        self.n = n
        self._paths: list[str] = []

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse a run in which no ``Checkpoint`` writes checkpoints."""
        check_saved(self, trainer, stage)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Forget the files of a run in another folder: they are not this run's to delete."""
        folder = Path(trainer.default_root_dir).resolve()
        self._paths = [path for path in self._paths if Path(path).resolve().parent == folder]

    def before_checkpoint(self, trainer: pl.Trainer, path: Path) -> None:
        """Note the new file before its state is written: so the file lists itself on resume."""
        self._paths.append(str(path))

    def after_checkpoint(self, trainer: pl.Trainer, path: Path) -> None:
        """Delete the oldest file."""
        while self.n is not None and len(self._paths) > self.n:
            oldest = self._paths.pop(0)
            if Path(oldest).exists():
                trainer.strategy.remove_checkpoint(oldest)

    def state_dict(self) -> dict[str, Any]:
        """The paths of the files that stay."""
        return {"paths": list(self._paths)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with the files of the run that is resumed."""
        self._paths = list(state_dict["paths"])
