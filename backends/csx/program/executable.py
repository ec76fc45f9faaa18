"""One entry point of a program, loaded and bound to the tensors that it works on."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence, Set
from typing import Any

import torch.utils._pytree as pytree
from torch import Tensor

from fulgurite.backends.csx.capture import (
    Accumulator,
    CapturedStep,
    ClosureCall,
    Exchange,
    LogCall,
    Outputs,
    Scope,
    output_writer,
)
from fulgurite.backends.csx.compile.fabric import Fabric, Loaded
from fulgurite.backends.csx.contract import ConstantSource
from fulgurite.backends.csx.costs.stock import Counts
from fulgurite.backends.csx.diagnostics.trace_errors import UnsupportedInput
from fulgurite.backends.csx.graph.collectives import has_collectives
from fulgurite.backends.csx.graph.graph import Kind, Role
from fulgurite.backends.csx.graph.passes.as_traced import changed_by_any
from fulgurite.backends.csx.graph.update import UPDATE
from fulgurite.backends.csx.objects import AttributeTree, BatchChanges, lies_in, place_of_list
from fulgurite.backends.csx.program.first_bad import first_not_finite
from fulgurite.backends.csx.program.speed import Pace, Speed
from fulgurite.backends.csx.state import Binding, Place, UnseenGradients, held_gradients


class Results:
    """Where the results of an entry point go, and what the host does after a step."""

    def __init__(self, outputs: Outputs) -> None:
        self.put = output_writer(
            outputs
        )  # into attributes; returns (result, host calls, their values)
        self.passed = outputs.passed  # what the step only passes on: after the program's outputs
        self.logs = [call for call in outputs.calls if isinstance(call, LogCall)]
        changes = [call for call in outputs.calls if isinstance(call, BatchChanges)]
        self.added = [place for change in changes for place in change.added]  # to the batch
        self.runs_users_code = any(isinstance(call, ClosureCall) for call in outputs.calls)
        self._in_objects = [
            place for place in outputs.attributes if isinstance(place.container, AttributeTree)
        ]

    def fill_objects(self) -> bool:
        """Whether there is a place in a dict, a list or an object that holds no tensors yet."""
        found = (pytree.tree_leaves(place.get()) for place in self._in_objects)
        return not all(any(isinstance(leaf, Tensor) for leaf in leaves) for leaves in found)


class Executable:
    """One entry point, loaded and bound to the tensors it works on.

    Args:
        captured: the entry point.
        loaded: its graph, as ``fabric`` loaded it.
        fabric: runs it.
        scope: what the step works on.
        speed: of the stage's steps.

    Attributes:
        paces: of its steps, operation by operation and compiled.
        firsts: those that run in its place while there is no such state as they make.
    """

    def __init__(
        self,
        captured: CapturedStep,
        loaded: Loaded,
        fabric: Fabric,
        scope: Scope,
        speed: Speed,
    ) -> None:
        graph, sources = captured.graph, captured.sources
        self.graph, self.loaded = graph, loaded
        waits = has_collectives(graph.runs)
        self._run = speed.waits.timed(fabric.run) if waits else fabric.run
        self.paces = Pace(), Pace()
        speed.paces.append(self.paces)
        self.counted, self._views = captured.counted, captured.views
        trained = frozenset(id(p) for group in scope.groups() for p in group["params"])
        state = [item.index for item in graph.inputs if item.kind is Kind.STATE]
        self._binding = Binding(tuple(sources.state[i] for i in state), trained)
        self._gradients = held_gradients(graph, sources.gradients)
        self._unseen = UnseenGradients(graph, sources.gradients)
        self._handover, self._announce = sources.gradients, scope.announcer()
        self._exchange = None if self._announce is None else _exchange(captured)
        # numbers of modules are each process's own, as under stock
        self._told = [i for i, one in enumerate(sources.numbers) if one.optimizer is not None]
        self._tells_all = len(self._told) == len(sources.numbers)
        self.firsts: list[tuple[Callable[[], bool], Executable]] = []
        self.filled: list[Callable[[], None]] = []  # to be called after a run
        self._on_first_run: Callable[[bool], None] = _nothing  # is told whether it fills objects
        takes_numbers = any(item.kind is Kind.NUMBERS for item in graph.inputs)
        self._numbers = len(sources.numbers) if takes_numbers else 0
        self._counters = [
            functools.partial(scope.counter, item.name)
            for item in graph.inputs
            if item.kind is Kind.COUNTER
        ]
        self._constants_read = [i.index for i in graph.inputs if i.kind is Kind.CONSTANT]
        self._batch = [item.index for item in graph.inputs if item.kind is Kind.BATCH]
        offset, written = len(graph.inputs) - len(self._batch), graph.written()
        self.written = [i for k, i in enumerate(self._batch) if offset + k in written]
        self.written_places = _written(captured, written)
        self._names = [leaf.name for leaf in sources.batch.tensor_leaves()]
        self._takes_all = self._batch == list(range(len(self._names)))
        self.recording, self._tables = captured.recording, captured.assumptions.tables
        self.follow(sources.constants, captured.outputs)

    def follow(self, constants: Sequence[ConstantSource | Accumulator], outputs: Outputs) -> None:
        """Take constants from these places, and put the results into those.

        Python has run again since this was traced: a step that makes state would be another one.
        """
        self.firsts.clear()
        self._constants = [constants[i] for i in self._constants_read]
        self.results = Results(outputs)

    def counts(self) -> Counts:
        """What an estimate of stock Lightning is made of."""
        loaded, (plain, compiled) = self.loaded, self.paces
        # the least of what is known: a step of several threads takes any time beside others
        known = [loaded.by_operations_s, plain.batch_s]
        if not loaded.compiled:
            known += loaded.threads.run_s.values()
        kernels_s = min((one for one in known if one is not None), default=None)
        return Counts(
            key=loaded.key,
            compiled=loaded.compiled,
            batches=plain.steps + compiled.steps,
            kernels_s=kernels_s,
            operations=sum(1 for _ in self.graph.runs.operations()),
            logged=len(self.results.logs),
        )

    def due(self) -> Executable:
        """What runs next in this one's place: itself, or a step that makes state."""
        for is_due, one in self.firsts:
            if is_due():
                return one
        return self

    def tell_first_run(self, tell: Callable[[bool], None]) -> None:
        """Have the first run of this, and of steps that make state, told with what it fills."""
        for one in (self, *(first for _, first in self.firsts)):
            one._on_first_run = tell

    def check(self) -> None:
        """Verify the state (see ``Binding.check``)."""
        self.due()._binding.check()

    def run(
        self,
        vector: Tensor | None,
        batch: list[Tensor],
        given: list[Tensor],
        passed: Sequence[Any],
    ) -> Any:
        """Run once.

        Args:
            vector: the numbers, float64.
            batch: its tensors in the traced layout.
            given: its tensors as they came.
            passed: what the step only passes on.
        """
        self._handover.begin()
        if self._announce is not None and self._exchange is not None:
            told = vector if vector is None or self._tells_all else vector[self._told]
            self._announce(self._exchange, told)
        gradients = [] if self._gradients is None else self._gradients.before()
        inputs = self._resident(vector, gradients)
        if self.written:
            self._check_writes(batch)
        # compiled code does not look whether inputs overlap. A batch that is memory of the state (a
        # view of a buffer) would change with the state before it is read
        storages = self._binding.storages
        if not storages.isdisjoint([t.untyped_storage().data_ptr() for t in batch]):
            batch = [t.clone() if t.untyped_storage().data_ptr() in storages else t for t in batch]
        inputs += batch if self._takes_all else [batch[i] for i in self._batch]
        shared = [inputs[view.input] for view in self._views]  # compiled code takes the list apart
        outputs = self._run(self.loaded, inputs)
        if shared:
            outputs = list(outputs)
            for view, base in zip(self._views, shared, strict=True):
                outputs[view.output] = view.of(base)
        if self._gradients is not None:
            self._gradients.after(gradients)
        self._unseen.put()
        for i in self.written:
            if given[i] is not batch[i]:  # a copy in another layout: the user's tensor changes too
                given[i].copy_(batch[i])
        if self._on_first_run is not _nothing:
            self._on_first_run(self.results.fill_objects())
            self._on_first_run = _nothing
        results = self.results.put([*outputs, *passed] if passed else outputs)
        if self._tables:
            self._tables.mark()
        for note in self.filled:
            note()
        return results

    def _resident(self, vector: Tensor | None, gradients: list[Tensor]) -> list[Tensor]:
        """The inputs of a run but for the batch."""
        inputs = self._binding.inputs() + gradients
        if n := self._numbers:
            assert vector is not None
            inputs.append(vector if len(vector) == n else vector[:n])  # others have more counts
        if self._counters:
            inputs += [count() for count in self._counters]
        if self._constants:
            inputs += [source.now() for source in self._constants]
        return inputs

    def first_not_finite(self, vector: Tensor | None, batch: list[Tensor]) -> str | None:
        """Run again operation by operation, to no effect (see ``program.first_bad``)."""
        gradients = [] if self._gradients is None else self._gradients.before()
        inputs = self._resident(vector, gradients) + [batch[i] for i in self._batch]
        return first_not_finite(self.graph, inputs, self._names)

    def _check_writes(self, batch: list[Tensor]) -> None:
        pointers = [tensor.untyped_storage().data_ptr() for tensor in batch]
        for i in self.written:
            others = [j for j, pointer in enumerate(pointers) if pointer == pointers[i] and j != i]
            if others:
                raise UnsupportedInput(
                    f"The step changes {self._names[i]} in place, and {self._names[others[0]]}"
                    " shares its memory.",
                    remedy=f"work on a copy: {self._names[i]}.clone(), in the step or the dataset",
                )


def _nothing(fills_objects: bool) -> None:
    """It has run before."""


def _exchange(captured: CapturedStep) -> Exchange:
    """What has to be the same in all processes that run a step."""
    graph, sources = captured.graph.runs, captured.sources
    others = (node for node in graph.operations() if node.target is not UPDATE)
    written, own = captured.graph.written(), changed_by_any(graph, others)
    names = {i: one.name for i, one in enumerate(captured.graph.inputs) if i in written}
    return Exchange(
        reduced=tuple(sources.gradients.reduced),
        updated=tuple(
            name for i, name in names.items() if captured.graph.inputs[i].role is Role.PARAMETER
        ),
        own=frozenset(one.name for i, one in enumerate(graph.inputs) if i in own),
        numbers=tuple(one for one in sources.numbers if one.optimizer is not None),
    )


def _written(captured: CapturedStep, changed: Set[int]) -> list[Place]:
    """Places of the state that the step writes.

    A list or deque that it adds to and reads from is written as a whole: a full deque moves on.

    Args:
        captured: the step.
        changed: positions of the graph's inputs that its program changes.
    """
    state, filled = captured.sources.state, frozenset(captured.outputs.attributes)
    read = [
        (k, place)
        for k, item in enumerate(captured.graph.inputs)
        if item.kind is Kind.STATE
        for held in state[item.index].tensors
        for place in held.places
    ]
    found = [place for k, place in read if k in changed or lies_in(place, filled)]
    for extended in map(place_of_list, captured.outputs.lists):
        inside = frozenset((extended,))
        if any(lies_in(place, inside) for _, place in read):
            places = [p for one in state for held in one.tensors for p in held.places]
            found += [place for place in places if lies_in(place, inside)]
    return found
