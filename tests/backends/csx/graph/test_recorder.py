"""What is recorded gives, run again, what was run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.testing import assert_close

from fulgurite.backends.csx.graph.recorder import Recorder, recorder

X = torch.arange(12.0).reshape(3, 4)
OUTSIDE = torch.full((4,), 2.0)


def recorded(
    run: Callable[[Tensor], Any], known: dict[int, Tensor] | None = None
) -> fx.GraphModule:
    """The graph of a function of ``X``, by fakes."""
    fakes = FakeTensorMode(allow_non_fake_inputs=True)
    mode = Recorder(fakes, lambda node: None, lambda tensor: (known or {}).get(id(tensor)))
    with fakes, torch.no_grad():
        return mode.record(lambda x: [run(x)], [fakes.from_tensor(X)])


def in_place(x: Tensor) -> Tensor:
    y = x.clone()
    y[:, 1].mul_(3)
    return y + y.t().reshape(3, 4)


def literal(x: Tensor) -> Tensor:
    kept = torch.tensor([1.0, 2.0])
    kept.add_(1)
    return x[:, :2] * kept


def in_inference_mode(x: Tensor) -> Tensor:
    with torch.inference_mode():
        return torch.matmul(x, x.t()).clone()


def in_autocast(x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return x @ x.t()


@pytest.mark.parametrize(
    "run",
    [
        lambda x: x.softmax(-1) @ x.t(),
        lambda x: torch.cat(x.split(2, 1)[::-1], 1),  # parts, each taken out
        lambda x: x.max(1).values,  # of two results one
        lambda x: x * OUTSIDE + OUTSIDE,
        lambda x: torch._foreach_add([x, x], 1.0)[1],
        in_place,
        literal,
        in_inference_mode,
        in_autocast,
    ],
)
def test_a_graph_gives_what_was_run(run: Callable[[Tensor], Tensor]) -> None:
    module = recorded(run)
    assert_close(module(X)[0], run(X), rtol=0, atol=0)
    assert all("val" in node.meta for node in module.graph.nodes if node.op != "output")


def test_a_time_span_is_no_operation() -> None:
    def run(x: Tensor) -> Tensor:
        with torch.autograd.profiler.record_function("a step"):
            return x + 1

    [one] = recorded(run).graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor)
    assert len(one.graph.nodes) == 3  # with input and output


def test_a_value_that_is_known_is_read_and_no_other() -> None:
    known: dict[int, Tensor] = {}

    def run(x: Tensor) -> Tensor:
        y = x.sum()
        known[id(y)] = torch.tensor(66.0)
        return x * torch.ops.aten._local_scalar_dense(y)

    module = recorded(run, known)
    assert_close(module(X)[0], X * 66)
    with pytest.raises(DataDependentOutputException):
        recorded(lambda x: x * torch.ops.aten._local_scalar_dense(x.sum()))


def test_a_tensor_is_a_node_by_the_object() -> None:
    def run(x: Tensor) -> Tensor:
        nodes = recorder().nodes
        y = x + 1
        assert nodes[y].target is torch.ops.aten.add.Tensor
        assert y in nodes
        assert OUTSIDE not in nodes
        with pytest.raises(KeyError):
            nodes[OUTSIDE]
        return y

    recorded(run)
