"""Steps per second."""

from __future__ import annotations

from harness import fit
from models import Measured, loader

from fulgurite.callbacks import StepRate


def test_rate_counts_every_step_but_those_after_a_pause() -> None:
    rate = StepRate()
    assert rate.steps_per_s == 0
    fit(
        Measured,
        lambda: (loader(160), loader(32)),
        static=True,
        callbacks=(rate,),
        max_epochs=2,
    )
    assert rate._steps == 2 * 9
    assert rate.steps_per_s > 0
