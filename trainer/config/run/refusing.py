"""What a checked file cannot be run with: known before anything is built."""

from __future__ import annotations

import glob
import inspect
import os
import re
from collections.abc import Iterator

import lightning.pytorch as pl

from fulgurite.config.document.problems import Problem
from fulgurite.config.schema.checking import Phase, Plan
from fulgurite.config.schema.schema import STAGES

LIGHTNINGS_PATHS = ("last", "hpc", "best", "registry")
"""Words for a checkpoint that Lightning itself finds."""


def refuse_unbuilt(plan: Plan, mode: str | None = None) -> None:
    """Refuse what would fail later, or change numbers.

    Args:
        plan: the file.
        mode: what is to be run; None where the caller decides later.

    Raises:
        ParameterFileError: with all of it.
    """
    problems = [problem for phase in plan.phases for problem in _unbuilt(phase)]
    problems += _other_devices(plan)
    if mode is None:
        problems += [problem for phase in plan.phases for problem in _unwatched(phase)]
    if mode is not None:
        for phase in plan.phases:
            problems += _missing(phase, mode)
        problems += missing_checkpoints(plan.phases[0], mode)
    plan.document.refuse(problems)


def _unbuilt(phase: Phase) -> Iterator[Problem]:
    init, at = phase.init, (*phase.path, "init")
    if init.device is None and init.backend is None:
        yield Problem(at, "device (CSX, CPU or GPU) or backend: required, and not given.")
    if init.autorestart is not None and init.autorestart.min_num_csx != 1:
        yield Problem(
            (*at, "autorestart", "min_num_csx"),
            f"{init.autorestart.min_num_csx} systems: only 1 is built yet. Leave it out.",
        )
    if init.sparsity:
        yield Problem(
            (*at, "sparsity"),
            "sparse training is not built; a dense run would give other numbers. Leave it out.",
        )


def _unwatched(phase: Phase) -> Iterator[Problem]:
    """Where the caller runs it, there is no process to watch."""
    restarts = phase.init.autorestart
    if restarts is not None and restarts.max_num_restarts:
        yield Problem(
            (*phase.path, "init", "autorestart"),
            "fulgurite fit and run_config start a run again; a Trainer in your own process does"
            " not. Leave it out, or set it to null here.",
        )


def _other_devices(plan: Plan) -> Iterator[Problem]:
    """A process has one type of backend."""
    kinds = [device_of(phase) for phase in plan.phases]
    for phase, kind in zip(plan.phases, kinds, strict=True):
        if kind != kinds[0]:
            yield Problem(
                (*phase.path, "init"),
                f"runs on {kind}, and the first trainer of the file on {kinds[0]}: a process has"
                " one type of device. Write two files.",
            )


def only_builds(phase: Phase) -> bool:
    """Whether a trainer builds its programs and runs none."""
    backend = phase.init.backend or {}
    return bool(backend.get("compile_only") or backend.get("validate_only"))


def device_of(phase: Phase) -> str:
    """CSX, CPU or GPU."""
    backend = phase.init.backend or {}
    return str(phase.init.device or backend.get("backend_type")).upper()


def _missing(phase: Phase, mode: str) -> Iterator[Problem]:
    if mode not in phase.stages:
        [loader] = STAGES[mode].required
        yield Problem(
            phase.path,
            f"{mode} requested, but the file has no {mode} section. Add"
            f" {mode}: {{{loader}: ...}} beside init.",
        )
    target = phase.init.model.target
    plain = inspect.isclass(target) and not issubclass(target, pl.LightningModule)
    if mode == "fit" and plain and phase.init.optimizer is None:
        yield no_optimizer(phase)


def no_optimizer(phase: Phase) -> Problem:
    """A plain module that shall be trained, and nothing to train it."""
    name = phase.init.model.name
    return Problem(
        (*phase.path, "init", "model"),
        f"{name} is a plain nn.Module, and the file has no optimizer to train it with. Add"
        " optimizer: {AdamW: {lr: 1e-3}} to init.",
    )


def missing_checkpoints(phase: Phase, mode: str) -> Iterator[Problem]:
    """Checkpoints that a stage names and that do not exist."""
    stage = phase.stages.get(mode, {})
    path = stage.get("ckpt_path")
    if path is not None and path not in LIGHTNINGS_PATHS and not _exists(path):
        yield Problem((*phase.path, mode, "ckpt_path"), _no_file(path))
    patterns = stage.get("ckpt_paths") or []
    for i, pattern in enumerate([patterns] if isinstance(patterns, str) else patterns):
        if not checkpoints_of(pattern):
            at = (*phase.path, mode, "ckpt_paths", *(() if isinstance(patterns, str) else (i,)))
            yield Problem(at, _no_file(pattern))


def checkpoints_of(pattern: str) -> list[str]:
    """The files that a path or glob stands for, in the order of the numbers in their names."""
    if _exists(pattern):
        return [pattern]
    # by number, for "step=10" is before "step=9" as text
    return sorted(glob.glob(pattern), key=lambda path: [*map(int, re.findall(r"\d+", path))])


def _exists(path: str) -> bool:
    return "://" in path or os.path.exists(path)


def _no_file(path: str) -> str:
    return f"there is no file {path!r} (from {os.getcwd()}). null means: begin anew."
