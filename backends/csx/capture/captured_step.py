"""Capture: run one step of Lightning's own code once, on fakes, and keep the operations.

Lightning's loop runs under a recorder on fakes of its tensors (``step_inputs``), and everything is
put back. What the step left behind is sorted: tensors updated in place, or put where one was, are
state; tensors in other attributes are outputs; logging and the like are host calls. ``capture``
gives a ``CapturedStep``: a graph, and all that is needed to run it.

``retrace`` traces a step again, and sees that it still is the program that was built. With
``retrace_every_iteration`` a step's Python runs on every batch, so what it does on the host happens
each time. The program that runs stays the first one; where its results go, and what is done on the
host with them, follows the new trace.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, fx

from fulgurite.backends.csx.capture.births import Birth, FirstStep, with_all_state, with_first_steps
from fulgurite.backends.csx.capture.comparison import check_same
from fulgurite.backends.csx.capture.host_calls import Accumulator
from fulgurite.backends.csx.capture.lightning_scope import Answers
from fulgurite.backends.csx.capture.recording import (
    Output,
    Outputs,
    Recording,
    Update,
    can_leave_out,
    record_operations,
)
from fulgurite.backends.csx.capture.scope import (
    BeforeTrace,
    Scope,
    restore_afterwards,
    undo_on_failure,
)
from fulgurite.backends.csx.capture.side_effects import (
    refuse_other_effects,
    release_rebound,
)
from fulgurite.backends.csx.capture.step_inputs import (
    CountFound,
    idle_numbers,
    numbers_of_others,
)
from fulgurite.backends.csx.capture.trace import Trace, results
from fulgurite.backends.csx.contract import (
    Access,
    ConstantSource,
    constant_sources,
    constants_as_inputs,
    explaining_errors,
    holds_traced,
    report_leaks,
    retry_with_values,
    warn_of_frozen_reads,
)
from fulgurite.backends.csx.diagnostics.muted import muted
from fulgurite.backends.csx.diagnostics.trace_errors import UnsupportedState
from fulgurite.backends.csx.graph.graph import Graph, Input, Kind, Placement, View
from fulgurite.backends.csx.graph.passes import CBFLOAT16_PASSES, PASSES, lower
from fulgurite.backends.csx.graph.passes.as_traced import let_views_copy, lowered
from fulgurite.backends.csx.graph.passes.shard_state import sharding
from fulgurite.backends.csx.graph.products import Product, products_of
from fulgurite.backends.csx.hyperparams.counts import CountSlot
from fulgurite.backends.csx.hyperparams.slots import NumberSlot
from fulgurite.backends.csx.hyperparams.traced_float import NumberGuard
from fulgurite.backends.csx.objects import (
    AppendedList,
    BatchSpec,
    ConstantTables,
    SharedTensorSplit,
    place_of_list,
)
from fulgurite.backends.csx.state import (
    GradientHandover,
    Place,
    StateInput,
    StateTensor,
    refill,
)
from fulgurite.backends.csx.streaming.residency import residency
from fulgurite.backends.patches import MISSING, tracing
from fulgurite.backends.program_scheduler import ProgramScheduler


@dataclass(frozen=True, slots=True, kw_only=True)
class InputSources:
    """Where a graph's inputs come from: each kind in the order of ``Input.index``."""

    state: tuple[StateInput, ...]
    gradients: GradientHandover
    numbers: tuple[NumberSlot | CountSlot, ...]
    constants: tuple[ConstantSource | Accumulator, ...]
    batch: BatchSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumptions:
    """What the traced Python read on the host: the graph is right while it would read the same."""

    numbers: tuple[NumberGuard, ...]  # of param groups
    idle: frozenset[tuple[int, int, str]]  # numbers of optimizers that it does not step, nor asks
    scalars: tuple[Access, ...]  # of modules
    answers: Answers  # of the trainer, about its state
    run: tuple[NumberGuard, ...]  # of counters of the run
    tables: ConstantTables  # that the step made


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedStep:
    """One captured entry point."""

    graph: Graph
    sources: InputSources
    outputs: Outputs
    assumptions: Assumptions
    changes: tuple[Access, ...]  # scalars of modules that the step changed
    counted: tuple[tuple[ProgramScheduler, int], ...]  # schedulers, and how often it steps each
    recording: Recording | None  # for later traces to be compared with
    products: tuple[Product, ...]  # of matrices, before any pass
    views: tuple[View, ...]  # of inputs, among the outputs
    births: tuple[FirstStep, ...] = ()

    def state_tensors(self) -> list[StateTensor]:
        """The tensors that the graph works on."""
        used = [item.index for item in self.graph.inputs if item.kind is Kind.STATE]
        return [held for i in used for held in self.sources.state[i].tensors]


@dataclass(frozen=True, slots=True)
class FinishedTrace:
    """A trace that has run.

    Args:
        trace: it.
        module: its graph, before any pass.
    """

    trace: Trace
    module: fx.GraphModule

    def check_host(self) -> None:
        """Look at what the step changed on the host."""
        scope = self.trace.scope
        with warn_of_frozen_reads() if scope.python_runs_once else contextlib.nullcontext():
            scope.check_trace(self.trace.host.snapshot)

    def refuse_other_effects(self) -> None:
        """Raise where the step left something behind that would be frozen."""
        host, changed_at = self.trace.host, self.trace.observers.changes.of_modules
        refuse_other_effects(host.snapshot, host.modules, host.scope.module, changed_at)

    def make_recording(self) -> Recording:
        """What is kept of a trace, to compare a later one with it."""
        trace, inputs, host = self.trace, self.trace.inputs, self.trace.host
        updates, once = trace.updates.found, trace.scope.python_runs_once
        recording = Recording(
            **self._operations(updates if trace.updates.left_out else ()),
            outputs=trace.result.collected.outputs,
            states=host.states,
            filled=self._filled(),
            left_elsewhere=[] if host.python is None else list(host.python.traced(holds_traced)),
            changes=trace.observers.attributes.changes() if once else (),
            lists=trace.observers.attributes.changed_lists if once else [],
            reads=host.reads,
            places=frozenset(
                place.name for held in inputs.state_tensors() for place in held.places
            ),
            was_none=inputs.gradients.handover.was_none,
        )
        if host.first is None and updates and can_leave_out(self.module.graph, updates):
            outline = replace(recording, **self._operations(updates), is_outline=True)
            recording = replace(recording, outline=outline)
        return recording

    def _operations(self, updates: Sequence[Update]) -> dict[str, Any]:
        """The fields of a recording that say what is computed; each of ``updates`` is one."""
        operations, own_count, constants = record_operations(
            self.module, self.trace.inputs.items, self.trace.result.last, updates
        )
        return {
            "operations": operations,
            "own_count": own_count,
            "constants": self._sources(constants),
        }

    def _filled(self) -> list[tuple[Place, Any]]:
        """The places that the program fills, and what is there now."""
        inputs, outputs = self.trace.inputs, self.trace.result.collected.outputs
        views = {p for item in inputs.state if item.whole for t in item.tensors for p in t.places}
        shared, given = self._shared(), outputs.template()["attributes"]
        for place, value in zip(outputs.attributes, given, strict=True):
            if isinstance(value, Output) and value.index in shared:
                views.add(place)
        filled = [(place, place.get(MISSING)) for place in outputs.attributes]
        kept = [(p, now) for p, now in filled if not isinstance(now, Tensor) or p in views]
        return kept + [(place, copy(place.get())) for place in map(place_of_list, outputs.lists)]

    def make_captured_step(self) -> CapturedStep:
        """Lower what was traced, and sort what the step left behind."""
        trace, scope, inputs = self.trace, self.trace.scope, self.trace.inputs
        recording = self.make_recording() if scope.compares_traces else None
        self.refuse_other_effects()
        shared = self._shared()
        # a place that gets a new tensor after every step shares memory with nobody from then on
        inputs.state = release_rebound(trace.result.collected.rebound, inputs.state, inputs.nodes)
        constants = constants_as_inputs(self.module, inputs.position_of_batch(), inputs.mode)
        sources = self._sources(constants)
        inputs.add_constants(constants)
        items = inputs.gradients.handover.mark_inputs(inputs.items)
        traced = let_views_copy(Graph(module=self.module, inputs=tuple(items), mode=inputs.mode))
        products = products_of(traced)
        narrow = scope.fp16_type == "cbfloat16"
        sharded = next((one.processes for one in inputs.state if one.processes), None)
        if sharded is not None:
            graph = lower(traced, (*PASSES, sharding(sharded)))
        else:
            graph = lower(traced, CBFLOAT16_PASSES) if narrow else lowered(traced)
        with warn_of_frozen_reads():
            trace.note_unseen_reads(graph)
        if sharded is not None:
            _refuse_left(graph, scope)
        return CapturedStep(
            graph=graph,
            sources=InputSources(
                state=inputs.state,
                gradients=inputs.gradients.handover,
                numbers=tuple(inputs.number_slots),
                constants=tuple(sources),
                batch=inputs.batch,
            ),
            outputs=trace.result.collected.outputs,
            assumptions=Assumptions(
                numbers=tuple(inputs.guards),
                idle=frozenset(idle_numbers(inputs, scope)),
                scalars=(
                    *trace.observers.attributes.reads(),
                    *trace.observers.frozen_buffers.accesses(),
                    *numbers_of_others(inputs, scope),
                )
                if scope.python_runs_once
                else (),
                answers=trace.answers,
                run=tuple(trace.run_guards),
                tables=ConstantTables(trace.result.collected.tables),
            ),
            changes=trace.observers.attributes.changes(),
            counted=tuple(inputs.scheduled.counted.items()),
            recording=recording,
            products=products,
            views=tuple(_views(shared, graph.inputs)),
        )

    def _shared(self) -> dict[int, tuple[Input, Tensor, bool]]:
        """Outputs for the user that are nothing but memory of the state and the batch.

        Of state alone that keeps its memory: neither where the step put a new tensor, nor what
        moves.
        """
        trace, inputs = self.trace, self.trace.inputs
        collected = trace.result.collected
        if residency.is_open or inputs.replaced_data.left:
            return {}
        if trace.host.first is not None or not trace.scope.python_runs_once:
            return {}
        kept = collected.outputs.kept_by_the_user()
        moved = {id(held) for held in (*collected.rebound, *collected.replaced)}

        def stays(item: Input) -> bool:
            if item.kind is not Kind.STATE:
                return item.kind is Kind.BATCH
            held = inputs.state[item.index].tensors
            return item.placement is Placement.REPLICATED and moved.isdisjoint(map(id, held))

        made = results(trace, self.module.graph) if kept else []
        found = {i: one.copied for i, one in enumerate(made) if i in kept and one.copied}
        return {i: one for i, one in found.items() if stays(one[0])}

    def _sources(self, constants: list[Tensor]) -> list[ConstantSource | Accumulator]:
        """Where tensors that were read from outside come from."""
        known: dict[int, ConstantSource | Accumulator] = {}
        for source in self.trace.host.outside:
            known.setdefault(id(source.tensor), source)  # the shortest way to it
        known |= self.trace.result.collected.accumulators
        return constant_sources(self.trace.scope.module, self.trace.scope.root, constants, known)


def _views(
    shared: Mapping[int, tuple[Input, Tensor, bool]], inputs: Sequence[Input]
) -> Iterator[View]:
    """Outputs that are memory of inputs, by the inputs' positions."""
    positions = {(item.kind, item.index): i for i, item in enumerate(inputs)}
    for output, (item, seen, is_input) in shared.items():
        base = item.example
        if seen.dtype == base.dtype and not seen.is_complex():  # which may be conjugated
            offset = int(seen.storage_offset()) - int(base.storage_offset())
            at = positions[item.kind, item.index]
            yield View(at, output, seen.shape, seen.stride(), offset, is_input)


def _refuse_left(graph: Graph, scope: Scope) -> None:
    """Gradients that a step by hand leaves in ``p.grad`` are whole: where weights are in parts, no.

    Raises:
        UnsupportedState: it leaves some to the next step.
    """
    left = [
        item.name
        for item in graph.inputs
        if item.kind is Kind.GRADIENT and item.placement is Placement.SHARDED
    ]
    if left and not scope.backward_is_lightnings:
        raise UnsupportedState(
            f"The step leaves {left[0]} to the next one, under manual optimization: it would be"
            " whole in each process, of which each holds a part of the weights.",
            remedy="automatic optimization with Trainer(accumulate_grad_batches=n);"
            " optimizer.zero_grad() before each backward pass; or execution='pipeline'",
        )


_TABLES = 3
"""How often a step is traced again for tables: one that it then still makes, it makes each time."""


def capture(scope: Scope, run: Callable[[Any], Any], batch: Any) -> CapturedStep:
    """Trace ``run(batch)``; to be called inside ``undo_on_failure``.

    Args:
        scope: what the step works on.
        run: one step of Lightning's own code, a function of the batch.
        batch: the batch to trace with; only its structure, shapes and dtypes matter.

    Raises:
        TraceError: the step is not static.
    """

    def trace() -> FinishedTrace:
        now = Trace(scope, run, batch)
        return FinishedTrace(now, now.trace())

    with explaining_errors():
        return retry_with_values(
            lambda: _trace_until_final(scope, trace), lambda: undo_on_failure(scope)
        )


def _trace_until_final(scope: Scope, trace: Callable[[], FinishedTrace]) -> CapturedStep:
    """Trace until the trace is what every later step will be.

    The first one may not be, for four reasons; each is dealt with, and the step is traced again:

    - It puts several tensors into places that hold one: each place gets memory of its own.
    - It changes a number that an optimizer keeps as an attribute: that is an input.
    - It caches a table (in ``functools.lru_cache``), which later steps find: now this one does.
    - It leaves tensors where none were, and later steps may read them: they are put there. If they
      do, what was traced without them is the first step.
    """
    before, born = BeforeTrace(scope), list[Birth]()
    with contextlib.ExitStack() as stack:

        def undo() -> None:
            before.restore()
            for one in born:
                one.put()
            for one in born:
                one.note()
            stack.enter_context(muted("stdout"))  # it printed once

        traced = functools.partial(_traced, trace, undo)

        def again() -> FinishedTrace:
            undo()
            return traced()

        def traced_and_undone() -> None:
            with restore_afterwards(scope):
                traced()

        finished, tables = traced(), 0
        finished.check_host()  # once: later traces change the same, and the user knows by then
        while finished.trace.result.fills_table and tables < _TABLES:
            tables += 1
            finished = again()
        finished, firsts = with_all_state(finished, again, born, stack)
        if scope.python_runs_once:  # not of a flag that says what the first step made
            with warn_of_frozen_reads():
                finished.trace.observers.attributes.warn_of_changes()
        captured = finished.make_captured_step()
        # last, for it traces the step once more where something leaked
        report_leaks(finished.trace.result.leaked, traced_and_undone)
    return with_first_steps(scope, captured, firsts, born)


def _traced(trace: Callable[[], FinishedTrace], undo: Callable[[], None]) -> FinishedTrace:
    """Trace, again after ``undo`` where that does not end."""
    while True:
        try:
            return trace()
        except SharedTensorSplit as error:
            undo()
            error.split()
        except CountFound:
            undo()


def retrace(
    scope: Scope,
    run: Callable[[Any], Any],
    batch: Any,
    first: Recording,
    *,
    step: str,
) -> Recording:
    """Trace ``run(batch)`` again, as ``capture`` does; on failure all is as before.

    Args:
        first: the trace that the program was built from.
        step: its name in messages.

    Raises:
        GraphChanged: it is another program than ``first``.
        TraceError: the step is no longer static.
    """
    with tracing(), undo_on_failure(scope), explaining_errors(), as_first_traced(first):
        return retry_with_values(
            lambda: _trace_again(Trace(scope, run, batch, first), step, first),
            lambda: undo_on_failure(scope),
        )


def _trace_again(trace: Trace, step: str, first: Recording) -> Recording:
    finished = FinishedTrace(trace, trace.trace())
    now = finished.make_recording()
    check_same(step, first, now)
    finished.refuse_other_effects()
    return now


@contextlib.contextmanager
def as_first_traced(first: Recording) -> Iterator[None]:
    """Put back what the program itself changes: attributes that it fills, unused optimizer state.

    A mask that the step cached in an attribute would else be state in the second trace. The same
    with scalars that the step changed, as the user was told, and with tensors of the first trace
    that are still where it left them.
    """
    kept = [(place, was) for place, was, left in first.left_elsewhere if place.get() is left]
    changed = [(Place(one.container, one.name), one.before) for one in first.changes]
    places = [*first.filled, *kept, *changed]
    found = [(place, place.get(MISSING)) for place, _ in places]
    states = [(state, dict(state)) for state, _ in first.states]
    lists = [(one, list(one)) for one, _ in first.lists]
    grown = (one.container for one in first.outputs.lists if type(one.container) is AppendedList)
    # a list that the host took away since: a step that began it anew would be another program
    begun = [place for one in grown if (place := one.begin()) is not None]
    try:
        for place, value in places:
            place.put(value)
        for one, before in first.lists:
            refill(one, before)
        for (state, now), (_, old) in zip(states, first.states, strict=True):
            # what no program updates was dropped after the first trace, which had it
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
