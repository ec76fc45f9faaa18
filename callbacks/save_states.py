"""Smaller checkpoints beside the whole ones."""

from __future__ import annotations

from pathlib import Path
from string import Formatter
from typing import Any

import lightning.pytorch as pl

from fulgurite.callbacks.checkpoint_states import chosen, without
from fulgurite.callbacks.saving import SaveObserver, check_saved


class SaveCheckpointState(pl.Callback, SaveObserver):
    """Writes a smaller checkpoint beside every k-th one, which KeepNCheckpoints leaves alone.

    It loads like any other: into ``load_from_checkpoint``, or in a fit with
    ``LoadCheckpointStates`` of the same states.

    Args:
        k: after every so many checkpoints that ``Checkpoint`` writes.
        checkpoint_states: "all" or parts of a checkpoint, as a list or with commas between: model,
            optimizer, schedulers, global_step, callbacks, random, precision.
        checkpoint_name: of the file, in the folder of the whole one; ``{checkpoint_states}`` is the
            parts with underscores between, ``{ckpt_name}`` the name of the whole one.
    """

    def __init__(
        self,
        k: int,
        checkpoint_states: str | list[str] = "model",
        checkpoint_name: str = "{checkpoint_states}_{ckpt_name}",
    ) -> None:
        if type(k) is not int or k < 1:
            raise ValueError(
                f"SaveCheckpointState: k is a number of checkpoints of at least 1; got {k!r}. k=5"
                " writes a smaller checkpoint beside every fifth."
            )
        self.k = k
        self.states = chosen("SaveCheckpointState", "checkpoint_states", checkpoint_states)
        is_all = str(checkpoint_states).lower() == "all"
        self._label = "all" if is_all else "_".join(self.states)
        _check_name(checkpoint_name)
        self.checkpoint_name = checkpoint_name
        self._saved = 0
        self._whole: dict[str, Any] | None = None  # while one is being saved
        self._is_saving = False

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse a run in which no ``Checkpoint`` writes checkpoints."""
        check_saved(self, trainer, stage)

    def before_checkpoint(self, trainer: pl.Trainer, path: Path) -> None:
        """What is saved now is the checkpoint that the smaller one is a part of."""
        self._is_saving = True

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Take note of the checkpoint; hooks and the strategy add to it until it is saved."""
        self._whole = checkpoint if self._is_saving else None

    def after_checkpoint(self, trainer: pl.Trainer, path: Path) -> None:
        """Write a smaller checkpoint beside every k-th one."""
        whole, self._whole, self._is_saving = self._whole, None, False
        self._saved += 1
        if self._saved % self.k or not trainer.is_global_zero or whole is None:
            return
        name = self.checkpoint_name.format(checkpoint_states=self._label, ckpt_name=path.name)
        smaller = without(whole, self.states)
        trainer.strategy.checkpoint_io.save_checkpoint(smaller, path.with_name(name))

    def state_dict(self) -> dict[str, Any]:
        """The number of checkpoints so far."""
        return {"saved": self._saved}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on counting; the checkpoint itself was written before it was counted."""
        self._saved = state_dict["saved"] + 1


def _check_name(name: str) -> None:
    try:
        fields = {field for _, field, _, _ in Formatter().parse(name) if field is not None}
    except ValueError:
        fields = set()
    if fields != {"checkpoint_states", "ckpt_name"} or "/" in name:
        raise ValueError(
            "SaveCheckpointState: checkpoint_name is the name of a file with {checkpoint_states}"
            f" and {{ckpt_name}} in it, and nothing else in braces; got {name!r}."
        )
