"""Strategy "csx": Lightning's training on static programs.

The step of each stage (train, validate, test, predict) is a ``StepFunction``. The mixin holds what
does not depend on how many processes there are; it goes over Lightning's own strategies.
"""

from __future__ import annotations

import contextlib
import pkgutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.callbacks import GradientAccumulationScheduler, StochasticWeightAveraging
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import SingleDeviceStrategy, StrategyRegistry
from lightning.pytorch.strategies.strategy import Strategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch.optim import Optimizer

from fulgurite.backends.backend import current_backend
from fulgurite.backends.closures import checkpoint_written, watch_trainer
from fulgurite.backends.csx.capture.host_reads import reads_gradients
from fulgurite.backends.csx.capture.scope import LightningScope
from fulgurite.backends.csx.compile.fabric import HostFabric
from fulgurite.backends.csx.config import CSXBackend
from fulgurite.backends.csx.contract.frozen_reads import forget_shown, frozen_index
from fulgurite.backends.csx.diagnostics.errors import UnsupportedState
from fulgurite.backends.csx.diagnostics.user_lines import user_line
from fulgurite.backends.csx.graph import rng
from fulgurite.backends.csx.hyperparams.schedules import RunSchedulers
from fulgurite.backends.csx.plugins.accelerator import CSXAccelerator
from fulgurite.backends.csx.plugins.precision import (
    CSXPrecision,
    csx_precision,
    refuse_replaced_precision,
)
from fulgurite.backends.csx.program import offline
from fulgurite.backends.csx.program.audit import Budget
from fulgurite.backends.csx.program.build import EntryPoints
from fulgurite.backends.csx.program.step_function import HostCode, StepFunction
from fulgurite.backends.csx.program.summary import STEP, Program
from fulgurite.backends.csx.state.dropped_gradient import forget
from fulgurite.backends.csx.state.first_update import hidden
from fulgurite.backends.step_context import step_context

LOOPS = "fulgurite.loops:install"
"""Who puts the CSX loops into a Trainer: a room above this one, so it is named, not imported."""

CHECKPOINT_KEY = "fulgurite"


class StaticGraph(Strategy):
    """What every CSX strategy does; a mixin over one of Lightning's.

    Args:
        backend: the options; None takes the live CSX backend, or makes the default one.
        install_loops: dotted name of the function that puts the CSX loops into a Trainer.
        strategy_options: Lightning's strategy's own arguments.
    """

    def __init__(
        self,
        backend: CSXBackend | None = None,
        install_loops: str = LOOPS,
        **strategy_options: Any,
    ) -> None:
        refuse_replaced_precision()
        live = current_backend()
        if backend is None:
            backend = live if isinstance(live, CSXBackend) else CSXBackend()
        self.backend = backend
        self.fabric = HostFabric(backend)
        self.data_position: dict[str, Any] = {}
        self.loader_generators: list[torch.Tensor] = []
        self.restored: dict[str, Any] | None = None
        self._install_loops = install_loops
        self._handles: list[Any] = []
        self._training: StepFunction | None = None
        self._evaluating: dict[tuple[str, int | None], StepFunction] = {}
        self._traced_module: pl.LightningModule | None = None
        self.host_code = HostCode()
        self.audit_budget = Budget()
        self._aside = contextlib.ExitStack()  # what a run that only builds puts back
        self.schedulers = RunSchedulers()
        self.keeps_gradients = False  # in p.grad between steps: the host reads them
        super().__init__(accelerator=CSXAccelerator(with_strategy=True), **strategy_options)

    # -- what Lightning's connector sets -------------------------------------------------------

    @property
    def accelerator(self) -> Accelerator | None:
        """Always the CSX accelerator, whatever ``accelerator="auto"`` found on this machine."""
        return self._accelerator

    @accelerator.setter
    def accelerator(self, accelerator: Accelerator | None) -> None:
        if self._accelerator is None:
            self._accelerator = accelerator

    @property
    def precision_plugin(self) -> Precision:
        """CSX's own, of the precision that Lightning chose."""
        return self._precision_plugin or CSXPrecision()

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        self._precision_plugin = None if plugin is None else csx_precision(plugin)

    # -- setting up ----------------------------------------------------------------------------

    def connect(self, model: pl.LightningModule) -> None:
        """Begin a run; one that only builds leaves no traces."""
        super().connect(model)
        if self.backend.only_builds:
            self._aside = offline.put_aside(model.trainer)

    def setup(self, trainer: pl.Trainer) -> None:
        """Check what is asked for, install the loops, and make the training step's function."""
        module = self.lightning_module
        assert module is not None
        _refuse_unsupported(trainer, module)
        forget_shown()
        self.audit_budget.begin()
        pkgutil.resolve_name(self._install_loops)(trainer)
        if module is not self._traced_module:
            self._evaluating.clear()
            self._traced_module = module
        self._training = None
        if trainer.ckpt_path is None or trainer.state.fn != TrainerFn.FITTING:
            self.restored = None
        super().setup(trainer)
        watch_trainer(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            scope = LightningScope(
                run_by=trainer,
                strategy=self,
                module=module,
                optimizers=self.optimizers,
                trains=True,
                freezes=not self.backend.retrace_every_iteration,
                gradients_read=reads_gradients(trainer, module),
                looks_again=self.backend.looks_again,
            )
            self.keeps_gradients = scope.keeps_gradients
            self._training = self._step_function("training", scope)

    def _step_function(self, stage: str, scope: LightningScope) -> StepFunction:
        return StepFunction(
            stage, scope, self.backend, self.fabric, self.host_code, self.audit_budget
        )

    @property
    def step_functions(self) -> dict[str, StepFunction]:
        """The step of each stage that has run, by name."""
        found = {} if self._training is None else {"training": self._training}
        return found | {step.stage: step for step in self._evaluating.values()}

    @property
    def programs(self) -> list[Program]:
        """Every program built so far."""
        return [program for step in self.step_functions.values() for program in step.programs]

    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        """Make the optimizers; from here on only programs step them."""
        super().setup_optimizers(trainer)
        self.schedulers.sort(self.lr_scheduler_configs)
        self.schedulers.check(self.lightning_module)
        for optimizer in self.optimizers:
            handle = optimizer.register_step_pre_hook(_refuse_host_step)
            self._handles.append(handle)
        self._handles.append(_Cleared(self._clear_gradients))

    def _clear_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        if step_context.get().is_on_host and self._training is not None:
            self._training.clear_gradients(set(map(id, parameters)))

    def teardown(self) -> None:
        """Give the optimizers back, and what a run that only builds had put aside."""
        while self._handles:
            self._handles.pop().remove()
        super().teardown()
        self._aside.close()

    def process_dataloader(self, dataloader: object) -> object:
        """Remember the states of a loader's generators before its iterator draws from them."""
        self.loader_generators += rng.collect_loaders([dataloader])
        if self.backend.only_builds:
            offline.put_generators_aside(self._aside, dataloader)
        return super().process_dataloader(dataloader)

    # -- steps ---------------------------------------------------------------------------------

    def train(
        self,
        batch: Any,
        entries: Callable[[], EntryPoints],
        entry: str = STEP,
        batch_idx: int | None = None,
    ) -> Any:
        """Run one training step (see ``StepFunction``)."""
        assert self._training is not None
        return self._training(batch, entries, entry, batch_idx)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Once an epoch, see that the model is still the one that was traced."""
        super().on_train_batch_start(batch, batch_idx)
        if batch_idx == 0 and self._training is not None:
            self._training.check_state()

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the validation program."""
        return self._evaluate("validation", super().validation_step, *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the test program."""
        return self._evaluate("test", super().test_step, *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the predict program; Lightning's own loop may have called hooks before it."""
        self.on_host_code()
        return self._evaluate("predict", super().predict_step, *args, **kwargs)

    def _evaluate(self, stage: str, run: Callable[..., Any], batch: Any, *rest: Any) -> Any:
        module = self.lightning_module
        assert module is not None
        results = module.trainer._results
        known = results.dataloader_idx if results is not None else None
        loader = rest[1] if len(rest) > 1 else known
        step = self._evaluating.get((stage, loader))
        if step is None:
            name = stage if loader is None else f"{stage} {loader}"
            freezes = not self.backend.retrace_every_iteration
            scope = LightningScope(
                run_by=module.trainer,
                strategy=self,
                module=module,
                freezes=freezes,
                looks_again=self.backend.looks_again,
            )
            step = self._step_function(name, scope)
            self._evaluating[stage, loader] = step

        def trace(batch: Any) -> Any:
            index = [frozen_index(index, stage) for index in rest[:1]]
            return run(batch, *index, *rest[1:])

        return step(batch, lambda: {STEP: trace}, batch_idx=rest[0] if rest else None)

    def on_host_code(self, ends: bool = False) -> None:
        """The user's code runs on the host: it may look at numbers, and change what steps read.

        Args:
            ends: whether the next step is the last of an epoch.
        """
        self.schedulers.show()
        self.host_code.runs += 1
        self.host_code.ends = ends

    def _check_evaluation(self) -> None:
        for step in self._evaluating.values():
            step.check_state()

    def on_validation_start(self) -> None:
        """See that the model is still the one that was traced."""
        super().on_validation_start()
        self._check_evaluation()

    def on_test_start(self) -> None:
        """See that the model is still the one that was traced."""
        super().on_test_start()
        self._check_evaluation()

    def on_predict_start(self) -> None:
        """See that the model is still the one that was traced."""
        super().on_predict_start()
        self._check_evaluation()

    # -- checkpoints ---------------------------------------------------------------------------

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Write Lightning's checkpoint, with random states and data position under a key of ours.

        Lightning ignores the key, so its own strategies resume from the file as from their own.
        """
        assert self.lightning_module is not None
        loader = self.lightning_module.trainer.fit_loop._combined_loader
        checkpoint[CHECKPOINT_KEY] = {
            **rng.portable(rng.collect_with(loader.flattened if loader is not None else [])),
            **{moment: rng.portable(states) for moment, states in self.data_position.items()},
        }
        super().save_checkpoint(checkpoint, filepath, storage_options)
        checkpoint_written(self.lightning_module.trainer)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """An optimizer's state, without what its first update is still to make."""
        self.schedulers.show_again()
        deferred = self._training.deferred if self._training is not None else []
        with hidden([one for one in deferred if one.new_state.optimizer is optimizer]):
            return super().optimizer_state(optimizer)

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a checkpoint, ours or Lightning's."""
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only=weights_only)
        self.restored = checkpoint.get(CHECKPOINT_KEY)
        return checkpoint


def _refuse_host_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    if step_context.get().is_on_host:
        raise UnsupportedState(
            f"{type(optimizer).__name__}.step() was called on the host during fit. Gradients live"
            " inside the program there, so it would do nothing.",
            line=user_line(),
            remedy="step it in training_step, under manual optimization",
        )


class _Cleared:
    """While it lasts, ``zero_grad()`` on the host reaches the gradients that programs keep.

    Args:
        clear: called with the parameters.
    """

    def __init__(self, clear: Callable[[Iterable[torch.nn.Parameter]], None]) -> None:
        of_optimizer, of_module = Optimizer.zero_grad, torch.nn.Module.zero_grad
        self._before = (of_optimizer, of_module)

        def zero_grad(self: Optimizer, set_to_none: bool = True) -> None:
            parameters = [p for group in self.param_groups for p in group["params"]]
            forget(parameters)
            of_optimizer(self, set_to_none)
            clear(parameters)

        def module_zero_grad(self: torch.nn.Module, set_to_none: bool = True) -> None:
            forget(self.parameters())
            of_module(self, set_to_none)
            clear(self.parameters())

        self._put(zero_grad, module_zero_grad)

    @staticmethod
    def _put(of_optimizer: Any, of_module: Any) -> None:
        setattr(Optimizer, "zero_grad", of_optimizer)  # noqa: B010  # mypy refuses the other form
        setattr(torch.nn.Module, "zero_grad", of_module)  # noqa: B010

    def remove(self) -> None:
        """Put torch's own back."""
        self._put(*self._before)


def strategy_of(trainer: pl.Trainer) -> StaticGraph:
    """The strategy of a Trainer that runs on CSX."""
    strategy = trainer.strategy
    assert isinstance(strategy, StaticGraph)
    return strategy


class CSXStrategy(StaticGraph, SingleDeviceStrategy):
    """CSX in one process."""

    strategy_name = "csx"

    def __init__(self, backend: CSXBackend | None = None, **strategy_options: Any) -> None:
        super().__init__(backend=backend, device=torch.device("cpu"), **strategy_options)

    @classmethod
    def register(cls) -> None:
        """Make ``strategy="csx"`` known to Lightning."""
        if cls.strategy_name not in StrategyRegistry:
            StrategyRegistry.register(
                cls.strategy_name, cls, description="Static programs: one trace, one compile"
            )


def _refuse_unsupported(trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """What CSX cannot do yet, as errors that name it."""
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    averaging = any(isinstance(callback, StochasticWeightAveraging) for callback in callbacks)
    nodes = trainer._accelerator_connector._num_nodes_flag
    refused = {
        f"{trainer.num_devices} devices; use devices=1": trainer.num_devices > 1,
        f"{nodes} nodes; use num_nodes=1": nodes > 1,
        "Trainer(detect_anomaly=True); find the operation with device='CPU'": (
            trainer._detect_anomaly
        ),
        "StochasticWeightAveraging; use WeightAveraging": averaging,
        "a module that went through torch.compile; pass the module itself": (
            module._compiler_ctx is not None
        ),
    }
    for step in ("training_step", "validation_step", "test_step", "predict_step"):
        takes = is_param_in_hook_signature(getattr(module, step), "dataloader_iter", explicit=True)
        refused[f"{step}(dataloader_iter); take a batch"] = takes
    for what, asked in refused.items():
        if asked:
            raise MisconfigurationException(f"CSX does not support {what}.")
    planned = [
        factor
        for callback in callbacks
        if isinstance(callback, GradientAccumulationScheduler)
        for factor in callback.scheduling.values()
    ]
    if module.automatic_optimization:
        refuse_zero_grad_hooks(trainer, module, max(planned, default=1))


def refuse_zero_grad_hooks(
    trainer: pl.Trainer, module: pl.LightningModule, planned: int = 1
) -> None:
    """Refuse hooks around ``zero_grad`` where gradients accumulate, or are ``planned`` to.

    Raises:
        MisconfigurationException: there is one; a program of two entry points would not call it.
    """
    window = max(trainer.accumulate_grad_batches, planned)
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    for hook in ("on_before_zero_grad", "optimizer_zero_grad") if window > 1 else ():
        owners = (module, *callbacks) if hook == "on_before_zero_grad" else (module,)
        for owner in owners:
            if is_overridden(hook, owner):
                raise MisconfigurationException(
                    f"CSX does not support {type(owner).__name__}.{hook} together with"
                    f" accumulate_grad_batches={window}: gradients are cleared inside the program."
                    " Remedy: on_before_optimizer_step, once before each update; or"
                    " on_train_batch_end, on the host."
                )
