"""Trace a step again, and see that it still is the program that was built.

With ``retrace_every_iteration`` a step's Python runs on every batch, so what it does on the host
happens each time. The program that runs stays the first one; where its results go, and what is done
on the host with them, follows the new trace.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from fulgurite.backends.csx.capture.comparison import check_same
from fulgurite.backends.csx.capture.finished_trace import FinishedTrace
from fulgurite.backends.csx.capture.recording import Recording
from fulgurite.backends.csx.capture.scope import Scope
from fulgurite.backends.csx.capture.trace import Trace
from fulgurite.backends.csx.capture.trees import Grown
from fulgurite.backends.csx.capture.undo import undone_on_failure
from fulgurite.backends.csx.contract.refusals import explained
from fulgurite.backends.csx.contract.watched import values_where_refused
from fulgurite.backends.csx.state.places import Place
from fulgurite.backends.csx.state.python_objects import refill
from fulgurite.backends.patches import MISSING, tracing


def retrace(
    scope: Scope,
    run: Callable[[Any], Any],
    batch: Any,
    first: Recording,
    *,
    step: str,
    clears_gradients: bool,
) -> Recording:
    """Trace ``run(batch)`` again, as ``capture`` does; on failure all is as before.

    Args:
        first: the trace that the program was built from.
        step: its name in messages.

    Raises:
        GraphChanged: it is another program than ``first``.
        TraceError: the step is no longer static.
    """
    with tracing(), undone_on_failure(scope), explained(), as_first_traced(first):
        return values_where_refused(
            lambda: _recorded_again(Trace(scope, run, batch, clears_gradients, first), step, first),
            lambda: undone_on_failure(scope),
        )


def _recorded_again(trace: Trace, step: str, first: Recording) -> Recording:
    finished = FinishedTrace(trace, trace.trace())
    now = finished.recorded()
    check_same(step, first, now)
    finished.refuse_the_rest()
    return now


@contextlib.contextmanager
def as_first_traced(first: Recording) -> Iterator[None]:
    """Put back what the program itself changes: attributes that it fills, unused optimizer state.

    A mask that the step cached in an attribute would else be state in the second trace. The same
    with scalars that the step changed, as the user was told, and with tensors of the first trace
    that are still where it left them.
    """
    kept = [(place, was) for place, was, left in first.kept if place.get() is left]
    changed = [(Place(one.container, one.name), one.before) for one in first.changes]
    places = [*first.filled, *kept, *changed]
    found = [(place, place.get(MISSING)) for place, _ in places]
    states = [(state, dict(state)) for state, _ in first.states]
    lists = [(one, list(one)) for one, _ in first.lists]
    grown = (one.container for one in first.outputs.lists if type(one.container) is Grown)
    begun = [place for one in grown if (place := one.begin()) is not None]
    try:
        for place, value in places:
            place.put(value)
        for one, before in first.lists:
            refill(one, before)
        for (state, now), (_, old) in zip(states, first.states, strict=True):
            refill(state, {key: now.get(key, value) for key, value in old.items()} | now)
        yield
    finally:
        for place, value in found:
            place.put(value)
        for place in reversed(begun):
            place.put(MISSING)
        for one, content in lists:
            refill(one, content)
        for state, now in states:
            refill(state, now)
