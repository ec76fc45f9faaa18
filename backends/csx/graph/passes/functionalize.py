"""Make a captured graph functional: every state is read once and written once, at the end.

Views are kept: removing them too copies transposed weights, 143 against 110-119 µs a step on an MLP
64-128-128-10, and twice the compile time on a GPT (measured, torch 2.13).

The graph is rewritten, not traced again, which would cost what its capture cost. An operation that
the compiler knows stays, with what the capture noted of it. One that has a decomposition is traced
the first time that it comes with such arguments, and its nodes are copied from then on: sixty equal
updates of an optimizer take one. An operation that changes a tensor in place becomes the one that
returns it changed, and whatever is the same memory in the same layout means that from then on.
Where the same memory is read afterwards in another layout (``x[:, 0] = 1``), and in what else is
not as plain as this, torch functionalizes the graph as a whole.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx import traceback
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental.proxy_tensor import make_fx

from fulgurite.backends.csx.graph.graph import Graph
from fulgurite.backends.csx.graph.passes.decompositions import decompositions
from fulgurite.backends.csx.graph.passes.memories import is_plain, memories_of, with_new_views
from fulgurite.backends.csx.graph.passes.rewriting import NotPlain, Rewriting
from fulgurite.backends.torch_compiler import options


def functionalize(graph: Graph) -> Graph:
    """Replace in-place operations by pure ones and decompose for the compiler, lines kept."""
    graph = with_new_views(graph)
    table, memories = decompositions(), memories_of(graph)
    if memories is not None and is_plain(graph, memories):
        with contextlib.suppress(NotPlain):
            return _traced(graph, lambda *inputs: _rewritten(graph, memories, table), table)
    # tracing all of it again takes what the capture took, but torch knows every case
    return by_torch(graph)


def by_torch(graph: Graph) -> Graph:
    """The same by tracing the whole graph again."""

    def run(*inputs: Tensor) -> Any:
        return fx.Interpreter(graph.module).run(*inputs)

    return _traced(graph, torch.func.functionalize(run, remove="mutations"), decompositions())


def _traced(graph: Graph, run: Any, table: dict[Any, Any]) -> Graph:
    """What ``run`` does with a graph's inputs."""
    examples = [item.example for item in graph.inputs]
    # the flag marks the operations that eagerly are kernels, after which the compiler then rounds
    rounding = options.patch(emulate_precision_casts=True)
    lazy = _use_lazy_graph_module(True)  # no pass runs the graph's Python
    with graph.mode, torch.no_grad(), traceback.preserve_node_meta(), rounding, lazy:
        module = make_fx(
            run, decomposition_table=table, tracing_mode="fake", _allow_non_fake_inputs=True
        )(*examples)
    return Graph(module=module, inputs=graph.inputs, mode=graph.mode)


def _rewritten(graph: Graph, memories: dict[fx.Node, int], table: dict[Any, Any]) -> Any:
    with torch._C.DisableTorchFunction():  # modes that look at every attribute of a tensor
        return Rewriting(graph, memories, table).run()
