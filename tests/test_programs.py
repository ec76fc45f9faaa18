"""Programs as users write them, compiled: the results of stock Lightning, or the error that is due.

Each takes some ten seconds: a few are in the core, the others are drawn.
"""

from __future__ import annotations

import harness
import pytest
import same_passes
from programs import difference, every_program

from fulgurite.backends.csx.graph.passes import observing_passes

CORE = (
    "vision.digit_convnet_onecycle",
    "rl.double_dueling_dqn_soft_target",
    "text.byte_language_model_gru",
    "tabular.diabetes_regression",
)
PROGRAMS = [
    pytest.param(name, marks=[pytest.mark.core] if name in CORE else []) for name in every_program()
]


@pytest.mark.numbers
@pytest.mark.compiler
@pytest.mark.filterwarnings("ignore")  # of what a user would be warned of too
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_gives_the_results_of_stock(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "defaults", {"background": False})  # a user's, but it waits
    with observing_passes(same_passes.compare):
        wrong = difference(name)
    assert wrong is None, f"{wrong}\n  repeat: python tests/support/programs {name}"
