"""What runs now: the one place that says whether a step does, and what belongs to that step.

Whoever runs a step (a trace, a Trainer, a function that is called eagerly) sets what it has with
``running``; whoever behaves otherwise inside of one asks ``step_context.get()``. So one module can
ask for ``fulgurite.global_step()`` and ``fulgurite.gradient_norm()`` on every device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor
from torch.optim import Optimizer


@dataclass(frozen=True, slots=True, kw_only=True)
class StepContext:
    """What the code that runs now is part of; each is None outside of what it belongs to.

    Args:
        trace: the ``capture.trace.Trace`` of the step, while it is traced.
        steps_optimizer: this package runs an optimizer on the host: to make its state, or where
            Lightning steps it without a backward pass.
        global_step: gives the number of optimizer steps done, for ``fulgurite.global_step()``.
        norms: the norms of gradients that this step clipped; the last one counts.
        calls: receives what is done on the host after every step.
        note: takes calls of closures, which run when the step is over: (closure, args, kwargs).
        schedules: what a trace does with schedulers (a ``schedules.Traced``).
        reads: the frozen values that the trace reads (a ``contract.Reads``).
    """

    trace: Any = None
    steps_optimizer: bool = False
    global_step: Callable[[], Tensor] | None = None
    norms: list[Tensor] | None = None
    calls: list[Any] | None = None
    note: Callable[[Any, tuple[Any, ...], dict[str, Any]], None] | None = None
    schedules: Any = None
    reads: Any = None

    @property
    def is_on_host(self) -> bool:
        """Whether the user's code runs between steps: no trace, nor its optimizers."""
        return self.trace is None and not self.steps_optimizer


step_context: ContextVar[StepContext] = ContextVar(
    "step_context",
    default=StepContext(),  # noqa: B039  # frozen
)


@contextlib.contextmanager
def running(**changes: Any) -> Iterator[None]:
    """Let the fields of the step context have other values while the block runs."""
    token = step_context.set(replace(step_context.get(), **changes))
    try:
        yield
    finally:
        step_context.reset(token)


def global_step() -> Tensor:
    """The number of optimizer steps done before this step, an int64 tensor without dimensions.

    It is what Lightning's ``trainer.global_step`` is when the step begins. In a traced step it is
    an input of the program, so it counts on where ``self.global_step`` would stay as it was.

    Raises:
        RuntimeError: nothing runs that has steps.
    """
    count = step_context.get().global_step
    if count is None:
        raise RuntimeError(
            "fulgurite.global_step() was called outside of a run. Call it in a step or a hook while"
            " a fulgurite.Trainer runs, or in a function under fulgurite.trace."
        )
    return count()


def gradient_norm() -> Tensor:
    """The total norm of the gradients before they were last clipped in this step, float32 [].

    It is the 2-norm over all parameters of that optimizer, where Lightning clips by norm
    (``gradient_clip_val``, ``self.clip_gradients``). To log it::

        def configure_gradient_clipping(
            self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None
        ):
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
            self.log("grad_norm", fulgurite.gradient_norm())

    Raises:
        RuntimeError: nothing was clipped by norm in this step.
    """
    norms = step_context.get().norms
    if not norms:
        where = "in this step" if norms is not None else "yet: no training step runs"
        raise RuntimeError(
            f"fulgurite.gradient_norm() was called, and nothing was clipped by norm {where}. Call"
            " it after self.clip_gradients(...) in configure_gradient_clipping, with"
            " Trainer(gradient_clip_val=1.0); clipping by value computes no norm. In a loop of your"
            " own: norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)."
        )
    return norms[-1]


def clip_by_norm(plugin: Precision, optimizer: Optimizer, clip_val: float) -> None:
    """What ``Precision.clip_grad_by_norm`` does, and keep the norm."""
    norm = torch.nn.utils.clip_grad_norm_(plugin.main_params(optimizer), clip_val)
    norms = step_context.get().norms
    if norms is not None:
        norms[:] = [norm]
