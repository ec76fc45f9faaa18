"""Random modules: several in one training, or misused alone.

``tests/tools/compiled.py`` runs 500 of the proper ones, compiled.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from fuzz import finding, recipe
from together import check_each, groups

COUNT, COMPILED = 90, 500


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Those that are misused end before anything is compiled."""
    compiled = metafunc.config.getoption("--compiled")
    seeds = range(2 * COMPILED if compiled else COUNT)
    proper = [seed for seed in seeds if not recipe(seed).misuse][:COMPILED]
    if "seeds" in metafunc.fixturenames:
        rows = list(groups(proper))
        metafunc.parametrize("seeds", rows, ids=[f"{row[0]}-{row[-1]}" for row in rows])
    else:
        metafunc.parametrize("seed", [] if compiled else sorted({*seeds} - {*proper}))


def check(seeds: Sequence[int]) -> None:
    wrong = finding(*seeds)
    assert wrong is None, wrong


def again(seed: int) -> str:
    return f"{recipe(seed)}; repeat: python tests/tools/fuzz.py --seed {seed}"


@pytest.mark.numbers
@pytest.mark.filterwarnings("ignore")  # of layers that a user would be warned of too
def test_random_modules_train_as_in_stock_lightning(seeds: list[int]) -> None:
    check_each(seeds, check, again)


@pytest.mark.fits
@pytest.mark.filterwarnings("ignore")
def test_the_misuse_of_a_random_module_is_named(seed: int) -> None:
    wrong = finding(seed)
    assert wrong is None, f"{again(seed)}\n{wrong}"
