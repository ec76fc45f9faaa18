"""Tiny graphs for the tests of passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fulgurite.backends.csx.graph.graph import Graph, Input, Kind


def graph_of(function: Callable[..., Any], *tensors: Tensor, kind: Kind = Kind.STATE) -> Graph:
    """A function of tensors as a graph: its results in a list, each tensor an input."""

    def run(*inputs: Tensor) -> list[Any]:
        result = function(*inputs)
        return list(result) if isinstance(result, (list, tuple)) else [result]

    mode = FakeTensorMode()
    fakes = [mode.from_tensor(tensor) for tensor in tensors]
    module = make_fx(run, tracing_mode="fake", _allow_non_fake_inputs=True)(*fakes)
    inputs = tuple(
        Input(kind=kind, index=i, name=f"input {i}", example=fake) for i, fake in enumerate(fakes)
    )
    return Graph(module=module, inputs=inputs, mode=mode)


def operations(graph: Graph) -> list[str]:
    """The operations of a graph, by name: ``aten.add.Tensor``."""
    return [str(node.target) for node in graph.operations()]
