"""A functional graph computes what the captured one does, whatever it changes in place."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from graphs import graph_of, operations
from torch import Tensor

from fulgurite.backends.csx.graph.graph import storage_of
from fulgurite.backends.csx.graph.op_schema import is_mutable
from fulgurite.backends.csx.graph.passes.functionalize import by_torch, functionalize
from fulgurite.backends.csx.graph.passes.memories import functional
from fulgurite.backends.csx.graph.verify import verify

_aten = torch.ops.aten


def updated(x: Tensor, y: Tensor) -> Any:
    """An update of an optimizer, as torch's are."""
    x.mul_(0.9).add_(y, alpha=0.1)
    return x.sum()


def read_before_and_after(x: Tensor, y: Tensor) -> Any:
    """A view of what is changed: the old values once, the new ones afterwards."""
    turned = x.t()
    before = turned @ y
    x.add_(1)
    return before, turned @ y, turned[0], x.view(-1).view(2, 6)


def chain_of_views(x: Tensor, y: Tensor) -> Any:
    """Views of views, changed twice, in between by the last one's twin in layout."""
    row, rows = x[1], x.unbind()
    x.mul_(2)
    first = row * rows[1]
    x.detach().add_(y)
    return first, row * rows[2], row.view(2, 2).t().clone()


def passed_on(x: Tensor, y: Tensor) -> Any:
    """Other names of the same memory, and results that are inputs."""
    name = x.detach()
    name.relu_()
    return x, name + y, y


def lists(x: Tensor, y: Tensor) -> Any:
    """Operations on lists of tensors."""
    torch._foreach_mul_([x, y], 2.0)
    torch._foreach_addcdiv_([x, y], [y[0] + 1, x.cos()], [y[1] + 2, y + 3], [1.0, 0.5])
    return x - y


def integers(x: Tensor, y: Tensor) -> Any:
    """In place, a result keeps the type of what is changed."""
    count = torch.zeros(4, dtype=torch.bfloat16)
    count.add_(y.sum(0))
    return count * 2, x


def statistics(x: Tensor, y: Tensor) -> Any:
    """BatchNorm's kernel changes what its schema calls read only, twice here."""
    norm = torch.nn.functional.batch_norm
    mean, spread = x[0].clone(), x[1].clone().abs()
    first = norm(y, mean, spread, training=True)
    second = norm(first + x, mean, spread, training=True)
    return second, mean, spread


def dropped(x: Tensor, y: Tensor) -> Any:
    """A row that is changed, and only the row is read afterwards."""
    rows = y * 2
    row = rows[1]
    row.exp_()
    return row + x[0]


def gates(x: Tensor, y: Tensor) -> Any:
    """Parts of one tensor, each changed in place, as a cell of nn.LSTM does."""
    parts = torch.unsafe_chunk(x * 2, 2, 1)
    one, other = parts[0], parts[1]
    column = one[:, 1]
    one.sigmoid_()
    first = one.t() @ other.tanh_()
    one.add_(other).mul_(y[:, :2])
    turned = torch.unsafe_chunk((x - y).t(), 2, 0)[1]
    flat = turned.exp_().t().reshape(-1, 3)
    return first, column * 2, one.view(3, 1, 2), turned, flat, one[1:].reshape(-1)


def turned_in_place(x: Tensor, y: Tensor) -> Any:
    """Lies in memory in another order from then on, as in nn.GRU(batch_first=True)."""
    both = torch.stack([x, y])
    both.transpose_(0, 1)
    both.unsqueeze_(0)
    return both.sum(2), both[0, 0] + 1, both.squeeze_(0) * 2


def a_row(x: Tensor, y: Tensor) -> Any:
    """A row that is changed, and all of it is read afterwards."""
    x[1] = y[0]
    return x.sum(0)


def a_turned_one(x: Tensor, y: Tensor) -> Any:
    """Changed through a view, and read as what it was."""
    x.t().copy_(y.t() * 3)
    return x + y


def strides(x: Tensor, y: Tensor) -> Any:
    """Memory seen by numbers of elements."""
    diagonal = x.as_strided((3,), (5,))
    x.add_(y)
    return diagonal * 2


PLAIN = (
    *(updated, read_before_and_after, chain_of_views, passed_on, lists, integers, statistics),
    *(dropped, gates, turned_in_place),
)
OTHERS = (a_row, a_turned_one, strides)


def results(run: Callable[..., Any]) -> list[Tensor]:
    """What a function returns, and what it leaves in its inputs."""
    inputs = [torch.arange(12.0).reshape(3, 4).sin(), torch.arange(12.0).reshape(3, 4).cos()]
    found = run(*inputs)
    return [*(found if isinstance(found, (tuple, list)) else [found]), *inputs]


@pytest.mark.parametrize("function", [*PLAIN, *OTHERS])
def test_numbers_are_those_of_the_captured_graph(
    function: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # the package has the function under the module's name
    module = importlib.import_module(functionalize.__module__)
    traced: list[Any] = []
    monkeypatch.setattr(
        module, "by_torch", lambda graph: (traced.append(graph), by_torch(graph))[1]
    )
    captured = graph_of(function, torch.ones(3, 4), torch.ones(3, 4))
    graph = functionalize(captured)
    assert bool(traced) == (function in OTHERS)
    verify(graph)
    changes = [node for node in graph.operations() if is_mutable(node.target)]
    assert {node.target for node in changes} <= {_aten.copy_.default}
    assert len({node.args[0] for node in changes}) == len(changes) or function is statistics
    for found, expected in zip(results(graph.module), results(function), strict=True):
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_repeated_operations_are_traced_once_and_noted_each() -> None:
    def step(x: Tensor, y: Tensor) -> Any:
        a = torch.nn.functional.gelu(x, approximate="tanh")
        return a, torch.nn.functional.gelu(y, approximate="tanh")

    captured = graph_of(step, torch.ones(3), torch.ones(3))
    for node in captured.operations():
        node.meta["stack_trace"] = f"line of {node.name}"
    graph = functionalize(captured)
    verify(graph)
    ours, theirs = operations(graph), operations(by_torch(captured))
    assert sorted(ours) == sorted(theirs)
    values = [node.meta["val"] for node in graph.operations()]
    assert len({storage_of(value) for value in values}) == len(values)
    lines = [node.meta["stack_trace"] for node in graph.operations()]
    half = len(lines) // 2
    assert ours[:half] == ours[half:]
    assert lines == ["line of gelu"] * half + ["line of gelu_1"] * half


def test_which_operations_have_a_twin() -> None:
    assert functional(_aten.add_.Tensor) is _aten.add.Tensor
    assert functional(_aten.copy_.default) is _aten.copy.default
    assert functional(_aten._foreach_mul_.Scalar) is _aten._foreach_mul.Scalar
    for operation in (_aten.t_.default, _aten.resize_.default, _aten.add.out):
        assert functional(operation) is None
