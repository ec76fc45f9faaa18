"""Two runs of a graph, compared: what rounding explains, and what it does not."""

from __future__ import annotations

import pytest
import torch
from graphs import graph_of
from torch import Tensor
from torch.nn import functional as F

from fulgurite.backends.csx.compile.checking.differences import Comparison, Start


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


@pytest.mark.parametrize(("begins", "wrong"), [(4, None), (3, "memory of another value")])
def test_pieces_that_lie_side_by_side_share_no_memory(begins: int, wrong: str | None) -> None:
    """As the parts of what several processes have reduced together."""

    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        return x[:4] * 2, x[begins : begins + 4] * 2

    def in_one_storage(inputs: list[Tensor]) -> list[Tensor]:
        whole = inputs[0] * 2
        return [whole[:4], whole[begins : begins + 4]]

    x = torch.randn(8)
    graph = graph_of(step, x)
    comparison, start = Comparison(graph), Start([x], torch.get_rng_state())
    right = comparison.run(lambda inputs: [*graph.module(*inputs)], start)
    found = comparison.difference(comparison.run(in_one_storage, start), right, start)
    assert (found is None) is (wrong is None)
    assert wrong is None or wrong in found.what  # type: ignore[union-attr]
