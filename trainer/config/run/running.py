"""``run_config``: fit, validate, validate_all, test or predict what a file describes."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.rank_zero import rank_zero_info

from fulgurite.backends.checkpoints.folders import check_checkpoint
from fulgurite.backends.patches import patched
from fulgurite.callbacks import LoadCheckpointStates
from fulgurite.config.run.attempt import Attempt
from fulgurite.config.run.loading import Loaded, build
from fulgurite.config.run.modules import FileModule
from fulgurite.config.run.own_checkpoints import (
    all_of,
    checkpoints_callback,
    newest_of,
    progress_of,
    steps_of,
)
from fulgurite.config.run.refusing import (
    checkpoints_of,
    missing_checkpoints,
    no_optimizer,
    refuse_unbuilt,
)
from fulgurite.config.run.resolved import hiding
from fulgurite.config.run.restarting import run_watched, wants_restarts
from fulgurite.config.schema.checking import Phase, Plan, check

Callbacks = Sequence[pl.Callback]

MODES = ("fit", "validate", "validate_all", "test", "predict")


def run_config(
    file: str | os.PathLike[str] | Mapping[str, Any],
    mode: str,
    overrides: Mapping[str, Any] | None = None,
) -> list[Any]:
    """Run a parameter file; its trainers in order, if it lists several.

    Args:
        file: its path, or a dict of what it says.
        mode: "fit", "validate", "validate_all", "test" or "predict".
        overrides: dotted keys and the values that they get.

    Returns:
        What each trainer's stage found. "fit": the last value of each metric, by name. "validate"
        and "test": a list with those of each loader. "validate_all": a list with a dict for each
        checkpoint and loader: ``ckpt_path``, ``loader`` (its index) and ``metrics``. "predict":
        what Lightning's returns.

    Raises:
        ParameterFileError: with all the mistakes of the file, before anything is built.
        ValueError: no such mode.
        RestartsUsedUp: the file has ``autorestart``, and the run crashed too often.
    """
    if mode not in MODES:
        raise ValueError(f"mode must be one of {', '.join(MODES)}; got {mode!r}.")
    plan = check(file, overrides)
    refuse_unbuilt(plan, mode)
    of_rank = Attempt.of_this_rank()
    if of_rank is None and wants_restarts(plan):
        return run_watched(plan, mode, _attempt, (file, mode, overrides))
    return run_plan(plan, mode, of_rank)


def run_plan(plan: Plan, mode: str, attempt: Attempt | None = None) -> list[Any]:
    """Run a checked file in one of the modes, in this process; the same errors as ``run_config``.

    Args:
        plan: the file.
        mode: as for ``run_config``.
        attempt: that this is, where another process watches; trainers that are done are left out.
    """
    refuse_unbuilt(plan, mode)
    left = plan.phases[attempt.trainer if attempt else 0 :]
    return [run_phase(plan, phase, mode, attempt=attempt) for phase in left]


def _attempt(attempt: Attempt, file: Any, mode: str, overrides: Mapping[str, Any] | None) -> int:
    """What the other process does."""
    attempt.begin()
    try:
        run_plan(check(file, overrides), mode, attempt)
    except Exception:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


def run_phase(
    plan: Plan,
    phase: Phase,
    mode: str,
    callbacks: Callbacks = (),
    attempt: Attempt | None = None,
) -> Any:
    """Run one trainer of a file, which ``refuse_unbuilt`` let pass.

    Args:
        plan: the file.
        phase: the trainer.
        mode: as for ``run_config``.
        callbacks: more of them, before the file's.
        attempt: that this is, where another process watches.

    Returns:
        As an item of ``run_config``'s.
    """
    if attempt is None:
        with hiding(plan.document.variables):
            return _RUNS[mode](plan, phase, callbacks)
    [index] = [i for i, one in enumerate(plan.phases) if one is phase]
    fits = mode == "fit"
    reporting = attempt.running(index, all_of(phase) if fits else ())
    with reporting as watched, hiding(plan.document.variables):
        resume = attempt.resumes(index) if fits else None
        run = _RUNS[mode] if resume is None else functools.partial(_fit, resume=resume)
        result = run(plan, phase, [watched, *callbacks])
    attempt.done(index, result)
    return result


def _fit(
    plan: Plan, phase: Phase, callbacks: Callbacks, resume: str | None = None
) -> dict[str, float]:
    ckpt_path = resume or checkpoint(plan, phase, "fit")
    with _told_of(phase, "fit", ckpt_path):
        done, epochs = progress_of(ckpt_path) if resume or _loads_steps(phase) else (0, 0)
    named, loop = phase.stages["fit"].get("ckpt_path"), phase.init.loop
    begin = 0
    if named is not None and loop and loop.num_steps:
        # num_steps counts from where the first attempt began, not from the checkpoint of this
        # restart
        begin = done if resume is None else _first_step(plan, phase)
    loaded = build(plan, phase, begin, callbacks)
    trainer, module, data = loaded
    if resume is not None:  # what this run has written counts whole
        for one in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(one, LoadCheckpointStates):
                one.states = LoadCheckpointStates().states
    if isinstance(module, FileModule) and not is_overridden("configure_optimizers", module):
        plan.document.refuse([no_optimizer(phase)])
    if epochs > (trainer.max_epochs or -1) > 0:  # Lightning refuses to load it
        rank_zero_info(f"Nothing left to train: {ckpt_path} has {epochs} epochs.")
        return {}
    with _loading(trainer, phase, "fit", ckpt_path):
        trainer.fit(module, datamodule=data, ckpt_path=ckpt_path)
    say_if_done(trainer, ckpt_path, done)
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def _first_step(plan: Plan, phase: Phase) -> int:
    """The step that a fit began from which goes on after a crash."""
    plan.document.refuse(missing_checkpoints(phase, "fit"))
    return steps_of(phase.stages["fit"]["ckpt_path"]) if _loads_steps(phase) else 0


def say_if_done(trainer: pl.Trainer, ckpt_path: str | None, done: int) -> None:
    """Say so where a fit found that its checkpoint has all steps."""
    if ckpt_path is not None and done and trainer.global_step == done:
        rank_zero_info(f"Nothing left to train: {ckpt_path} has all {done} steps.")


def _stage(mode: str) -> Callable[[Plan, Phase, Callbacks], Any]:
    def run(plan: Plan, phase: Phase, callbacks: Callbacks) -> Any:
        ckpt_path = checkpoint(plan, phase, mode)
        trainer, module, data = build(plan, phase, callbacks=callbacks)
        with _loading(trainer, phase, mode, ckpt_path):
            return getattr(trainer, mode)(module, datamodule=data, ckpt_path=ckpt_path)

    return run


def _validate_all(plan: Plan, phase: Phase, callbacks: Callbacks) -> list[dict[str, Any]]:
    """Each checkpoint on each loader; loaders may differ in shape, so each has its own programs."""
    calls = phase.stages["validate_all"]["val_dataloaders"]
    paths = _checkpoints(plan, phase)
    found, loggers = [], None
    for i, call in enumerate(calls):
        loaded = build(plan, phase, callbacks=callbacks)
        # all loaders write to the same loggers, though each has a Trainer of its own
        loggers = loaded.trainer.loggers = loaded.trainer.loggers if loggers is None else loggers
        source = loaded.data.find_or_make(call)
        if len(calls) > 1:
            rank_zero_info(f"Loader {i} of {len(calls)}, from 0: {call.name}")
        with _named_by(loaded, f"validate_{i}/" if len(calls) > 1 else ""):
            for path in paths:
                with _loading(loaded.trainer, phase, "validate_all", path):
                    results = loaded.trainer.validate(loaded.module, source, ckpt_path=path)
                metrics = {name: value for result in results for name, value in result.items()}
                found.append({"ckpt_path": path, "loader": i, "metrics": metrics})
    # by checkpoint, though each loader went through all of them: programs are built once for a
    # loader
    return sorted(found, key=lambda one: paths.index(one["ckpt_path"]))


@contextmanager
def _named_by(loaded: Loaded, prefix: str) -> Iterator[None]:
    """Let loggers tell the loaders apart."""

    def renamed(log: Callable[..., Any]) -> Callable[..., Any]:
        def log_metrics(metrics: Mapping[str, float], step: int | None = None) -> Any:
            own = {k if k == "epoch" else prefix + k: v for k, v in metrics.items()}
            return log(metrics=own, step=step)

        return log_metrics

    loggers = loaded.trainer.loggers if prefix else []
    with patched([(one, "log_metrics", renamed(one.log_metrics)) for one in loggers]):
        yield


_RUNS: dict[str, Callable[[Plan, Phase, Callbacks], Any]] = {
    "fit": _fit,
    "validate": _stage("validate"),
    "validate_all": _validate_all,
    "test": _stage("test"),
    "predict": _stage("predict"),
}


def checkpoint(plan: Plan, phase: Phase, mode: str) -> str | None:
    """The checkpoint that a stage begins from: the named one, or the newest.

    Raises:
        ParameterFileError: there is no such file.
        CheckpointError: the named one is damaged, or all are.
    """
    stage = phase.stages[mode]
    if "ckpt_path" in stage:
        plan.document.refuse(missing_checkpoints(phase, mode))
        path: str | None = stage["ckpt_path"]
        if path is not None and os.path.exists(path):
            check_checkpoint(path)
        return path
    newest = newest_of(phase)
    if newest is not None:
        begins = "Going on from" if mode == "fit" else "Weights of"
        rank_zero_info(f"{begins} {newest}. (ckpt_path: null takes none.)")
    elif mode != "fit":
        rank_zero_info("No checkpoint: these are the weights that the model begins with.")
    return newest


@contextmanager
def _told_of(phase: Phase, mode: str, path: str | None) -> Iterator[None]:
    """Add a note to errors: which checkpoint they come from, and how to do without it."""
    try:
        yield
    except Exception as error:
        named = {"ckpt_path", "ckpt_paths"} & phase.stages[mode].keys()
        why = "" if named else ", the newest in model_dir (ckpt_path: null takes none)"
        error.add_note(f"while loading {path}{why}")
        raise


@contextmanager
def _loading(trainer: pl.Trainer, phase: Phase, mode: str, path: str | None) -> Iterator[None]:
    """Add the same note to errors of loading that come while a stage runs."""
    strategy = trainer.strategy

    # Lightning loads deep inside of fit(): what fails there is told apart from errors of the
    # training by the strategy's methods, which load and do nothing else
    def told(name: str) -> tuple[Any, str, Callable[..., Any]]:
        load = getattr(strategy, name)

        def loads(*args: Any, **kwargs: Any) -> Any:
            with _told_of(phase, mode, path):
                found = load(*args, **kwargs)
                _check_kinds(trainer)
            return found

        return strategy, name, loads

    loads = ("load_checkpoint", "load_model_state_dict", "load_optimizer_state_dict")
    with patched([told(name) for name in loads]):
        yield


def _check_kinds(trainer: pl.Trainer) -> None:
    """Torch loads the state of any optimizer into any other, which fails at the first step."""
    for optimizer in trainer.optimizers:
        for group in optimizer.param_groups:
            lacks = [name for name in optimizer.defaults if name not in group]
            if lacks:
                raise ValueError(
                    f"the optimizer is {type(optimizer).__name__}, and the checkpoint has the state"
                    f" of another kind: it has no {', '.join(lacks)}. To begin with its weights"
                    " alone, add this to callbacks:"
                    " - LoadCheckpointStates: {load_checkpoint_states: model}"
                )


def _checkpoints(plan: Plan, phase: Phase) -> list[str | None]:
    """Those that ``validate_all`` loads: named, or all of the folder."""
    stage = phase.stages["validate_all"]
    if "ckpt_paths" not in stage:
        saves = checkpoints_callback(phase)
        loads = saves is not None and saves.autoload_last_checkpoint
        return [*(all_of(phase) if loads else [])] or [None]
    plan.document.refuse(missing_checkpoints(phase, "validate_all"))
    given = stage["ckpt_paths"]
    patterns = [given] if isinstance(given, str) else given
    paths = [path for pattern in patterns for path in checkpoints_of(pattern)]
    return list(dict.fromkeys(paths)) or [None]


def _loads_steps(phase: Phase) -> bool:
    """Whether a run counts on from its checkpoint's step."""
    calls = phase.init.own_callbacks
    loads = [call() for call in calls if call.target is LoadCheckpointStates]
    return all("global_step" in one.states for one in loads)
