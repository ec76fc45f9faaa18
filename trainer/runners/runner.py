"""What runs a script's model: shells over the Trainer, with the twelve hooks.

PyTorchBaseRunner   on any device
PyTorchRunner       on CPU or GPU
PyTorchCSRunner     on CSX
PyTorchCSCompiler   builds the programs of CSX, and runs nothing
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.rank_zero import rank_zero_info

from fulgurite.backends.safe_load import read_checkpoint
from fulgurite.callbacks.runner_hooks import Runner, RunnerHooks
from fulgurite.config.run.building import built, model_dir
from fulgurite.config.run.own_checkpoints import all_of, steps_of
from fulgurite.config.run.refusing import device_of
from fulgurite.config.run.resolved import SaveParams
from fulgurite.config.run.running import checkpoint, say_if_done
from fulgurite.config.types.report import Call
from fulgurite.runners.flags import DEVICES
from fulgurite.runners.models import lightning_module
from fulgurite.runners.parameters import Parameters, plan_of

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
        self.trainer = built(self._plan, replace(self._phase, init=init, stages={}), done).trainer
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
