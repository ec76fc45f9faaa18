"""What a trace gives: a recording to compare later ones with, and what a program is built from."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import torch.utils._pytree as pytree
from torch import Tensor, fx

from fulgurite.backends.csx.capture.captured import Assumptions, Captured, InputSources
from fulgurite.backends.csx.capture.created_state import CreatedState
from fulgurite.backends.csx.capture.logs import Accumulator
from fulgurite.backends.csx.capture.outputs import passed_on
from fulgurite.backends.csx.capture.recording import Recording, can_leave_out, record_operations
from fulgurite.backends.csx.capture.side_effects import refuse_the_rest, release_rebound
from fulgurite.backends.csx.capture.trace import Trace
from fulgurite.backends.csx.capture.trees import where_put
from fulgurite.backends.csx.capture.updates import Update
from fulgurite.backends.csx.contract.constants import Source, constant_sources, constants_as_inputs
from fulgurite.backends.csx.contract.frozen_reads import warn_of_frozen_reads
from fulgurite.backends.csx.contract.watched import EPOCH, INDEX, holds_traced
from fulgurite.backends.csx.graph.flops import products_of
from fulgurite.backends.csx.graph.graph import Graph
from fulgurite.backends.csx.graph.passes import CBFLOAT16_PASSES, lower
from fulgurite.backends.csx.graph.passes.as_traced import let_views_copy, lowered
from fulgurite.backends.csx.state.carried_gradients import Carried
from fulgurite.backends.csx.state.places import Place
from fulgurite.backends.patches import MISSING


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
        with warn_of_frozen_reads() if scope.freezes else contextlib.nullcontext():
            scope.check_trace(self.trace.host.snapshot)

    def begins_with_other_gradients(self) -> bool:
        """Whether the next step finds other gradients than this trace did.

        Those that its optimizers need and this trace hid from them are added to
        ``scope.carried``; the caller then traces the step again.
        """
        inputs = self.trace.inputs
        for name in sorted(inputs.gradients.missed):
            there = inputs.parameters[name].grad is not None
            self.trace.scope.carried[name] = Carried(name, there)
        return inputs.gradients.begins_otherwise() or bool(inputs.gradients.missed)

    def created_state(self) -> CreatedState:
        """What the step left in places that held no tensors."""
        nodes = pytree.tree_leaves(self.module.graph.output_node().args[0])
        examples = [node.meta["val"] for node in nodes]
        recording, batch = self.recorded(), self.trace.step.batch
        passed = passed_on(recording.outputs.passed, batch, batch, {INDEX: 0, EPOCH: 0})
        return CreatedState(self.trace.left.collected.new_places, recording, examples, passed)

    def refuse_the_rest(self) -> None:
        """Raise where the step left something behind that would be frozen."""
        host, changed_at = self.trace.host, self.trace.watch.changes.of_modules
        refuse_the_rest(host.snapshot, host.modules, host.scope.module, changed_at)

    def recorded(self) -> Recording:
        """What is kept of a trace, to compare a later one with it."""
        trace, inputs, host = self.trace, self.trace.inputs, self.trace.host
        updates, once = trace.updates.noted, trace.scope.freezes  # what Python does happens once
        recording = Recording(
            **self._operations(updates if trace.updates.left_out else ()),
            outputs=trace.left.collected.outputs,
            deferred=inputs.deferred,
            states=host.states,
            filled=self._filled(),
            kept=[] if host.python is None else list(host.python.traced(holds_traced)),
            changes=trace.watch.attributes.changes() if once else (),
            lists=trace.watch.attributes.changed_lists if once else [],
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
        operations, own, constants = record_operations(
            self.module, self.trace.inputs.items, self.trace.left.last, updates
        )
        return {"operations": operations, "own": own, "constants": self._sources(constants)}

    def _filled(self) -> list[tuple[Place, Any]]:
        """The places that the program fills, and what is there now."""
        inputs, outputs = self.trace.inputs, self.trace.left.collected.outputs
        views = {p for item in inputs.state if item.whole for t in item.tensors for p in t.places}
        filled = [(place, place.get(MISSING)) for place in outputs.attributes]
        kept = [(p, now) for p, now in filled if not isinstance(now, Tensor) or p in views]
        return kept + [(place, copy(place.get())) for place in map(where_put, outputs.lists)]

    def captured(self) -> Captured:
        """Lower what was traced, and sort what the step left behind."""
        trace, scope, inputs = self.trace, self.trace.scope, self.trace.inputs
        recording = self.recorded() if scope.looks_again else None
        self.refuse_the_rest()
        inputs.state = release_rebound(trace.left.collected.rebound, inputs.state, inputs.nodes)
        constants = constants_as_inputs(self.module, inputs.position_of_batch(), inputs.mode)
        sources = self._sources(constants)
        inputs.add_constants(constants)
        items = inputs.gradients.marked(inputs.items)
        traced = let_views_copy(Graph(module=self.module, inputs=tuple(items), mode=inputs.mode))
        products = products_of(traced)
        narrow = scope.fp16_type == "cbfloat16"
        graph = lower(traced, CBFLOAT16_PASSES) if narrow else lowered(traced)
        return Captured(
            graph=graph,
            sources=InputSources(
                state=inputs.state,
                gradients=inputs.gradients.handover,
                numbers=tuple(inputs.number_slots),
                constants=tuple(sources),
                batch=inputs.batch,
            ),
            outputs=trace.left.collected.outputs,
            assumptions=Assumptions(
                numbers=tuple(inputs.guards),
                scalars=(*trace.watch.attributes.reads(), *trace.watch.fixed.accesses())
                if scope.freezes
                else (),
                answers=trace.answers,
            ),
            changes=trace.watch.attributes.changes(),
            counted=tuple(inputs.scheduled.counted.items()),
            recording=recording,
            products=products,
        )

    def _sources(self, constants: list[Tensor]) -> list[Source | Accumulator]:
        """Where tensors that were read from outside come from."""
        known: dict[int, Source | Accumulator] = {}
        for source in self.trace.host.outside:
            known.setdefault(id(source.tensor), source)  # the shortest way to it
        known |= self.trace.left.collected.accumulators
        return constant_sources(self.trace.scope.module, self.trace.scope.root, constants, known)
