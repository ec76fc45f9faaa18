"""``run``: a script's command line, parameter file, model and data, to a runner at work."""

from __future__ import annotations

import inspect
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning_utilities.core.rank_zero import rank_zero_info

from fulgurite.callbacks.load_states import LoadCheckpointStates
from fulgurite.callbacks.stopping import StopOnSignal
from fulgurite.cli import without_noise
from fulgurite.config.document.problems import ParameterFileError
from fulgurite.config.run.refusing import device_of
from fulgurite.config.schema.checking import Phase
from fulgurite.runners.flags import ExtraParsers, Given, notes, parsed
from fulgurite.runners.models import module_of
from fulgurite.runners.parameters import Parameters, plan_of, read_parameters
from fulgurite.runners.runner import RUNNERS, PyTorchBaseRunner, PyTorchCSCompiler

DataFn = Callable[[dict[str, Any]], Any]


def run(
    model_fn: Callable[..., Any],
    train_data_fn: DataFn | None = None,
    eval_data_fn: DataFn | None = None,
    default_params_fn: Callable[[dict[str, Any]], dict[str, Any] | None] | None = None,
    extra_args_parser_fn: Callable[[], ExtraParsers] | None = None,
    runner: type[PyTorchBaseRunner] | None = None,
) -> None:
    """Run a script's model as the command line says (docs/runners.md has all flags).

    Args:
        model_fn: a function or class of (params) or (params, device); gives an ``nn.Module`` whose
            forward(data) returns the loss, a ``PyTorchBaseModel``, or a LightningModule.
        train_data_fn: of (params); gives the loader of training batches.
        eval_data_fn: of (params); gives the loader of evaluation batches.
        default_params_fn: of (params); sets what is missing there, in place or in what it returns.
        extra_args_parser_fn: gives parsers of the script's own arguments, which its functions find
            under ``params["runconfig"]``.
        runner: a subclass of ``PyTorchBaseRunner`` or of one of its subclasses, with hooks.

    Raises:
        SystemExit: with status 2, for a wrong command line; 1, for a wrong parameter file, told
            line by line; 130 or 143, after Ctrl-C or SIGTERM ended the run.
        ValueError: the mode needs data that no function gives; the runner is for another device.
    """
    script = Path(inspect.stack()[1].filename)
    given = parsed(None, extra_args_parser_fn() if extra_args_parser_fn else None)
    try:
        params = _parameters(given, script, default_params_fn)
        plan, told = plan_of(params)
    except ParameterFileError as error:
        raise SystemExit(str(error)) from None
    for note in (*notes(given), *told):
        rank_zero_info(note)
    _refuse_mode_without(given, train_data_fn, eval_data_fn)
    without_noise()
    [phase] = plan.phases
    if phase.init.seed is not None:
        pl.seed_everything(phase.init.seed, workers=True, verbose=False)
    made = (runner or _runner_of(phase))(module_of(model_fn, params, device_of(phase)), params)
    functions = {"train": train_data_fn, "eval": eval_data_fn}
    stages = _MODES[given.mode][1]
    loaders = [functions[stage](params) for stage in stages]  # type: ignore[misc]
    with StopOnSignal() as stop:
        made.callbacks.append(stop)
        getattr(made, _MODES[given.mode][0])(*loaders)
    if stop.signal is not None:
        loop = phase.init.loop
        counts = loop is not None and loop.num_steps is not None
        left = made.trainer.max_steps - made.trainer.global_step if counts else None
        partly = any(call.target is LoadCheckpointStates for call in phase.init.own_callbacks)
        _say_how_to_go_on(stop, script, left, partly)
        raise SystemExit(stop.exit_status)


_MODES: dict[str, tuple[str, tuple[str, ...]]] = {
    "train": ("train", ("train",)),
    "eval": ("evaluate", ("eval",)),
    "train_and_eval": ("train_and_eval", ("train", "eval")),
    "eval_all": ("evaluate_all", ("eval",)),
}
"""Of each mode: the runner's method, and the data that it takes."""


def _parameters(
    given: Given, script: Path, default_params_fn: Callable[[dict[str, Any]], Any] | None
) -> Parameters:
    params = read_parameters(given, str(script.parent / "model_dir"))
    if default_params_fn is not None:
        returned = default_params_fn(params)
        if returned is not None and returned is not params:
            params = Parameters(returned, document=params.document, own=params.own)
    return params


def _refuse_mode_without(
    given: Given, train_data_fn: DataFn | None, eval_data_fn: DataFn | None
) -> None:
    missing = {"train": train_data_fn is None, "eval": eval_data_fn is None}
    for stage in _MODES[given.mode][1]:
        if missing[stage]:
            raise ValueError(
                f"mode {given.mode} needs {stage}_data_fn, and run() got none. Give it a function"
                " of the parameters that returns a DataLoader."
            )
    if given.mode == "eval_all" and "checkpoint_path" in given.values:
        given.error("--checkpoint_path: mode eval_all takes every checkpoint of the model_dir")


def _runner_of(phase: Phase) -> type[PyTorchBaseRunner]:
    backend = phase.init.backend or {}
    if backend.get("compile_only") or backend.get("validate_only"):
        return PyTorchCSCompiler
    return RUNNERS[device_of(phase)]


def _say_how_to_go_on(stop: StopOnSignal, script: Path, left: int | None, partly: bool) -> None:
    """Print the command that goes on with a stopped run.

    Args:
        stop: what stopped the run.
        script: whose command it is.
        left: what remains of num_steps, which count from a checkpoint.
        partly: whether the run loads parts of a checkpoint; one of a stopped run counts whole.
    """
    assert stop.signal is not None
    command = list(sys.argv[1:])
    if stop.checkpoint is not None:
        command = _without(command, "--checkpoint_path", 1)
        command = _without(command, "--is_pretrained_checkpoint", 0)
        if partly:
            command = _without(command, "--load_checkpoint_states", 1)
            command += ["--load_checkpoint_states", "all"]
        command += ["--checkpoint_path", str(stop.checkpoint)]
        if left is not None:
            command = [*_without(command, "--num_steps", 1), "--num_steps", str(left)]
    print(f"Stopped by {stop.signal.name}. To go on:", file=sys.stderr)
    print(f"  python {shlex.join([str(script), *command])}", file=sys.stderr)


def _without(command: list[str], flag: str, values: int) -> list[str]:
    """A command line without a flag and its values, in either form."""
    kept = [part for part in command if not part.startswith(f"{flag}=")]
    while flag in kept:
        at = kept.index(flag)
        del kept[at : at + 1 + values]
    return kept
