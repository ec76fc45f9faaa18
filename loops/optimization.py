"""The training step: Lightning's optimization loops, run once and then replaced by the program.

Hooks, clipping and optimizers are Lightning's own code in its own order; this file only says which
code is an entry point of the program, and advances Lightning's counters as it would have.
"""

from __future__ import annotations

import contextlib
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.loops.optimization.automatic import (
    Closure,
    ClosureResult,
    _AutomaticOptimization,
)
from lightning.pytorch.loops.optimization.manual import _ManualOptimization
from lightning.pytorch.loops.utilities import _block_parallel_sync_behavior
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from fulgurite.backends.csx import (
    ACCUMULATE,
    STEP,
    NoLoss,
    refuse_stop_iteration,
    returns_value,
    step_clears,
    strategy_of,
)
from fulgurite.backends.patches import patched
from fulgurite.backends.step_context import running
from fulgurite.loops.finite import Losses
from fulgurite.loops.lean import uncounted


class AutomaticOptimization(_AutomaticOptimization):
    """Automatic optimization as a program of one or two entry points."""

    losses: Losses

    def run(
        self, optimizer: Optimizer, batch_idx: int, kwargs: OrderedDict[str, Any]
    ) -> dict[str, Any]:
        """Run one training step; returns ``{"loss": ..., **extra}``, detached."""
        trainer, strategy = self.trainer, strategy_of(self.trainer)
        window = trainer.accumulate_grad_batches
        accumulating = window > 1 and trainer.fit_loop._should_accumulate()
        skips = self._skip_backward  # as StochasticWeightAveraging has it do in its last epoch

        def entry(steps: bool) -> Callable[[Any], Any]:
            return lambda batch: self._trace(
                optimizer, batch_idx, {**kwargs, "batch": batch}, steps
            )

        def entries() -> dict[str, Callable[[Any], Any]]:
            # both are traced on the first batch, whichever of them it is for: they share one state
            accumulate = {ACCUMULATE: entry(False)} if window > 1 else {}
            return accumulate if skips else {**accumulate, STEP: entry(True)}

        assert strategy.training is not None
        output: dict[str, Any] = strategy.training(
            kwargs["batch"], entries, ACCUMULATE if accumulating or skips else STEP, batch_idx
        )
        progress = self.optim_progress.optimizer
        if batch_idx % window == 0 and not skips:
            progress.zero_grad.increment_by(1)
        if not accumulating and skips:
            # by the gradients of the epoch before, as eagerly, unless a validation has cleared them
            with running(steps_optimizer=True):
                self._optimizer_step(batch_idx, lambda: output.get("loss"))
        elif not accumulating:
            progress.step.increment_by(1)
        self.losses.observe(output.get("loss"), kwargs["batch"], not accumulating)
        return output

    def _trace(
        self, optimizer: Optimizer, batch_idx: int, kwargs: dict[str, Any], steps: bool
    ) -> dict[str, Any]:
        """Lightning's ``run``, with the entry point given instead of found out."""
        strategy = strategy_of(self.trainer)
        arguments = strategy.traced_arguments(kwargs)
        closure = Closure(
            step_fn=lambda: self._checked_step(arguments),
            backward_fn=self._make_backward_fn(optimizer),
            zero_grad_fn=lambda: self._clear_gradients(optimizer, batch_idx),
        )
        with uncounted(self.optim_progress), strategy.traced_hooks():
            if steps:
                with strategy.stepping():
                    self._optimizer_step(batch_idx, closure)
                strategy.schedulers.step()
            else:
                with _block_parallel_sync_behavior(strategy, block=True):
                    closure()
        result = closure.consume_result()
        return {} if result.loss is None else result.asdict()  # as Lightning's

    def _clear_gradients(self, optimizer: Optimizer, batch_idx: int) -> None:
        """What Lightning does after ``training_step``, where the step is to do it itself."""
        clear = self._make_zero_grad_fn(batch_idx, optimizer)  # None within a window
        if step_clears(self.trainer, optimizer, begins=clear is not None) and clear is not None:
            clear()

    def _checked_step(self, kwargs: OrderedDict[str, Any]) -> ClosureResult:
        result, step = self._training_step(kwargs), self.trainer.lightning_module.training_step
        code = getattr(inspect.unwrap(step), "__code__", None)
        if result.closure_loss is None and code is not None and not returns_value(code):
            raise NoLoss(
                "training_step returned None, and does so on every batch: there is nothing to train"
                " by.",
                remedy="return the loss; where no batch has one, in __init__():"
                " self.automatic_optimization = False",
            )
        return result


def keep_statistics(averaging: StochasticWeightAveraging) -> None:
    """Have StochasticWeightAveraging write into BatchNorm's statistics, which it replaces.

    Programs work on these tensors: it resets them before its epoch without a backward pass.
    """
    reset = type(averaging).reset_batch_norm_and_save_state

    def reset_in_place(pl_module: pl.LightningModule) -> None:
        norms = [one for one in pl_module.modules() if isinstance(one, _BatchNorm)]
        before = [(one.running_mean, one.running_var) for one in norms]
        reset(averaging, pl_module)
        for norm, (mean, var) in zip(norms, before, strict=True):
            assert mean is not None
            assert var is not None
            norm.running_mean, norm.running_var = mean.zero_(), var.fill_(1)

    setattr(averaging, reset.__name__, reset_in_place)


class ManualOptimization(_ManualOptimization):
    """Manual optimization: the whole ``training_step`` is the program."""

    losses: Losses

    def run(self, kwargs: OrderedDict[str, Any]) -> dict[str, Any]:
        """Run one training step; returns what it returned, detached."""

        strategy = strategy_of(self.trainer)

        def trace(batch: Any) -> dict[str, Any]:
            # the step's own optimizers count while they are traced: each run then counts as many
            before = self.optim_step_progress.total.completed
            with uncounted(self.optim_step_progress), self._backwards() as losses:
                arguments = strategy.traced_arguments({**kwargs, "batch": batch})
                output = super(ManualOptimization, self).run(arguments)
                steps = self.optim_step_progress.total.completed - before
            # under manual optimization a step need not return its loss: then the first that it
            # differentiates is watched
            first = None if "loss" in output or not losses else losses[0].detach().clone()
            return {"output": output, "steps": steps, "loss": first}

        index = kwargs.get("batch_idx")
        assert strategy.training is not None
        result = strategy.training(kwargs["batch"], lambda: {STEP: trace}, batch_idx=index)
        self.optim_step_progress.increment_by(result["steps"])
        output: dict[str, Any] = result["output"]
        loss = result["loss"]
        self.losses.observe(output.get("loss") if loss is None else loss, kwargs["batch"])
        return output

    def advance(self, kwargs: OrderedDict[str, Any]) -> None:
        """Run the user's step, to be traced; Lightning takes a StopIteration for its end."""
        try:
            super().advance(kwargs)
        except StopIteration as error:
            refuse_stop_iteration(error)
            raise

    @contextlib.contextmanager
    def _backwards(self) -> Iterator[list[Tensor]]:
        """The losses that go to ``manual_backward``."""
        module, losses = self.trainer.lightning_module, list[Tensor]()
        manual_backward = module.manual_backward

        def noted(loss: Tensor, *args: Any, **kwargs: Any) -> None:
            losses.append(loss)
            manual_backward(loss, *args, **kwargs)

        with patched([(module, "manual_backward", noted)]):
            yield losses
