"""Random modules: as many as fit in about 40 s of one core (measured: 0.45 s each).

Compiled, one takes about 6 s: ``tests/tools/compiled.py`` runs 500 of the proper ones.
"""

from __future__ import annotations

import pytest
from fuzz import finding, recipe

COUNT, COMPILED = 90, 500


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Those that are misused end before anything is compiled."""
    seeds = list(range(COUNT))
    if metafunc.config.getoption("--compiled"):
        seeds = [seed for seed in range(2 * COMPILED) if not recipe(seed).misuse][:COMPILED]
    metafunc.parametrize("seed", seeds)


@pytest.mark.filterwarnings("ignore")  # of layers that a user would be warned of too
def test_a_random_module_trains_as_stock_or_its_misuse_is_named(seed: int) -> None:
    wrong = finding(seed)
    again = f"python tests/tools/fuzz.py --seed {seed}"
    assert wrong is None, f"{recipe(seed)}\n{wrong}\n  repeat: {again}"
