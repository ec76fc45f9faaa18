"""DataExecutor: a loop over a loader that knows its steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from harness import csx
from models import loader
from torch.utils.data import DataLoader, IterableDataset

from fulgurite.backends.csx.diagnostics.trace_errors import InputChanged
from fulgurite.utils.data import DataExecutor


class Endless(IterableDataset[int]):
    """Five samples, without a length."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(5))


def steps(executor: DataExecutor) -> list[tuple[int, Any, bool]]:
    """(step, batch, is it the last) of a loop."""
    return [(executor.step, batch, executor.is_last_step) for batch in executor]


def test_it_counts_from_one_and_knows_the_last_step() -> None:
    executor = DataExecutor("abc")
    assert executor.step == 0
    assert steps(executor) == [(1, "a", False), (2, "b", False), (3, "c", True)]
    assert executor.step == 3


def test_it_begins_again_where_more_steps_are_asked_for() -> None:
    executor = DataExecutor("abc", num_steps=7)
    assert [batch for _, batch, _ in steps(executor)] == list("abcabca")
    assert len(executor) == 7


def test_it_stops_where_fewer_are() -> None:
    assert [batch for _, batch, _ in steps(DataExecutor("abc", num_steps=2))] == ["a", "b"]


@pytest.mark.parametrize("kind", ["generator", "loader"])
def test_without_a_length_it_looks_one_batch_ahead(kind: str) -> None:
    batches: Any = (i for i in range(5))
    if kind == "loader":
        batches = DataLoader(Endless(), batch_size=None)
    executor = DataExecutor(batches)
    with pytest.raises(TypeError, match="give DataExecutor num_steps"):
        len(executor)
    assert [last for _, _, last in steps(executor)] == [False] * 4 + [True]


def test_with_a_length_it_fetches_a_batch_only_when_it_is_due() -> None:
    fetched = []

    def batches() -> Iterator[int]:
        for i in range(4):
            fetched.append(i)
            yield i

    for i in DataExecutor(batches(), num_steps=4):
        assert len(fetched) == i + 1


def test_an_executor_may_be_used_again_but_not_within_itself() -> None:
    executor = DataExecutor("ab")
    assert steps(executor) == steps(executor)
    for _ in executor:
        with pytest.raises(RuntimeError, match="Make another one for the inner loop"):
            next(iter(executor))
    for _ in executor:
        break
    assert len(steps(executor)) == 2


@pytest.mark.parametrize("name", ["num_steps", "checkpoint_steps", "activation_steps"])
@pytest.mark.parametrize("value", [0, -1, 1.0, True, "3"])
def test_numbers_of_steps_are_positive_integers(name: str, value: Any) -> None:
    kind = ValueError if type(value) is int else TypeError
    with pytest.raises(kind, match=f"{name} must be"):
        DataExecutor("abc", **{name: value})


def test_what_has_no_batches_is_refused() -> None:
    with pytest.raises(ValueError, match="its length is 0"):
        DataExecutor([])
    with pytest.raises(ValueError, match="without a batch"):
        list(DataExecutor(iter([])))
    with pytest.raises(TypeError, match="takes an iterable of batches; got int"):
        DataExecutor(3)  # type: ignore[arg-type]


def test_a_loader_that_ends_too_early_is_named() -> None:
    with pytest.raises(RuntimeError, match="ended after 3 batches and cannot be iterated over"):
        list(DataExecutor(iter("abc"), num_steps=5))

    class Wrong:
        def __len__(self) -> int:
            return 4

        def __iter__(self) -> Iterator[str]:
            return iter("abc")

    with pytest.raises(RuntimeError, match="ended after 3 batches; its length is 4"):
        list(DataExecutor(Wrong()))


def test_on_csx_a_smaller_last_batch_is_refused_before_the_first_step() -> None:
    csx(max_programs=1)
    with pytest.raises(InputChanged, match="The last batch of the loader is smaller"):
        next(iter(DataExecutor(loader(count=50, batch_size=16))))
    assert len(list(DataExecutor(loader(count=50, batch_size=16), num_steps=3))) == 3


def test_executors_nest() -> None:
    outer, inner = DataExecutor("ab", checkpoint_steps=1), DataExecutor("xyz")
    seen = []
    for _ in outer:
        for _ in inner:
            seen.append((outer.step, inner.step, inner.is_checkpoint_step))
        assert outer.is_checkpoint_step
    assert seen[:3] == [(1, 1, False), (1, 2, False), (1, 3, True)]
    assert len(seen) == 6


def test_the_random_order_of_a_loader_is_that_of_a_plain_loop() -> None:
    data = torch.arange(12)
    found = []
    for wrap in (DataExecutor, iter):
        torch.manual_seed(5)
        batches: Any = DataLoader(data, batch_size=4, shuffle=True)  # type: ignore[arg-type]
        found.append([batch.tolist() for batch in wrap(batches)])
    assert found[0] == found[1]
