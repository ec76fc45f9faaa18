"""What runs a script's model: shells over the Trainer, with the twelve hooks, and ``run``.

PyTorchBaseRunner   on any device
PyTorchRunner       on CPU or GPU
PyTorchCSRunner     on CSX
PyTorchCSCompiler   builds the programs of CSX, and runs nothing
run                 from a script's command line, parameter file, model and data to one at work
"""

from __future__ import annotations

import inspect
import shlex
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.rank_zero import rank_zero_info

from fulgurite.backends.safe_load import read_checkpoint
from fulgurite.callbacks.checkpoint_states import LoadCheckpointStates
from fulgurite.callbacks.runner_hooks import Runner, RunnerHooks
from fulgurite.callbacks.stopping import StopOnSignal
from fulgurite.config.document.problems import ParameterFileError
from fulgurite.config.run.loading import build, model_dir
from fulgurite.config.run.own_checkpoints import all_of, steps_of
from fulgurite.config.run.refusing import device_of, only_builds
from fulgurite.config.run.resolved import SaveParams
from fulgurite.config.run.running import checkpoint, say_if_done
from fulgurite.config.schema.checking import Phase
from fulgurite.config.types.report import Call
from fulgurite.runners.models import lightning_module, module_of
from fulgurite.runners.parameters import (
    DEVICES,
    CommandLine,
    ExtraParsers,
    Parameters,
    notes,
    parse_command_line,
    plan_of,
    read_parameters,
)

_STEP = "the step is one program: put it in the model's forward, or give a LightningModule"
_LOOP = "Lightning's loops run here: use the hooks on_*_epoch_start and on_*_epoch_end"
NOT_CALLED = {
    "train_forward": _STEP,
    "eval_forward": _STEP,
    "backward": _STEP,
    "optimizer_zero_grad": _STEP,
    "optimizer_step": _STEP,
    "lr_scheduler_step": _STEP,
    "train_epoch": _LOOP,
    "eval_epoch": _LOOP,
    "compute_eval_metrics": "log metrics in a LightningModule's validation_step",
    "on_checkpoint_saved": "use fulgurite.checkpoint_closure, or a callback's on_save_checkpoint",
}
"""Methods that runners had and that nothing here would call, with what to do instead."""


class PyTorchBaseRunner(Runner):
    """Runs a model by its parameters, on the device that they name.

    Override any of the twelve hooks; ``super()`` does nothing in them. Extra callbacks for the
    Trainer go to ``self.callbacks``.

    Args:
        model: what a model_fn gives (``fulgurite.runners.models``).
        params: the parameters, in the old form or the new one.

    Raises:
        ParameterFileError: with all mistakes of the parameters.
        ValueError: they name a device on which this runner does not run.
        TypeError: the model is of no kind that runs; a subclass overrides a method that is not
            called here.
    """

    devices: ClassVar[tuple[str, ...]] = DEVICES
    trainer: Any
    """The ``fulgurite.Trainer``, once a run began."""

    def __init_subclass__(cls) -> None:
        for name, remedy in NOT_CALLED.items():
            if hasattr(cls, name):
                raise TypeError(f"{cls.__name__}.{name} would not be called: {remedy}.")

    def __init__(self, model: Any, params: Mapping[str, Any]) -> None:
        self.params = params if isinstance(params, Parameters) else Parameters(params)
        self.model = model
        self.module = lightning_module(model)
        self.callbacks: list[Callback] = []
        self._plan, _ = plan_of(self.params)
        [self._phase] = self._plan.phases
        device = device_of(self._phase)
        if device not in self.devices:
            raise ValueError(
                f"{type(self).__name__} runs on {' or '.join(self.devices)}, and the parameters say"
                f" {device}. Subclass {RUNNERS[device].__name__}, or PyTorchBaseRunner, which runs"
                " on any."
            )

    def train(self, train_dataloader: Any) -> None:
        """Train on a loader's batches."""
        self._fit(train_dataloader, None)

    def train_and_eval(self, train_dataloader: Any, eval_dataloader: Any) -> None:
        """Train, and evaluate as often as the parameters say.

        Those of the old form mean after every epoch where they say nothing.
        """
        if self.params.legacy and self.params.runconfig.get("eval_frequency") is None:
            call = self._phase.init.trainer
            often = replace(call, arguments={**call.arguments, "check_val_every_n_epoch": 1})
            self._phase = replace(self._phase, init=replace(self._phase.init, trainer=often))
        self._fit(train_dataloader, eval_dataloader)

    def evaluate(self, eval_dataloader: Any) -> None:
        """Evaluate one checkpoint: the one that is named, else the newest."""
        path = checkpoint(self._plan, self._phase, "validate")
        if path is None:
            rank_zero_info("There is no checkpoint: the model is evaluated as it was made.")
        self._begin()
        self.trainer.validate(self.module, eval_dataloader, ckpt_path=path)

    def evaluate_all(self, eval_dataloader: Any) -> None:
        """Evaluate every checkpoint of the model_dir, in the order of their steps.

        Raises:
            FileNotFoundError: there is none.
        """
        paths = all_of(self._phase)
        if not paths:
            folder = model_dir(self._phase.init)
            raise FileNotFoundError(f"{folder} holds no checkpoint to evaluate.")
        self._begin()
        for path in paths:
            rank_zero_info(f"Evaluating {path}")
            self.trainer.validate(self.module, eval_dataloader, ckpt_path=path)

    # -- from parameters to a Trainer ----------------------------------------------------------

    def _fit(self, train_dataloader: Any, eval_dataloader: Any) -> None:
        path = checkpoint(self._plan, self._phase, "fit")
        if path is not None and self.params.runconfig.get("is_pretrained_checkpoint"):
            self._load_weights(path)
            # weights were loaded above, and nothing else of the file is: training begins at step 0
            path = None
        loop, named = self._phase.init.loop, "ckpt_path" in self._phase.stages["fit"]
        self._begin(steps_of(path) if named and loop and loop.num_steps else 0)
        if not is_overridden("configure_optimizers", self.module, pl.LightningModule):
            raise ValueError(
                f"There is nothing to train {type(self.model).__name__} with: the parameters have"
                " no optimizer. Add one (AdamW: {lr: 1e-3}), or define get_optimizer(self)."
            )
        with warnings.catch_warnings():
            if eval_dataloader is None:
                message = "You defined a `validation_step` but have no `val_dataloader`"
                warnings.filterwarnings("ignore", message=message)
            self.trainer.fit(self.module, train_dataloader, eval_dataloader, ckpt_path=path)
        say_if_done(self.trainer, path, steps_of(path))

    def _load_weights(self, path: str) -> None:
        found = read_checkpoint(path)
        self.module.on_load_checkpoint(found)
        self.module.load_state_dict(found["state_dict"], strict=self.module.strict_loading)

    def _begin(self, done: int = 0) -> None:
        """Make the Trainer, with the module's optimizer and the callbacks.

        Args:
            done: the step that ``num_steps`` counts from.
        """
        model = _Made(path=(), name=type(self.model).__name__, target=None, script=self.module)
        init = replace(self._phase.init, model=model, **self._placement())
        own = is_overridden("configure_optimizers", self.module, pl.LightningModule)
        if own and not isinstance(self.model, pl.LightningModule) and init.optimizer:
            rank_zero_info(
                f"{type(self.model).__name__}.get_optimizer makes the optimizer; the parameters'"
                f" {init.optimizer.name} is not used."
            )
            init = replace(init, optimizer=None, schedulers=())
        self.trainer = build(self._plan, replace(self._phase, init=init, stages={}), done).trainer
        # the plan has a placeholder for the model, so the file that it would write could not be run
        callbacks = [one for one in self.trainer.callbacks if not isinstance(one, SaveParams)]
        self.trainer.callbacks[:] = [RunnerHooks(self), *callbacks, *self.callbacks]

    def _placement(self) -> dict[str, Any]:
        """What replaces ``device`` and ``backend`` of the parameters."""
        return {}


@dataclass(frozen=True, kw_only=True)
class _Made(Call):
    """In the place of a file's model, the one that a model_fn made."""

    arguments: dict[str, Any] = field(default_factory=dict)
    script: pl.LightningModule

    def __call__(self, *first: Any, **more: Any) -> Any:
        return self.script


class PyTorchRunner(PyTorchBaseRunner):
    """Runs on the CPU, or on a GPU."""

    devices = ("CPU", "GPU")


class PyTorchCSRunner(PyTorchBaseRunner):
    """Runs on CSX."""

    devices = ("CSX",)


class PyTorchCSCompiler(PyTorchBaseRunner):
    """Builds the programs that a run on CSX needs, and runs nothing.

    With ``validate_only`` in the parameters it traces them; else it compiles them too.
    """

    devices = ("CSX",)

    def _placement(self) -> dict[str, Any]:
        backend = self._phase.init.backend or {"backend_type": "CSX"}
        if not backend.get("validate_only"):
            backend = {**backend, "compile_only": True}
        return {"device": None, "backend": backend}


RUNNERS = {"CSX": PyTorchCSRunner, "CPU": PyTorchRunner, "GPU": PyTorchRunner}
"""The runner of each device."""


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
    # whoever called run(): its folder gets model_dir, and its name is in the command that goes on
    script = Path(inspect.stack()[1].filename)
    given = parse_command_line(None, extra_args_parser_fn() if extra_args_parser_fn else None)
    try:
        params = _parameters(given, script, default_params_fn)
        plan, told = plan_of(params)
    except ParameterFileError as error:
        raise SystemExit(str(error)) from None
    for note in (*notes(given), *told):
        rank_zero_info(note)
    _refuse_mode_without(given, train_data_fn, eval_data_fn)
    [phase] = plan.phases
    if phase.init.seed is not None:
        pl.seed_everything(phase.init.seed, workers=True, verbose=False)
    made = (runner or _runner_of(phase))(module_of(model_fn, params, device_of(phase)), params)
    functions = {"train": train_data_fn, "eval": eval_data_fn}
    stages = _STAGES[given.mode][1]
    loaders = [functions[stage](params) for stage in stages]  # type: ignore[misc]
    with StopOnSignal() as stop:
        made.callbacks.append(stop)
        getattr(made, _STAGES[given.mode][0])(*loaders)
    if stop.signal is not None:
        loop = phase.init.loop
        counts = loop is not None and loop.num_steps is not None
        left = made.trainer.max_steps - made.trainer.global_step if counts else None
        partly = any(call.target is LoadCheckpointStates for call in phase.init.own_callbacks)
        _say_how_to_go_on(stop, script, left, partly)
        raise SystemExit(stop.exit_status)


_STAGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "train": ("train", ("train",)),
    "eval": ("evaluate", ("eval",)),
    "train_and_eval": ("train_and_eval", ("train", "eval")),
    "eval_all": ("evaluate_all", ("eval",)),
}
"""Of each mode: the runner's method, and the data that it takes."""


def _parameters(
    given: CommandLine, script: Path, default_params_fn: Callable[[dict[str, Any]], Any] | None
) -> Parameters:
    params = read_parameters(given, str(script.parent / "model_dir"))
    if default_params_fn is not None:
        returned = default_params_fn(params)
        if returned is not None and returned is not params:
            params = Parameters(returned, document=params.document, own=params.own)
    return params


def _refuse_mode_without(
    given: CommandLine, train_data_fn: DataFn | None, eval_data_fn: DataFn | None
) -> None:
    missing = {"train": train_data_fn is None, "eval": eval_data_fn is None}
    for stage in _STAGES[given.mode][1]:
        if missing[stage]:
            raise ValueError(
                f"mode {given.mode} needs {stage}_data_fn, and run() got none. Give it a function"
                " of the parameters that returns a DataLoader."
            )
    if given.mode == "eval_all" and "checkpoint_path" in given.values:
        given.error("--checkpoint_path: mode eval_all takes every checkpoint of the model_dir")


def _runner_of(phase: Phase) -> type[PyTorchBaseRunner]:
    return PyTorchCSCompiler if only_builds(phase) else RUNNERS[device_of(phase)]


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
        # the checkpoint of a stopped run counts whole, and is gone on from
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
