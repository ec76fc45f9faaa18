"""What runs a graph operation by operation, by torch's own kernels, as it was traced."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from torch import Tensor, fx

from fulgurite.backends.csx.compile.fabric import Call
from fulgurite.backends.csx.graph.graph import Graph
from fulgurite.backends.csx.graph.passes import INTERPRETER_PASSES, lower
from fulgurite.backends.csx.graph.passes.as_traced import changed_early
from fulgurite.backends.csx.graph.passes.hold import held_inputs
from fulgurite.backends.csx.streaming.positions import most_at_once, with_positions
from fulgurite.backends.csx.streaming.residency import residency


def reference_of(graph: Graph) -> Call:
    """A function that runs a graph's operations one by one, by torch's own kernels."""
    forward: Any = (graph.as_traced or lower(graph, INTERPRETER_PASSES)).module
    if residency.is_open:
        forward = _streamed(graph, forward)
    early = [] if graph.as_traced is None else changed_early(graph.as_traced)

    def call(inputs: list[Tensor]) -> Sequence[Tensor]:
        before = [residency.copy_of(inputs[i]) for i in early]
        try:
            outputs = forward(*inputs)
        except (RuntimeError, IndexError):
            # so that what is told holds: the step changed nothing
            for i, state in zip(early, before, strict=True):
                residency.use(inputs[i], state)
                inputs[i].copy_(state)
            raise
        # a graph that gives one tensor returns it bare
        return outputs if isinstance(outputs, (list, tuple)) else [outputs]

    held = None if graph.as_traced is None else held_inputs(graph)
    return call if held is None else functools.partial(_holding, call, *held)


def _streamed(graph: Graph, forward: fx.GraphModule) -> Any:
    """The operations, with the state that is in files brought into memory as it is used.

    Raises:
        ValueError: one works on more of it than there may be in memory.
    """
    module, uses = with_positions(forward, graph.runs, graph.written())
    most, names = most_at_once(uses, graph.runs)
    if most > residency.room_bytes:
        raise ValueError(
            f"max_resident_bytes={residency.limit_bytes} is too small: one operation works on"
            f" {most:,} bytes of state at once ({', '.join(names)}). Give at least twice that."
        )

    def call(*inputs: Tensor) -> Any:
        with residency.running(uses, inputs):
            return module(*inputs)

    return call


def _holding(call: Call, guard: int, held: list[int], inputs: list[Tensor]) -> Sequence[Tensor]:
    """Run a step as it was traced, and put its state back where the guard says that it was wrong.

    ``guard`` and ``held`` are positions of inputs (see ``passes.hold``).
    """
    before = [residency.copy_of(inputs[i]) for i in held]
    outputs = call(inputs)
    # compiled, each write is a choice by the guard (passes/hold); as it was traced it has none
    if inputs[guard].item() < 0:
        for i, state in zip(held, before, strict=True):
            residency.use(inputs[i], state)
            inputs[i].copy_(state)
    return outputs
