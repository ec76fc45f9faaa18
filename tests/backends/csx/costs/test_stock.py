"""What stock Lightning would have taken: kernels, and Python in units of a tiny net's step."""

from __future__ import annotations

import time
from typing import Any

import pytest
import rich
import torch
from harness import fit, make_trainer
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from models import Measured, loader
from rich.console import Console

from fulgurite.backends.csx.costs import stock
from fulgurite.backends.csx.costs.stock import Counts, Stage, Used, estimate
from fulgurite.backends.csx.program import build
from fulgurite.backends.csx.program.description import Program

UNIT_S = 0.001


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[float]]:
    """What was measured before and is now, on a machine with a known unit."""
    kept: dict[str, list[float]] = {}
    monkeypatch.setattr(stock, "unit_s", lambda: UNIT_S)
    monkeypatch.setattr(stock, "measured_before", lambda name: kept.get(name, []))
    monkeypatch.setattr(stock, "note_measured", lambda name, one: kept.setdefault(name, [one]))
    return kept


def counts(**given: Any) -> Counts:
    fields = {"key": "k", "compiled": False, "batches": 0, "kernels_s": 0.002, "operations": 100}
    return Counts(**{**fields, "logged": 1, **given})


def batch_s(operations: int, logged: int, loops: float = stock._BATCH) -> float:
    python = loops + stock._OPERATION * operations + stock._LOGGED * logged
    return 0.002 + python * UNIT_S


def test_all_batches_take_what_stock_takes_and_the_rest_what_it_took(
    notes: dict[str, list[float]],
) -> None:
    training = Stage([counts()], 1000, in_steps_s=3.0)
    validation = Stage([counts(operations=20, logged=2)], 100, in_steps_s=0.5)
    never = Stage([], 0, in_steps_s=0.0)
    stages = {"training": training, "validation": validation, "test": never}
    found = estimate(make_trainer(True), stages, total_s=5.0)
    assert found is not None
    assert found.batch_s == pytest.approx(batch_s(100, 1))
    wanted_s = 1.5 + 1000 * batch_s(100, 1) + 100 * batch_s(20, 2, stock._EVALUATED)
    assert found.total_s == pytest.approx(wanted_s)


@pytest.mark.parametrize(("batches", "mean"), [((300, 100), 140), ((0, 0), 180)])
def test_an_entry_point_counts_as_often_as_it_was(
    notes: dict[str, list[float]], batches: tuple[int, int], mean: int
) -> None:
    few, many = batches
    entries = [counts(batches=few), counts(batches=many, operations=260, key="l")]
    found = estimate(make_trainer(True), {"training": Stage(entries, 10, 0.0)}, 1.0)
    assert found is not None
    assert found.batch_s == pytest.approx(batch_s(mean, 1))


def test_a_program_that_is_found_compiled_takes_what_an_earlier_run_has_noted(
    notes: dict[str, list[float]],
) -> None:
    trainer = make_trainer(True)
    found_compiled = counts(compiled=True, kernels_s=None)
    assert estimate(trainer, {"training": Stage([found_compiled], 10, 0.0)}, 1.0) is None
    first = estimate(trainer, {"training": Stage([counts()], 10, 0.0)}, 1.0)
    again = estimate(trainer, {"training": Stage([found_compiled], 10, 0.0)}, 1.0)
    assert first is not None
    assert again is not None
    assert again.total_s == pytest.approx(first.total_s)


def test_what_was_measured_before_code_was_compiled_is_noted_too(
    notes: dict[str, list[float]],
) -> None:
    trainer = make_trainer(True)
    compared = {"training": Stage([counts(compiled=True)], 10, 0.0)}  # once, operation by operation
    found_compiled = {"training": Stage([counts(compiled=True, kernels_s=None)], 10, 0.0)}
    first, again = (estimate(trainer, one, 1.0) for one in (compared, found_compiled))
    assert first is not None
    assert again is not None
    assert again.total_s == pytest.approx(first.total_s)


@pytest.mark.parametrize(
    ("bar", "units"),
    [
        (None, 0.0),
        (TQDMProgressBar(), stock._BAR),
        (RichProgressBar(), stock._BAR),
        ("terminal", stock._RICH),
    ],
)
def test_a_bar_that_is_shown_has_its_units(
    bar: Any, units: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    console = Console(force_terminal=bar == "terminal")
    monkeypatch.setattr(rich, "get_console", lambda: console)
    shown = RichProgressBar() if bar == "terminal" else bar
    options = {} if bar is None else {"callbacks": [shown], "enable_progress_bar": True}
    trainer = make_trainer(True, **options)
    assert stock._bar_units(trainer) == units


def test_the_unit_leaves_the_random_state() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    with torch.inference_mode():
        assert 1e-6 < stock.unit_s() < 1.0
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(("waited_ns", "busy"), [(99, False), (101, True)])
def test_a_thread_that_waits_for_a_core_is_beside_others(
    waited_ns: int, busy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter([(5, 7), (1005, 7 + waited_ns)])
    monkeypatch.setattr(stock, "_scheduled_ns", lambda: next(times))
    assert Used().is_busy is busy


@pytest.mark.fits
def test_a_fit_has_an_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Used, "is_busy", False)
    run = fit(Measured, lambda: (loader(320), loader(64)), static=True)
    found = run.trainer.fit_summary
    assert found.lightning_s > 20 * found.lightning_batch_s > 0


@pytest.mark.fits
def test_stock_does_not_wait_for_what_the_sanity_check_builds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Used, "is_busy", False)
    make = build.make_program

    def slow(stage: str, *args: Any) -> Program:
        time.sleep(3.0 if stage == "validation" else 0.0)
        return make(stage, *args)

    monkeypatch.setattr(build, "make_program", slow)
    run = fit(Measured, lambda: (loader(320), loader(64)), static=True, num_sanity_val_steps=1)
    found = run.trainer.fit_summary
    assert found.lightning_s < 3.0 < found.total_s
