"""Graph passes: optimizations, and what else is done to a graph before it is compiled.

Pure functions Graph -> Graph, one a file, which ``lower`` runs in the order of ``PASSES``. To add a
pass: its file, and its place in ``PASSES``; ``verify`` checks what it makes.

write_updates_out  an optimizer's update is its operations again (update_formulas)
drop_renames    no operations that only rename
functional_draws  random numbers are drawn into tensors of their own (draws)
to_cbfloat16    in a cbfloat16 run alone: its results in float32, each rounded once
functionalize   no in-place operations but the final write of each state; decomposed
                (memories, rewriting, decompositions)
drop_renames    none that this added
fold_zeros      fold away additions to gradients that are zero
simplify        none that repeat another, no dead ones
prune           no inputs that nothing reads
hold_state      where a guard says that the step went wrong, no state changes (hold)

and for a run of several processes that hold state in parts (weight streaming), after those:

shard_state     inputs are parts, gathered for their use; what they become is computed in parts
                (gathers, overlap)

and for compiled programs those of ``COMPILER_PASSES``:

write_factors_out  a factor of a sum is a product, which the compiler would lose (factors)
cast_before_sums  a cumulative sum in another dtype casts first (cumulative)
realize_scalars  are computed once, outside the loops (realize)
separate_regions  fused regions are kept apart from what is around them (region_borders)

and for those that run operation by operation, of ``INTERPRETER_PASSES``:

use_kernels     what torch has a kernel for is one operation again (recompose)

which is for steps that a pass makes another of; all others run as they were traced (as_traced).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from fulgurite.backends.csx.graph.graph import Graph
from fulgurite.backends.csx.graph.passes.cbfloat16 import to_cbfloat16
from fulgurite.backends.csx.graph.passes.cumulative import cast_before_sums
from fulgurite.backends.csx.graph.passes.draws import functional_draws
from fulgurite.backends.csx.graph.passes.factors import write_factors_out
from fulgurite.backends.csx.graph.passes.fold import fold_zeros
from fulgurite.backends.csx.graph.passes.functionalize import functionalize
from fulgurite.backends.csx.graph.passes.hold import hold_state
from fulgurite.backends.csx.graph.passes.prune import prune
from fulgurite.backends.csx.graph.passes.realize import realize_scalars
from fulgurite.backends.csx.graph.passes.recompose import use_kernels
from fulgurite.backends.csx.graph.passes.region_borders import separate_regions
from fulgurite.backends.csx.graph.passes.rename import drop_renames
from fulgurite.backends.csx.graph.passes.simplify import simplify
from fulgurite.backends.csx.graph.passes.update_formulas import write_updates_out

PASSES: tuple[Callable[[Graph], Graph], ...] = (
    write_updates_out,
    drop_renames,
    functional_draws,
    functionalize,
    drop_renames,
    fold_zeros,
    simplify,
    prune,
    hold_state,
)
CBFLOAT16_PASSES = (*PASSES[:3], to_cbfloat16, *PASSES[3:])
COMPILER_PASSES: tuple[Callable[[Graph], Graph], ...] = (
    write_factors_out,
    cast_before_sums,
    realize_scalars,
    separate_regions,
)
INTERPRETER_PASSES: tuple[Callable[[Graph], Graph], ...] = (use_kernels,)


PassObserver = Callable[[str, Graph, Graph], None]
"""Sees the name of a pass, the graph that it was given, and the one that it made."""

_observers: list[PassObserver] = []


def lower(graph: Graph, passes: tuple[Callable[[Graph], Graph], ...] = PASSES) -> Graph:
    """Run passes."""
    for lowering in passes:
        before, graph = graph, lowering(graph)
        for observe in _observers:
            observe(lowering.__name__, before, graph)
    return graph


def are_observed() -> bool:
    """Whether somebody wants to see the passes that run."""
    return bool(_observers)


@contextlib.contextmanager
def observing_passes(observe: PassObserver) -> Iterator[None]:
    """While it lasts, show ``observe`` each pass that ran."""
    _observers.append(observe)
    try:
        yield
    finally:
        _observers.remove(observe)
