"""Capture: run one step of Lightning's own code once, on fakes, and keep the operations.

The tensors of module, optimizers and metrics are swapped for fakes *in place* (the objects stay, so
optimizers, ties and user references hold), Lightning's loop runs under ``make_fx``, and everything
is put back. What the step left behind is sorted: tensors updated in place or put into a slot are
state; tensors in other attributes are outputs; logging and the like are host calls.
"""

from __future__ import annotations

import contextlib
import functools
import io
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, ClassVar

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
from fulgurite.backends.csx.capture.born import Born
from fulgurite.backends.csx.capture.host_calls import record_host_calls
from fulgurite.backends.csx.capture.logs import Accumulator, LogCall
from fulgurite.backends.csx.capture.outputs import Outputs, numbered, passed_on, with_plain_keys
from fulgurite.backends.csx.capture.patch_table import traceable
from fulgurite.backends.csx.capture.recording import Recording, can_leave_out, record_operations
from fulgurite.backends.csx.capture.scope import Before, World, undone_on_failure
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
from fulgurite.backends.csx.contract.attributes import Access, Attributes
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
from fulgurite.backends.csx.contract.replay import Reads
from fulgurite.backends.csx.contract.rules import MASKS, explained
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
from fulgurite.backends.csx.graph.graph import Graph, Input, Kind, storage_of, used_numbers
from fulgurite.backends.csx.graph.passes import CBFLOAT16_PASSES, PASSES, lower
from fulgurite.backends.csx.hyperparams.schedules import Scheduled, scheduler_slots
from fulgurite.backends.csx.hyperparams.slots import (
    NotedGroup,
    NumberSlot,
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
from fulgurite.backends.csx.state.fake_swap import stand_in_for, swap
from fulgurite.backends.csx.state.first_update import first_updates
from fulgurite.backends.csx.state.gradients import Gradients, Handover
from fulgurite.backends.csx.state.places import Birth, Leftovers
from fulgurite.backends.csx.state.set_data import Moved
from fulgurite.backends.csx.state.storage import (
    Entry,
    Held,
    Slot,
    Snapshot,
    entries_of,
    module_slots,
    optimizer_slots,
)
from fulgurite.backends.gradient_norm import norms_kept
from fulgurite.backends.patches import MISSING, patched
from fulgurite.backends.schedules import ProgramScheduler, program_schedulers, traced_by
from fulgurite.backends.step_count import counted_by


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """One captured entry point."""

    graph: Graph
    entries: tuple[Entry, ...]  # state, by ``Input.index``
    numbers: tuple[NumberSlot, ...]
    guards: tuple[Guard, ...]
    used_numbers: frozenset[int]
    constants: tuple[Source | Accumulator, ...]
    batch: BatchSpec
    outputs: Outputs
    reads: tuple[Access, ...]  # scalars of modules that the step's Python read
    changes: tuple[Access, ...]  # and those that it changed
    recording: Recording | None  # for later traces to be compared with
    gradients: Handover
    answers: Answers  # what the step asked of the trainer's state
    counted: tuple[tuple[ProgramScheduler, int], ...]  # schedulers, and how often it steps each
    trained: frozenset[int]  # the identity of the optimizers' parameters

    def held(self) -> list[Held]:
        """The tensors of its state."""
        used = [item.index for item in self.graph.inputs if item.kind is Kind.STATE]
        return [held for i in used for held in self.entries[i].held]


def capture(
    world: World,
    run: Callable[[Any], Any],
    batch: Any,
    *,
    clears_gradients: bool = False,
) -> Captured:
    """Trace ``run(batch)``; to be called inside ``undone_on_failure``.

    Args:
        world: what the step works on.
        run: one step of Lightning's own code, a function of the batch.
        batch: the batch to trace with; only its structure, shapes and dtypes matter.
        clears_gradients: the step ends an accumulation window: gradients are zero afterwards.

    Raises:
        TraceError: the step is not static.
    """
    with explained():
        return values_where_refused(
            lambda: _captured(world, run, batch, clears_gradients), lambda: undone_on_failure(world)
        )


def _captured(
    world: World, run: Callable[[Any], Any], batch: Any, clears_gradients: bool
) -> Captured:
    """Trace as often as it takes to know what the step leaves to the next one."""
    before = Before(world)
    with contextlib.ExitStack() as stack:

        def again() -> None:
            before.restore()
            stack.enter_context(_printed_once())

        def traced() -> tuple[Trace, fx.GraphModule]:
            try:
                trace = Trace(world, run, batch, clears_gradients)
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
        if trace.births:
            born = trace.born(module)
            again()
            stack.enter_context(born.there())
            trace, module = traced()
            born.check(trace.recorded(module), module.graph, trace.input_names())
        captured = trace.result(module)
        tell_of_leaks(trace.leaked, lambda: _undone(world, traced))
    return captured


def _undone(world: World, trace: Callable[[], object]) -> None:
    """Trace, and put back what that changed."""
    now = Before(world)
    try:
        trace()
    finally:
        now.restore()


def _printed_once() -> contextlib.AbstractContextManager[Any]:
    """While the step's Python runs again, what it prints was printed."""
    return contextlib.redirect_stdout(io.StringIO())


class Trace:
    """One capture while it runs."""

    current: ClassVar[Trace | None] = None

    def __init__(
        self,
        world: World,
        run: Callable[[Any], Any],
        batch: Any,
        clears_gradients: bool,
        first: Recording | None = None,
        leaves_out_updates: bool = False,
    ) -> None:
        self._world, self._run, self._first = world, run, first
        self._reads = Reads() if first is None else first.reads
        self._clears_gradients = clears_gradients
        self._batch, self._batch_spec = batch, BatchSpec(batch, world.leaf_name)
        self._snapshot, self._trees = Snapshot(world.objects()), world.trees()
        records = first is None and world.looks_again and world.freezes
        self._python = world.python_state() if records else None
        noted = world.optimizers if world.trains and (records or leaves_out_updates) else ()
        self.updates = Updates(noted, leaves_out_updates)
        self._states = [(optimizer.state, dict(optimizer.state)) for optimizer in world.optimizers]
        self._unborn = world.unborn if first is None else first.unborn
        lists = () if first is None else first.outputs.lists
        self._regrown = {place.name for place, _ in lists if isinstance(place, Regrown)}
        self.births: list[Birth] = []
        self._outside = world.outside_tensors()
        self._parameters = world.parameters()
        self.gradients = Gradients(self._parameters if world.trains else {}, world)
        if first is not None and world.freezes:
            self.gradients.handover.was_none = first.was_none
        self._schedulers = program_schedulers(world.schedulers)
        self._entries = entries_of(self._slots())
        self._names = Names(self._entries)
        self._number_slots = number_slots(world.named_optimizers(), self._schedulers)
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._inputs = list(self._make_inputs())
        self._guards: list[Guard] = []
        self._constants = Constants(self._fallback_line)
        self._contract = Contract(
            self._fallback_line,
            self._names,
            self._constants.value_of,
            self._set_data,
            OneNarrowType(world.fp16_type),
        )
        self._modules = list(world.module.modules())
        self._attributes = Attributes(world.module)
        self._changes = Changes(world.module)
        self._nodes: dict[int, fx.Node] = {}  # of each state tensor
        self._rebound: list[Held] = []
        self._moved = Moved()
        self._noted: list[NotedGroup] = []
        self._answers: Answers = {}

    def _slots(self) -> Iterator[Slot]:
        first = self._first
        for slot in self._all_slots():
            if first is None or not self._world.freezes or slot.name in first.places:
                yield slot  # what the host put elsewhere since is no state of the program

    def _all_slots(self) -> Iterator[Slot]:
        yield from module_slots(self._world.module, self._world.root)
        known = {id(p) for p in self._world.module.parameters()}
        for name, p in self._parameters.items():
            if id(p) not in known:
                yield Slot({0: p}, 0, name)
        names = {id(p): name for name, p in self._parameters.items()}
        yield from optimizer_slots(self._world.named_optimizers(), names)
        yield from (one.slot() for one in self._unborn)
        yield from (one.slot() for one in self._world.carried.values())
        yield from scheduler_slots(self._schedulers)
        yield from self._world.outside_state()
        yield from self._trees.slots

    def _slots_held(self) -> Iterator[Slot]:
        return (slot for held in self.state() for slot in held.slots)

    def state(self) -> list[Held]:
        """The tensors of the program's state."""
        return [held for entry in self._entries for held in entry.held]

    def _fake(self, tensor: Tensor) -> Tensor:
        """A fake of it; never one of inference mode, which torch's functions treat otherwise."""
        with torch.inference_mode(False):
            real = tensor.clone() if tensor.is_inference() else tensor
            return self._mode.from_tensor(real.detach(), static_shapes=True)

    def _make_inputs(self) -> Iterator[Input]:
        fake = self._fake
        for i, entry in enumerate(self._entries):
            yield Input(kind=Kind.STATE, index=i, name=entry.name, example=fake(entry.base()))
        for i, (name, p) in enumerate(self.gradients.parameters.items()):
            zero = fake(torch.zeros_like(p, requires_grad=False))
            yield Input(kind=Kind.GRADIENT, index=i, name=f"{name}.grad", example=zero)
        if self._number_slots:
            vector = as_vector(read_numbers(self._number_slots, self._world.optimizers))
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
        self.filled = fill_constants(self._constants.born.living(), self._constants.value_of)
        self.leaked = self._constants.born.spoil_the_living(self._names.origin, self._is_constant)
        return module

    def refuse_the_rest(self) -> None:
        """Raise where the step left something behind that would be frozen."""
        refuse_the_rest(self._snapshot, self._modules, self._world.module, self._changes.of_modules)

    def recorded(self, module: fx.GraphModule) -> Recording:
        """What is kept of a trace, to compare a later one with it."""
        record = functools.partial(record_operations, module, self._inputs, self._last)
        updates = self.updates.noted
        operations, own, constants = record(updates if self.updates.left_out else ())
        filled = [(owner, key, owner.get(key, MISSING)) for owner, key in self._outputs.attributes]
        shared = {s.name for e in self._entries if e.whole for h in e.held for s in h.slots}
        names = {(id(s.container), s.key): s.name for s in self._slots_held()}
        once = self._world.freezes  # what Python does happens once
        recording = Recording(
            operations=operations,
            own=own,
            constants=self._sources(constants),
            outputs=self._outputs,
            unborn=self._unborn,
            states=self._states,
            filled=[
                (owner, key, was)
                for owner, key, was in filled
                if not isinstance(was, Tensor) or names.get((id(owner), key)) in shared
            ]
            + [
                (owner, key, copy(owner[key])) for owner, key in map(where_put, self._outputs.lists)
            ],
            kept=[] if self._python is None else list(self._python.traced(holds_traced)),
            changes=self._attributes.changes() if once else (),
            lists=self._attributes.changed_lists if once else [],
            reads=self._reads,
            places=frozenset(names.values()),
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

        From now on the world knows of them: to be traced again.
        """
        missed = self.gradients.missed
        for name in sorted(missed):
            there = self._parameters[name].grad is not None
            self._world.carried[name] = Carried(name, there)
        return bool(missed)

    def check_host(self) -> None:
        """Look at what the step changed on the host."""
        with warn_of_frozen_reads() if self._world.freezes else contextlib.nullcontext():
            self._world.check_trace(self._snapshot)

    def born(self, module: fx.GraphModule) -> Born:
        """The places in ``births``."""
        nodes = pytree.tree_leaves(module.graph.output_node().args[0])
        examples = [node.meta["val"] for node in nodes]
        recording, batch = self.recorded(module), self._batch
        passed = passed_on(recording.outputs.passed, batch, batch, {INDEX: 0, EPOCH: 0})
        return Born(self.births, recording, examples, passed)

    def input_names(self) -> list[str]:
        """Of the graph's inputs, in order."""
        return [item.name for item in self._inputs]

    def result(self, module: fx.GraphModule) -> Captured:
        """Lower what was traced, and sort what the step left behind."""
        recording = self.recorded(module) if self._world.looks_again else None
        self.refuse_the_rest()
        self._entries = release_rebound(self._rebound, self._entries, self._nodes)
        constants = constants_as_inputs(module, position=self._count_before_batch())
        sources = self._sources(constants)
        self._add_constants(constants)
        self._inputs = self.gradients.marked(self._inputs)
        passes = CBFLOAT16_PASSES if self._world.fp16_type == "cbfloat16" else PASSES
        graph = lower(Graph(module=module, inputs=tuple(self._inputs), mode=self._mode), passes)
        return Captured(
            graph=graph,
            entries=self._entries,
            numbers=tuple(self._number_slots),
            guards=tuple(self._guards),
            used_numbers=frozenset(used_numbers(graph)),
            constants=tuple(sources),
            batch=self._batch_spec,
            outputs=self._outputs,
            reads=self._attributes.reads() if self._world.freezes else (),
            changes=self._attributes.changes(),
            recording=recording,
            gradients=self.gradients.handover,
            answers=self._answers,
            counted=tuple(self._scheduled.counted.items()),
            trained=frozenset(id(p) for group in self._world.groups() for p in group["params"]),
        )

    def _sources(self, constants: list[Tensor]) -> list[Source | Accumulator]:
        """Where tensors that were read from outside come from."""
        known: dict[int, Source | Accumulator] = {}
        for source in self._outside:
            known.setdefault(id(source.tensor), source)  # the shortest way to it
        known |= self._accumulators
        return constant_sources(self._world.module, self._world.root, constants, known)

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
        Trace.current = self
        try:
            with contextlib.ExitStack() as stack:
                if self._world.freezes:
                    stack.enter_context(self._reads.used(again=self._first is not None))
                stack.enter_context(traceable(self._world, self._fallback_line))
                stack.enter_context(noted_answers(self._answers))
                stack.enter_context(self._mode)
                stack.enter_context(record_lines(boundary, self._world.line_now))
                stack.enter_context(self._contract)
                stack.enter_context(patched([self._contract.in_backward()]))
                traced = make_fx(self._step, tracing_mode="fake", _allow_non_fake_inputs=True)(
                    *[entry.example for entry in self._inputs]
                )
                settle(self._world.line_now())
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
                line=raised_at(error) or self._world.line_now(),  # the step is off the stack by now
                remedy=MASKS,
            ) from None
        finally:
            Trace.current = None

    def _count_before_batch(self) -> int:
        return sum(entry.kind is not Kind.BATCH for entry in self._inputs)

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
            self._constants.born.add(tensor)
        leaves = zip(given[Kind.BATCH], self._batch_spec.tensor_leaves(), strict=True)
        self._names.give({id(tensor): leaf.name for tensor, leaf in leaves})
        [steps] = given[Kind.STEPS]
        with self._inputs_in_place(given), counted_by(steps.clone), norms_kept():
            batch = self._batch_spec.rebuild(given[Kind.BATCH])
            before = copied(batch)
            with (
                record_host_calls(self._world.trainer, self._world.schedulers) as calls,
                torch.set_grad_enabled(self._world.trains),
                self.gradients.hidden_from_steps(
                    self._world.backward_is_lightnings, self._world.optimizers, self._unborn
                ),
                first_updates(self._unborn),
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
        groups = [dict(group) for group in self._world.groups()]
        swapped: list[tuple[Tensor, Tensor]] = []
        try:
            for entry, base in zip(self._entries, given[Kind.STATE], strict=True):
                for i, held in enumerate(entry.held):
                    stand_in = stand_in_for(held.tensor, entry.view(base, i))
                    self.gradients.watch(held.tensor, stand_in)
                    swapped.append((held.tensor, stand_in))
            tracker = self._names.tracker
            for tensor, stand_in in swapped:
                swap(tensor, stand_in)
                tracker[tensor] = tracker[stand_in]  # by the object, which stayed
                self._nodes[id(tensor)] = tracker[stand_in].proxy.node
            self.gradients.put(given[Kind.GRADIENT])
            for vector in given[Kind.NUMBERS]:
                self._guards = install(self._number_slots, vector, self._world.optimizers)
            self._scheduled = Scheduled(self._guards, self._contract.in_double)
            with traced_by(self._scheduled):
                for scheduler in self._schedulers:
                    scheduler.show()
                with noted_groups(self._world.optimizers) as self._noted:
                    yield
        finally:
            for group, before in zip(self._world.groups(), groups, strict=True):
                group.clear()
                group.update(before)
            for tensor, stand_in in swapped:
                if isinstance(tensor, FakeTensor):
                    swap(tensor, stand_in)

    # -- what the step left behind -----------------------------------------------------------

    def _collect(self, result: Any, calls: list[Any]) -> list[Tensor]:
        check_groups(self._noted, self._world.line_of("training_step"))
        self.gradients.keep(cleared=self._clears_gradients)
        module, left = self._world.module, Leftovers()
        self._attributes.settle(left, self._is_constant)
        if self._first is None:
            check_ties(self._entries)
        check_gradients(self._entries)
        order = self._trees.order()
        known = collect_trees(
            self._trees, self._entries, left, self._is_constant, self._fallback_line, self._regrown
        )
        known |= sort_state(self._entries, module, self._boundaries, left, self._line_of_change)
        collect_outputs(module, self._snapshot, known, left)
        self.births = left.births
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
        self._moved.write_back()
        return outputs

    def _is_constant(self, tensor: Tensor) -> bool:
        return self._constants.value_of(tensor) is not None

    def _set_data(self, tensor: Tensor, value: Tensor) -> None:
        if storage_of(tensor) in self._boundaries or self._moved.holds(tensor):
            self._moved.move(tensor, value)
        else:
            tensor.detach().copy_(value)

    # -- after the trace --------------------------------------------------------------------

    def _line_of_change(self, slot: Slot, value: Any) -> UserLine | None:
        """Where the user put a value into a slot, or else where they made it."""
        made = self._names.origin(value)[1] if isinstance(value, Tensor) else None
        return self._changes.line_of(slot.container, slot.key) or made or self._fallback_line()

    def _fallback_line(self) -> UserLine | None:
        """The user's line that runs now, or where they wrote the hook that does."""
        return user_line(Trace._step.__code__) or self._world.line_now()
