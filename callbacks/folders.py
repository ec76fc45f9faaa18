"""What is looked at before the first step: can this run write its checkpoints?"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.nn.parameter import is_lazy

from fulgurite.backends.checkpoints.files import part, sweep
from fulgurite.backends.checkpoints.plugin import files_of, is_local
from fulgurite.backends.csx.plugins.strategy import StaticGraph
from fulgurite.callbacks.checkpoint import Checkpoint

_PROBE = bytes(4096)
_STATES = {
    torch.optim.Adam: 2,
    torch.optim.AdamW: 2,
    torch.optim.NAdam: 2,
    torch.optim.RAdam: 2,
}
"""How many tensors of a parameter's size an optimizer keeps, where nobody made them yet."""


def check_folders(trainer: pl.Trainer) -> None:
    """Remove what killed processes left in the folders of a fit's checkpoints, and try to write.

    Raises:
        OSError: a folder cannot be written, or has too little free space for one checkpoint.
    """
    if files_of(trainer) is None or not trainer.is_global_zero:
        return
    for folder in {os.path.abspath(folder): None for folder in _folders(trainer)}:
        sweep(folder)
        _check_writable(Path(folder))
        _check_free(Path(folder), trainer)


def _folders(trainer: pl.Trainer) -> Iterator[str]:
    """The local folders that the callbacks of this fit write checkpoints to."""
    strategy = trainer.strategy
    builds = isinstance(strategy, StaticGraph) and strategy.backend.only_builds
    if builds or trainer.fast_dev_run:  # type: ignore[attr-defined]
        return
    for callback in trainer.checkpoint_callbacks:
        saves = False
        if isinstance(callback, Checkpoint):
            saves = callback.steps is not None
        elif isinstance(callback, ModelCheckpoint):
            saves = callback.save_top_k != 0 or bool(callback.save_last)
        folder = str(getattr(callback, "dirpath", None) or "")
        if saves and folder and is_local(folder):
            yield folder


def _check_writable(folder: Path) -> None:
    """Write a file and remove it; where there is no folder yet, in the one that it will be in."""
    there = folder
    while not os.path.lexists(there):
        there = there.parent
    try:
        with part(there) as file:
            file.write(_PROBE)
            os.fsync(file.fileno())
    except OSError as error:
        raise OSError(
            error.errno,
            f"The checkpoints of this run could not be written ({error.strerror})."
            " Nothing was trained. Make the folder writable, or give another model_dir",
            str(folder),
        ) from None


def _check_free(folder: Path, trainer: pl.Trainer) -> None:
    while not folder.exists():
        folder = folder.parent
    disk, needed = shutil.disk_usage(folder), _bytes(trainer)
    if disk.total and disk.free < needed:
        raise OSError(
            errno.ENOSPC,
            f"A checkpoint of this run takes about {needed / 1e6:,.1f} MB, and"
            f" {disk.free / 1e6:,.1f} MB are free. Nothing was trained. Free space, or give another"
            " model_dir",
            str(folder),
        )


def _bytes(trainer: pl.Trainer) -> int:
    """The bytes of a checkpoint's tensors, as far as they are known before the first step."""
    module = trainer.lightning_module
    tensors: list[Tensor] = [*module.parameters(), *module.buffers()]
    found = {id(one): one for one in tensors if not is_lazy(one)}
    states = 0
    for optimizer in trainer.optimizers:
        made = [value for state in optimizer.state.values() for value in state.values()]
        found |= {id(one): one for one in made if isinstance(one, Tensor)}
        if not made:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            states += _STATES.get(type(optimizer), 0) * sum(p.nbytes for p in parameters)
    return states + sum(one.nbytes for one in found.values())
