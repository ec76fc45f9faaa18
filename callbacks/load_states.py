"""Loading some parts of a checkpoint."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import lightning.pytorch as pl
from lightning_utilities.core.rank_zero import rank_zero_info

from fulgurite.backends.csx.plugins.strategy import StaticGraph
from fulgurite.backends.patches import patched
from fulgurite.callbacks.checkpoint_states import STATES, check_there, chosen, without


class LoadCheckpointStates(pl.Callback):
    """Loads only these parts of the checkpoint that a run is given (``ckpt_path``).

    What is not loaded stays as the run makes it: with "model", training begins at step 0 with a
    fresh optimizer and these weights.

    Args:
        load_checkpoint_states: "all" or parts of a checkpoint, as a list or with commas between:
            model, optimizer, schedulers, global_step (the progress of the loops), callbacks, random
            (random states and position in the data), precision (the loss scale).
    """

    def __init__(self, load_checkpoint_states: str | list[str] = "all") -> None:
        name = type(self).__name__
        self.states = chosen(name, "load_checkpoint_states", load_checkpoint_states)
        self._aside = ExitStack()

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Filter checkpoints as the strategy loads them: no hook sees all of one early enough."""
        left_out = [state for state in STATES if state not in self.states]
        if not left_out:
            return
        strategy = trainer.strategy
        load = strategy.load_checkpoint

        def load_checkpoint(*args: Any, **kwargs: Any) -> dict[str, Any]:
            whole = load(*args, **kwargs)
            check_there("LoadCheckpointStates", whole, self.states)
            rank_zero_info(f"Not loaded from the checkpoint: {', '.join(left_out)}.")
            if "random" in left_out and isinstance(strategy, StaticGraph):
                strategy.restored = None
            return _with_own(trainer, without(whole, self.states))

        changes = [(strategy, "load_checkpoint", load_checkpoint)]
        self._aside.enter_context(patched(changes))

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Load whole checkpoints again."""
        self._aside.close()

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Load whole checkpoints again."""
        self._aside.close()


def _with_own(trainer: pl.Trainer, checkpoint: dict[str, Any]) -> dict[str, Any]:
    """What Lightning must find, from the run itself: its own weights, and states of nothing."""
    if "state_dict" not in checkpoint:
        checkpoint["state_dict"] = trainer.strategy.lightning_module_state_dict()
    return {"optimizer_states": [], "lr_schedulers": [], **checkpoint}
