"""What runs a script's model: shells over the Trainer, with the twelve hooks.

PyTorchBaseRunner   on any device
PyTorchRunner       on CPU or GPU
PyTorchCSRunner     on CSX
PyTorchCSCompiler   builds the programs of CSX, and runs nothing
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.rank_zero import rank_zero_info

from fulgurite.callbacks.runner_hooks import Runner, RunnerHooks
from fulgurite.config.building import built
from fulgurite.runners.flags import DEVICES
from fulgurite.runners.models import lightning_module
from fulgurite.runners.parameters import Parameters, checkpoint_of, plan_of

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
        self._phase, _ = plan_of(self.params)
        device = device_of(self._phase.init)
        if device not in self.devices:
            raise ValueError(
                f"{type(self).__name__} runs on {' or '.join(self.devices)}, and the parameters say"
                f" {device}. Subclass {RUNNERS[device].__name__}, or PyTorchBaseRunner, which runs"
                " on any."
            )

    def train(self, train_dataloader: Any) -> None:
        """Train."""
        self._fit(train_dataloader, None)

    def train_and_eval(self, train_dataloader: Any, eval_dataloader: Any) -> None:
        """Train, and evaluate as often as the parameters say."""
        self._fit(train_dataloader, eval_dataloader)

    def evaluate(self, eval_dataloader: Any) -> None:
        """Evaluate one checkpoint: the one that is named, else the newest."""
        self._begin()
        path = self._checkpoint("validate")
        if path is None:
            rank_zero_info("There is no checkpoint: the model is evaluated as it was made.")
        self.trainer.validate(self.module, eval_dataloader, ckpt_path=path)

    def evaluate_all(self, eval_dataloader: Any) -> None:
        """Evaluate every checkpoint of the model_dir, in the order of their steps.

        Raises:
            FileNotFoundError: there is none.
        """
        self._begin()
        folder = Path(self.trainer.default_root_dir)
        paths = sorted(folder.rglob("*.ckpt"), key=_by_numbers)
        if not paths:
            raise FileNotFoundError(f"{folder} holds no checkpoint (*.ckpt) to evaluate.")
        for path in paths:
            rank_zero_info(f"Evaluating {path}")
            self.trainer.validate(self.module, eval_dataloader, ckpt_path=path)

    # -- from parameters to a Trainer ----------------------------------------------------------

    def _fit(self, train_dataloader: Any, eval_dataloader: Any) -> None:
        self._begin()
        path = self._checkpoint("fit")
        if self.params.runconfig.get("is_pretrained_checkpoint"):
            if path is not None:
                strict = self.module.strict_loading
                weights = torch.load(path, map_location="cpu", weights_only=True)["state_dict"]
                self.module.load_state_dict(weights, strict=strict)
            path = None
        with warnings.catch_warnings():
            if eval_dataloader is None:
                message = "You defined a `validation_step` but have no `val_dataloader`"
                warnings.filterwarnings("ignore", message=message)
            self.trainer.fit(self.module, train_dataloader, eval_dataloader, ckpt_path=path)

    def _begin(self) -> None:
        """Make the Trainer, with the module's optimizer and the callbacks."""
        init = {**self._phase.init, **self._placement(), "model": lambda: self.module}
        own = is_overridden("configure_optimizers", self.module, pl.LightningModule)
        if own and not isinstance(self.model, pl.LightningModule) and init.get("optimizer"):
            rank_zero_info(
                f"{type(self.model).__name__}.get_optimizer makes the optimizer; the parameters'"
                f" {init['optimizer'].name} is not used."
            )
            init |= {"optimizer": None, "schedulers": []}
        self.trainer = built(replace(self._phase, init=init, stages={})).trainer
        self.trainer.callbacks[:0] = [RunnerHooks(self)]
        self.trainer.callbacks.extend(self.callbacks)

    def _placement(self) -> dict[str, Any]:
        """What replaces ``device`` and ``backend`` of the parameters."""
        return {}

    def _checkpoint(self, stage: str) -> str | Path | None:
        """The checkpoint to load: as the parameters say, else the newest where they allow it."""
        said, path = checkpoint_of(self.params, stage)
        callback: Any = self.trainer.checkpoint_callback
        if said or not getattr(callback, "autoload_last_checkpoint", False):
            return path
        newest: Path | None = callback.newest(self.trainer.default_root_dir)
        return newest


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
        backend = self._phase.init.get("backend") or {"backend_type": "CSX"}
        if not backend.get("validate_only"):
            backend = {**backend, "compile_only": True}
        return {"device": None, "backend": backend}


RUNNERS = {"CSX": PyTorchCSRunner, "CPU": PyTorchRunner, "GPU": PyTorchRunner}
"""The runner of each device."""


def device_of(init: Mapping[str, Any]) -> str:
    """The device of a checked ``init``, in capitals."""
    backend = init.get("backend") or {}
    return str(init.get("device") or backend.get("backend_type")).upper()


def _by_numbers(path: Path) -> tuple[list[int], str]:
    return [int(number) for number in re.findall(r"\d+", path.stem)], path.name
