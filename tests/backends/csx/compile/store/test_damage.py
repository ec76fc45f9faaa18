"""``tests/tools/damage_cache.py`` and ``full_disk.py``, shortened."""

from __future__ import annotations

from pathlib import Path

import pytest
from damage_cache import COUNT, exchange_entries, flip_bits, race
from full_disk import forget, limit_sizes


def test_random_bits_in_the_cache_are_found(tmp_path: Path) -> None:
    outcomes = flip_bits(tmp_path / "programs", 60, seed=1)
    assert sum(outcomes.values()) == 60


def test_an_entry_in_the_place_of_any_other_is_built_again(tmp_path: Path) -> None:
    assert exchange_entries(tmp_path / "programs") == COUNT * (COUNT - 1)


@pytest.mark.process
def test_four_processes_on_one_cache_each_get_their_own_programs(tmp_path: Path) -> None:
    race(tmp_path / "programs", processes=4, rounds=30, seed=1)


@pytest.mark.filterwarnings("ignore:Compiled programs are not kept")
def test_where_files_are_limited_in_size_nothing_half_written_stays() -> None:
    outcomes = limit_sizes(step=100)
    forget()
    assert set(outcomes) == {"kept", "kept nowhere: operation by operation"}
