"""Profilers: a clock that runs while training does, what it measures, and the file of it."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn
from torch import fx
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from fulgurite.backends.csx import STEP, strategy_of
from fulgurite.callbacks.saving import SaveObserver
from fulgurite.callbacks.sparse import (
    SparseCallback,
    Undoing,
    batches_ready,
    is_log_step,
    is_static,
    log_steps,
    log_values,
    same_size,
    samples_in,
)


class TrainingClock:
    """Counts batches and seconds between readings; stopped, it counts nothing.

    Attributes:
        batches: training batches while it ran.
        samples: in these.
        seconds: how long it ran.
    """

    def __init__(self) -> None:
        self.batches = self.samples = 0
        self.seconds = 0.0
        self.runs = False
        self._size = 0
        self._ready = 0
        self._since = 0.0

    def start(self, trainer: pl.Trainer) -> None:
        """Let the clock run."""
        self._mark(trainer, time.perf_counter())

    def read(self, trainer: pl.Trainer, batch: Any) -> None:
        """Count the batches since the last reading, each as large as this one, and their time."""
        now = time.perf_counter()
        # the batches since the last reading were not looked at: where they may differ in size, each
        # is read
        self._size = samples_in(batch) or 0
        if self.runs:
            self._count(trainer, now)
        self._mark(trainer, now)

    def stop(self, trainer: pl.Trainer) -> None:
        """Count up to now, and stop the clock."""
        if self.runs:
            self._count(trainer, time.perf_counter())
        self.runs = False

    def _mark(self, trainer: pl.Trainer, now: float) -> None:
        self.runs, self._ready, self._since = True, batches_ready(trainer), now

    def _count(self, trainer: pl.Trainer, now: float) -> None:
        batches = batches_ready(trainer) - self._ready
        self.batches += batches
        self.samples += batches * self._size
        self.seconds += now - self._since


class Profiler(SparseCallback, SaveObserver):
    """Base of callbacks that measure training and log what they found on log steps.

    The clock leaves out the first batch of an epoch, which builds programs and starts the loader,
    validation, the end of an epoch, and checkpoints of ``fulgurite.callbacks.Checkpoint``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.clock = TrainingClock()
        self._ran_before_saving = False

    @property
    def perf_metrics(self) -> dict[str, float]:
        """What is known about the run, as ``SavePerformanceData`` writes it."""
        return {}

    def measured(self, trainer: pl.Trainer) -> Mapping[str, float]:
        """The values to log, asked on log steps once the clock has run."""
        raise NotImplementedError

    def every_n_steps(self, trainer: pl.Trainer) -> int:
        """Log steps; every batch where batches may differ in size, so that samples are right."""
        return log_steps(trainer) if same_size(trainer) else 1

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start a new clock."""
        self.clock = TrainingClock()

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Read the clock; on log steps, log."""
        self.clock.read(trainer, batch)
        if self.clock.batches and is_log_step(trainer):
            log_values(trainer, self.measured(trainer))

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop the clock for validation."""
        if trainer.state.fn == TrainerFn.FITTING:
            self.clock.stop(trainer)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Let the clock run again."""
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            self.clock.start(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop the clock for the end of an epoch."""
        self.clock.stop(trainer)

    def before_checkpoint(self, trainer: pl.Trainer, path: Path) -> None:
        """Stop the clock while a checkpoint is written."""
        self._ran_before_saving = self.clock.runs
        self.clock.stop(trainer)

    def after_checkpoint(self, trainer: pl.Trainer, path: Path) -> None:
        """Let the clock run again."""
        if self._ran_before_saving:
            self.clock.start(trainer)


class RateProfiler(Profiler):
    """Logs how fast training goes.

    Logged on log steps: ``local_samples_per_sec`` (since the last log step),
    ``avg_samples_per_sec`` (since the run began) and ``avg_steps_per_sec`` (optimizer steps). A
    sample is a row of the first tensor of a batch; with accumulation the samples of all batches of
    a step count. What is left out: see ``Profiler``.
    """

    def __init__(self) -> None:
        super().__init__()
        self._last = (0, 0.0)
        self._window = 1

    @property
    def steps_per_s(self) -> float:
        """Optimizer steps per second of the last fit; 0 before its second batch."""
        return self._per_s(self.clock.batches) / self._window

    @property
    def samples_per_s(self) -> float:
        """Samples per second of the last fit; 0 before its second batch."""
        return self._per_s(self.clock.samples)

    @property
    def perf_metrics(self) -> dict[str, float]:
        """Samples, seconds, and samples per second, under the three names in use for it."""
        rate = self.samples_per_s
        return {
            "total_samples": self.clock.samples,
            "total_time": self.clock.seconds,
            "global_rate": rate,
            "rate": rate,
            "samples_per_sec": rate,
        }

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Forget what was measured in the run before."""
        super().on_train_start(trainer, pl_module)
        self._last, self._window = (0, 0.0), trainer.accumulate_grad_batches

    def measured(self, trainer: pl.Trainer) -> Mapping[str, float]:
        """The rates now."""
        samples, seconds = self._last
        self._last = self.clock.samples, self.clock.seconds
        elapsed_s = self.clock.seconds - seconds
        local = (self.clock.samples - samples) / elapsed_s if elapsed_s else 0.0
        return {
            "local_samples_per_sec": local,
            "avg_samples_per_sec": self.samples_per_s,
            "avg_steps_per_sec": self.steps_per_s,
        }

    def _per_s(self, count: int) -> float:
        return count / self.clock.seconds if self.clock.seconds else 0.0


class DurationProfiler(Profiler):
    """Logs the seconds that remain.

    Logged on log steps: ``loop_time_remaining``, of the epoch, at the speed of its batches so far,
    and ``time_remaining``, of the whole run, at the pace so far with validation, checkpoints and
    the ends of epochs. Where no end is known (``max_epochs=-1`` without ``max_steps``, a loader
    without a length), the one that needs it is left out.
    """

    def __init__(self) -> None:
        super().__init__()
        self._began: tuple[float, int] | None = None  # seconds of the clock on the wall, batches

    @property
    def perf_metrics(self) -> dict[str, float]:
        """Seconds of training, pauses left out."""
        return {"training_time": self.clock.seconds}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Forget what was measured in the run before."""
        super().on_train_start(trainer, pl_module)
        self._began = None

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Leave the end of an epoch out of the speed of batches."""
        super().on_train_epoch_end(trainer, pl_module)
        self._begin(trainer)

    def measured(self, trainer: pl.Trainer) -> Mapping[str, float]:
        """The seconds that remain now."""
        began_s, began_at = self._begin(trainer)
        batch_s = self.clock.seconds / self.clock.batches
        progress = trainer.fit_loop.epoch_loop.batch_progress
        of_epoch = trainer.num_training_batches - progress.current.ready
        of_run = self._batches_left(trainer, of_epoch)
        pace_s = (time.perf_counter() - began_s) / (progress.total.ready - began_at)
        found = {
            "loop_time_remaining": min(of_epoch, of_run) * batch_s,
            "time_remaining": of_run * pace_s,
        }
        return {name: left for name, left in found.items() if math.isfinite(left)}

    def _begin(self, trainer: pl.Trainer) -> tuple[float, int]:
        """What the pace is measured from: when the clock began, seen from the first reading."""
        if self._began is None:
            ready = batches_ready(trainer)
            since = time.perf_counter() - self.clock.seconds
            self._began = since, ready - self.clock.batches
        return self._began

    def _batches_left(self, trainer: pl.Trainer, of_epoch: float) -> float:
        """Batches to the end of the run; infinity where none is known."""
        left, epochs, steps = math.inf, trainer.max_epochs, trainer.max_steps
        if epochs is not None and epochs >= 0:
            left = of_epoch + (epochs - trainer.current_epoch - 1) * trainer.num_training_batches
        if steps >= 0:
            left = min(left, (steps - trainer.global_step) * self._batches_per_step(trainer))
        return max(left, 0)

    def _batches_per_step(self, trainer: pl.Trainer) -> float:
        """The window of accumulation; under manual optimization, what was seen."""
        module = trainer.lightning_module
        if module.automatic_optimization:
            return trainer.accumulate_grad_batches
        batches = batches_ready(trainer)
        return batches / trainer.global_step if trainer.global_step else math.inf


class FlopUtilization(Profiler, Undoing):
    """Logs how many floating-point operations a second training does.

    Counted are matrix products, convolutions and attention, forward and backward, two operations
    for a multiplication and an addition, by torch's own formulas (``torch.utils.flop_counter``): on
    CSX in the program, elsewhere in the first batch. Logged on log steps: ``flops_per_sec`` and,
    where a peak is given, ``flops_utilization``, in percent of it. Programs that take batches of
    several shapes (``max_programs``) count as the first.

    Args:
        peak_flops_per_sec: what the device can do; torch and Lightning know none for a CPU.
    """

    def __init__(self, peak_flops_per_sec: float | None = None) -> None:
        super().__init__()
        if peak_flops_per_sec is not None and not peak_flops_per_sec > 0:
            raise ValueError(
                f"FlopUtilization: peak_flops_per_sec must be above 0; got {peak_flops_per_sec!r}."
                " Give the operations per second that the device can do, such as 1.5e12, or leave"
                " it out."
            )
        self.peak_flops_per_sec = peak_flops_per_sec
        self.flops_per_batch: float | None = None
        self._counter: FlopCounterMode | None = None

    @property
    def flops_per_sec(self) -> float:
        """Operations per second of the last fit; 0 before its second batch."""
        if not self.flops_per_batch or not self.clock.seconds:
            return 0.0
        return self.flops_per_batch * self.clock.batches / self.clock.seconds

    @property
    def perf_metrics(self) -> dict[str, float]:
        """Operations per batch and per second, and the part of the peak."""
        found = {"flops_per_batch": self.flops_per_batch or 0.0, **self._rates()}
        return found if self.flops_per_batch else {}

    every_n_steps = Profiler.every_n_steps  # and the first batch

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Forget what was counted in the run before."""
        self.flops_per_batch = self._counter = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Where steps are eager, watch the first."""
        super().on_train_start(trainer, pl_module)
        if not is_static(trainer):
            self.undo.enter_context(counter := FlopCounterMode(display=False))
            self._counter = counter

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """After the first batch, count."""
        if self.flops_per_batch is None:
            self.flops_per_batch = self._count(trainer)
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def measured(self, trainer: pl.Trainer) -> Mapping[str, float]:
        """The rate now."""
        return self._rates()

    def _rates(self) -> dict[str, float]:
        found = {"flops_per_sec": self.flops_per_sec}
        if self.peak_flops_per_sec is not None:
            found["flops_utilization"] = 100 * self.flops_per_sec / self.peak_flops_per_sec
        return found

    def _count(self, trainer: pl.Trainer) -> float:
        if self._counter is not None:
            self.undo.close()
            return float(self._counter.get_total_flops())
        program = strategy_of(trainer).step_functions["training"].programs[0]
        counts = {one.name: sum(map(flops_of, one.graph.operations())) for one in program.entries}
        others = [count for name, count in counts.items() if name != STEP]
        window = trainer.accumulate_grad_batches
        # the first batches of a window run the entry point that only accumulates
        return (counts[STEP] + sum(others) * (window - 1)) / window


def flops_of(node: fx.Node) -> int:
    """The floating-point operations of one in a graph, where torch has a formula for it."""
    packet = getattr(node.target, "_overloadpacket", None)
    if packet not in flop_registry:
        return 0
    args, kwargs, out = fx.node.map_arg(
        (node.args, node.kwargs, node), lambda argument: argument.meta["val"]
    )
    return int(flop_registry[packet](*args, **kwargs, out_val=out))


FILE = "performance.json"


class SavePerformanceData(pl.Callback):
    """Writes what the run's profilers measured to ``performance.json`` when training ends.

    It lies in the folder of the first logger, or in the trainer's ``default_root_dir``
    (``model_dir``), and holds ``perf_metrics`` of RateProfiler, DurationProfiler, FlopUtilization
    and any other ``Profiler`` among the callbacks: an object of numbers. A run that an exception
    ends writes it too.
    """

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write the file."""
        self._write(trainer)

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Write the file with what was measured so far."""
        if trainer.training:
            self._write(trainer)

    def _write(self, trainer: pl.Trainer) -> None:
        found: dict[str, float] = {}
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, Profiler):
                found |= callback.perf_metrics
        folder = Path(trainer.log_dir or trainer.default_root_dir)
        if trainer.is_global_zero:
            folder.mkdir(parents=True, exist_ok=True)
            text = json.dumps(found, indent=4, sort_keys=True)
            (folder / FILE).write_text(text + "\n", encoding="utf-8")
