"""What processes tell each other: digests that differ are seen, before anything is updated."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from graphs import graph_of
from torch import Tensor

from fulgurite.backends.csx.graph.passes.functionalize import functionalize
from fulgurite.backends.csx.graph.passes.hold import hold_state
from fulgurite.backends.csx.graph.verify import verify
from fulgurite.backends.csx.graph.votes import AGREED, StepsDiffer, Votes, apart


def shares_of(digests: list[int], present: int | None = None) -> Tensor:
    """The sum of the processes' numbers, each divided first; of those that are present."""
    total = torch.zeros_like(Votes(1, bool).ballot)
    for digest in digests[:present]:
        votes = Votes(len(digests), bool)
        votes.say_digest(digest)
        total += votes.ballot / len(digests)
    return total


def differ(shares: Tensor, count: int) -> bool:
    """What is found on the host, and in a program, too."""
    votes = Votes(count, bool)
    votes.hear(shares)
    assert bool(apart(shares, count)) == votes.differ
    return votes.differ


@pytest.mark.parametrize("count", [2, 3, 7, 12, 100, 1000])
@pytest.mark.parametrize("digest", [0, 0x12345678, 0xFFFFFFFF, 0xDEADBEEF])
def test_one_bit_of_one_process_is_seen_and_rounding_is_not(count: int, digest: int) -> None:
    assert not differ(shares_of([digest] * count), count)
    for bit in (0, 5, 31):
        assert differ(shares_of([*[digest] * (count - 1), digest ^ 1 << bit]), count)


def test_a_step_that_is_run_alone_differs_from_nobody() -> None:
    assert not differ(shares_of([0xDEADBEEF] * 4, present=1), 4)


def updated(weight: Tensor, mean: Tensor, shares: Tensor) -> Any:
    mean.mul_(0.5)
    said = AGREED(shares, 2)
    weight.sub_(1.0)
    return said


@pytest.mark.parametrize("others", [7, 8])
def test_lowered_a_step_that_differs_changes_no_state(others: int) -> None:
    given = [torch.ones(3), torch.ones(2), shares_of([7, others])]
    graph = hold_state(functionalize(graph_of(updated, *given)))
    verify(graph)
    assert AGREED not in [node.target for node in graph.operations()]
    weight, mean, shares = [one.clone() for one in given]
    [said] = graph.module(weight, mean, shares)
    assert torch.equal(said, given[2])
    changed = others == 7
    assert weight.tolist() == [0.0 if changed else 1.0] * 3
    assert mean.tolist() == [0.5 if changed else 1.0] * 2


def test_operation_by_operation_it_ends_before_it_updates() -> None:
    weight, mean, shares = torch.ones(3), torch.ones(2), shares_of([7, 8])
    with pytest.raises(StepsDiffer) as caught:
        updated(weight, mean, shares)
    assert torch.equal(caught.value.shares, shares)
    assert weight.tolist() == [1.0] * 3
