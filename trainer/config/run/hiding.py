"""What came from the environment stays out of what a run writes and says."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl

from fulgurite.config.document.variables import Variables


@contextlib.contextmanager
def hiding(variables: Variables) -> Iterator[None]:
    """Write ``${NAME}`` for values of the environment in the errors of a block."""
    try:
        yield
    except Exception as error:
        variables.hide_in(error)
        raise


class HideVariables(pl.Callback):
    """Writes ``${NAME}`` for values of the environment in hyperparameters that a model saves.

    In checkpoints and in what loggers get: ``self.hparams`` of the model itself keeps them. Only
    strings are changed, so ``load_from_checkpoint`` needs those that hold one as an argument.

    Args:
        variables: of the file.
    """

    def __init__(self, variables: Variables) -> None:
        self._variables = variables

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Hide them in what loggers get (``_hparams_initial``, checked against Lightning 2.6.6)."""
        logged = getattr(pl_module, "_hparams_initial", None)
        if logged is not None:
            pl_module._hparams_initial = type(logged)(self._variables.hidden_in(dict(logged)))

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Hide them in what a checkpoint gets."""
        key = pl_module.CHECKPOINT_HYPER_PARAMS_KEY
        if key in checkpoint:
            checkpoint[key] = self._variables.hidden_in(checkpoint[key])
