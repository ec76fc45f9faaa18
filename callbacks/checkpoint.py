"""Checkpoints by the number of steps; and the folders of all, tried before the first step."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterator
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Literal
from weakref import proxy

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.nn.parameter import is_lazy

from fulgurite.backends.checkpoints.damage import CheckpointError
from fulgurite.backends.checkpoints.files import part, sweep
from fulgurite.backends.checkpoints.folders import check_checkpoint, is_folder
from fulgurite.backends.checkpoints.plugin import files_of, is_local
from fulgurite.callbacks.saving import SaveAnnouncer, SaveObserver, fields_of, saved_beside
from fulgurite.callbacks.sparse import SparseCallback, only_builds

_STAMP = "%Y%m%d_%H%M%S_%f"


class Checkpoint(SaveAnnouncer, SparseCallback, ModelCheckpoint):
    """Writes Lightning checkpoints every n optimizer steps and at the end of a fit.

    They lie in the trainer's ``default_root_dir`` (``model_dir``) itself and load in Lightning, as
    Lightning's load here. A file appears when it is complete, never before. One that exists is not
    overwritten: the time follows the new one's step (``{step}_YYYYmmdd_HHMMSS_microseconds``).
    ``fit(ckpt_path="last")`` takes the newest of the folder. ``trainer.checkpoint_callback`` is
    this object, and ``best_model_path`` the file that it wrote last.

    Args:
        steps: after every so many optimizer steps (``trainer.global_step``), and at the end of a
            fit; left out, at the end alone; None, never.
        autoload_last_checkpoint: whether a run from a parameter file without ``ckpt_path`` goes on
            from the newest checkpoint in the folder. ``Trainer.fit`` called from Python does not
            look at it.
        disable_strict_checkpoint_loading: let checkpoints load that lack weights of the module or
            have others (``module.strict_loading = False``).
        save_initial_checkpoint: write one before the first step of a fit, too.
        checkpoint_name: of the file; ``{step}`` is the optimizer step.

    Raises:
        ValueError: ``steps`` is no such number, ``checkpoint_name`` has no ``{step}`` or more.
    """

    def __init__(
        self,
        steps: int | Literal["end"] | None = "end",
        autoload_last_checkpoint: bool = True,
        disable_strict_checkpoint_loading: bool = False,
        save_initial_checkpoint: bool = False,
        checkpoint_name: str = "checkpoint_{step}.ckpt",
    ) -> None:
        if steps not in (None, "end") and (type(steps) is not int or steps < 1):
            raise ValueError(
                f"Checkpoint: steps is a number of optimizer steps of at least 1; got {steps!r}."
                " Leave it out for one checkpoint at the end, or give None for none."
            )
        _check_name(checkpoint_name)
        super().__init__(save_top_k=-1)
        self.steps = steps
        self.autoload_last_checkpoint = autoload_last_checkpoint
        self.disable_strict_checkpoint_loading = disable_strict_checkpoint_loading
        self.save_initial_checkpoint = save_initial_checkpoint
        self.checkpoint_name = checkpoint_name
        self._saved_at: int | None = None  # the step of the last one, in this fit

    # -- what is there -----------------------------------------------------------------------

    def newest(self, folder: str | Path) -> Path | None:
        """The newest checkpoint in a folder, by step and then by time; None where there is none.

        Only files count whose names this callback would give.
        """
        found = self.found(folder)
        return found[-1] if found else None

    def found(self, folder: str | Path) -> list[Path]:
        """The checkpoints in a folder, the newest last; as for ``newest``, others do not count."""
        return [path for _, _, path in sorted(self._found(Path(folder)))]

    def newest_whole(self, folder: str | Path) -> Path | None:
        """The newest that is not damaged, with a warning about those that are.

        Raises:
            CheckpointError: there are some, and all are damaged.
        """
        damaged: list[CheckpointError] = []
        for path in reversed(self.found(folder)):
            try:
                check_checkpoint(path)
            except CheckpointError as error:
                damaged.append(error)
                continue
            for one in damaged:
                rank_zero_warn(f"{one.path} {one.what}. An older one is taken: {path}")
            return path
        if damaged:
            remedy = "No older one is whole. ckpt_path=None (null in a file) begins anew."
            raise CheckpointError(damaged[0].path, damaged[0].what, remedy)
        return None

    def _found(self, folder: Path) -> Iterator[tuple[int, str, Path]]:
        before, after = map(re.escape, self.checkpoint_name.split("{step}"))
        pattern = re.compile(rf"{before}(\d+)(?:_(\d{{8}}_\d{{6}}_\d{{6}}))?{after}")
        for path in folder.glob("*") if folder.is_dir() else ():
            match = pattern.fullmatch(path.name)
            if match and (path.is_file() or is_folder(path)):
                yield int(match[1]), match[2] or "", path

    # -- when to save ------------------------------------------------------------------------

    def every_n_steps(self, trainer: pl.Trainer) -> int:
        """Every ``steps``; 1 under manual optimization, where a batch has any number of them."""
        if not isinstance(self.steps, int):
            return 0
        return self.steps if trainer.lightning_module.automatic_optimization else 1

    @property
    def state_key(self) -> str:
        """The name under which a checkpoint keeps the state of this callback."""
        return type(self).__qualname__

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Find the folder; say how strictly the module loads."""
        if "://" in str(trainer.default_root_dir):
            raise ValueError(
                "Checkpoint writes to a local folder; the trainer's default_root_dir (model_dir)"
                f" is {trainer.default_root_dir!r}. Use Lightning's ModelCheckpoint there."
            )
        self.dirpath = trainer.default_root_dir
        if self.disable_strict_checkpoint_loading:
            pl_module.strict_loading = False

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save the beginning, if asked to."""
        self._saved_at = trainer.global_step if self._saves(trainer) else None
        if self.save_initial_checkpoint and trainer.global_step == 0 and self._saves(trainer):
            self.save(trainer)

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Save, where a multiple of ``steps`` was passed since the last one."""
        if not isinstance(self.steps, int) or self._saved_at is None:
            return
        # under manual optimization a batch may take several steps and pass by the multiple; with
        # accumulation several batches have the same step
        if trainer.global_step // self.steps > self._saved_at // self.steps:
            self.save(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write nothing: this callback counts steps, where Lightning's also counts epochs."""

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write nothing: this callback counts steps, where Lightning's follows metrics."""

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Write nothing: what an exception leaves is no state to resume from."""

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save the end, unless it was saved already."""
        if self._saved_at not in (None, trainer.global_step):
            self.save(trainer)

    # -- saving ------------------------------------------------------------------------------

    def save(self, trainer: pl.Trainer) -> Path:
        """Write a checkpoint of this moment; returns where it lies, or will once it is written.

        During the steps of a fit it is copied, and written beside the steps that follow. The line
        that names it is printed when it is there.
        """
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        observers = [callback for callback in callbacks if isinstance(callback, SaveObserver)]
        path, files = self._free_path(trainer), files_of(trainer)
        with saved_beside(trainer):
            for observer in observers:
                observer.before_checkpoint(trainer, path)
            self._write(trainer, path)
            self._saved_at = self._last_global_step_saved = trainer.global_step
            self.best_model_path = self.last_model_path = self._last_checkpoint_saved = str(path)
            say = partial(rank_zero_info, f"Checkpoint: {path}")
            say() if files is None else files.when_there(path, say)
            for observer in observers:
                observer.after_checkpoint(trainer, path)
        # a logger that uploads the file gets the callback as a weak proxy, as from Lightning's
        # ModelCheckpoint
        for logger in trainer.loggers if trainer.is_global_zero else ():
            logger.after_save_checkpoint(proxy(self))
        return path

    @staticmethod
    def _write(trainer: pl.Trainer, path: Path) -> None:
        """A checkpoint appears only when it is complete, whoever writes it."""
        if files_of(trainer) is not None:
            trainer.save_checkpoint(path, weights_only=False)
            return
        # with a CheckpointIO of the user's own nobody else renames it when it is whole
        part = path.with_name(f".{path.name}.part")
        trainer.save_checkpoint(part, weights_only=False)
        if trainer.is_global_zero:
            part.replace(path)
        trainer.strategy.barrier("Checkpoint")

    def _free_path(self, trainer: pl.Trainer) -> Path:
        folder, step, files = Path(trainer.default_root_dir), trainer.global_step, files_of(trainer)
        path = folder / self.checkpoint_name.format(step=step)
        if not (path.exists() if files is None else files.exists(path)):
            return path
        return folder / self.checkpoint_name.format(step=f"{step}_{datetime.now():{_STAMP}}")

    def _saves(self, trainer: pl.Trainer) -> bool:
        """Whether this run writes checkpoints: a run that only builds, or a dry one, does not."""
        is_dry: bool = trainer.fast_dev_run  # type: ignore[attr-defined]
        return self.steps is not None and not only_builds(trainer) and not is_dry

    # -- what Lightning asks a ModelCheckpoint ------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Keep nothing: which checkpoints there are is read from the folder."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore nothing: see ``state_dict``."""

    def _find_last_checkpoints(self, trainer: pl.Trainer) -> set[str]:
        """What ``ckpt_path="last"`` loads (checked against Lightning 2.6.6)."""
        newest = self.newest_whole(trainer.default_root_dir)
        return set() if newest is None else {str(newest)}


def _check_name(name: str) -> None:
    if fields_of(name) != ["step"] or "{step}" not in name:  # "{step:d}" would fit no file again
        raise ValueError(
            "Checkpoint: checkpoint_name is the name of a file with {step} in it, once, and nothing"
            f" else in braces; got {name!r}. For instance 'checkpoint_{{step}}.ckpt'."
        )


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
    if only_builds(trainer) or trainer.fast_dev_run:  # type: ignore[attr-defined]
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
        # by identity, for tied weights are in the file once
        found |= {id(one): one for one in made if isinstance(one, Tensor)}
        if not made:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            states += _STATES.get(type(optimizer), 0) * sum(p.nbytes for p in parameters)
    return states + sum(one.nbytes for one in found.values())
