"""Running a graph again to find something out, to no effect."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

from fulgurite.backends.csx.graph.collectives import alone, has_collectives
from fulgurite.backends.csx.graph.graph import Graph, like


@contextmanager
def on_copies(graph: Graph, inputs: list[Tensor]) -> Iterator[list[Tensor]]:
    """Inputs to run a graph on: copies of what it writes; the random state is put back afterwards.

    Other processes take no part in it.

    Args:
        graph: what will be run.
        inputs: what it ran on.
    """
    written, state = graph.written(), torch.get_rng_state()
    try:
        with alone() if has_collectives(graph) else nullcontext():
            yield [like(x).copy_(x) if i in written else x for i, x in enumerate(inputs)]
    finally:
        torch.set_rng_state(state)
