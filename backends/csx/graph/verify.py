"""Running a graph again, to no effect: to verify it after every pass, or to find something out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx

from fulgurite.backends.csx.graph.collectives import alone, has_collectives
from fulgurite.backends.csx.graph.fakes import laid_out_by_kernels
from fulgurite.backends.csx.graph.graph import Graph, like
from fulgurite.backends.patches import applied


def verify(graph: Graph) -> None:
    """Check a graph's form, its inputs, and the layout that it notes of each result.

    A layout is a dtype, a shape and strides: those in ``node.meta["val"]``, on which passes and the
    compiler rely, must be what the operations give when they are run again on fakes.

    Raises:
        AssertionError: the graph is not sound; the text names the operation.
        RuntimeError: torch's own check of its form fails, or an operation on its arguments.
    """
    graph.module.graph.lint()
    examples = [item.example for item in graph.inputs]
    nodes = graph.placeholders()
    assert len(nodes) == len(examples), f"{len(nodes)} placeholders for {len(examples)} inputs"
    for node, example in zip(nodes, examples, strict=True):
        _compare(node, example)
    # with the layouts that the capture saw: torch's fakes say otherwise of some operations
    with applied(laid_out_by_kernels()), graph.mode, torch.no_grad():
        _Rerun(graph.module).run(*map(like, examples))


def writing_graphs(folder: Path) -> Callable[[str, Graph, Graph], None]:
    """For ``passes.observing_passes``: write each graph into a folder, then verify it.

    The files are numbered in the order of the passes, and named after them.
    """

    def look(name: str, before: Graph, graph: Graph) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        number = len(list(folder.iterdir())) + 1
        (folder / f"{number:02}_{name}.txt").write_text(graph.text())
        verify(graph)

    return look


class _Rerun(fx.Interpreter):
    """Runs a graph on fakes, and compares each result with the layout that the graph has of it."""

    def run_node(self, n: fx.Node) -> Any:
        """The node's result, compared."""
        result = super().run_node(n)
        if n.op == "call_function":
            _compare(n, result)
        return result


def _compare(node: fx.Node, given: Any) -> None:
    noted, found = map(_layouts, (node.meta.get("val"), given))
    assert noted == found, f"{node.format_node()} is noted as {noted}; run again it is {found}"


def _layouts(value: Any) -> list[Any]:
    """Of the tensors in a value; numbers (``is_same_size``) are noted nowhere."""
    leaves = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
    return [(leaf.dtype, leaf.shape, leaf.stride(), leaf.device) for leaf in leaves]


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
