"""Checkpoints that are refused: no fit could go on from them, or they would hold half a step."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import nn
from torch.optim import Optimizer

from fulgurite.backends.checkpoints.damage import ANOTHER, CheckpointError, check_lightning
from fulgurite.backends.checkpoints.plugin import files_of
from fulgurite.backends.csx.plugins.checkpoint_position import ORDER, RANKS, is_order
from fulgurite.backends.csx.state import is_finite

_LIKE_THEIR_PARAMETER = frozenset(
    {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "grad_avg"}
    | {"acc_delta", "sum", "ax", "exp_inf", "prev", "step_size"}
)
"""Names of state that has its parameter's shape in torch's optimizers and ours (torch 2.13); in
others' it may have another."""


class ChecksStates(Strategy):
    """The part of a strategy that looks at optimizers' states before it loads any."""

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the states of all optimizers; those that do not fit are a CheckpointError."""
        module = self.lightning_module
        assert module is not None
        path, states = module.trainer.ckpt_path, checkpoint["optimizer_states"]
        check_optimizer_states(path, module, self.optimizers, states)
        super().load_optimizer_state_dict(checkpoint)


def read_position(strategy: Strategy, path: str | Path, checkpoint: Any, key: str) -> Any:
    """What a checkpoint has under our key; None where it is of Lightning's.

    Raises:
        CheckpointError: it is no Lightning checkpoint; or a fit is to go on from it, and what it
            has there is not what we put there.
    """
    check_lightning(path, checkpoint)
    _warn_of_weights(path, checkpoint)
    found, module = checkpoint.get(key), strategy.lightning_module
    trainer = None if module is None else module._trainer
    # whoever validates, tests or predicts takes the weights alone
    fits = trainer is None or trainer.state.fn == TrainerFn.FITTING
    if fits and trainer is not None and checkpoint.get("optimizer_states") == []:
        rank_zero_warn(f"{path} has no state of optimizers: they begin anew, without moments.")
    if found is None or not fits or _is_position(found):
        return found
    held = f"a {type(found).__name__}"
    if isinstance(found, dict):
        held = f"a dict with the keys {', '.join(map(repr, list(found)[:5]))}"
    what = (
        f"has under {key!r} not what Fulgurite writes there (random states, the place in the data"
        f" and in the epoch), but {held}"
    )
    remedy = f"Load another checkpoint; or take {key!r} out of it, and it is one of Lightning's."
    raise CheckpointError(path, what, remedy)


def _warn_of_weights(path: str | Path, checkpoint: Any) -> None:
    """Warn of weights that are not finite: whatever is computed with them is not, either."""
    weights = checkpoint.get("state_dict")
    bad = [
        name
        for name, value in (weights.items() if isinstance(weights, dict) else ())
        if isinstance(value, torch.Tensor) and value.is_floating_point()
        if not is_finite(value)
    ]
    if bad:
        rank_zero_warn(
            f"{path} holds numbers that are not finite, in {_in_short(bad)}. Load one"
            " from before; callbacks=[fulgurite.callbacks.CheckLoss()] ends a run before it writes"
            " such a one."
        )


def _in_short(names: list[str]) -> str:
    others = f" and {len(names) - 3} others" if len(names) > 3 else ""
    return f"{', '.join(names[:3])}{others}"


def _is_position(found: Any) -> bool:
    """Whether it is what ``position_of`` and the loops put into a checkpoint."""
    if not isinstance(found, dict):
        return False
    moments = [found[name] for name in ("iterator", "first_batch") if name in found]
    progress, ranks = found.get("progress"), found.get(RANKS, [])
    if not isinstance(ranks, list) or any(RANKS in one for one in ranks if isinstance(one, dict)):
        return False
    if ORDER in found and (progress is None or not is_order(found[ORDER])):
        return False
    return all([*map(_are_states, [found, *moments]), *map(_is_position, ranks)]) and (
        progress is None
        or (isinstance(progress, dict) and {"moment", "logged", "gradients"} <= progress.keys())
    )


def _are_states(found: Any) -> bool:
    """Whether it is what ``rng.collect_with`` found, made portable."""
    if not isinstance(found, dict) or not isinstance(found.get("generators"), list):
        return False
    states = found.get("rng")
    return isinstance(states, dict) and {"torch", "python", "numpy"} <= states.keys()


def check_optimizer_states(
    path: object, module: nn.Module, optimizers: Sequence[Optimizer], states: Sequence[Any]
) -> None:
    """Compare the state of all optimizers with their parameters, before any is loaded.

    A parameter whose state is missing gets a line, for that is also how one is saved that never
    had a gradient.

    Raises:
        CheckpointError: a state has not its parameter's shape.
    """
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    for optimizer, state in zip(optimizers, states, strict=False):
        kind = type(optimizer)
        knows = kind.__module__.split(".")[0] in ("torch", "fulgurite")
        if not isinstance(state, Mapping) or not {"state", "param_groups"} <= state.keys():
            continue  # an optimizer of somebody's own, which reads it
        missing = []
        for position, parameter in _pairs(optimizer, state):
            name = names.get(id(parameter), f"parameter {position}")
            values = state["state"].get(position)
            if values is None:
                missing += [name] if parameter.requires_grad else []
                continue
            for key in _LIKE_THEIR_PARAMETER & values.keys() if knows else ():
                value = values[key]
                if isinstance(value, torch.Tensor) and value.shape != parameter.shape:
                    what = (
                        f"does not fit: {kind.__name__}'s {key!r} of {name} has the shape"
                        f" {tuple(value.shape)}, and {name} has {tuple(parameter.shape)}"
                    )
                    raise CheckpointError(str(path), what, ANOTHER)
        if missing and state["state"]:
            rank_zero_info(
                f"{path} has no state of {kind.__name__} for {_in_short(missing)}: it"
                " begins anew there. That is as it should be where they never had a gradient."
            )


def _pairs(optimizer: Optimizer, state: Mapping[str, Any]) -> list[tuple[Any, nn.Parameter]]:
    """What a saved optimizer calls each parameter, and the parameter; torch checks the numbers."""
    return [
        pair
        for saved, group in zip(state["param_groups"], optimizer.param_groups, strict=False)
        for pair in zip(saved["params"], group["params"], strict=False)
    ]


def refuse_half_a_step(trainer: pl.Trainer, path: str | Path) -> None:
    """Say that a checkpoint is not written, and which was written last.

    In ``on_exception`` by a warning, for the error of the step is the one to be seen.

    Raises:
        RuntimeError: anywhere else.
    """
    last = _last(trainer)
    what = (
        f"{path} was not written: a step failed or was interrupted in the middle of its updates, so"
        " weights, optimizer and buffers are not those after any step. "
        + (f"Go on from {last}." if last else "This run has no checkpoint from before it.")
    )
    if trainer.lightning_module._current_fx_name != "on_exception":
        raise RuntimeError(what)
    warnings.warn(what, stacklevel=2)


def _last(trainer: pl.Trainer) -> str | None:
    """The checkpoint that callbacks of the trainer wrote last, of those that are there."""
    files = files_of(trainer)
    # a checkpoint that is written beside the steps has no name yet
    if files is not None:
        files.wait()
    callbacks = trainer.checkpoint_callbacks
    saved = [getattr(one, "_last_checkpoint_saved", "") for one in callbacks]  # Lightning 2.6.6
    return max(filter(os.path.exists, saved), key=os.path.getmtime, default=None)
