"""Two runs of a graph, compared: what rounding explains, and what it does not."""

from __future__ import annotations

import pytest
import torch
from graphs import graph_of
from torch import Tensor
from torch.nn import functional as F

from fulgurite.backends.csx.compile.differences import Comparison, Start


def near_zero(x: Tensor) -> Tensor:
    """Zero but for rounding, whose sign decides whether RReLU draws a slope."""
    return F.rrelu(x * 0.1 - x / 10, training=True)


def elsewhere(x: Tensor) -> Tensor:
    """The same, rounded otherwise."""
    return F.rrelu(x / 10 - x * 0.1, training=True)


def never_near_zero(x: Tensor) -> Tensor:
    return F.rrelu(x.abs() + 1, training=True)


@pytest.mark.parametrize(
    ("right", "other", "wrong"),
    [
        (near_zero, elsewhere, None),
        (never_near_zero, lambda x: -never_near_zero(x), "output 0"),
        (never_near_zero, lambda x: never_near_zero(x) + 0 * torch.rand(3)[0], "random numbers"),
    ],
)
def test_how_much_is_drawn_may_depend_on_rounding_and_on_nothing_else(
    right: object, other: object, wrong: str | None
) -> None:
    x = torch.randn(64, generator=torch.Generator().manual_seed(0))
    graph = graph_of(right, x)  # type: ignore[arg-type]
    compared, start = Comparison(graph), Start([x], torch.get_rng_state())
    first = compared.run(lambda given: graph.module(*given), start)
    second = compared.run(lambda given: [other(*given)], start)  # type: ignore[operator]
    assert torch.equal(first.random_state, second.random_state) is (wrong == "output 0")
    found = compared.difference(second, first, start)
    assert (found is None) if wrong is None else (found is not None)
    if found is not None and wrong == "random numbers":
        assert wrong in found.what
