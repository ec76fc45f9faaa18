"""The training step: Lightning's optimization loops, run once and then replaced by the program.

Hooks, clipping and optimizers are Lightning's own code in its own order; this file only says which
code is an entry point of the program, and advances Lightning's counters as it would have.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

from lightning.pytorch.loops.optimization.automatic import (
    Closure,
    ClosureResult,
    _AutomaticOptimization,
)
from lightning.pytorch.loops.optimization.manual import _ManualOptimization
from lightning.pytorch.loops.progress import _BaseProgress
from lightning.pytorch.loops.utilities import _block_parallel_sync_behavior
from torch import Tensor
from torch.optim import Optimizer

from fulgurite.backends.csx.contract import frozen_hook_arguments, frozen_index
from fulgurite.backends.csx.diagnostics.errors import NoLoss
from fulgurite.backends.csx.diagnostics.stop_iteration import refuse_users
from fulgurite.backends.csx.plugins.refusals import refuse_zero_grad_hooks
from fulgurite.backends.csx.plugins.strategy import strategy_of
from fulgurite.backends.csx.program.summary import ACCUMULATE, STEP
from fulgurite.backends.patches import patched
from fulgurite.loops.finite import Losses


class AutomaticOptimization(_AutomaticOptimization):
    """Automatic optimization as a program of one or two entry points."""

    losses: Losses

    def run(
        self, optimizer: Optimizer, batch_idx: int, kwargs: OrderedDict[str, Any]
    ) -> dict[str, Any]:
        """Run one training step; returns ``{"loss": ..., **extra}``, detached."""
        trainer = self.trainer
        window = trainer.accumulate_grad_batches
        accumulating = window > 1 and trainer.fit_loop._should_accumulate()

        def entry(steps: bool) -> Callable[[Any], Any]:
            return lambda batch: self._trace(
                optimizer, batch_idx, {**kwargs, "batch": batch}, steps
            )

        def entries() -> dict[str, Callable[[Any], Any]]:
            refuse_zero_grad_hooks(trainer, trainer.lightning_module)
            accumulate = {ACCUMULATE: entry(False)} if window > 1 else {}
            return {**accumulate, STEP: entry(True)}

        strategy = strategy_of(trainer)
        if strategy.keeps_gradients and window > 1 and batch_idx % window == 0:
            _clear(optimizer)  # the host could see those of the window before until now
        assert strategy.training is not None
        output: dict[str, Any] = strategy.training(
            kwargs["batch"], entries, ACCUMULATE if accumulating else STEP, batch_idx
        )
        progress = self.optim_progress.optimizer
        if batch_idx % window == 0:
            progress.zero_grad.increment_by(1)
        if not accumulating:
            progress.step.increment_by(1)
        self.losses.note(output["loss"], kwargs["batch"], not accumulating)
        return output

    def _trace(
        self, optimizer: Optimizer, batch_idx: int, kwargs: dict[str, Any], steps: bool
    ) -> dict[str, Any]:
        """Lightning's ``run``, with the entry point given instead of found out."""
        arguments = traced_arguments(kwargs)
        window = self.trainer.accumulate_grad_batches
        closure = Closure(
            step_fn=lambda: self._step_with_loss(arguments),
            backward_fn=self._make_backward_fn(optimizer),
            # with a window, the "step" entry point leaves the gradients zero, or the host clears
            zero_grad_fn=self._make_zero_grad_fn(batch_idx, optimizer) if window == 1 else None,
        )
        with _Uncounted(self.optim_progress), frozen_hook_arguments(self.trainer.lightning_module):
            if steps:
                strategy = strategy_of(self.trainer)
                with strategy.stepping():
                    self._optimizer_step(batch_idx, closure)
                strategy.schedulers.step()
            else:
                with _block_parallel_sync_behavior(self.trainer.strategy, block=True):
                    closure()
        return closure.consume_result().asdict()

    def _step_with_loss(self, kwargs: OrderedDict[str, Any]) -> ClosureResult:
        result = self._training_step(kwargs)
        if result.closure_loss is None:
            raise NoLoss(
                "training_step returned None; under automatic optimization a static step has a"
                " loss on every batch.",
                remedy="return the loss; to weigh a batch with nothing, return loss * 0 (momentum"
                " and weight decay still act); where no batch has one, in __init__():"
                " self.automatic_optimization = False",
            )
        return result


def _clear(optimizer: Any) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = None


class ManualOptimization(_ManualOptimization):
    """Manual optimization: the whole ``training_step`` is the program."""

    losses: Losses

    def run(self, kwargs: OrderedDict[str, Any]) -> dict[str, Any]:
        """Run one training step; returns what it returned, detached."""

        def trace(batch: Any) -> dict[str, Any]:
            before = self.optim_step_progress.total.completed
            with _Uncounted(self.optim_step_progress), self._backwards() as losses:
                arguments = traced_arguments({**kwargs, "batch": batch}, by_hand=True)
                with strategy_of(self.trainer).stepping():
                    output = super(ManualOptimization, self).run(arguments)
                steps = self.optim_step_progress.total.completed - before
            first = None if "loss" in output or not losses else losses[0].detach().clone()
            return {"output": output, "steps": steps, "loss": first}

        index = kwargs.get("batch_idx")
        training = strategy_of(self.trainer).training
        assert training is not None
        result = training(kwargs["batch"], lambda: {STEP: trace}, batch_idx=index)
        self.optim_step_progress.increment_by(result["steps"])
        output: dict[str, Any] = result["output"]
        loss = result["loss"]
        self.losses.note(output.get("loss") if loss is None else loss, kwargs["batch"])
        return output

    def advance(self, kwargs: OrderedDict[str, Any]) -> None:
        """Run the user's step, to be traced; Lightning takes a StopIteration for its end."""
        try:
            super().advance(kwargs)
        except StopIteration as error:
            refuse_users(error)
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


def traced_arguments(kwargs: dict[str, Any], by_hand: bool = False) -> OrderedDict[str, Any]:
    """The arguments of ``training_step`` for a trace: reading ``batch_idx`` warns."""
    arguments = OrderedDict(kwargs)
    if "batch_idx" in arguments:
        arguments["batch_idx"] = frozen_index(arguments["batch_idx"], by_hand=by_hand)
    return arguments


class _Uncounted:
    """Put a progress counter back on exit: a trace is no step."""

    def __init__(self, progress: _BaseProgress) -> None:
        self._progress = progress

    def __enter__(self) -> None:
        self._before = self._progress.state_dict()

    def __exit__(self, *exception: object) -> None:
        self._progress.load_state_dict(self._before)
