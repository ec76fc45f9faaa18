"""From a plan to Trainer, module and data."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import lightning.pytorch as pl

from fulgurite.config.checking import Phase, check
from fulgurite.config.data import FileData
from fulgurite.config.modules import with_optimizer
from fulgurite.config.sections import Logging, Loop
from fulgurite.trainer import Trainer


class Loaded(NamedTuple):
    """What a parameter file describes: ``trainer.fit(module, data)`` runs it."""

    trainer: Trainer
    module: pl.LightningModule
    data: FileData


def load(
    file: str | os.PathLike[str] | Mapping[str, Any], overrides: Mapping[str, Any] | None = None
) -> Loaded:
    """Trainer, module and data of a parameter file with one trainer.

    Args:
        file: its path, or a dict of what it says.
        overrides: dotted keys (``trainer.init.loop.max_steps``) and the values that they get.

    Raises:
        ParameterFileError: with all the mistakes of the file, before anything is built.
    """
    plan = check(file, overrides)
    [phase] = plan.phases
    return built(phase)


def built(phase: Phase) -> Loaded:
    """Trainer, module and data of one trainer of a file."""
    init = phase.init
    if init.get("seed") is not None:
        pl.seed_everything(init["seed"], workers=True, verbose=False)
    trainer = Trainer(**trainer_arguments(init))
    module = init["model"]()
    with_optimizer(module, init)
    return Loaded(trainer, module, FileData(phase.stages))


def trainer_arguments(init: Mapping[str, Any]) -> dict[str, Any]:
    """The Trainer's arguments for what ``init`` says, key by key as its shapes made it."""
    loop, logging = init.get("loop") or Loop(), init.get("logging") or Logging()
    given = {
        key: init[key]
        for key in ("device", "backend", "model_dir", "precision")
        if init.get(key) is not None
    }
    callbacks = [call() for call in init.get("callbacks", [])]
    if init.get("checkpoint") is not None:
        callbacks.append(init["checkpoint"])
    return {
        **given,
        **loop_arguments(loop),
        "log_every_n_steps": logging.log_steps,
        "callbacks": callbacks,
        **init["trainer"].made(),
    }


def loop_arguments(loop: Loop) -> dict[str, Any]:
    """The Trainer's arguments for a ``loop``."""
    made: dict[str, Any] = {"accumulate_grad_batches": loop.grad_accum_steps}
    if loop.max_steps is not None:
        made["max_steps"] = loop.max_steps
    if loop.num_epochs is not None or loop.max_steps is None:
        made["max_epochs"] = loop.num_epochs or 1
    if loop.eval_steps is not None:
        made["limit_val_batches"] = loop.eval_steps
    return made
