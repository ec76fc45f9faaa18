"""Capture: run one step of Lightning's own code once, on fakes, and keep the operations.

The tensors of module, optimizers and metrics are swapped for fakes *in place* (the objects stay, so
optimizers, ties and user references hold), Lightning's loop runs under ``make_fx``, and everything
is put back. What the step left behind is sorted: tensors updated in place or put into a place are
state; tensors in other attributes are outputs; logging and the like are host calls.
"""

from __future__ import annotations

import contextlib
import functools
import io
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.fx.experimental.proxy_tensor import get_innermost_proxy_mode, make_fx

from fulgurite.backends.csx.capture.batch_changes import BatchChanges, copied
from fulgurite.backends.csx.capture.batch_spec import BatchSpec
from fulgurite.backends.csx.capture.captured import Assumptions, Captured, InputSources
from fulgurite.backends.csx.capture.created_state import CreatedState
from fulgurite.backends.csx.capture.host_calls import record_host_calls
from fulgurite.backends.csx.capture.logs import Accumulator, LogCall
from fulgurite.backends.csx.capture.outputs import Outputs, numbered, passed_on, with_plain_keys
from fulgurite.backends.csx.capture.patch_table import traceable
from fulgurite.backends.csx.capture.recording import Recording, can_leave_out, record_operations
from fulgurite.backends.csx.capture.scope import Before, Scope, undone_on_failure
from fulgurite.backends.csx.capture.side_effects import (
    collect_outputs,
    metric_calls,
    refuse_the_rest,
    release_rebound,
    sort_state,
)
from fulgurite.backends.csx.capture.trainer_state import Answers, noted_answers
from fulgurite.backends.csx.capture.trees import (
    Regrown,
    Untied,
    check_gradients,
    check_ties,
    collect_trees,
    order_of,
    where_put,
)
from fulgurite.backends.csx.capture.updates import Updates
from fulgurite.backends.csx.contract.attributes import Attributes
from fulgurite.backends.csx.contract.changes import Changes
from fulgurite.backends.csx.contract.constants import (
    Constants,
    Source,
    constant_sources,
    constants_as_inputs,
)
from fulgurite.backends.csx.contract.dtype_rules import OneNarrowType
from fulgurite.backends.csx.contract.frozen_reads import warn_of_frozen_reads
from fulgurite.backends.csx.contract.function_mode import Contract
from fulgurite.backends.csx.contract.holders import fill_constants, tell_of_leaks
from fulgurite.backends.csx.contract.refusals import explained
from fulgurite.backends.csx.contract.replay import Reads
from fulgurite.backends.csx.contract.rules import MASKS
from fulgurite.backends.csx.contract.tensor_names import Names
from fulgurite.backends.csx.contract.watched import (
    EPOCH,
    INDEX,
    holds_traced,
    settle,
    values_where_refused,
)
from fulgurite.backends.csx.diagnostics.errors import DynamicShape
from fulgurite.backends.csx.diagnostics.user_lines import (
    UserLine,
    raised_at,
    record_lines,
    user_line,
)
from fulgurite.backends.csx.graph.graph import Graph, Input, Kind, storage_of
from fulgurite.backends.csx.graph.passes import CBFLOAT16_PASSES, PASSES, lower
from fulgurite.backends.csx.hyperparams.schedules import Scheduled, scheduler_places
from fulgurite.backends.csx.hyperparams.slots import (
    NotedGroup,
    as_vector,
    check_groups,
    install,
    noted_groups,
    number_slots,
    read_numbers,
)
from fulgurite.backends.csx.hyperparams.torch_functions import forget_failed_reads
from fulgurite.backends.csx.hyperparams.traced_float import Guard
from fulgurite.backends.csx.state.carried_gradients import Carried
from fulgurite.backends.csx.state.fake_swap import fake_for, swap
from fulgurite.backends.csx.state.first_update import first_updates
from fulgurite.backends.csx.state.gradients import Gradients
from fulgurite.backends.csx.state.places import NewPlace, Place, SideEffects, StateTensor
from fulgurite.backends.csx.state.set_data import ReplacedData
from fulgurite.backends.csx.state.snapshot import Snapshot
from fulgurite.backends.csx.state.storage import module_places, optimizer_places, state_inputs
from fulgurite.backends.patches import MISSING, patched
from fulgurite.backends.schedules import program_schedulers
from fulgurite.backends.step_context import running


def capture(
    scope: Scope,
    run: Callable[[Any], Any],
    batch: Any,
    *,
    clears_gradients: bool = False,
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
    with explained():
        return values_where_refused(
            lambda: _captured(scope, run, batch, clears_gradients), lambda: undone_on_failure(scope)
        )


def _captured(
    scope: Scope, run: Callable[[Any], Any], batch: Any, clears_gradients: bool
) -> Captured:
    """Trace as often as it takes to know what the step leaves to the next one."""
    before = Before(scope)
    with contextlib.ExitStack() as stack:

        def again() -> None:
            before.restore()
            stack.enter_context(_printed_once())

        def traced() -> tuple[Trace, fx.GraphModule]:
            try:
                trace = Trace(scope, run, batch, clears_gradients)
                return trace, trace.trace()
            except Untied as tied:
                again()
                tied.untie()
                return traced()

        trace, module = traced()
        trace.check_host()
        while trace.filled or trace.carries_more_gradients():
            again()
            trace, module = traced()
        if trace.new_places:
            created = trace.created_state(module)
            again()
            stack.enter_context(created.there())
            trace, module = traced()
            created.check(trace.recorded(module), module.graph, trace.input_names())
        captured = trace.result(module)
        tell_of_leaks(trace.leaked, lambda: _undone(scope, traced))
    return captured


def _undone(scope: Scope, trace: Callable[[], object]) -> None:
    """Trace, and put back what that changed."""
    now = Before(scope)
    try:
        trace()
    finally:
        now.restore()


def _printed_once() -> contextlib.AbstractContextManager[Any]:
    """While the step's Python runs again, what it prints was printed."""
    return contextlib.redirect_stdout(io.StringIO())


class Trace:
    """One capture while it runs."""

    def __init__(
        self,
        scope: Scope,
        run: Callable[[Any], Any],
        batch: Any,
        clears_gradients: bool,
        first: Recording | None = None,
        leaves_out_updates: bool = False,
    ) -> None:
        self._scope, self._run, self._first = scope, run, first
        self._reads = Reads() if first is None else first.reads
        self._clears_gradients = clears_gradients
        self._batch, self._batch_spec = batch, BatchSpec(batch, scope.leaf_name)
        self._snapshot, self._trees = Snapshot(scope.objects()), scope.trees()
        records = first is None and scope.looks_again and scope.freezes
        self._python = scope.python_state() if records else None
        noted = scope.optimizers if scope.trains and (records or leaves_out_updates) else ()
        self.updates = Updates(noted, leaves_out_updates)
        self._states = [(optimizer.state, dict(optimizer.state)) for optimizer in scope.optimizers]
        self._deferred = scope.deferred if first is None else first.deferred
        lists = () if first is None else first.outputs.lists
        self._regrown = {one.name for one in lists if isinstance(one.container, Regrown)}
        self.new_places: list[NewPlace] = []
        self._outside = scope.outside_tensors()
        self._parameters = scope.parameters()
        self.gradients = Gradients(self._parameters if scope.trains else {}, scope)
        if first is not None and scope.freezes:
            self.gradients.handover.was_none = first.was_none
        self._schedulers = program_schedulers(scope.schedulers)
        self._state = state_inputs(self._places())
        self._names = Names(self._state)
        self._number_slots = number_slots(scope.named_optimizers(), self._schedulers)
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._inputs = list(self._make_inputs())
        self._guards: list[Guard] = []
        self._constants = Constants(self._fallback_line)
        self._contract = Contract(
            self._fallback_line,
            self._names,
            self._constants.value_of,
            self._set_data,
            OneNarrowType(scope.fp16_type),
        )
        self._modules = list(scope.module.modules())
        self._attributes = Attributes(scope.module)
        self._changes = Changes(scope.module)
        self._nodes: dict[int, fx.Node] = {}  # of each state tensor
        self._rebound: list[StateTensor] = []
        self._replaced_data = ReplacedData()
        self._noted: list[NotedGroup] = []
        self._answers: Answers = {}

    def _places(self) -> Iterator[Place]:
        first = self._first
        for place in self._all_places():
            if first is None or not self._scope.freezes or place.name in first.places:
                yield place  # what the host put elsewhere since is no state of the program

    def _all_places(self) -> Iterator[Place]:
        yield from module_places(self._scope.module, self._scope.root)
        known = {id(p) for p in self._scope.module.parameters()}
        for name, p in self._parameters.items():
            if id(p) not in known:
                yield Place({0: p}, 0, name)
        names = {id(p): name for name, p in self._parameters.items()}
        yield from optimizer_places(self._scope.named_optimizers(), names)
        yield from (one.place() for one in self._deferred)
        yield from (one.place() for one in self._scope.carried.values())
        yield from scheduler_places(self._schedulers)
        yield from self._scope.outside_state()
        yield from self._trees.places

    def state_tensors(self) -> list[StateTensor]:
        """The tensors of the program's state."""
        return [held for item in self._state for held in item.tensors]

    def _fake(self, tensor: Tensor) -> Tensor:
        """A fake of it; never one of inference mode, which torch's functions treat otherwise."""
        with torch.inference_mode(False):
            real = tensor.clone() if tensor.is_inference() else tensor
            return self._mode.from_tensor(real.detach(), static_shapes=True)

    def _make_inputs(self) -> Iterator[Input]:
        fake = self._fake
        for i, item in enumerate(self._state):
            yield Input(kind=Kind.STATE, index=i, name=item.name, example=fake(item.base()))
        for i, (name, p) in enumerate(self.gradients.parameters.items()):
            zero = fake(torch.zeros_like(p, requires_grad=False))
            yield Input(kind=Kind.GRADIENT, index=i, name=f"{name}.grad", example=zero)
        if self._number_slots:
            vector = as_vector(read_numbers(self._number_slots, self._scope.optimizers))
            yield Input(kind=Kind.NUMBERS, index=0, name="numbers", example=fake(vector))
        steps = fake(torch.zeros((), dtype=torch.int64))
        yield Input(kind=Kind.STEPS, index=0, name="global_step", example=steps)
        for i, leaf in enumerate(self._batch_spec.tensor_leaves()):
            assert leaf.shape is not None
            laid_out = torch.empty_strided(leaf.shape, leaf.stride, dtype=leaf.dtype)
            yield Input(kind=Kind.BATCH, index=i, name=leaf.name, example=fake(laid_out))

    def trace(self) -> fx.GraphModule:
        """The step as it was traced, before any pass."""
        module = self._traced()
        forget_failed_reads(module.graph)
        self._inputs = [self._with_own_example(item) for item in self._inputs]
        self.filled = fill_constants(self._constants.created.living(), self._constants.value_of)
        self.leaked = self._constants.created.spoil_the_living(
            self._names.origin, self._is_constant
        )
        return module

    def refuse_the_rest(self) -> None:
        """Raise where the step left something behind that would be frozen."""
        refuse_the_rest(self._snapshot, self._modules, self._scope.module, self._changes.of_modules)

    def recorded(self, module: fx.GraphModule) -> Recording:
        """What is kept of a trace, to compare a later one with it."""
        record = functools.partial(record_operations, module, self._inputs, self._last)
        updates = self.updates.noted
        operations, own, constants = record(updates if self.updates.left_out else ())
        shared = {p for e in self._state if e.whole for held in e.tensors for p in held.places}
        own_places = {place for held in self.state_tensors() for place in held.places}
        once = self._scope.freezes  # what Python does happens once
        recording = Recording(
            operations=operations,
            own=own,
            constants=self._sources(constants),
            outputs=self._outputs,
            deferred=self._deferred,
            states=self._states,
            filled=[
                (place, was)
                for place, was in ((one, one.get(MISSING)) for one in self._outputs.attributes)
                if not isinstance(was, Tensor) or place in shared
            ]
            + [(place, copy(place.get())) for place in map(where_put, self._outputs.lists)],
            kept=[] if self._python is None else list(self._python.traced(holds_traced)),
            changes=self._attributes.changes() if once else (),
            lists=self._attributes.changed_lists if once else [],
            reads=self._reads,
            places=frozenset(place.name for place in own_places),
            was_none=self.gradients.handover.was_none,
        )
        if self._first is None and updates and can_leave_out(module.graph, updates):
            operations, own, constants = record(updates)
            sources = self._sources(constants)
            outline = replace(
                recording, operations=operations, own=own, constants=sources, is_outline=True
            )
            recording = replace(recording, outline=outline)
        return recording

    def carries_more_gradients(self) -> bool:
        """Whether the step leaves gradients for optimizers of the next one that it hid from them.

        From now on the scope knows of them: to be traced again.
        """
        missed = self.gradients.missed
        for name in sorted(missed):
            there = self._parameters[name].grad is not None
            self._scope.carried[name] = Carried(name, there)
        return bool(missed)

    def check_host(self) -> None:
        """Look at what the step changed on the host."""
        with warn_of_frozen_reads() if self._scope.freezes else contextlib.nullcontext():
            self._scope.check_trace(self._snapshot)

    def created_state(self, module: fx.GraphModule) -> CreatedState:
        """The places in ``new_places``."""
        nodes = pytree.tree_leaves(module.graph.output_node().args[0])
        examples = [node.meta["val"] for node in nodes]
        recording, batch = self.recorded(module), self._batch
        passed = passed_on(recording.outputs.passed, batch, batch, {INDEX: 0, EPOCH: 0})
        return CreatedState(self.new_places, recording, examples, passed)

    def input_names(self) -> list[str]:
        """Of the graph's inputs, in order."""
        return [item.name for item in self._inputs]

    def result(self, module: fx.GraphModule) -> Captured:
        """Lower what was traced, and sort what the step left behind."""
        recording = self.recorded(module) if self._scope.looks_again else None
        self.refuse_the_rest()
        self._state = release_rebound(self._rebound, self._state, self._nodes)
        constants = constants_as_inputs(module, position=self._count_before_batch())
        sources = self._sources(constants)
        self._add_constants(constants)
        self._inputs = self.gradients.marked(self._inputs)
        passes = CBFLOAT16_PASSES if self._scope.fp16_type == "cbfloat16" else PASSES
        graph = lower(Graph(module=module, inputs=tuple(self._inputs), mode=self._mode), passes)
        return Captured(
            graph=graph,
            sources=InputSources(
                state=self._state,
                gradients=self.gradients.handover,
                numbers=tuple(self._number_slots),
                constants=tuple(sources),
                batch=self._batch_spec,
            ),
            outputs=self._outputs,
            assumptions=Assumptions(
                numbers=tuple(self._guards),
                scalars=self._attributes.reads() if self._scope.freezes else (),
                answers=self._answers,
            ),
            changes=self._attributes.changes(),
            counted=tuple(self._scheduled.counted.items()),
            recording=recording,
        )

    def _sources(self, constants: list[Tensor]) -> list[Source | Accumulator]:
        """Where tensors that were read from outside come from."""
        known: dict[int, Source | Accumulator] = {}
        for source in self._outside:
            known.setdefault(id(source.tensor), source)  # the shortest way to it
        known |= self._accumulators
        return constant_sources(self._scope.module, self._scope.root, constants, known)

    def _with_own_example(self, item: Input) -> Input:
        """An input without the tensor that the step saw: the user may have kept it."""
        if item.kind is not Kind.BATCH:
            return item
        seen = item.example
        with self._mode:
            own = torch.empty_strided(seen.shape, seen.stride(), dtype=seen.dtype)
        return replace(item, example=own)

    def _traced(self) -> fx.GraphModule:
        """The step as a graph, with everything changed that keeps it from being one."""
        boundary = Trace._step.__code__
        self._reads.begin(again=self._first is not None)
        reads = self._reads if self._scope.freezes else None
        try:
            with contextlib.ExitStack() as stack:
                stack.enter_context(running(trace=self, reads=reads))
                stack.enter_context(traceable(self._scope, self._fallback_line))
                stack.enter_context(noted_answers(self._answers))
                stack.enter_context(self._mode)
                stack.enter_context(record_lines(boundary, self._scope.line_now))
                stack.enter_context(self._contract)
                stack.enter_context(patched([self._contract.in_backward()]))
                traced = make_fx(self._step, tracing_mode="fake", _allow_non_fake_inputs=True)(
                    *[item.example for item in self._inputs]
                )
                settle(self._scope.line_now())
            if self._contract.refused is not None:  # and caught by code in between
                raise self._contract.refused
            return traced
        except TypeError as error:
            refused = self._contract.refused_by_torch(error)
            if refused is None:
                raise
            raise refused from None
        except (DynamicOutputShapeException, DataDependentOutputException) as error:
            raise DynamicShape(
                f"{error.func} has a result whose shape depends on values.",
                line=raised_at(error) or self._scope.line_now(),  # the step is off the stack by now
                remedy=MASKS,
            ) from None

    def _count_before_batch(self) -> int:
        return sum(item.kind is not Kind.BATCH for item in self._inputs)

    def _add_constants(self, constants: list[Tensor]) -> None:
        """Put constants among the inputs, before the batch."""
        position = self._count_before_batch()
        self._inputs[position:position] = [
            Input(kind=Kind.CONSTANT, index=i, name=f"constant {i}", example=self._fake(constant))
            for i, constant in enumerate(constants)
        ]

    # -- the traced function -----------------------------------------------------------------

    def _step(self, *flat: Tensor) -> list[Tensor]:
        given: dict[Kind, list[Tensor]] = {kind: [] for kind in Kind}
        for item, tensor in zip(self._inputs, flat, strict=True):
            given[item.kind].append(tensor)
        tracer = get_innermost_proxy_mode().tracer  # type: ignore[union-attr]
        self._names.tracker = tracer.tensor_tracker
        self._boundaries = {storage_of(tensor) for tensor in flat}
        for tensor in given[Kind.BATCH]:
            self._constants.created.add(tensor)
        leaves = zip(given[Kind.BATCH], self._batch_spec.tensor_leaves(), strict=True)
        self._names.give({id(tensor): leaf.name for tensor, leaf in leaves})
        [steps] = given[Kind.STEPS]
        with self._inputs_in_place(given), running(global_step=steps.clone, norms=[]):
            batch = self._batch_spec.rebuild(given[Kind.BATCH])
            before = copied(batch)
            with (
                record_host_calls(self._scope.trainer, self._scope.schedulers) as calls,
                torch.set_grad_enabled(self._scope.trains),
                self.gradients.hidden_from_steps(
                    self._scope.backward_is_lightnings, self._scope.optimizers, self._deferred
                ),
                first_updates(self._deferred),
                self.updates.watched(tracer.graph, self._node_of),
                self._changes.watched(Trace._step.__code__),
                self._attributes.watched(Trace._step.__code__),
                self._constants,
            ):
                result = self._run(batch)
            changes = BatchChanges(batch, before)
            if changes.value:
                calls.insert(0, changes)
            self._last = next(reversed(tracer.graph.nodes))
            with torch.no_grad():
                return self._collect(result, calls)

    def _node_of(self, tensor: Tensor) -> fx.Node | None:
        found = self._names.tracker.get(tensor)
        return None if found is None else found.proxy.node

    @contextlib.contextmanager
    def _inputs_in_place(self, given: dict[Kind, list[Tensor]]) -> Iterator[None]:
        """Put the inputs where state, gradients and numbers are, and take them out again."""
        groups = [dict(group) for group in self._scope.groups()]
        swapped: list[tuple[Tensor, Tensor]] = []
        try:
            for item, base in zip(self._state, given[Kind.STATE], strict=True):
                for i, held in enumerate(item.tensors):
                    fake = fake_for(held.tensor, item.view(base, i))
                    self.gradients.watch(held.tensor, fake)
                    swapped.append((held.tensor, fake))
            tracker = self._names.tracker
            for tensor, fake in swapped:
                swap(tensor, fake)
                tracker[tensor] = tracker[fake]  # by the object, which stayed
                self._nodes[id(tensor)] = tracker[fake].proxy.node
            self.gradients.put(given[Kind.GRADIENT])
            for vector in given[Kind.NUMBERS]:
                self._guards = install(self._number_slots, vector, self._scope.optimizers)
            self._scheduled = Scheduled(self._guards, self._contract.in_double)
            with running(schedules=self._scheduled):
                for scheduler in self._schedulers:
                    scheduler.show()
                with noted_groups(self._scope.optimizers) as self._noted:
                    yield
        finally:
            for group, before in zip(self._scope.groups(), groups, strict=True):
                group.clear()
                group.update(before)
            for tensor, fake in swapped:
                if isinstance(tensor, FakeTensor):
                    swap(tensor, fake)

    # -- what the step left behind -----------------------------------------------------------

    def _collect(self, result: Any, calls: list[Any]) -> list[Tensor]:
        check_groups(self._noted, self._scope.line_of("training_step"))
        self.gradients.keep(cleared=self._clears_gradients)
        module, left = self._scope.module, SideEffects()
        self._attributes.settle(left, self._is_constant)
        if self._first is None:
            check_ties(self._state)
        check_gradients(self._state)
        order = self._trees.order()
        known = collect_trees(
            self._trees, self._state, left, self._is_constant, self._fallback_line, self._regrown
        )
        known |= sort_state(self._state, module, self._boundaries, left, self._line_of_change)
        collect_outputs(module, self._snapshot, known, left)
        self.new_places = left.new_places
        calls = [*metric_calls(module, self._snapshot), *calls]
        self._rebound = left.rebound
        self._accumulators: dict[int, Accumulator] = {}
        for call in calls:
            if isinstance(call, LogCall):
                self._accumulators |= call.reduce()
        owners = {id(vars(m)): path for path, m in module.named_modules()}
        places, values = left.written(lambda place: order_of(place, owners, order))
        payload = {
            "result": result,
            "attributes": values,
            "lists": left.list_values,
            "calls": [call.value for call in calls],
        }
        leaves, tree = pytree.tree_flatten(with_plain_keys(payload))
        kept, outputs, passed = numbered(leaves, self._boundaries)
        self._outputs = Outputs(
            tree=tree,
            leaves=kept,
            passed=passed,
            attributes=tuple(places),
            lists=tuple(left.lists),
            calls=tuple(calls),
        )
        for call in calls:
            call.value = None
        self._replaced_data.write_back()
        return outputs

    def _is_constant(self, tensor: Tensor) -> bool:
        return self._constants.value_of(tensor) is not None

    def _set_data(self, tensor: Tensor, value: Tensor) -> None:
        if storage_of(tensor) in self._boundaries or self._replaced_data.holds(tensor):
            self._replaced_data.replace(tensor, value)
        else:
            tensor.detach().copy_(value)

    # -- after the trace --------------------------------------------------------------------

    def _line_of_change(self, place: Place, value: Any) -> UserLine | None:
        """Where the user put a value into a place, or else where they made it."""
        made = self._names.origin(value)[1] if isinstance(value, Tensor) else None
        return self._changes.line_of(place.container, place.key) or made or self._fallback_line()

    def _fallback_line(self) -> UserLine | None:
        """The user's line that runs now, or where they wrote the hook that does."""
        return user_line(Trace._step.__code__) or self._scope.line_now()
