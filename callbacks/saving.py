"""Around a checkpoint that is written: who is told of it, beside which steps, and which ones go.

``Checkpoint`` and Lightning's own ``ModelCheckpoint`` write in a thread while the steps of a fit
run. Whoever else saves (subclasses, other callbacks, a script) has the file when
``save_checkpoint`` returns.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from string import Formatter
from types import TracebackType
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import Logger, TensorBoardLogger

from fulgurite.backends.checkpoints.plugin import CheckpointFiles, files_of
from fulgurite.backends.patches import Change, patched


class SaveObserver:
    """A callback that ``Checkpoint`` tells of each checkpoint it writes; a mixin."""

    def before_checkpoint(self, trainer: pl.Trainer, path: Path) -> None:
        """A checkpoint is about to be written."""

    def after_checkpoint(self, trainer: pl.Trainer, path: Path) -> None:
        """A checkpoint was written."""


def fields_of(name: str) -> list[str]:
    """What the name of a file has in braces; nothing where it is no name, or cannot be read."""
    try:
        return [
            one for _, one, _, _ in Formatter().parse(name) if one is not None and "/" not in name
        ]
    except ValueError:
        return []


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


_DO_NOTHING = (Logger.after_save_checkpoint, TensorBoardLogger.after_save_checkpoint)


@contextlib.contextmanager
def beside_steps(trainer: pl.Trainer) -> Iterator[None]:
    """While the block, a fit, runs its steps, checkpoints may be written beside them.

    Before anybody's ``on_train_end`` all is written, and what is saved from there on is there when
    it is saved. What cannot be written is an error of the fit; where it ends with another, a note
    of that one.
    """
    files = files_of(trainer)
    if files is None or trainer.world_size > 1:
        yield
        return
    with contextlib.ExitStack() as stack:
        stack.push(partial(_end, files))
        files.is_training = True
        end = partial(_on_run_end, files, trainer.fit_loop.on_run_end)
        stack.enter_context(patched([(trainer.fit_loop, "on_run_end", end)]))
        for callback in trainer.checkpoint_callbacks:
            # a subclass may read the file as soon as it has saved it
            if type(callback) is ModelCheckpoint:
                stack.enter_context(patched(_changes(callback, files)))
        yield


@contextlib.contextmanager
def saved_beside(trainer: pl.Trainer) -> Iterator[None]:
    """Write what the block saves beside the steps of a fit, if there are any to come.

    A logger that is told of checkpoints reads them: with one, they are written at once.
    """
    files = files_of(trainer)
    told = [getattr(type(one), "after_save_checkpoint", None) for one in trainer.loggers]
    if files is None or not files.is_training or any(one not in _DO_NOTHING for one in told):
        yield
        return
    with files.beside():
        yield


def _changes(callback: ModelCheckpoint, files: CheckpointFiles) -> list[Change]:
    """Let a ModelCheckpoint save in the background (its methods are Lightning 2.6.6's).

    It is answered as if the files that are still being written were there.
    """
    return [
        (callback, "_save_checkpoint", partial(_save, callback._save_checkpoint)),
        (callback, "_link_checkpoint", partial(_link, files)),
        (callback, "file_exists", partial(_exists, files)),
    ]


def _save(save: Any, trainer: pl.Trainer, path: str) -> None:
    with saved_beside(trainer):
        save(trainer, path)


def _link(files: CheckpointFiles, trainer: pl.Trainer, target: str, name: str) -> None:
    files.link(target, name)


def _exists(files: CheckpointFiles, path: str, trainer: pl.Trainer) -> bool:
    return files.exists(path)


def _on_run_end(files: CheckpointFiles, on_run_end: Any) -> None:
    # before on_train_end: what hooks save from here on is there when they have saved it
    files.is_training = False
    files.wait()
    on_run_end()


def _end(
    files: CheckpointFiles,
    kind: type[BaseException] | None,
    error: BaseException | None,
    traceback: TracebackType | None,
) -> None:
    files.is_training = False
    try:
        files.wait()
    except OSError as failure:
        if error is None:
            raise
        error.add_note(f"Besides: {failure}")


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
