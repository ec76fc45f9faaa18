"""What runs a graph operation by operation, by torch's own kernels, as it was traced."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from torch import Tensor

from fulgurite.backends.csx.compile.fabric import Call
from fulgurite.backends.csx.graph.graph import Graph
from fulgurite.backends.csx.graph.passes import INTERPRETER_PASSES, lower
from fulgurite.backends.csx.graph.passes.as_traced import changed_early
from fulgurite.backends.csx.graph.passes.hold import held_inputs


def reference_of(graph: Graph) -> Call:
    """A function that runs a graph's operations one by one, by torch's own kernels."""
    forward = (graph.as_traced or lower(graph, INTERPRETER_PASSES)).module

    early = [] if graph.as_traced is None else changed_early(graph.as_traced)

    def call(inputs: list[Tensor]) -> Sequence[Tensor]:
        before = [inputs[i].clone() for i in early]
        try:
            outputs = forward(*inputs)
        except (RuntimeError, IndexError):
            # so that what is told holds: the step changed nothing
            for i, state in zip(early, before, strict=True):
                inputs[i].copy_(state)
            raise
        # a graph that gives one tensor returns it bare
        return outputs if isinstance(outputs, (list, tuple)) else [outputs]

    held = None if graph.as_traced is None else held_inputs(graph)
    return call if held is None else functools.partial(_holding, call, *held)


def _holding(call: Call, guard: int, held: list[int], inputs: list[Tensor]) -> Sequence[Tensor]:
    """Run a step as it was traced, and put its state back where the guard says that it was wrong.

    ``guard`` and ``held`` are positions of inputs (see ``passes.hold``).
    """
    before = [inputs[i].clone() for i in held]
    outputs = call(inputs)
    # compiled, each write is a choice by the guard (passes/hold); as it was traced it has none
    if inputs[guard].item() < 0:
        for i, state in zip(held, before, strict=True):
            inputs[i].copy_(state)
    return outputs
