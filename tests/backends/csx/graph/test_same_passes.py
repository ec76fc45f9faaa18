"""The comparison of passes with the graph before them sees a pass that is wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import same_passes
import torch
from graphs import graph_of
from torch import Tensor, fx

from fulgurite.backends.csx.graph.graph import Graph
from fulgurite.backends.csx.graph.passes import PASSES, lower

aten = torch.ops.aten


def step(weight: Tensor, count: Tensor, x: Tensor) -> Any:
    drawn = torch.rand_like(x)
    loss = (x * weight - drawn).clamp(max=0.1).square().sum()
    weight.sub_(0.1 * (2 * x * weight))
    count.add_(1)
    return loss, drawn > 0.5


def changed(target: Any, change: Callable[[fx.Node], Any]) -> Callable[[Graph], Graph]:
    """A pass that changes the first operation of a kind."""

    def wrong(graph: Graph) -> Graph:
        fresh = graph.copied()
        change(next(node for node in fresh.nodes if node.target is target))
        return graph.with_operations(fresh)

    return wrong


def argument(i: int, value: Any) -> Callable[[fx.Node], None]:
    return lambda node: node.update_arg(i, value)


def otherwise(target: Any) -> Callable[[fx.Node], None]:
    def change(node: fx.Node) -> None:
        node.target = target

    return change


def left_out(node: fx.Node) -> None:
    node.replace_all_uses_with(node.args[0])
    node.graph.erase_node(node)


WRONG = {
    "a number": changed(aten.clamp.default, argument(2, 2.0)),
    "a sign": changed(aten.sub.Tensor, otherwise(aten.add.Tensor)),
    "a write": changed(aten.sub_.Tensor, left_out),
    "a count": changed(aten.add_.Tensor, argument(1, 2)),
    "a comparison": changed(aten.gt.Scalar, otherwise(aten.le.Scalar)),
    "a draw": changed(aten.rand_like.default, otherwise(aten.zeros_like.default)),
    "a reduction": changed(aten.sum.default, otherwise(aten.mean.default)),
}


def graph() -> Graph:
    return graph_of(step, torch.ones(5), torch.zeros(5, dtype=torch.int64), torch.ones(5))


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_pass_is_seen(what: str) -> None:
    before = graph()
    with pytest.raises(same_passes.PassChanged):
        same_passes.compare(what, before, WRONG[what](before))


def test_right_passes_are_not() -> None:
    looked: list[str] = []
    before = graph()
    for one in PASSES:
        after = lower(before, (one,))
        same_passes.compare(one.__name__, before, after)
        looked.append(one.__name__)
        before = after
    assert len(looked) == len(PASSES)
