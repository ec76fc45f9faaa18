"""At which moment of an epoch a checkpoint was written, and what of it is still to be done.

A checkpoint is written from a hook. What the loops do after that hook belongs to the run that goes
on from it: the row for the loggers, a validation that is due, plateau schedulers, the epoch's end.
Lightning 2.6.6 guesses from its counters, leaves a due validation out, calls the hooks of an
epoch's end twice, and begins another epoch where ``max_steps`` ended one early. Here the moment is
in the checkpoint, and the loops begin with the rest of it. Where a checkpoint has none (Lightning
wrote it, or it was written in the middle of a step), they do as Lightning's.

BATCH_END        in a hook at a batch's end: its row, validation if due, schedulers are to come
VALIDATION       in a validation within an epoch: all of it is done anew, from its random states
VALIDATION_END   in a hook at its end: schedulers are to come
BATCH_DONE       after all of that: the next batch is to come
EPOCH_END        in a hook at an epoch's end: plateau schedulers and the epoch's row are to come
EPOCH_DONE       after that, or before the first epoch: the next epoch is to come
"""

from __future__ import annotations

import warnings
from typing import Any

from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.loops.fit_loop import RestartStage
from lightning.pytorch.loops.utilities import _is_max_limit_reached
from torch import Tensor

from fulgurite.backends.csx import rng, strategy_of
from fulgurite.loops import accumulated, data_position, dealing
from fulgurite.loops.data_position import PROGRESS

BATCH_END, VALIDATION, VALIDATION_END = "batch_end", "validation", "validation_end"
BATCH_DONE, EPOCH_END, EPOCH_DONE = "batch_done", "epoch_end", "epoch_done"
WITHIN = (BATCH_END, VALIDATION, VALIDATION_END, BATCH_DONE)
UNFINISHED = (BATCH_END, VALIDATION, VALIDATION_END, EPOCH_END)
_BEGINNINGS = ("on_train_epoch_start", "on_train_batch_start")


def moment_of(trainer: Any) -> str | None:
    """The moment of a fit's epoch that is now; None in the middle of a step, and before it all.

    Args:
        trainer: a ``pl.Trainer``, whose attributes have no types.
    """
    epochs = trainer.fit_loop.epoch_progress.total
    # of this epoch: in the totals a batch that -1 skipped stays one that is not completed
    batches = trainer.fit_loop.epoch_loop.batch_progress.current
    if trainer.fit_loop._combined_loader is None:  # the fit has not begun: on_fit_start
        return None
    # in the middle of a step, as in on_before_optimizer_step: no run can begin there
    if batches.ready != batches.processed:
        return None
    if epochs.ready == epochs.started == epochs.processed:
        return EPOCH_DONE if epochs.completed == epochs.processed else EPOCH_END
    if not epochs.ready == epochs.started == epochs.processed + 1:
        return None
    if batches.completed < batches.processed:
        return BATCH_END
    if trainer.validating:
        return VALIDATION_END if trainer.fit_loop.epoch_loop.val_loop.ended else VALIDATION
    return BATCH_DONE


def add_progress(trainer: Any, found: dict[str, Any]) -> None:
    """Add to random states and data position what a run goes on with."""
    epoch_loop = trainer.fit_loop.epoch_loop
    moment = moment_of(trainer)
    if moment is None:
        _warn_of_hook(trainer)
        return
    if epoch_loop.stopped is not None:  # the epoch ended early: the run goes on within it
        found |= epoch_loop.stopped
        return
    states: dict[str, Any] = {"moment": moment, "logged": accumulated.collect(trainer)}
    states["gradients"] = _gradients(trainer)
    loader = epoch_loop.val_loop._combined_loader
    if loader is not None:
        states["validation"] = rng.collect_loaders(loader.flattened)
    if moment == VALIDATION:
        began = epoch_loop.val_loop.began
        found["rng"], states["validation"] = rng.portable(began["rng"]), began["generators"]
    found[PROGRESS] = states
    if moment in WITHIN:
        found[data_position.SAMPLE] = _sample(epoch_loop)
        dealing.add_order(trainer, found)


def _warn_of_hook(trainer: Any) -> None:
    """Say, once a run and hook, that a checkpoint of this hook cannot be gone on from exactly.

    The batch that is fetched by then, or whose order is drawn next, is fetched from random states
    that later hooks change, and of the hooks with this name some were called and others were not.
    """
    fit_loop, hook = trainer.fit_loop, trainer.lightning_module._current_fx_name
    begun = fit_loop._combined_loader is not None
    if not begun or hook not in _BEGINNINGS or hook in fit_loop.warned_hooks:
        return
    fit_loop.warned_hooks |= {hook}
    warnings.warn(
        f"A checkpoint was saved in {hook}, in the middle of what begins an"
        f" {'epoch' if hook == _BEGINNINGS[0] else 'optimization step'}: a run that goes on from it"
        " differs from the undisturbed one in what is drawn (shuffles, dropout), calls hooks again,"
        " and has lost what the epoch accumulated. Save it in on_train_start, on_train_batch_end"
        " or on_train_epoch_end, or with fulgurite.callbacks.Checkpoint or ModelCheckpoint, to go"
        " on exactly.",
        stacklevel=2,
    )


def stopped(trainer: Any) -> dict[str, Any] | None:
    """What checkpoints of a run hold that ends within an epoch: all as before the hooks of its end.

    None where the epoch was not ended early, by ``max_steps`` or somebody who asked for it.
    """
    epoch_loop = trainer.fit_loop.epoch_loop
    asked = trainer.should_stop or _is_max_limit_reached(trainer.global_step, epoch_loop.max_steps)
    if not asked or epoch_loop._num_ready_batches_reached():
        return None
    found = strategy_of(trainer).position()
    return found if found.get(PROGRESS, {}).get("moment") == BATCH_DONE else None


def _sample(epoch_loop: Any) -> str | None:
    """Of the batch that runs, for a later run to compare; None where somebody may change it."""
    training = strategy_of(epoch_loop.trainer).training
    batch, leave = epoch_loop.fetched, epoch_loop.hooks.leave_batches
    if batch is None or training is None or not leave:
        return None
    written = any(executable.written for executable in training.executables())
    return None if written else data_position.sample(batch)


def is_exact(trainer: Any) -> bool:
    """Whether a run goes on from a moment: the checkpoint says it, and counters were loaded."""
    loaded: bool = trainer.fit_loop._loaded_from_state_dict
    return loaded and PROGRESS in (strategy_of(trainer).restored or {})


def begin(trainer: Any) -> str | None:
    """Put back what ``add_progress`` found, loops' counters first; returns the moment, if any."""
    restored = strategy_of(trainer).restored
    if restored is None or not is_exact(trainer):
        return None
    states = restored[PROGRESS]
    moment: str = states["moment"]
    fit_loop = trainer.fit_loop
    if moment in WITHIN:
        for epochs in (fit_loop.epoch_progress.total, fit_loop.epoch_progress.current):
            epochs.processed = epochs.completed = epochs.started - 1
    if moment == VALIDATION:
        # the validation is done anew: what it did before the checkpoint would be counted twice
        batches = fit_loop.epoch_loop.val_loop.batch_progress
        for name, of_this in vars(batches.current).items():
            setattr(batches.total, name, getattr(batches.total, name) - of_this)
    device = trainer.strategy.root_device
    accumulated.restore(trainer, move_data_to_device(states["logged"], device))
    _put_gradients(trainer, move_data_to_device(states["gradients"], device))
    fit_loop.epoch_loop.val_loop.generators = states.get("validation")
    return moment


def set_window(trainer: Any) -> None:
    """Within an epoch: set how many batches a window has, as is done where one begins."""
    for one in trainer.callbacks:
        if isinstance(one, GradientAccumulationScheduler):
            one.on_train_epoch_start(trainer)


def restart_stage(moment: str) -> str:
    """Lightning's name of a moment: the hooks of the epoch's start are not called again."""
    if moment == EPOCH_DONE:
        return RestartStage.NONE
    if moment == EPOCH_END:
        return RestartStage.RESTARTED_ON_EPOCH_END
    return RestartStage.RESTARTED_MID_EPOCH


def _gradients(trainer: Any) -> dict[str, Tensor]:
    """Gradients that the next step adds to: those of a window of micro-batches that is not over."""
    module, training = trainer.lightning_module, strategy_of(trainer).training
    if training is None:
        return {}
    # a window that has just ended leaves gradients that nobody adds to
    if module.automatic_optimization and not trainer.fit_loop._should_accumulate():
        return {}
    held = training.gradients.values()
    found = {f"{name}.grad": gradient.clone() for name, gradient in held.items()}
    if strategy_of(trainer).keeps_gradients or not module.automatic_optimization:
        for name, p in module.named_parameters():
            if type(p.grad) is Tensor:  # else there is none, or nobody has its values
                found[f"p.{name}"] = p.grad.detach().clone()
    return found


def _put_gradients(trainer: Any, gradients: dict[str, Tensor]) -> None:
    training = strategy_of(trainer).training
    parameters = dict(trainer.lightning_module.named_parameters())
    kept = {}
    for name, gradient in gradients.items():
        if name.endswith(".grad"):
            kept[name.removesuffix(".grad")] = gradient
        elif name[2:] in parameters:
            parameters[name[2:]].grad = gradient
    if training is not None:
        training.gradients.begin_with(kept)
