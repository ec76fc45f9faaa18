"""Mutated files either load or are refused with places: nothing else comes out, in two seconds."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
from fuzz_files import BROKEN, EXAMPLES, FOLDER, GOOD, refusal_of, tried
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st


@pytest.fixture(scope="module", autouse=True)
def modules_that_files_name() -> object:
    before = list(sys.path)
    sys.path[:0] = [str(FOLDER), str(EXAMPLES)]
    for file in GOOD:  # what they name is imported before anything is timed
        refusal_of(file, imports=True)
    yield
    sys.path[:] = before
    sys.modules.pop("nets", None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mutated")


@pytest.mark.parametrize("file", GOOD, ids=lambda file: file.stem)
def test_what_is_mutated_loads_before(file: Path) -> None:
    assert refusal_of(file, imports=True) is None


def test_many_broken_files_are_mutated_too() -> None:
    assert len(BROKEN) > 60


@settings(
    max_examples=300,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(rng=st.randoms(use_true_random=False))
def test_a_mutated_file_loads_or_is_refused_with_places(rng: random.Random, folder: Path) -> None:
    assert tried(rng, folder)[0] in ("loads", "refused")
