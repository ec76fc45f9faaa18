"""Programs as users write them, compiled: the results of stock Lightning, or the error that is due.

Only with ``--compiled``: each takes some ten seconds (``tests/tools/compiled.py``).
"""

from __future__ import annotations

import pytest
from programs import difference, every_program


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """All programs, or none."""
    compiled = metafunc.config.getoption("--compiled")
    metafunc.parametrize("name", list(every_program()) if compiled else [])


@pytest.mark.filterwarnings("ignore")  # of what a user would be warned of too
def test_a_program_gives_the_results_of_stock(name: str) -> None:
    wrong = difference(name)
    assert wrong is None, f"{wrong}\n  repeat: python tests/support/programs {name}"
