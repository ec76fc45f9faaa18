"""What runs now: the one place that says whether a step does, and what belongs to that step.

Whoever runs a step (a trace, a Trainer, a function that is called eagerly) sets what it has with
``running``; whoever behaves otherwise inside of one asks ``step_context.get()``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class StepContext:
    """What the code that runs now is part of; each is None outside of what it belongs to.

    Args:
        trace: the ``capture.trace.Trace`` of the step, while it is traced.
        initializes: an optimizer is run only to make its state.
        global_step: gives the number of optimizer steps done, for ``fulgurite.global_step()``.
        norms: the norms of gradients that this step clipped; the last one counts.
        calls: receives what is done on the host after every step.
        note: takes calls of closures, which run when the step is over: (closure, args, kwargs).
        schedules: what a trace does with schedulers (a ``schedules.Traced``).
        reads: the frozen values that the trace reads (a ``contract.Reads``).
    """

    trace: Any = None
    initializes: bool = False
    global_step: Callable[[], Tensor] | None = None
    norms: list[Tensor] | None = None
    calls: list[Any] | None = None
    note: Callable[[Any, tuple[Any, ...], dict[str, Any]], None] | None = None
    schedules: Any = None
    reads: Any = None

    @property
    def is_on_host(self) -> bool:
        """Whether the user's code runs between steps: no trace, no trial of an optimizer."""
        return self.trace is None and not self.initializes


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
