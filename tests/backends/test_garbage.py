"""The garbage collector while a step is traced."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from fulgurite.backends.runtime import young_alone


@pytest.fixture(autouse=True)
def thresholds() -> Iterator[None]:
    """Python's own, put back after the test."""
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*before)


class Node:
    """Something that may hold itself."""

    def __init__(self) -> None:
        self.held = self


def full_collections() -> int:
    """How many there were."""
    return int(gc.get_stats()[-1]["collections"])


def test_there_is_no_full_collection_in_the_block() -> None:
    def fill() -> int:
        gc.freeze()
        # a full collection comes where a quarter more objects are there than after the last one,
        # which has none of those that are frozen
        gc.collect()
        before = full_collections()
        try:
            kept = [Node() for _ in range(300_000)]
        finally:
            gc.unfreeze()
        assert kept
        return full_collections() - before

    assert fill() > 0
    with young_alone():
        assert fill() == 0


def test_no_full_collection_comes_with_the_end_of_the_block() -> None:
    gc.collect()
    with young_alone():
        kept: list[list[int]] = [[] for _ in range(1_600_000)]
        before = full_collections()
    kept += [[] for _ in range(1_000)]
    assert full_collections() == before


def test_what_somebody_has_frozen_stays_frozen() -> None:
    gc.freeze()
    try:
        with young_alone():
            pass
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


def test_what_was_set_is_set_again_whatever_ends_the_block() -> None:
    @young_alone()
    def fail() -> None:
        with young_alone():
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert gc.get_threshold() == (700, 10, 10)


@pytest.mark.parametrize("own", [(0, 0, 0), (50_000, 20, 20)])
def test_a_collector_that_is_off_or_seldom_runs_stays_as_it_is(own: tuple[int, int, int]) -> None:
    gc.set_threshold(*own)
    with young_alone():
        assert gc.get_threshold() == own
