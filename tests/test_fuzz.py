"""Random modules: as many as fit in about 40 s of one core (measured: 0.45 s each)."""

from __future__ import annotations

import pytest
from fuzz import finding, recipe

COUNT = 90


@pytest.mark.filterwarnings("ignore")  # of layers that a user would be warned of too
@pytest.mark.parametrize("seed", range(COUNT))
def test_a_random_module_trains_as_stock_or_its_misuse_is_named(seed: int) -> None:
    wrong = finding(seed)
    assert wrong is None, f"{recipe(seed)}\n{wrong}\n  repeat: python tests/fuzz.py --seed {seed}"
