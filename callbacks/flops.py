"""Floating-point operations per second."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import lightning.pytorch as pl
from torch import fx
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from fulgurite.backends.csx.graph.graph import Graph
from fulgurite.backends.csx.plugins.strategy import strategy_of
from fulgurite.backends.csx.program.summary import STEP
from fulgurite.callbacks.profiler import Profiler
from fulgurite.callbacks.sparse import is_static


class FlopUtilization(Profiler):
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
        self._aside = ExitStack()

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
            self._aside.enter_context(counter := FlopCounterMode(display=False))
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

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Stop counting where no batch ended."""
        self._aside.close()

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Stop counting."""
        self._aside.close()

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
            self._aside.close()
            return float(self._counter.get_total_flops())
        program = strategy_of(trainer).step_functions["training"].programs[0]
        counts = {entry.name: flops_of(entry.graph) for entry in program.entries}
        others = [count for name, count in counts.items() if name != STEP]
        window = trainer.accumulate_grad_batches
        return (counts[STEP] + sum(others) * (window - 1)) / window


def flops_of(graph: Graph) -> int:
    """The floating-point operations of a graph that torch has formulas for."""
    return sum(map(_flops_of_node, graph.operations()))


def _flops_of_node(node: fx.Node) -> int:
    packet = getattr(node.target, "_overloadpacket", None)
    if packet not in flop_registry:
        return 0
    args, kwargs, out = fx.node.map_arg(
        (node.args, node.kwargs, node), lambda argument: argument.meta["val"]
    )
    return int(flop_registry[packet](*args, **kwargs, out_val=out))
