"""Strategy "csx": Lightning's training on static programs.

The step of each stage (train, validate, test, predict) is a ``StepFunction``. The mixin holds what
does not depend on how many processes there are; it goes over Lightning's own strategies.
"""

from __future__ import annotations

import contextlib
import pkgutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import SingleDeviceStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset

from fulgurite.backends.backend import current_backend
from fulgurite.backends.checkpoints.plugin import Budget as CheckpointBudget
from fulgurite.backends.checkpoints.plugin import files_of, install
from fulgurite.backends.closures import checkpoint_written, watch_trainer
from fulgurite.backends.csx.capture import (
    CapturedStep,
    Exchange,
    LightningScope,
    hooks_between_steps,
    reads_gradients,
)
from fulgurite.backends.csx.compile.fabrics import fabric_devices, make_fabric
from fulgurite.backends.csx.config import CSXBackend, process_config
from fulgurite.backends.csx.contract import forget_warned_lines
from fulgurite.backends.csx.graph import rng
from fulgurite.backends.csx.hyperparams.counts import OF_MODULES
from fulgurite.backends.csx.hyperparams.scheduled_numbers import RunSchedulers
from fulgurite.backends.csx.plugins.accelerator import CSXAccelerator
from fulgurite.backends.csx.plugins.checkpoint_checks import (
    ChecksStates,
    read_position,
    refuse_half_a_step,
)
from fulgurite.backends.csx.plugins.checkpoint_position import (
    Progress,
    position_of,
    position_of_rank,
)
from fulgurite.backends.csx.plugins.evaluation_steps import EvaluationSteps
from fulgurite.backends.csx.plugins.host_optimizers import ZeroGradObserver, refuse_host_step
from fulgurite.backends.csx.plugins.loop_services import LoopServices
from fulgurite.backends.csx.plugins.precision_plugins import (
    CSXPrecision,
    csx_precision,
    refuse_replaced_precision,
)
from fulgurite.backends.csx.plugins.unsupported import (
    refuse_exchange,
    refuse_unsupported,
)
from fulgurite.backends.csx.program import offline
from fulgurite.backends.csx.program.audit import Budget
from fulgurite.backends.csx.program.step_function import HostCode, StepFunction
from fulgurite.backends.csx.state import Gradients, before_steps
from fulgurite.backends.csx.streaming.residency import residency
from fulgurite.backends.runtime import keep_freed_memory, return_freed_memory
from fulgurite.backends.safe_load import naming_classes

LOOPS = "fulgurite.loops:install"
"""Who puts the CSX loops into a Trainer: a room above this one, so it is named, not imported."""

CHECKPOINT_KEY = "fulgurite"


class OneProcess:
    """A strategy's dealings with other processes, where there are none."""

    def reducing(self, gradients: Gradients) -> contextlib.AbstractContextManager[None]:
        """What happens to the gradients of a backward pass that is traced inside of it."""
        return contextlib.nullcontext()

    def stepping(self) -> contextlib.AbstractContextManager[None]:
        """What happens around a step that is traced, where it does not only accumulate."""
        return contextlib.nullcontext()

    def reporting_errors(self) -> contextlib.AbstractContextManager[None]:
        """Tell other processes at once if the block, which is a run, ends by an error."""
        return contextlib.nullcontext()

    def requeue_if_asked(self) -> None:
        """Between two steps: save the job of all processes, if a cluster asked for that."""

    def ask_for_audit(self) -> bool:
        """Have all processes audit the training's step after the next; False: it is up to each."""
        return False

    def announcer(self) -> Callable[[Exchange, torch.Tensor | None], None] | None:
        """What tells other processes what a training step exchanges with them; None: nobody."""
        return None

    def note_audit(self) -> None:
        """Tell other processes that the training's next step is traced again."""

    def all_stop(self) -> bool:
        """Whether a signal that ends the run ends it now, in all processes."""
        return True

    def compare(self, stage: str, captured: Mapping[str, CapturedStep]) -> None:
        """Verify that all processes have traced the same step."""

    def agree_on_batch(self, stage: str, loader: int, has_one: bool) -> None:
        """See that a stream has one more batch in all processes, or in none."""

    def with_other_positions(self, position: dict[str, Any]) -> dict[str, Any]:
        """Where the run is, in every process, for a checkpoint."""
        return position

    def own_position(self, path: object, checkpoint: Mapping[str, Any], position: Any) -> Any:
        """Where this process was, by what ``with_other_positions`` put into a checkpoint."""
        return position_of_rank(path, checkpoint, position, rank=0, count=1)


class StaticGraph(LoopServices, ChecksStates, OneProcess):
    """What every CSX strategy does; a mixin over one of Lightning's.

    Args:
        backend: the options; None takes the live CSX backend, or makes the default one.
        strategy_options: Lightning's strategy's own arguments.
    """

    def __init__(self, backend: CSXBackend | None = None, **strategy_options: Any) -> None:
        refuse_replaced_precision()
        live = current_backend()
        self.backend = backend or (live if isinstance(live, CSXBackend) else CSXBackend())
        self.fabric = make_fabric(self.backend)
        self.data_position: dict[str, Any] = {}
        self.loader_generators: list[torch.Tensor] = []
        self.restored: dict[str, Any] | None = None
        self.progress: Progress | None = None  # set by the loops
        self.training: StepFunction | None = None  # the step, once a fit has begun
        self._evaluation = EvaluationSteps(self._step_function)
        self.host_code, self.audit_budget = HostCode(), Budget()
        self._hooks = contextlib.ExitStack()  # taken away by closing it
        self._aside = contextlib.ExitStack()  # what a run that only builds puts back
        self.schedulers, self.keeps_gradients = RunSchedulers(), False  # in p.grad between steps
        super().__init__(accelerator=CSXAccelerator(with_strategy=True), **strategy_options)

    @property
    def accelerator(self) -> Accelerator | None:
        """Always the CSX accelerator, whatever ``accelerator="auto"`` found on this machine."""
        return self._accelerator

    @accelerator.setter
    def accelerator(self, accelerator: Accelerator | None) -> None:
        # Lightning sets the one that it has found on this machine after the strategy was made
        self._accelerator = self._accelerator or accelerator

    @property
    def precision_plugin(self) -> Precision:
        """CSX's own, of the precision that Lightning chose."""
        return self._precision_plugin or CSXPrecision()

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        self._precision_plugin = None if plugin is None else csx_precision(plugin)

    def connect(self, model: pl.LightningModule) -> None:
        """Begin a run; one that only builds leaves no traces."""
        super().connect(model)
        self.training = None
        install(self)
        if self.backend.only_builds:
            self._aside = offline.put_aside(model.trainer)
        self.precision_plugin.convert_module(model)  # or a checkpoint's float64 would be rounded

    def setup(self, trainer: pl.Trainer) -> None:
        """Check what is asked for, install the loops, and make the training step's function."""
        module = self.lightning_module
        assert module is not None
        refuse_unsupported(trainer, module)
        forget_warned_lines()
        self.begin_measuring()
        pkgutil.resolve_name(LOOPS)(trainer)
        self.host_code.hooks = hooks_between_steps(trainer, module)
        self._evaluation.begin(trainer, module)
        scarce = self.backend.execution == "weight_streaming"
        self._hooks.callback(return_freed_memory() if scarce else keep_freed_memory())
        fits = trainer.state.fn == TrainerFn.FITTING
        # what an earlier run of this Trainer has loaded is not this one's
        self.restored = self.restored if fits and trainer.ckpt_path is not None else None
        super().setup(trainer)
        watch_trainer(trainer)
        if fits:
            self.fabric.torn = False
            self.keeps_gradients = read = reads_gradients(trainer, module)
            self.training = self._step_function("training", trains=True, gradients_read=read)

    def _step_function(self, stage: str, **options: Any) -> StepFunction:
        """The step of a stage; ``options`` are those of its scope."""
        module = self.lightning_module
        assert module is not None
        scope = LightningScope(
            run_by=module.trainer,
            strategy=self,
            module=module,
            python_runs_once=not self.backend.retrace_every_iteration,
            compares_traces=self.backend.compares_traces,
            **options,
        )
        run = self.host_code, self.audit_budget
        return StepFunction(stage, scope, self.backend, self.fabric, *run)

    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        """Make the optimizers; from here on only programs step them."""
        super().setup_optimizers(trainer)
        self.schedulers.sort(self.lr_scheduler_configs)
        self.schedulers.check(self.lightning_module)
        refuse_exchange(trainer, self.schedulers.computed)
        for optimizer in self.optimizers:
            self._hooks.callback(before_steps(optimizer, refuse_host_step).remove)
        self._hooks.callback(ZeroGradObserver(lambda: self.training).remove)

    def teardown(self) -> None:
        """Give the optimizers back, and what a run that only builds had put aside."""
        self._hooks.close()
        OF_MODULES.clear()  # they hold the module
        super().teardown()
        self._aside.close()

    def process_dataloader(self, dataloader: object) -> object:
        """Give a loader its workers; remember its generators' states before it draws from them."""
        give_workers(dataloader, process_config().num_workers_per_csx, self._hooks)
        self.loader_generators += rng.collect_loaders([dataloader])
        if self.backend.only_builds:
            offline.put_generators_aside(self._aside, dataloader)
        return super().process_dataloader(dataloader)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Once an epoch, see that the model is still the one that was traced."""
        super().on_train_batch_start(batch, batch_idx)
        if batch_idx == 0 and self.training is not None:
            self.training.check_state()

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the validation program."""
        return self._evaluation.run("validation", super().validation_step, *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the test program."""
        return self._evaluation.run("test", super().test_step, *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the predict program; Lightning's own loop may have called hooks before it."""
        self.on_host_code()
        return self._evaluation.run("predict", super().predict_step, *args, **kwargs)

    def on_host_code(self, ends: bool = False, last: bool = False) -> None:
        """The user's code runs on the host: it may look at numbers, and change what steps read.

        The next step is the last of an epoch if that ``ends``, or the run's ``last``.
        """
        self.schedulers.show()
        self.host_code.runs += 1
        self.host_code.ends, self.host_code.last = ends, last

    def begin_evaluation(self) -> None:
        """Have the first step see that the model is still the one that was traced."""
        self._evaluation.begin_loop()

    def on_validation_start(self) -> None:
        """A validation begins, a test, or a prediction."""
        self.begin_evaluation()

    on_test_start = on_predict_start = on_validation_start

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Write Lightning's checkpoint, with random states and data position under a key of ours.

        Lightning ignores the key, so its own strategies resume from the file as from their own.
        """
        assert self.lightning_module is not None
        trainer = self.lightning_module._trainer
        if trainer is None:  # connected by hand: there is no run to go on
            return super().save_checkpoint(checkpoint, filepath, storage_options)
        if self.fabric.torn:
            return refuse_half_a_step(trainer, filepath)
        progress = self.progress if "optimizer_states" in checkpoint else None  # weights alone
        checkpoint[CHECKPOINT_KEY] = self.with_other_positions(
            position_of(trainer, self.data_position, progress)
        )
        self.write_checkpoint(checkpoint, filepath, storage_options)
        checkpoint_written(trainer)

    def write_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None
    ) -> None:
        """Write a dict of Lightning's as it is; all processes call this."""
        super().save_checkpoint(checkpoint, path, storage_options)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """An optimizer's state, and the numbers of its groups as they are now."""
        self.schedulers.show_again()
        return super().optimizer_state(optimizer)

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a checkpoint, ours or Lightning's; what is in it runs only if that is asked for."""
        # torch loads what a file names only where somebody allows that class: the error says which
        with naming_classes(checkpoint_path):
            checkpoint = super().load_checkpoint(checkpoint_path, weights_only is not False)
        here = read_position(self, checkpoint_path, checkpoint, CHECKPOINT_KEY)
        if not self.training:  # else it is the tuner's
            self.restored = self.own_position(checkpoint_path, checkpoint, here)
        return checkpoint


def strategy_of(trainer: pl.Trainer) -> StaticGraph:
    """The strategy of a Trainer that runs on CSX."""
    strategy = trainer.strategy
    assert isinstance(strategy, StaticGraph)
    return strategy


class CSXStrategy(StaticGraph, SingleDeviceStrategy):
    """CSX in one process."""

    strategy_name = "csx"

    def __init__(self, backend: CSXBackend | None = None, **strategy_options: Any) -> None:
        super().__init__(backend=backend, device=fabric_devices(backend)[0], **strategy_options)
        limit_bytes = self.backend.max_resident_bytes
        if self.backend.execution == "weight_streaming" and limit_bytes is None:
            raise ValueError(
                "execution='weight_streaming' in one process keeps weights in files beyond"
                " max_resident_bytes, which is None. Give max_resident_bytes=..., in bytes; or"
                " devices=2 or more, of which each holds a part; or leave execution out."
            )
        if limit_bytes is not None and sys.platform != "linux":
            raise NotImplementedError(
                f"max_resident_bytes={limit_bytes} is built for Linux alone. Leave it out."
            )

    def setup_environment(self) -> None:
        """Keep state within a budget until teardown, where there is one."""
        if (limit_bytes := self.backend.max_resident_bytes) is not None:
            self._stream(limit_bytes)
        super().setup_environment()

    def _stream(self, limit_bytes: int) -> None:
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        residency.open(limit_bytes, Path(trainer.default_root_dir))
        self._hooks.callback(residency.close)
        if (files := files_of(trainer)) is not None:
            files.budget = CheckpointBudget(limit_bytes, residency.drop_used)
            self._hooks.callback(setattr, files, "budget", None)

    @classmethod
    def register(cls) -> None:
        """Make ``strategy="csx"`` known to Lightning."""
        if cls.strategy_name not in StrategyRegistry:
            StrategyRegistry.register(
                cls.strategy_name, cls, description="Static programs: one trace, one compile"
            )


BATCHES_AHEAD = 2
"""What each worker has ready: the default of DataLoader(num_workers=...)."""


def give_workers(loader: object, count: int, until: contextlib.ExitStack) -> None:
    """Have a DataLoader without workers fetch its batches in some, until a stack is closed.

    Args:
        loader: of any kind; one that has workers of its own keeps them. A stream has none: each
            would go through all of it, unless it is written for them.
        count: workers; 0 leaves every loader as it is.
        until: puts the loader back, which is the user's.
    """
    if not count or not isinstance(loader, DataLoader) or loader.num_workers:
        return
    if isinstance(loader.dataset, IterableDataset):
        return
    until.callback(vars(loader).update, num_workers=0, prefetch_factor=None)
    loader.num_workers, loader.prefetch_factor = count, loader.prefetch_factor or BATCHES_AHEAD
