"""Capture: run one step of Lightning's own code once, on fakes, and keep the operations.

Lightning's loop runs under ``make_fx`` on fakes of its tensors (``step_inputs``), and everything is
put back. What the step left behind is sorted: tensors updated in place, or put where one was, are
state; tensors in other attributes are outputs; logging and the like are host calls.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from fulgurite.backends.csx.capture.captured import Captured
from fulgurite.backends.csx.capture.finished_trace import FinishedTrace
from fulgurite.backends.csx.capture.scope import Scope
from fulgurite.backends.csx.capture.trace import Trace
from fulgurite.backends.csx.capture.trees import Untied
from fulgurite.backends.csx.capture.undo import Before, restored, undone_on_failure
from fulgurite.backends.csx.contract.holders import tell_of_leaks
from fulgurite.backends.csx.contract.refusals import explained
from fulgurite.backends.csx.contract.watched import values_where_refused
from fulgurite.backends.csx.diagnostics.muted import muted

_TABLES = 3
"""How often a step is traced again for tables: one that it then still makes, it makes each time."""


def capture(
    scope: Scope, run: Callable[[Any], Any], batch: Any, *, clears_gradients: bool = False
) -> Captured:
    """Trace ``run(batch)``; to be called inside ``undone_on_failure``.

    Args:
        scope: what the step works on.
        run: one step of Lightning's own code, a function of the batch.
        batch: the batch to trace with; only its structure, shapes and dtypes matter.
        clears_gradients: the step ends an accumulation window: gradients are zero afterwards.

    Raises:
        TraceError: the step is not static.
    """

    def trace() -> FinishedTrace:
        now = Trace(scope, run, batch, clears_gradients)
        return FinishedTrace(now, now.trace())

    with explained():
        return values_where_refused(
            lambda: _captured(scope, trace), lambda: undone_on_failure(scope)
        )


def _captured(scope: Scope, trace: Callable[[], FinishedTrace]) -> Captured:
    """Trace until the trace is what every later step will be.

    The first one may not be, for five reasons; each is dealt with, and the step is traced again:

    - It puts several tensors into places that hold one: each place gets memory of its own.
    - It caches a table (in ``functools.lru_cache``), which later steps find: now this one does.
    - It leaves a gradient for an optimizer of the next step, which this step hid from it.
    - It began with a zero where every step begins with None, and its code may ask for that.
    - It leaves tensors where none were, and later steps may read them: they are put there.
    """
    before = Before(scope)
    with contextlib.ExitStack() as stack:

        def undo() -> None:
            before.restore()
            stack.enter_context(muted("stdout"))  # it printed once

        def traced() -> FinishedTrace:
            while True:
                try:
                    return trace()
                except Untied as tied:
                    undo()
                    tied.untie()
                except AssertionError:  # that there is no gradient yet, perhaps
                    if not scope.other_programs.supposed_none():
                        raise
                    undo()

        def traced_and_undone() -> None:
            with restored(scope):
                traced()

        finished, tables = traced(), 0
        finished.check_host()
        while finished.begins_with_other_gradients() or (
            finished.trace.left.filled and tables < _TABLES
        ):
            tables += finished.trace.left.filled
            undo()
            finished = traced()
        if finished.trace.left.collected.new_places:
            created = finished.created_state()
            undo()
            stack.enter_context(created.there())
            finished = traced()
            names = [item.name for item in finished.trace.inputs.items]
            created.check(finished.recorded(), finished.module.graph, names)
        captured = finished.captured()
        tell_of_leaks(finished.trace.left.leaked, traced_and_undone)
    return captured
