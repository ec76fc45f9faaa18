"""The Trainer: Lightning's, which also takes ``device`` or ``backend``."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeVar

import lightning.pytorch as pl
import lightning.pytorch.plugins as plugins_of_lightning
import torch
from lightning.fabric.loggers import tensorboard
from lightning.fabric.plugins.precision import precision as precisions
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities import argparse as lightnings_argparse
from torch import Tensor

from fulgurite.backends import Backend, CSConfig, CSXBackend, backend_from
from fulgurite.backends import backend as make_backend
from fulgurite.backends.backend import current_backend, set_backend
from fulgurite.backends.checkpoints.plugin import install, loads_lightnings
from fulgurite.backends.closures import checkpoint_written, watch_trainer
from fulgurite.backends.csx.diagnostics.trace_errors import UsersFramesAlone
from fulgurite.backends.csx.distributed.parallel import CSXParallelStrategy
from fulgurite.backends.csx.plugins.strategy import CSXStrategy, StaticGraph
from fulgurite.backends.csx.program.fit_table import FitSummary
from fulgurite.backends.patches import patched
from fulgurite.backends.program_scheduler import check_schedulers
from fulgurite.backends.safe_load import reading_safely
from fulgurite.backends.step_context import clip_by_norm, running
from fulgurite.callbacks.checkpoint import check_folders
from fulgurite.callbacks.saving import beside_steps
from fulgurite.mixed_precision import MixedPrecision
from fulgurite.placement import ACCELERATORS, PLACEMENT, contradiction, systems
from fulgurite.precision_arguments import precision_arguments
from fulgurite.screen import replace_defaults, without_noise

_Init = TypeVar("_Init", bound=Callable[..., None])
_P = ParamSpec("_P")
_R = TypeVar("_R")


def _with_env_defaults(init: _Init) -> _Init:
    """Take defaults from ``PL_TRAINER_<ARGUMENT>``, as Lightning's Trainer does.

    Lightning's own decorator looks at the signature of the *sub*class, so it would hand
    ``PL_TRAINER_DEVICE`` to its own ``__init__``. Here our names are read too, and an argument that
    is given also overrides the variable of its other name (``device`` and ``backend``).
    """

    @functools.wraps(init)
    def with_defaults(self: Any, **given: Any) -> None:
        defaults = vars(lightnings_argparse._parse_env_variables(type(self)))
        for names in (("device", "backend"), ("model_dir", "default_root_dir")):
            if any(given.get(name) is not None for name in names):
                defaults = {k: v for k, v in defaults.items() if k not in names}
        _refuse_backends_options(given)
        init(self, **{**defaults, **given})

    return with_defaults  # type: ignore[return-value]


def _refuse_backends_options(given: Mapping[str, Any]) -> None:
    """Say where an option of the backend belongs that was given to the Trainer.

    Raises:
        TypeError: there is one.
    """
    for name in (one.name for one in fields(CSXBackend)):
        if name in given:
            raise TypeError(
                f"Trainer takes no {name}, which is an option of the backend:"
                f' Trainer(backend=fulgurite.backend("CSX", {name}={given[name]!r}))'
            )


def _with_short_traceback(run: Callable[_P, _R]) -> Callable[_P, _R]:
    @functools.wraps(run)
    def fit(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with UsersFramesAlone():
            return run(*args, **kwargs)

    return fit


# Lightning's own, whoever puts this class in its place afterwards, as its own tests may
_construct: Any = pl.Trainer.__init__.__wrapped__  # type: ignore[attr-defined]


class Trainer(pl.Trainer):
    """Lightning's Trainer on one of three devices.

    On "CSX" each stage's step becomes one static program; "CPU" and "GPU" are ordinary eager
    Lightning. Exactly one of ``device`` and ``backend`` is given; everything else is Lightning's.

    Args:
        device: "CSX", "CPU" or "GPU", in any case: the default backend of that type.
        backend: a backend (``fulgurite.backend("CSX", ...)``), or a dict of its arguments with the
            key ``backend_type``.
        model_dir: root of logs and checkpoints; another name of Lightning's ``default_root_dir``.
        precision: Lightning's names, "cb16-mixed", or a ``fulgurite.MixedPrecision``
            (docs/precision.md).

    Raises:
        ValueError: both ``device`` and ``backend`` are given, or neither is; no such device.
        RuntimeError: a backend of another type lives in this process.
        MisconfigurationException: ``accelerator``, ``strategy`` or ``devices`` contradict the
            device; there is no GPU; CSX does not support what is asked for.
    """

    @_with_env_defaults
    def __init__(
        self,
        *,
        device: str | None = None,
        backend: Backend | Mapping[str, Any] | None = None,
        model_dir: str | Path | None = None,
        accelerator: str | Accelerator = "auto",
        strategy: str | Strategy = "auto",
        devices: list[int] | str | int = "auto",
        num_nodes: int = 1,
        precision: precisions._PRECISION_INPUT
        | Literal["cb16-mixed"]
        | MixedPrecision
        | None = None,
        logger: Logger | Iterable[Logger] | bool | None = None,
        callbacks: list[Callback] | Callback | None = None,
        fast_dev_run: int | bool = False,
        max_epochs: int | None = None,
        min_epochs: int | None = None,
        max_steps: int = -1,
        min_steps: int | None = None,
        max_time: str | timedelta | dict[str, int] | None = None,
        limit_train_batches: int | float | None = None,
        limit_val_batches: int | float | None = None,
        limit_test_batches: int | float | None = None,
        limit_predict_batches: int | float | None = None,
        overfit_batches: int | float = 0.0,
        val_check_interval: int | float | str | timedelta | dict[str, int] | None = None,
        check_val_every_n_epoch: int | None = 1,
        num_sanity_val_steps: int | None = None,
        log_every_n_steps: int | None = None,
        enable_checkpointing: bool | None = None,
        enable_progress_bar: bool | None = None,
        enable_model_summary: bool | None = None,
        accumulate_grad_batches: int = 1,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
        deterministic: bool | Literal["warn"] | None = None,
        benchmark: bool | None = None,
        inference_mode: bool = True,
        use_distributed_sampler: bool = True,
        profiler: Profiler | str | None = None,
        detect_anomaly: bool = False,
        barebones: bool = False,
        plugins: plugins_of_lightning._PLUGIN_INPUT
        | list[plugins_of_lightning._PLUGIN_INPUT]
        | None = None,
        sync_batchnorm: bool = False,
        reload_dataloaders_every_n_epochs: int = 0,
        default_root_dir: str | Path | None = None,
        enable_autolog_hparams: bool = True,
        model_registry: str | None = None,
    ) -> None:
        # exactly Lightning's arguments: its constructor is called with them by name. A copy of the
        # locals: in Python 3.12 a debugger puts the comprehension's k and v into them
        given = dict(locals())
        arguments = {k: v for k, v in given.items() if k not in ("self", *_OURS, "__class__")}
        # what is wrong with the arguments is in the error's text, and not in our frames
        with UsersFramesAlone(*_REFUSALS):
            self.backend = _claim_backend(device, backend, arguments)
        arguments["default_root_dir"] = _root(model_dir, default_root_dir)
        # barebones refuses any logger that is given
        if logger in (True, None) and not barebones:
            arguments["logger"] = default_logger(arguments["default_root_dir"])
        # Lightning puts its own into the list that it is given
        own = [*callbacks] if isinstance(callbacks, list) else [callbacks]
        with without_noise(self._is_on_csx):
            _construct(self, **arguments)
        replace_defaults(self, own)
        install(self.strategy)
        watch_trainer(self)

    def save_checkpoint(
        self,
        filepath: str | Path,
        weights_only: bool | None = None,
        storage_options: Any | None = None,
    ) -> None:
        """Write a checkpoint, as Lightning does; then run the checkpoint closures.

        The file is there when this returns.

        Raises:
            OSError: it could not be written; a file of that name is the one before.
        """
        super().save_checkpoint(filepath, weights_only, storage_options)
        checkpoint_written(self)

    @property
    def fit_summary(self) -> FitSummary | None:
        """What the latest fit on CSX took, as data; ``str()`` of it is the table at its end.

        None before one has trained, and on other devices.
        """
        return self.strategy.fit_summary if isinstance(self.strategy, StaticGraph) else None

    @property
    def _is_on_csx(self) -> bool:
        return isinstance(self.backend, CSXBackend)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        """Lightning's run of a stage; ``global_step()`` and ``gradient_norm()`` are its own."""
        with without_noise(self._is_on_csx), _counting(self):
            return super()._run(*args, **kwargs)

    def _run_stage(self) -> Any:
        """Lightning's loop of a stage; a fit first tries to write to its folders."""
        if not self.training:
            return super()._run_stage()
        check_folders(self)
        with beside_steps(self):
            return super()._run_stage()

    fit = _with_short_traceback(pl.Trainer.fit)
    validate = _with_short_traceback(pl.Trainer.validate)
    test = _with_short_traceback(pl.Trainer.test)
    predict = _with_short_traceback(pl.Trainer.predict)


_OURS = ("device", "backend", "model_dir")
_REFUSALS = (RuntimeError, TypeError, ValueError, MisconfigurationException)


def _claim_backend(
    device: str | None, backend: Backend | Mapping[str, Any] | None, arguments: dict[str, Any]
) -> Backend:
    """The Trainer's backend; what it means for Lightning goes to Lightning's arguments.

    Raises:
        ValueError: both ``device`` and ``backend`` are given, or neither is.
        MisconfigurationException: the arguments contradict the backend.
    """
    if device is not None and backend is not None:
        raise ValueError(
            "backend and device are mutually exclusive arguments of Trainer. Please only"
            " provide one or the other"
        )
    if device is None and backend is None:
        raise ValueError(
            "Trainer takes exactly one of device ('CSX', 'CPU' or 'GPU') and backend"
            " (fulgurite.backend('CSX', ...)); got neither."
        )
    live = current_backend()
    made = make_backend(device) if backend is None else backend_from(backend)
    given = f"device={device!r}" if backend is None else f"backend {made.backend_type}"
    try:
        placement = {name: arguments[name] for name in PLACEMENT}
        arguments |= _placement(made, given, arguments["plugins"], **placement)
        arguments |= precision_arguments(made, arguments)
    except (MisconfigurationException, ValueError):
        set_backend(live)  # a refused Trainer claims nothing
        raise
    return made


@contextlib.contextmanager
def _counting(trainer: pl.Trainer) -> Iterator[None]:
    """Let ``global_step()`` give a Trainer's counter, keep the norms of an eager step, and let
    schedulers that count steps do so.

    Within an eager training step the counter is the number at its begin, as in a program: under
    manual optimization Lightning's own goes on inside.
    """
    strategy, begun = trainer.strategy, []
    norms: list[Tensor] = []
    step, plugin = strategy.training_step, strategy.precision_plugin

    def training_step(*args: Any, **kwargs: Any) -> Any:
        norms.clear()
        begun.append(trainer.global_step)
        try:
            return step(*args, **kwargs)
        finally:
            begun.pop()

    def count() -> Tensor:
        steps = begun[-1] if begun else trainer.global_step
        return torch.tensor(steps, device=strategy.root_device)

    def setup_optimizers(trainer: pl.Trainer) -> None:
        make_optimizers(trainer)
        check_schedulers(strategy.lr_scheduler_configs)

    make_optimizers = strategy.setup_optimizers

    changes = [(strategy, "training_step", training_step), loads_lightnings(strategy)]
    # on CSX they are checked where the numbers that they set become inputs of the program
    if not isinstance(strategy, StaticGraph):
        changes.append((strategy, "setup_optimizers", setup_optimizers))
    if type(plugin).clip_grad_by_norm is Precision.clip_grad_by_norm:  # sharded ones compute others
        changes.append((plugin, "clip_grad_by_norm", functools.partial(clip_by_norm, plugin)))
    with patched(changes), reading_safely(strategy), running(global_step=count, norms=norms):
        yield


def _placement(backend: Backend, given: str, plugins: Any, **placement: Any) -> dict[str, Any]:
    """Lightning's accelerator, strategy and devices for a backend.

    Raises:
        MisconfigurationException: what was given of them contradicts the backend.
    """
    wrong = contradiction(backend.backend_type, given, **placement)
    if wrong is not None:
        raise MisconfigurationException(wrong)
    if isinstance(backend, CSXBackend):
        config = backend.cluster_config
        num_csx = config.num_csx if isinstance(config, CSConfig) else None
        of_nodes = placement["devices"], int(placement["num_nodes"])
        each, nodes, wrong = systems(num_csx, *of_nodes, plugins)
        if wrong is not None:
            raise MisconfigurationException(wrong)
        kind = CSXStrategy if each * nodes == 1 else CSXParallelStrategy
        made = {"accelerator": "auto", "devices": each, "num_nodes": nodes}
        return {**made, "strategy": kind(backend)}
    accelerator = placement["accelerator"]
    wanted = ACCELERATORS[backend.backend_type][0]
    return {"accelerator": wanted if accelerator == "auto" else accelerator}


def _root(model_dir: str | Path | None, default_root_dir: str | Path | None) -> str | Path | None:
    if model_dir is None or default_root_dir is None:
        return default_root_dir if model_dir is None else model_dir
    if os.path.normpath(model_dir) != os.path.normpath(default_root_dir):
        raise ValueError(
            f"model_dir={os.fspath(model_dir)!r} and"
            f" default_root_dir={os.fspath(default_root_dir)!r} name the same thing and differ."
            " Give one."
        )
    return model_dir


def default_logger(root: str | Path | None) -> Logger:
    """TensorBoard where it is installed, else CSV files; Lightning's choice without its warning."""
    folder = os.fspath(root or os.getcwd())
    if tensorboard._TENSORBOARD_AVAILABLE or tensorboard._TENSORBOARDX_AVAILABLE:
        return TensorBoardLogger(save_dir=folder)
    return CSVLogger(save_dir=folder)
