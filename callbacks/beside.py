"""Checkpoints of a fit are written beside its steps.

``Checkpoint`` and Lightning's own ``ModelCheckpoint`` write in a thread while steps run. Whoever
else saves (subclasses, other callbacks, a script) has the file when ``save_checkpoint`` returns.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from types import TracebackType
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import Logger, TensorBoardLogger

from fulgurite.backends.checkpoints.plugin import CheckpointFiles, files_of
from fulgurite.backends.patches import Change, patched

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
    """A ModelCheckpoint that saves beside; it asks which files there are (Lightning 2.6.6)."""
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
