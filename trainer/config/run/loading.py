"""From a plan to Trainer, module and data.

In the order of a script: ``seed_everything``, callbacks and loggers, the Trainer, the model. Data
is made when the Trainer first asks for it, the optimizer when training begins. So a run gives the
numbers of the same thing written in Python.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import Logger

import fulgurite.callbacks
from fulgurite.callbacks import DEFAULT_CALLBACKS, Checkpoint
from fulgurite.config.document.problems import Path, dotted
from fulgurite.config.run.eval_frequency import ARGUMENTS, EvalFrequency
from fulgurite.config.run.modules import FileData, as_lightning, with_optimizer
from fulgurite.config.run.refusing import refuse_unbuilt
from fulgurite.config.run.resolved import HideVariables, SaveParams
from fulgurite.config.schema.checking import Phase, Plan, check
from fulgurite.config.schema.schema import Init
from fulgurite.config.schema.sections import Loop
from fulgurite.config.types.classes import Named
from fulgurite.config.types.loggers import ProgressLogger
from fulgurite.config.types.report import Call
from fulgurite.config.types.signatures import names_of
from fulgurite.trainer import Trainer, default_logger

MODEL_DIR = "model_dir"
"""Where a file without ``model_dir`` leaves what a run makes."""

LIGHTNINGS_VALIDATION = frozenset({"val_check_interval", "check_val_every_n_epoch"})
"""The Trainer's arguments that say when to validate, in place of ``eval_frequency``."""


class Loaded(NamedTuple):
    """What a parameter file describes: ``trainer.fit(module, data)`` runs it."""

    trainer: Trainer
    module: pl.LightningModule
    data: FileData


def load(
    file: str | os.PathLike[str] | Mapping[str, Any],
    overrides: Mapping[str, Any] | None = None,
    phase: int | None = None,
) -> Loaded:
    """Trainer, module and data of one trainer of a parameter file.

    What the file says about ``ckpt_path`` and ``checkpoint.autoload_last_checkpoint`` is for
    ``run_config``: here the caller says what ``fit`` begins from.

    >>> parts = "lightning.pytorch.demos.boring_classes"
    >>> init = {"device": "CPU", "model": {"name": f"{parts}.BoringModel"}}
    >>> rows = {"name": f"{parts}.RandomDataset", "size": 32, "length": 64, "batch_size": 4}
    >>> file = {"trainer": {"init": init, "fit": {"train_dataloader": rows}}}
    >>> trainer, module, data = load(file, {"trainer.init.loop.max_steps": 10})
    >>> trainer.max_steps
    10

    Args:
        file: its path, or a dict of what it says.
        overrides: dotted keys (``trainer.init.loop.max_steps``) and the values that they get.
        phase: which of a list of trainers, from 0.

    Raises:
        ParameterFileError: with all the mistakes of the file, before anything is built.
        ValueError: the file has several trainers, and nothing says which; or not so many.
    """
    plan = check(file, overrides)
    refuse_unbuilt(plan)
    count = len(plan.phases)
    if phase is None and count > 1:
        raise ValueError(
            f"{plan.document.source} has {count} trainers: say which one,"
            f" fulgurite.load(..., phase=0) to phase={count - 1}; run_config runs them all."
        )
    if phase is not None and not 0 <= phase < count:
        raise ValueError(f"phase={phase}: {plan.document.source} has {count} trainer(s), from 0.")
    return build(plan, plan.phases[phase or 0])


def build(
    plan: Plan, phase: Phase, begin: int = 0, callbacks: Sequence[pl.Callback] = ()
) -> Loaded:
    """Trainer, module and data of one trainer of a file.

    Args:
        plan: the file.
        phase: the trainer.
        begin: the step that ``loop.num_steps`` counts from.
        callbacks: more of them, before the file's.

    Raises:
        Exception: what a class of the file raises, with a note of where the file names it.
    """
    init, refuse = phase.init, plan.document.refuse
    _set_log_level(init)
    if init.seed is not None:
        pl.seed_everything(init.seed, workers=True, verbose=False)
    callbacks = [*callbacks, *file_callbacks(plan, init), SaveParams(plan)]
    if plan.document.variables.values:
        callbacks.append(HideVariables(plan.document.variables))
    with naming_place(plan, (*phase.path, "init"), "the Trainer"):
        trainer = Trainer(**trainer_arguments(plan, init, callbacks, begin))
    # after the Trainer, as in a script: what it draws (its weights) comes in this order from the
    # seed
    model = make(plan, init.model)
    module = as_lightning(model)
    with_optimizer(module, init, refuse)
    validates = init.loop is None or bool(init.loop.eval_frequency)
    return Loaded(trainer, module, FileData(phase.stages, validates))


def make(plan: Plan, call: Call, **more: Any) -> Any:
    """What a call of the file makes; an error gets a note of where it stands."""
    with naming_place(plan, call.path, call.name):
        return call(**more)


@contextlib.contextmanager
def naming_place(plan: Plan, path: Path, name: str) -> Iterator[None]:
    """Add a note to errors: which part of the file they come from. What the environment gave is
    hidden in them.
    """
    try:
        yield
    except Exception as error:
        error.add_note(f"while making {name}, at {plan.document.place(path)}: {dotted(path)}")
        plan.document.variables.hide_in(error)
        raise


def _set_log_level(init: Init) -> None:
    if init.logging is not None:
        for name in ("fulgurite", "lightning"):
            logging.getLogger(name).setLevel(init.logging.log_level.upper())


def model_dir(init: Init) -> str:
    """Where a run leaves what it makes."""
    return init.model_dir or init.trainer.arguments.get("default_root_dir") or MODEL_DIR


def trainer_arguments(
    plan: Plan, init: Init, callbacks: list[pl.Callback], begin: int = 0
) -> dict[str, Any]:
    """The Trainer's arguments for what ``init`` says.

    Args:
        plan: the file.
        init: of one of its trainers.
        callbacks: made before.
        begin: the step that ``loop.num_steps`` counts from.
    """
    lightnings = init.trainer.made()
    ours = {"device": init.device, "backend": init.backend, "precision": init.precision}
    schedule = validation(init.loop, lightnings, begin)
    given = {
        **{key: value for key, value in ours.items() if value is not None},
        "default_root_dir": model_dir(init),
        **_loop_arguments(init.loop or Loop(), lightnings, begin),
        **(ARGUMENTS if schedule and not LIGHTNINGS_VALIDATION & lightnings.keys() else {}),
        **_loggers(plan, init, lightnings),
        **({} if init.logging is None else {"log_every_n_steps": init.logging.log_steps}),
        **lightnings,
    }
    return {**given, "callbacks": [*callbacks, *([schedule] if schedule else [])]}


def validation(
    loop: Loop | None, lightnings: Mapping[str, Any], begin: int
) -> EvalFrequency | None:
    """The callback that keeps ``eval_frequency``; Lightning's own arguments need none."""
    if loop is None:
        return None
    if LIGHTNINGS_VALIDATION & lightnings.keys():
        return EvalFrequency(None, begin, loop.steps_per_epoch) if loop.steps_per_epoch else None
    counts_on = begin if loop.num_steps is not None else 0
    return EvalFrequency(loop.eval_frequency, counts_on, loop.steps_per_epoch)


def _loop_arguments(loop: Loop, lightnings: Mapping[str, Any], begin: int) -> dict[str, Any]:
    """The Trainer's arguments for a ``loop``; Lightning's own go before its defaults."""
    accumulate = lightnings.get("accumulate_grad_batches") or loop.grad_accum_steps
    made: dict[str, Any] = {"accumulate_grad_batches": accumulate}
    ends = [loop.max_steps, None if loop.num_steps is None else begin + loop.num_steps]
    steps = [end for end in ends if end is not None]
    if steps:
        made["max_steps"] = min(steps)
    if loop.num_epochs is not None:
        made["max_epochs"] = loop.num_epochs
    elif not steps and not {"max_epochs", "max_steps", "max_time"} & lightnings.keys():
        # Lightning's own default is 1,000 epochs, with a warning
        made["max_epochs"] = 1
    if loop.steps_per_epoch is not None:
        made["limit_train_batches"] = loop.steps_per_epoch * accumulate
    if loop.eval_steps is not None:
        made["limit_val_batches"] = loop.eval_steps
    return made


def file_callbacks(plan: Plan, init: Init) -> list[pl.Callback]:
    """The defaults that a file neither names nor removes, its own, and Checkpoint."""
    if init.trainer.arguments.get("barebones"):
        return []
    named = {one.name.rpartition(".")[2].lower() for one in init.callbacks}
    made_by_default = [
        getattr(fulgurite.callbacks, name)(**arguments)
        for name, arguments in DEFAULT_CALLBACKS.items()
        if name.lower() not in named
    ]
    own = [make(plan, call) for call in init.own_callbacks]
    checkpoint = init.checkpoint
    if checkpoint is None and init.wants_checkpoints:
        others = any(isinstance(one, ModelCheckpoint) for one in own)
        checkpoint = None if others else Checkpoint()
    return [*made_by_default, *own, *([checkpoint] if checkpoint is not None else [])]


def _loggers(plan: Plan, init: Init, lightnings: Mapping[str, Any]) -> dict[str, Any]:
    """The Trainer's arguments for the loggers of a file, and the default one."""
    if not init.loggers or lightnings.get("barebones"):
        return {}
    removed = {one.name.lower() for one in init.loggers if isinstance(one, Named)}
    calls = [one for one in init.loggers if isinstance(one, Call)]
    folder = model_dir(init)
    own = [_logger(plan, call, folder) for call in calls if call.target is not ProgressLogger]
    default = default_logger(folder)
    names = {type(one).__name__.lower() for one in own} | removed
    if "tensorboardlogger" not in names and type(default).__name__.lower() not in names:
        own.insert(0, default)
    bar = {"enable_progress_bar": False} if "progresslogger" in removed else {}
    return {"logger": own or False, **bar}


def _logger(plan: Plan, call: Call, folder: str) -> Logger:
    assert call.target is not None
    beside = "save_dir" in names_of(call.target) and "save_dir" not in call.arguments
    logger: Logger = make(plan, call, **({"save_dir": folder} if beside else {}))
    return logger
