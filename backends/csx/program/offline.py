"""compile_only and validate_only: a run that builds its programs, and leaves all else as it was.

A ``StepFunction`` raises ``BuiltOnly`` where it would run for the first time; whoever drives it
catches that and goes on to the next one. Nothing here trains, logs or saves.
"""

from __future__ import annotations

import contextlib
import tempfile
from typing import Any

from lightning.pytorch.loggers.logger import DummyLogger

from fulgurite.backends.csx.graph import rng
from fulgurite.backends.csx.state import Snapshot


class BuiltOnly(Exception):
    """A step was built and, as the backend asks, not run. No error: whoever calls it decides.

    Args:
        result: what the step would return, with tensors that have no value.
    """

    def __init__(self, result: Any) -> None:
        super().__init__()
        self.result = result


class _Silent(DummyLogger):
    """Stands in for a logger; Lightning finalizes it as the last thing of a run, however it ends.

    Args:
        trainer: gets its own loggers back then.
    """

    def __init__(self, trainer: Any) -> None:
        super().__init__()
        self._trainer, self._own = trainer, trainer.loggers
        self._folder = tempfile.TemporaryDirectory()

    @property
    def save_dir(self) -> str:
        """A folder for what callbacks save beside the logs (LightningCLI's config), for a while."""
        return self._folder.name

    def finalize(self, status: str) -> None:
        """Put the real loggers back."""
        self._folder.cleanup()
        self._trainer.loggers = self._own


def put_aside(trainer: Any) -> contextlib.ExitStack:
    """Keep a run from leaving traces; closing what this returns puts everything back.

    Loggers write nothing, the progress bar stays empty; random states and what checkpoint callbacks
    found out (their folder, which loggers decide) become what they were.

    Args:
        trainer: a ``pl.Trainer``, whose attributes have no types.
    """
    stack = contextlib.ExitStack()
    stack.callback(rng.restore, rng.collect())
    # their folder follows from the loggers, and these are none for now
    stack.callback(Snapshot(trainer.checkpoint_callbacks).restore)
    trainer.loggers = [_Silent(trainer) for _ in trainer.loggers]
    bar = trainer.progress_bar_callback
    if bar is not None and getattr(bar, "is_enabled", False):
        bar.disable()
        stack.callback(bar.enable)
    return stack


def put_generators_aside(stack: contextlib.ExitStack, loader: object) -> None:
    """Let the generators of a loader be put back too."""
    for generator in rng.generators_of(loader):
        stack.callback(generator.set_state, generator.get_state())
