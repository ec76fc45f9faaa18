"""Passes: pure functions Graph -> Graph, one a file, run in the order of ``PASSES``.

functionalize   no in-place operations but the final write of each state; decomposed
simplify        no operations that only rename, no dead ones
prune           no inputs that nothing reads
"""

from __future__ import annotations

from collections.abc import Callable

from fulgurite.backends.csx.graph import Graph
from fulgurite.backends.csx.passes.functionalize import functionalize
from fulgurite.backends.csx.passes.prune import prune
from fulgurite.backends.csx.passes.simplify import simplify

PASSES: tuple[Callable[[Graph], Graph], ...] = (functionalize, simplify, prune)


def lower(graph: Graph) -> Graph:
    """Run all passes."""
    for lowering in PASSES:
        graph = lowering(graph)
    return graph
