"""The checkpoints that a trainer of a file has in its folder, and how far a checkpoint is."""

from __future__ import annotations

import os
from typing import Any

from lightning.pytorch.callbacks import Checkpoint as AnyCheckpoint

from fulgurite.backends.safe_load import read_rest
from fulgurite.callbacks import Checkpoint
from fulgurite.config.run.loading import model_dir
from fulgurite.config.run.refusing import LIGHTNINGS_PATHS
from fulgurite.config.schema.checking import Phase


def newest_of(phase: Phase) -> str | None:
    """The newest checkpoint of a trainer's folder, if the file wants it loaded."""
    saves = checkpoints_callback(phase)
    if saves is None or not saves.autoload_last_checkpoint:
        return None
    newest = saves.newest_whole(model_dir(phase.init))
    return None if newest is None else str(newest)


def all_of(phase: Phase) -> list[str]:
    """The checkpoints of a trainer's folder that the trainer itself wrote, by step."""
    saves = checkpoints_callback(phase) or Checkpoint()
    return [str(path) for path in saves.found(model_dir(phase.init))]


def checkpoints_callback(phase: Phase) -> Checkpoint | None:
    """The Checkpoint of a trainer, or one with its defaults; None where checkpoints are off."""
    init = phase.init
    if init.checkpoint is not None:
        return init.checkpoint
    for call in init.own_callbacks:
        target: Any = call.target
        # another checkpoint callback of the file says that checkpoints are its own affair
        if issubclass(target, AnyCheckpoint):
            return call() if issubclass(target, Checkpoint) else None
    return Checkpoint() if init.wants_checkpoints else None


def steps_of(path: str | None) -> int:
    """The optimizer steps that a checkpoint has behind it; weights are not read."""
    return progress_of(path)[0]


def progress_of(path: str | None) -> tuple[int, int]:
    """The optimizer steps and the epochs."""
    if path is None or path in LIGHTNINGS_PATHS or not os.path.exists(path):
        return 0, 0
    found = read_rest(path)
    return int(found.get("global_step", 0)), int(found.get("epoch", 0))
