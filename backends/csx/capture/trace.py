"""One trace: the step's code runs under ``make_fx``, and what it left is collected."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from itertools import starmap
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental.proxy_tensor import get_innermost_proxy_mode, make_fx

from fulgurite.backends.csx.capture.batch_changes import BatchChanges, copied
from fulgurite.backends.csx.capture.host_calls import NumberCall, record_host_calls
from fulgurite.backends.csx.capture.logs import Accumulator, LogCall
from fulgurite.backends.csx.capture.metrics import metrics_in_step
from fulgurite.backends.csx.capture.outputs import collected_outputs
from fulgurite.backends.csx.capture.patch_table import traceable
from fulgurite.backends.csx.capture.recording import Recording
from fulgurite.backends.csx.capture.scope import Scope
from fulgurite.backends.csx.capture.side_effects import collect_outputs, metric_calls, sort_state
from fulgurite.backends.csx.capture.step_inputs import StepInputs
from fulgurite.backends.csx.capture.trainer_state import Answers
from fulgurite.backends.csx.capture.trees import (
    Regrown,
    TreeChanges,
    check_gradients,
    check_ties,
    order_of,
)
from fulgurite.backends.csx.capture.undo import flat_weights_kept
from fulgurite.backends.csx.capture.updates import Updates
from fulgurite.backends.csx.contract.attributes import Attributes
from fulgurite.backends.csx.contract.changes import Changes
from fulgurite.backends.csx.contract.constants import Constants
from fulgurite.backends.csx.contract.dtype_rules import OneNarrowType
from fulgurite.backends.csx.contract.fixed_buffers import FixedBuffers
from fulgurite.backends.csx.contract.function_mode import Contract
from fulgurite.backends.csx.contract.holders import fill_constants
from fulgurite.backends.csx.contract.replay import Reads
from fulgurite.backends.csx.contract.rules import MASKS
from fulgurite.backends.csx.contract.tensor_names import Names
from fulgurite.backends.csx.contract.watched import settle
from fulgurite.backends.csx.diagnostics.errors import DynamicShape
from fulgurite.backends.csx.diagnostics.user_lines import (
    UserLine,
    raised_at,
    record_lines,
    user_line,
)
from fulgurite.backends.csx.graph.dtypes import in_double
from fulgurite.backends.csx.graph.graph import Kind, storage_of
from fulgurite.backends.csx.hyperparams.slots import set_numbers
from fulgurite.backends.csx.hyperparams.torch_functions import forget_failed_reads
from fulgurite.backends.csx.state.first_update import first_updates
from fulgurite.backends.csx.state.places import Place, SideEffects
from fulgurite.backends.csx.state.python_objects import Snapshot
from fulgurite.backends.csx.state.set_data import ReplacedData
from fulgurite.backends.patches import applied
from fulgurite.backends.step_context import running


class Trace:
    """One trace while it runs.

    Args:
        scope, run, batch, clears_gradients: see ``capture.capture``.
        first: the trace that this one is to be compared with.
        leaves_out_updates: torch's and our optimizers are not to update anything.

    Attributes, when it has run:
        filled: whether a table that the step caches was given its values.
        leaked: traced tensors that somebody outside of the step still holds.
        new_places: where the step left tensors, and none were.
        outputs: where the graph's results go.
        last: the last node that the step's own code made.
    """

    def __init__(
        self,
        scope: Scope,
        run: Callable[[Any], Any],
        batch: Any,
        clears_gradients: bool,
        first: Recording | None = None,
        leaves_out_updates: bool = False,
    ) -> None:
        self.scope, self._run, self.batch, self.first = scope, run, batch, first
        self._clears_gradients = clears_gradients
        self.reads = Reads() if first is None else first.reads
        self.snapshot, self._trees = Snapshot(scope.objects()), scope.trees()
        records = first is None and scope.looks_again and scope.freezes
        self.python = scope.python_state() if records else None
        noted = scope.optimizers if scope.trains and (records or leaves_out_updates) else ()
        self.updates = Updates(noted, leaves_out_updates)
        self.states = [(optimizer.state, dict(optimizer.state)) for optimizer in scope.optimizers]
        lists = () if first is None else first.outputs.lists
        self._regrown = {one.name for one in lists if isinstance(one.container, Regrown)}
        self.outside = scope.outside_tensors()
        self.inputs = StepInputs(scope, batch, self._trees, first)
        self._names = Names(self.inputs.state)
        self._constants = Constants(self._fallback_line)
        self.fixed = FixedBuffers(self._fallback_line)
        self._contract = Contract(
            self._fallback_line,
            self._names,
            self._constants.value_of,
            self._set_data,
            OneNarrowType(scope.fp16_type),
            self.fixed,
            in_double(scope.module),
        )
        self.modules, self.attributes = list(scope.module.modules()), Attributes(scope.module)
        self.changes, self._replaced_data = Changes(scope.module), ReplacedData()
        self.accumulators: dict[int, Accumulator] = {}
        self.answers: Answers = {}

    def trace(self) -> fx.GraphModule:
        """The step as it was traced, before any pass."""
        module = self._graph()
        forget_failed_reads(module.graph)
        self.inputs.drop_batch()
        created = self._constants.created
        self.filled = fill_constants(created.living(), self._constants.value_of)
        self.leaked = created.spoil_the_living(self._names.origin, self._is_constant)
        return module

    def _graph(self) -> fx.GraphModule:
        """Run the step as a graph, with everything changed that keeps it from being one."""
        try:
            with contextlib.ExitStack() as stack:
                self._prepare(stack)
                examples = [item.example for item in self.inputs.items]
                graph = make_fx(self._step, tracing_mode="real")(*examples)
                settle(self.scope.line_now())
            if self._contract.refused is not None:  # and caught by code in between
                raise self._contract.refused
            return graph
        except TypeError as error:
            refused = self._contract.refused_by_torch(error)
            if refused is None:
                raise
            raise refused from None
        except (DynamicOutputShapeException, DataDependentOutputException) as error:
            raise DynamicShape(
                f"{error.func} has a result whose shape depends on values.",
                line=raised_at(error) or self.scope.line_now(),  # the step is off the stack by now
                remedy=MASKS,
            ) from None

    def _prepare(self, stack: contextlib.ExitStack) -> None:
        """Enter what holds while the step is traced."""
        self.reads.begin(again=self.first is not None)
        stack.enter_context(_use_lazy_graph_module(True))  # nobody runs the graph's Python
        stack.enter_context(running(trace=self, reads=self.reads if self.scope.freezes else None))
        stack.enter_context(traceable(self.scope, self._fallback_line, self.answers))
        stack.enter_context(self.inputs.mode)
        paths = {id(module): path for path, module in self.scope.module.named_modules()}
        stack.enter_context(record_lines(Trace._step.__code__, self.scope.line_now, paths))
        stack.enter_context(self._contract)
        stack.enter_context(applied(self._contract.in_backward()))

    def _step(self, *flat: Tensor) -> list[Tensor]:
        tracer, scope = get_innermost_proxy_mode().tracer, self.scope  # type: ignore[union-attr]
        self._names.tracker = tracer.tensor_tracker
        self._boundaries = {storage_of(tensor) for tensor in flat}
        given = self.inputs.of_kind(Kind.BATCH, flat)
        for tensor in given:
            self._constants.created.add(tensor)
        leaves = zip(given, self.inputs.batch.tensor_leaves(), strict=True)
        self._names.give({id(tensor): leaf.name for tensor, leaf in leaves})
        [steps] = self.inputs.of_kind(Kind.STEPS, flat)
        in_place = self.inputs.in_place(flat, self._names.tracker, self._contract.in_double)
        with in_place, running(global_step=steps.clone, norms=[]):
            self.fixed.find(scope.module, scope.root, self._names.tracker, self.inputs.values)
            batch = self.inputs.batch.rebuild(given)
            before = copied(batch)
            with (
                record_host_calls(scope.trainer, scope.schedulers) as calls,
                metrics_in_step(
                    scope.module, calls, tracer.graph, self._contract, self._fallback_line
                ) as emptied,
                torch.set_grad_enabled(scope.trains),
                self._watched(tracer.graph),
            ):
                result = self._run(batch)
            changes = BatchChanges(batch, before)
            if changes.value:
                calls.insert(0, changes)
            self.last = next(reversed(tracer.graph.nodes))
            with torch.no_grad():
                return self._collect(result, calls, emptied)

    @contextlib.contextmanager
    def _watched(self, graph: fx.Graph) -> Iterator[None]:
        """Watch, while the step's own code runs, what it does besides operations."""
        inputs, boundary = self.inputs, Trace._step.__code__
        with (
            inputs.gradients.hidden_from_steps(
                self.scope.backward_is_lightnings, self.scope.optimizers, inputs.deferred
            ),
            first_updates(inputs.deferred),
            self.updates.watched(graph, self._node_of),
            self.changes.watched(boundary),
            self.attributes.watched(boundary),
            self._constants,
            flat_weights_kept(self.modules),
        ):
            yield

    def _node_of(self, tensor: Tensor) -> fx.Node | None:
        found = self._names.tracker.get(tensor)
        return None if found is None else found.proxy.node

    def _collect(self, result: Any, calls: list[Any], emptied: Collection[int]) -> list[Tensor]:
        """Find what the step left behind, and undo it; returns the graph's results."""
        inputs, state, module = self.inputs, self.inputs.state, self.scope.module
        self.fixed.check()
        numbers = [*set_numbers(inputs.groups, self.scope.line_of("training_step"))]
        inputs.gradients.keep(cleared=self._clears_gradients)
        left = SideEffects()
        self.attributes.settle(left, self._is_constant)
        if self.first is None:
            check_ties(state)
        check_gradients(state)
        order = self._trees.order()
        known = TreeChanges(
            self._trees, state, left, self._is_constant, self._fallback_line, self._regrown
        ).collect()
        known |= sort_state(inputs, module, self._boundaries, left, self._line_of_change)
        collect_outputs(module, self.snapshot, known, left)
        self.new_places, self.rebound = left.new_places, left.rebound
        counted = metric_calls(module, self.snapshot, emptied)
        calls = [*starmap(NumberCall, numbers), *counted, *calls]
        for call in calls:
            if isinstance(call, LogCall):
                self.accumulators |= call.reduce()
        owners = {id(vars(m)): path for path, m in module.named_modules()}
        left.writes.sort(key=lambda write: order_of(write[0][0], owners, order))
        self.outputs, tensors = collected_outputs(result, left, calls, self._boundaries)
        self._replaced_data.write_back()
        self.fixed.check()  # again, for what was written back
        return tensors

    def _is_constant(self, tensor: Tensor) -> bool:
        return self._constants.value_of(tensor) is not None

    def _set_data(self, tensor: Tensor, value: Tensor) -> None:
        """``tensor.data = value``."""
        if storage_of(tensor) in self._boundaries or self._replaced_data.holds(tensor):
            self._replaced_data.replace(tensor, value)
        else:
            tensor.detach().copy_(value)

    def _line_of_change(self, place: Place, value: Any) -> UserLine | None:
        """Where the user put a value into a place, or else where they made it."""
        made = self._names.origin(value)[1] if isinstance(value, Tensor) else None
        return self.changes.line_of(place.container, place.key) or made or self._fallback_line()

    def _fallback_line(self) -> UserLine | None:
        """The user's line that runs now, or where they wrote the hook that does."""
        return user_line(Trace._step.__code__) or self.scope.line_now()
