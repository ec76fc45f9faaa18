"""What is in memory of state that is in files: within a budget, by who needs it last."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fulgurite.backends.csx.streaming.mapped import over
from fulgurite.backends.csx.streaming.residency import Residency, Uses

SIZE = 1 << 16


@pytest.fixture
def state(tmp_path: Path) -> Iterator[Residency]:
    one = Residency()
    one.open(4 * SIZE, tmp_path)
    yield one
    one.close()


def tensors(state: Residency, count: int) -> list[Tensor]:
    """Tensors in files, each of ``SIZE`` bytes, full of its number."""
    example = torch.empty(SIZE // 4)
    made = [over(state.storage(SIZE), example) for _ in range(count)]
    return [one.fill_(i) for i, one in enumerate(made)]


def resident(state: Residency, inputs: list[Tensor]) -> set[int]:
    found = [state._files.find(one) for one in inputs]
    return {i for i, one in enumerate(found) if one is not None and one.is_resident}


def test_what_a_call_works_on_is_there_and_no_more_than_the_budget(state: Residency) -> None:
    draw = random.Random(1)
    inputs = tensors(state, 12)
    calls = tuple(tuple(draw.sample(range(12), draw.randint(1, 3))) for _ in range(40))
    uses = Uses(calls, frozenset(range(6)))
    for _ in range(3):
        with state.running(uses, inputs):
            for number, call in enumerate(calls):
                state.at(number)
                with state._changed:
                    there = resident(state, inputs)
                assert there >= {*call}
                assert len(there) <= 4
                assert all(float(inputs[i][-1]) == i for i in call)


def test_what_is_needed_last_goes_first(state: Residency) -> None:
    inputs = tensors(state, 5)
    state.use(*inputs[:4])
    uses = Uses(((0,), (1,), (2,), (4,), (3,), (0, 1)), frozenset())
    state._thread = object()  # type: ignore[assignment]  # none goes ahead
    with state.running(uses, inputs):
        for number in range(4):
            state.at(number)
        assert resident(state, inputs) == {0, 1, 3, 4}  # 2 is needed in the next run alone
        state._thread = None


def test_in_two_runs_of_a_cycle_only_what_has_no_room_is_read(state: Residency) -> None:
    inputs = tensors(state, 6)
    uses = Uses(tuple((i,) for i in range(6)), frozenset())
    for _ in range(11):
        with state.running(uses, inputs):
            for number in range(6):
                state.at(number)
    # Belady's rule on a cycle of 6 with room for 4 reads 2 of 5; the last used first reads all
    read = state.traffic.read_bytes / SIZE
    assert read <= 6 + 10 * 6 * 0.55


def test_a_tensor_that_is_gone_makes_room(state: Residency) -> None:
    inputs = tensors(state, 4)
    state.use(*inputs)
    del inputs[:2]
    assert len(state._files.residents()) == 2
    more = tensors(state, 2)
    state.use(*more)
    assert resident(state, inputs) == {0, 1}


def test_a_copy_of_what_is_in_a_file_is_in_another(state: Residency) -> None:
    [one] = tensors(state, 1)
    copy = state.copy_of(one)
    one.fill_(7)
    assert state.is_in_file(copy)
    assert float(copy[0]) == 0.0
    assert not state.is_in_file(state.copy_of(torch.zeros(4)))
