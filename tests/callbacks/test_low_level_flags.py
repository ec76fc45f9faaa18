"""Low-level flags: what is known, what acts, what is refused."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
from harness import fit
from models import Measured, loader

from fulgurite.callbacks import GlobalFlags, ScopedTrainFlags, ScopedValidateFlags
from fulgurite.callbacks.low_level_flags import KNOWN, RETRACE

all_kinds = pytest.mark.parametrize("kind", [GlobalFlags, ScopedTrainFlags, ScopedValidateFlags])
MICRO_BATCH = "csx.performance.micro_batch_size"


class Counting(Measured):
    """Counts how often Python runs its steps."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.calls["training"] += 1
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.calls["validation"] += 1
        super().validation_step(batch, batch_idx)


def calls(*callbacks: pl.Callback, static: bool = True) -> dict[str, int]:
    """Of training (3 batches) and validation (2 batches)."""
    run = fit(
        Counting,
        lambda: (loader(48), loader(32)),
        static=static,
        callbacks=callbacks,
        num_sanity_val_steps=0,
    )
    return dict(run.module.calls)


@pytest.mark.fits
@pytest.mark.parametrize(
    ("kind", "training", "validation"),
    [
        (None, False, False),
        (GlobalFlags, True, True),
        (ScopedTrainFlags, True, False),
        (ScopedValidateFlags, False, True),
    ],
)
def test_retracing_holds_where_it_is_asked_for(kind: Any, training: bool, validation: bool) -> None:
    found = calls(*([] if kind is None else [kind(**{RETRACE: True})]))
    assert (found["training"] > 1) == training
    assert (found["validation"] > 1) == validation


@pytest.mark.fits
@all_kinds
def test_off_csx_flags_do_nothing(kind: Any) -> None:
    assert calls(kind(**{RETRACE: True, MICRO_BATCH: 8}), static=False) == calls(static=False)


@pytest.mark.fits
@pytest.mark.long
@all_kinds
def test_a_known_flag_without_meaning_is_noted_once(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr("fulgurite.callbacks.low_level_flags.rank_zero_info", said.append)
    flags = kind(**{MICRO_BATCH: "auto", "csx.debug.ini.frame": 3})
    plain = calls()
    for _ in range(2):
        assert calls(flags) == plain
    assert len(said) == 2
    assert said[0].startswith(f"{kind.__name__}: {MICRO_BATCH} does nothing here: a program takes")


@all_kinds
def test_a_flag_that_is_not_known_is_an_error_with_the_nearest(kind: Any) -> None:
    with pytest.raises(ValueError, match=rf"{kind.__name__}: there is no flag .*'{MICRO_BATCH}'"):
        kind(**{"csx.performance.micro_batchsize": 8})


def test_retracing_is_true_or_false() -> None:
    with pytest.raises(ValueError, match="is true or false; got 'sometimes'"):
        GlobalFlags(**{RETRACE: "sometimes"})


def test_every_flag_without_an_effect_says_why() -> None:
    assert [flag for flag, why in KNOWN.items() if why is None] == [RETRACE]
    assert list(KNOWN)[1:] == sorted(list(KNOWN)[1:])
