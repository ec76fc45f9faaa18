"""The parts of a checkpoint, by their names in parameter files; loading or saving some alone."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning_utilities.core.rank_zero import rank_zero_info

from fulgurite.backends.backend import did_you_mean
from fulgurite.backends.csx import StaticGraph
from fulgurite.backends.patches import patched
from fulgurite.callbacks.saving import SaveObserver, check_saved, fields_of
from fulgurite.callbacks.sparse import Undoing

STATES: dict[str, tuple[str, ...]] = {
    "model": ("state_dict",),
    "optimizer": ("optimizer_states",),
    "schedulers": ("lr_schedulers",),
    "global_step": ("loops",),
    "callbacks": ("callbacks",),
    "random": ("fulgurite",),
    "precision": (
        "MixedPrecision",
        "EagerMixedPrecision",
        "CSXMixedPrecision",
        "native_amp_scaling_state",
    ),
}
"""Lightning's keys of each part. ``global_step`` is the progress of all loops, ``random`` random
states and the position in the data; what has none of these keys (hyperparameters, versions, states
of data modules, what hooks add) belongs to every part."""


def chosen(owner: str, argument: str, states: Any) -> tuple[str, ...]:
    """The names of parts that an argument gives, as a list or with commas; all for "all".

    Raises:
        ValueError: one of them is not known.
    """
    if isinstance(states, str):
        states = [state.strip() for state in states.split(",")]
    if not isinstance(states, Collection) or not all(isinstance(s, str) for s in states):
        raise _wrong(owner, argument, states, "")
    if [state.lower() for state in states] == ["all"]:
        return tuple(STATES)
    for state in states:
        if state not in STATES:
            raise _wrong(owner, argument, states, did_you_mean(state, [*STATES, "all"]))
    if not states:
        raise _wrong(owner, argument, states, "")
    return tuple(states)


def _wrong(owner: str, argument: str, given: Any, hint: str) -> ValueError:
    return ValueError(
        f"{owner}: {argument} is 'all' or parts of a checkpoint, as a list or with commas between;"
        f" got {given!r}.{hint} The parts are {', '.join(STATES)}."
    )


def keys_of(states: Iterable[str]) -> set[str]:
    """Lightning's keys of these parts."""
    return {key for state in states for key in STATES[state]}


def without(checkpoint: Mapping[str, Any], kept: Collection[str]) -> dict[str, Any]:
    """A checkpoint without the parts that are not ``kept``."""
    dropped = keys_of(STATES) - keys_of(kept)
    return {key: value for key, value in checkpoint.items() if key not in dropped}


def check_there(owner: str, checkpoint: Mapping[str, Any], wanted: Iterable[str]) -> None:
    """Raise a ValueError where a part that was asked for by name is not in a checkpoint."""
    there = [state for state in STATES if not keys_of([state]).isdisjoint(checkpoint)]
    missing = [state for state in wanted if state not in there]
    if missing:
        raise ValueError(
            f"{owner}: the checkpoint has no {', '.join(missing)}. It has {', '.join(there)}."
        )


class LoadCheckpointStates(Undoing):
    """Loads only these parts of the checkpoint that a run is given (``ckpt_path``).

    What is not loaded stays as the run makes it: with "model", training begins at step 0 with a
    fresh optimizer and these weights.

    Args:
        load_checkpoint_states: "all" or parts of a checkpoint, as a list or with commas between:
            model, optimizer, schedulers, global_step (the progress of the loops), callbacks, random
            (random states and position in the data), precision (the loss scale).
    """

    def __init__(self, load_checkpoint_states: str | list[str] = "all") -> None:
        super().__init__()
        name = type(self).__name__
        self.states = chosen(name, "load_checkpoint_states", load_checkpoint_states)

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
            # our strategy has taken the position out of the whole file by now
            if "random" in left_out and isinstance(strategy, StaticGraph):
                strategy.restored = None
            return _with_own(trainer, without(whole, self.states))

        changes = [(strategy, "load_checkpoint", load_checkpoint)]
        self.undo.enter_context(patched(changes))


def _with_own(trainer: pl.Trainer, checkpoint: dict[str, Any]) -> dict[str, Any]:
    """What Lightning must find, from the run itself: its own weights, and states of nothing."""
    if "state_dict" not in checkpoint:
        checkpoint["state_dict"] = trainer.strategy.lightning_module_state_dict()
    # without these keys Lightning says that the file has weights alone, and refuses it
    return {"optimizer_states": [], "lr_schedulers": [], **checkpoint}


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
        # others save too, such as ModelCheckpoint, and this hook hears of all
        self._whole = checkpoint if self._is_saving else None

    def after_checkpoint(self, trainer: pl.Trainer, path: Path) -> None:
        """Write a smaller checkpoint beside every k-th one."""
        whole, self._whole, self._is_saving = self._whole, None, False
        self._saved += 1
        if self._saved % self.k or whole is None:
            return
        name = self.checkpoint_name.format(checkpoint_states=self._label, ckpt_name=path.name)
        smaller, strategy = without(whole, self.states), trainer.strategy
        # Strategy.save_checkpoint of ours would put the random states back
        if isinstance(strategy, StaticGraph):
            strategy.write_checkpoint(smaller, path.with_name(name))
        else:
            strategy.save_checkpoint(smaller, path.with_name(name))

    def state_dict(self) -> dict[str, Any]:
        """The number of checkpoints so far."""
        return {"saved": self._saved}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on counting; the checkpoint itself was written before it was counted."""
        self._saved = state_dict["saved"] + 1


def _check_name(name: str) -> None:
    if {*fields_of(name)} != {"checkpoint_states", "ckpt_name"}:
        raise ValueError(
            "SaveCheckpointState: checkpoint_name is the name of a file with {checkpoint_states}"
            f" and {{ckpt_name}} in it, and nothing else in braces; got {name!r}."
        )
