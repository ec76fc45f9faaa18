"""One trace: the step's code runs under a recorder, and what it left is collected.

Two lists say what surrounds it, the outermost first: ``_around_trace`` while the graph is made, and
``_around_step`` while the step's own code runs. ``side_effects.collect`` says what becomes of what
the step left behind.

A batch of more shapes than are compiled has no program: Lightning's own code runs on the real
tensors (``run_as_lightning``). Recording such a step takes ten times as long as running it, which
pays where the program runs again; of lengths nobody knows that. What programs keep to themselves is
put where that code looks, and is theirs again afterwards: sums of gradients in ``p.grad``, numbers
that schedules compute in param groups. Scalars of modules that the step changes stay as its
programs have found them, for these have them as constants.
"""

from __future__ import annotations

import contextlib
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx
from torch.fx._lazy_graph_module import _use_lazy_graph_module

from fulgurite.backends.csx.capture.host_calls import record_host_calls
from fulgurite.backends.csx.capture.lightning_scope import set_by_hooks
from fulgurite.backends.csx.capture.metrics import metrics_in_step
from fulgurite.backends.csx.capture.patch_table import traceable
from fulgurite.backends.csx.capture.recording import Recording, Updates
from fulgurite.backends.csx.capture.scope import HostState, Scope, keep_flat_weights
from fulgurite.backends.csx.capture.side_effects import CollectedEffects, collect
from fulgurite.backends.csx.capture.step_inputs import StepInputs
from fulgurite.backends.csx.contract import (
    Access,
    Observers,
    frozen_value,
    holds_tensors,
    noting,
    raising_refusals,
)
from fulgurite.backends.csx.diagnostics.user_lines import NodeLines, UserLine, line_of
from fulgurite.backends.csx.graph.graph import Graph, Input, Kind
from fulgurite.backends.csx.graph.op_schema import is_mutable, memory_of
from fulgurite.backends.csx.graph.passes.rename import COPIES
from fulgurite.backends.csx.graph.recorder import Recorder
from fulgurite.backends.csx.hyperparams.counts import CountSlot
from fulgurite.backends.csx.hyperparams.run_numbers import COUNTERS, FOLLOWED, STEPS, RunNumber
from fulgurite.backends.csx.hyperparams.scheduled_numbers import show_all
from fulgurite.backends.csx.hyperparams.slots import used_with_gradients
from fulgurite.backends.csx.hyperparams.traced_float import NumberGuard
from fulgurite.backends.csx.objects import BatchChanges, copy_containers
from fulgurite.backends.csx.state import DroppedGradient
from fulgurite.backends.csx.streaming.residency import residency
from fulgurite.backends.patches import MISSING
from fulgurite.backends.program_scheduler import program_schedulers
from fulgurite.backends.step_context import running
from fulgurite.backends.torch_versions import last_node


@dataclass(frozen=True, slots=True)
class Step:
    """What is traced: see ``capture.capture``."""

    run: Callable[[Any], Any]
    batch: Any


@dataclass(slots=True)
class TraceResult:
    """What is known when a trace has run.

    Args:
        collected: what becomes of what the step left on the host.
        last: the last node that the step's own code made.
        fills_table: whether a table that the step caches was given its values.
        leaked: traced tensors that somebody outside of the step still holds.
    """

    collected: CollectedEffects
    last: fx.Node
    fills_table: bool
    leaked: list[weakref.ref[Tensor]]


class Result(NamedTuple):
    """A result of a traced graph: of which layout it is, and whose memory before it was copied.

    That is a state's, by its name, or the node's that made it. ``line`` made the tensor; ``copied``
    is the input whose memory it was, the tensor there, and whether that was the input itself, where
    nothing else was done to it.
    """

    example: Tensor
    memory: Any
    line: UserLine | None
    copied: tuple[Input, Tensor, bool] | None


class Trace:
    """One trace while it runs.

    Args:
        scope, run, batch: see ``capture.capture``.
        first: the trace that this one is to be compared with.
        leaves_out_updates: torch's and our optimizers are not to update anything.

    Attributes:
        host: what was on the host before.
        inputs: what the graph takes.
        observers: what looks at the step's code.
        updates: those of optimizers.
        answers: what the step read of the trainer's state.
        run_guards: what its Python saw of counters of the run.
        run_numbers: the counters that it computed with, and the lines that did.
        result: what is known when it has run.
    """

    def __init__(
        self,
        scope: Scope,
        run: Callable[[Any], Any],
        batch: Any,
        first: Recording | None = None,
        leaves_out_updates: bool = False,
    ) -> None:
        self.scope, self.step = scope, Step(run, batch)
        self.host = HostState(scope, first)
        noted = scope.trains and (self.host.is_recorded or leaves_out_updates)
        self.updates = Updates(scope.optimizers if noted else (), leaves_out_updates)
        self.inputs = StepInputs(scope, batch, self.host.trees, first)
        self.observers = Observers(
            scope.module,
            self.inputs.state,
            Trace._step.__code__,
            line_now=scope.line_now,
            fp16_type=scope.fp16_type,
            move=self.inputs.set_data,
            look=self.inputs.gradients.look,
        )
        paths = {id(module): path for path, module in scope.module.named_modules()}
        lines = NodeLines(Trace._step.__code__, scope.line_now, paths)
        self.recorder = Recorder(
            self.inputs.mode,
            lines,
            self.observers.constants.value_of,
            notes_results=first is None or scope.fp16_type is not None,  # a scale looks at memory
        )
        self.answers: dict[tuple[str, str], Any] = {}
        self.run_guards = self.inputs.run_guards
        self.run_numbers: list[tuple[str, Callable[..., object], UserLine | None]] = []

    def run_number(self, name: str, now: int, value: int, note: Callable[..., object]) -> RunNumber:
        """A counter of the run, as the step computes with it.

        Args:
            name: one of ``COUNTERS``.
            now: what it is; steps that this step has done by hand are among them.
            value: what Python is to see.
            note: is called where Python takes the value.
        """
        begun = self._begun[name]
        more = 0 if begun is None else now - begun
        with self.observers.mode.in_double():
            tensor = self._counters[name].to(torch.float64)
            tensor = tensor + more if more else tensor
        number = RunNumber(value, tensor, self.run_guards, self._asked(name, more), name)
        number.note, number.may_grow = note, False
        if (line := self.observers.line()) is not None:
            FOLLOWED.add((line.file, line.function))
        # not the number itself: it holds a tensor, which would be looked for as one that leaked
        self.run_numbers.append((number.text, note, line))
        return number

    def _number_of_module(
        self, slot: CountSlot, value: float, tensor: Tensor, place: int
    ) -> RunNumber:
        """A number in an attribute of a module, as the step computes with it."""
        [(container, key)], kind = slot.held, type(value)
        value = frozen_value(str(slot), value)
        text = f"the type of {slot}"
        self.run_guards.append(NumberGuard(text, lambda _: type(container.get(key)), kind))
        number = RunNumber(value, tensor, self.run_guards, operator.itemgetter(place), str(slot))
        number.note, number.may_grow = noting(str(slot), value), True
        return number

    def note_unseen_reads(self, graph: Graph) -> None:
        """Warn of counters that the step took, of which neither graph nor guards have anything.

        Code written in C reads a float's value unseen.
        """
        taken = {item.name for item in graph.inputs if item.kind is Kind.COUNTER}
        asked = " ".join(guard.text for guard in self.run_guards)
        for text, note, line in self.run_numbers:
            if text not in taken and text not in asked:
                note(line)

    def note_answer(self, name: str, value: bool) -> None:
        """The step asked the run something, and got this answer."""
        self.run_guards.append(NumberGuard(name, self._asked(name), value))

    def _asked(self, name: str, more: int = 0) -> Callable[[Any], Any]:
        scope = self.scope
        return lambda numbers: scope.asked(name) + more if more else scope.asked(name)

    def trace(self) -> fx.GraphModule:
        """The step as it was traced, before any pass."""
        module = self._graph()
        self.inputs.drop_batch()
        self.result.fills_table, self.result.leaked = self.observers.release()
        return module

    def _graph(self) -> fx.GraphModule:
        """Run the step as a graph; no local of this function may outlive it, or it has leaked."""
        with (
            raising_refusals(self.observers.mode, self.scope.line_now),
            contextlib.ExitStack() as stack,
        ):
            self.host.reads.begin(replays=self.host.first is not None)
            for around in self._around_trace():
                stack.enter_context(around)
            examples = [item.example for item in self.inputs.items]
            graph = self.recorder.record(self._step, examples)
            self.observers.settle()
        return graph

    def _around_trace(self) -> Iterator[AbstractContextManager[object]]:
        """What holds while the graph is made, the outermost first; each is made when it begins."""
        scope, reads = self.scope, self.host.reads if self.scope.python_runs_once else None
        yield _use_lazy_graph_module(True)  # nobody runs the graph's Python
        yield running(trace=self, reads=reads)
        yield traceable(scope, self.observers.line, self.answers)
        yield self.inputs.mode
        yield from self.observers.around_trace()  # inside, for it sees the user's calls first

    def _around_step(self, graph: fx.Graph) -> Iterator[AbstractContextManager[object]]:
        """What watches the step's own code, the outermost first."""
        scope, inputs = self.scope, self.inputs
        yield torch.set_grad_enabled(scope.trains)
        yield inputs.gradients.noting_steps(scope.backward_is_lightnings)
        yield used_with_gradients(inputs.gradients.unseen)
        yield self.updates.noting(graph, self.observers.node_of)
        yield from self.observers.around_step()
        yield keep_flat_weights(self.host.modules)

    def _step(self, *flat: Tensor) -> list[Tensor]:
        """What is recorded: the inputs are in their places, the step runs, all is undone."""
        scope, inputs, observers = self.scope, self.inputs, self.observers
        graph, nodes = self.recorder.graph, self.recorder.nodes
        inputs.begin(flat)
        given = inputs.of_kind(Kind.BATCH, flat)
        names = (leaf.name for leaf in inputs.batch.tensor_leaves())
        observers.begin(nodes, zip(given, names, strict=True))
        self._counters = dict(zip(COUNTERS, inputs.of_kind(Kind.COUNTER, flat), strict=True))
        self._begun, steps = {name: scope.asked(name) for name in COUNTERS}, self._counters[STEPS]
        in_place = inputs.in_place(flat, nodes, observers.mode.in_double, self._number_of_module)
        with in_place, running(global_step=steps.clone, norms=[]):
            observers.find_buffers(scope.root, inputs.values)
            batch = inputs.batch.rebuild(given)
            before = copy_containers(batch)  # what the step does to its dicts and lists shows
            with contextlib.ExitStack() as stack:
                enter = stack.enter_context
                calls = enter(record_host_calls(scope.trainer, scope.schedulers))
                reset_ids = enter(
                    metrics_in_step(scope.module, calls, graph, observers.mode, observers.line)
                )
                for around in self._around_step(graph):
                    enter(around)
                result = self.step.run(batch)
            changes = BatchChanges(batch, before)
            if changes.value:
                calls.insert(0, changes)
            # what follows is ours, and brings results to their places: comparisons tell it apart
            last = last_node(graph)
            with torch.no_grad():
                kept = inputs.gradients.keep(_takes_turns(self), inputs.memory)
                collected, tensors = collect(inputs, self.host, observers, result, calls, reset_ids)
                for gradient, value in kept:
                    gradient.copy_(value)
        self.result = TraceResult(collected, last, False, [])
        return tensors


def _takes_turns(trace: Trace) -> bool:
    """Whether counters of the run, or what hooks set, may choose another program next time."""
    scope = trace.scope
    if trace.run_guards or scope.backward_is_lightnings or scope.trainer is None:
        return bool(trace.run_guards)
    read = {one.name for one in trace.observers.attributes.reads()}
    return not read.isdisjoint(set_by_hooks(scope.trainer, scope.module))


# -- a step that no program is for -----------------------------------------------------------------


def can_run(scope: Scope) -> bool:
    """Whether Lightning's code finds all that the step needs on this host.

    Not where other processes share in it, where weights are in files, where a loss scale or a type
    is the program's own, where a program's state still waits for its first gradient, and where the
    host sees gradients between steps.
    """
    trainer = scope.trainer
    if trainer is None or trainer.world_size > 1 or residency.is_open:
        return False
    scaled = getattr(trainer.precision_plugin, "scaler", None) is not None
    waits = any(one.is_optimizers and one() for one in scope.born)
    others = scaled or waits or scope.keeps_gradients or scope.fp16_type == "cbfloat16"
    return scope.python_runs_once and not others


def run_as_lightning(
    scope: Scope,
    run: Callable[[Any], Any],
    batch: Any,
    changes: Iterable[Access],
) -> Any:
    """Run Lightning's code of an entry point once.

    Args:
        scope: what the step works on.
        run: the code.
        batch: as the user's loader gave it.
        changes: scalars of modules that the step has changed while it was traced.
    """
    show_all(program_schedulers(scope.schedulers))
    steps = torch.tensor(scope.steps_done())
    context = running(steps_optimizer=True, global_step=steps.clone, norms=[])
    with _in_place(scope), _kept(changes), context:
        return run(batch)


@contextlib.contextmanager
def _in_place(scope: Scope) -> Iterator[None]:
    """Put gradients that programs keep to themselves into ``p.grad``, and take them out again."""
    parameters = scope.parameters() if scope.trains and not scope.shows_gradients else {}
    shown, stage = {name: p.grad for name, p in parameters.items()}, scope.stage_gradients
    for name, p in parameters.items():
        if name not in stage.there:
            p.grad = None
        elif name not in stage.lost:
            p.grad = stage.kept[f"{name}.grad"]
    try:
        yield
        now = {name: p.grad for name, p in parameters.items() if p.grad is not None}
        stage.clear(frozenset(parameters).difference(now))
        stage.there = stage.there.union(now)
        for name, gradient in now.items():
            if type(gradient) is not DroppedGradient:
                kept = stage.kept.setdefault(f"{name}.grad", torch.zeros_like(gradient))
                if kept is not gradient:
                    kept.copy_(gradient)
                stage.lost -= {name}
    finally:
        for name, p in parameters.items():
            p.grad = shown[name]


@contextlib.contextmanager
def _kept(changes: Iterable[Access]) -> Iterator[None]:
    """Put scalars back that programs have as constants; what they have as tensors goes on."""
    now = [(one, one.container.get(one.name, MISSING)) for one in changes]
    found = [replace(one, before=value) for one, value in now if not holds_tensors(value)]
    try:
        yield
    finally:
        for change in found:
            change.undo()


def results(trace: Trace, graph: fx.Graph) -> list[Result]:
    """The results of a trace's graph."""
    inputs = dict(zip(graph.find_nodes(op="placeholder"), trace.inputs.items, strict=True))
    ours, node = set[fx.Node](), last_node(graph)
    while node is not trace.result.last:
        ours.add(node)
        node = node.prev

    def result(node: fx.Node) -> Result:
        example, is_copy = node.meta["val"], True
        while node in ours and node.all_input_nodes:  # a copy, which the host gets
            is_copy &= node.target in COPIES
            [node, *_] = node.all_input_nodes
        memory = memory_of(node)
        item = inputs.get(memory)
        if item is None:
            return Result(example, memory, line_of(node), None)
        of = item.name if item.kind is Kind.STATE else memory
        looked = node
        while is_mutable(looked.target):  # in place: it gives what it was given
            [looked, *_] = looked.all_input_nodes
        copied = (item, node.meta["val"], looked is memory) if is_copy else None
        return Result(example, of, line_of(node), copied)

    return [result(node) for node in pytree.tree_leaves(graph.output_node().args[0])]
