"""The table at the end of a fit: what it did, and what that took."""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from harness import make_trainer
from models import GAN, Classifier, Measured, loader, mlp
from torch.utils.data import DataLoader, TensorDataset

from fulgurite.backends.csx.costs.stock import Stock
from fulgurite.backends.csx.program import announcements, fit_table
from fulgurite.backends.csx.program.description import Cost
from fulgurite.backends.csx.program.fit_table import FitSummary, summarize
from fulgurite.backends.csx.program.speed import Payback, Speed

HEAD = re.compile(r"CSX: ([\d,]+) batch(?:es)?( \([\d,]+ optimizer steps\))? in ([\d.]+) s")


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was said, in a process that has said nothing before."""
    said: list[str] = []
    monkeypatch.setattr(announcements, "rank_zero_info", said.append)
    return said


def summary_of(trainer: pl.Trainer) -> FitSummary:
    found: FitSummary | None = trainer.strategy.fit_summary  # type: ignore[attr-defined]
    assert found is not None
    return found


def parts_of(fit: FitSummary) -> list[float]:
    """The seconds that add up to the fit's."""
    built = fit.captured_s, fit.compiled_s, fit.loaded_s
    return [*built, fit.data_s, fit.stepped_s, fit.other_s]


def cost(**seconds: Any) -> Cost:
    names = "began", "captured_s", "capture_cpu_s", "compiled_s", "loaded_s", "waited_s"
    return Cost(**{**dict.fromkeys(names, 0.0), **seconds})


def payback(compiling_s: float, fixed: float = 0.0, pays: bool = False) -> Payback:
    made = Payback(None, 0.0, lambda: 0.0)
    made.compiling_s, made.fixed, made.pays = compiling_s, fixed, pays
    return made


def speed_of(before: tuple[int, float], after: tuple[int, float]) -> Speed:
    """Of steps before compiled code came, and with it: how many, and seconds for each."""
    speed = Speed()
    for _ in range(before[0]):
        speed.add(before[1])
    if before[0] and after[0]:
        speed.switch_to_compiled(lambda gain: None)
        speed.add(1.0, None, True)  # compares compiled code
    for _ in range(after[0]):
        speed.add(after[1], None, True)
    return speed


def made(speed: Speed, **given: Any) -> FitSummary:
    fields: dict[str, Any] = {"steps": 300, "total_s": 13.0, "data_s": 0.5, "batches": 300}
    return summarize(
        **{**fields, "costs": [], "training": [], "why_not": [], "speed": speed, **given}
    )


def test_what_was_compiled_before_the_first_step() -> None:
    first = cost(captured_s=1.0, compiled_s=9.75, waited_s=10.75)
    second = cost(captured_s=0.25, loaded_s=0.05, waited_s=0.3)
    speed = speed_of((0, 0.0), (299, 0.004))
    speed.in_steps_s += 10.75
    stock = Stock(total_s=26.1, batch_s=0.08)
    fit = made(speed, total_s=13.05, costs=[first, second], training=[first], stock=stock)
    assert sum(parts_of(fit)) == pytest.approx(13.05)
    assert str(fit) == (
        "CSX: 300 batches in 13.1 s\n"
        "  Lightning  about 26.1 s, 2.0 times as long (an estimate)\n"
        "  compiled   from the first batch on\n"
        "  building   1.25 s of tracing, 9.75 s of compiling: 85% of the fit\n"
        "  a batch    4.0 ms, Lightning about 80: 20.0 times as fast\n"
        "  pays       from 142 batches on"  # 10.75 s at 76 ms
    )


def test_a_fit_that_took_longer_says_how_many_times() -> None:
    speed = speed_of((0, 0.0), (299, 0.004))
    fit = made(speed, total_s=20.0, stock=Stock(total_s=0.5, batch_s=0.08))
    assert "  Lightning  about 0.50 s (an estimate): this took 40.0 times as long\n" in str(fit)


def test_what_was_compiled_meanwhile_is_in_no_sum() -> None:
    one = cost(captured_s=1.0, compiled_s=8.0, waited_s=1.0, first_compiled_step=101)
    speed = speed_of((100, 0.05), (199, 0.005))
    speed.in_steps_s += 1.0
    fit = made(speed, total_s=20.0, costs=[one], training=[one])
    assert fit.compiled_s == 0
    assert fit.background_s == 8.0
    assert sum(parts_of(fit)) == pytest.approx(20.0)
    assert fit.by_operations_s == pytest.approx(0.05)
    assert fit.batch_s == pytest.approx(0.005)
    assert "compiled   from batch 101 on\n  a batch    5.0 ms" in str(fit)


def test_other_programs_that_are_not_compiled_are_told_of_with_their_pace() -> None:
    one, other = cost(loaded_s=0.1, waited_s=0.5), cost(captured_s=1.0, waited_s=1.0)
    speed = speed_of((0, 0.0), (100, 0.005))
    for _ in range(199):
        speed.add(0.02)
    speed.in_steps_s += 1.5
    given: dict[str, Any] = {"costs": [one, other], "training": [one, other], "why_not": [""]}
    fit = made(speed, total_s=8.0, stock=Stock(total_s=9.0, batch_s=0.03), **given)
    assert fit.compiled_batches == 100
    assert fit.is_mixed
    assert str(fit) == (
        "CSX: 300 batches in 8.00 s\n"
        "  Lightning  about 9.00 s, 1.1 times as long (an estimate)\n"
        "  compiled   from the first batch on, 100 of 300 batches; some of its programs\n"
        "             not: compiling takes longer than they did\n"
        "  a batch    5.0 ms compiled, 20 others, Lightning about 30: 6.0 and 1.5 times\n"
        "             as fast\n"
        "  pays       from 100 batches on"  # 1.5 s at 30 - 15 ms
    )
    assert "as long as this (an estimate)" in str(replace(fit, lightning_s=8.1))


@pytest.mark.parametrize(
    ("batch_s", "total_s", "pays_after"),
    [
        (0.10, 40.0, 40),  # 2 s of building, of comparing, at 50 ms a batch before it is compiled
        (0.06, 25.0, 100 + 19),  # 1 s of 2 by then, and the rest at 55 ms
        (0.06, 15.0, 301),  # a checkpoint, say, took more than in stock Lightning
        (0.05, 25.0, 100 + 45),  # it gains nothing before
        (0.004, 9.0, None),
    ],
)
def test_from_how_many_batches_on_it_pays(
    batch_s: float, total_s: float, pays_after: int | None
) -> None:
    one = cost(captured_s=1.0, compiled_s=8.0, waited_s=1.0, first_compiled_step=101)
    speed = speed_of((100, 0.05), (199, 0.005))
    speed.in_steps_s += 1.0
    stock = Stock(total_s=total_s, batch_s=batch_s)
    fit = made(speed, total_s=20.0, costs=[one], training=[one], stock=stock)
    assert fit.pays_after == (pays_after and pytest.approx(pays_after, abs=1))
    told = f"from {fit.pays_after} batches on" if pays_after else "never, as it is"
    assert f"  pays       {told}" in str(fit)


@pytest.mark.parametrize(
    ("asked", "told", "compiles_from"),
    [
        (
            payback(6.0),
            "too short; from about 600 batches on it is; `fulgurite compile`",
            600,
        ),
        (payback(3.0, fixed=0.5), "too short; from about 600 batches on it is", 600),
        (payback(3.0, pays=True), "over before it was done; `fulgurite compile` does it", None),
        (payback(3.0, fixed=0.97), "97% of a step is in products of matrices", None),
    ],
)
def test_what_is_not_compiled_says_why(
    asked: Payback, told: str, compiles_from: int | None
) -> None:
    one = cost(captured_s=0.25, waited_s=0.25, payback=asked)
    fit = made(speed_of((300, 0.01), (0, 0.0)), costs=[one], training=[one], why_not=[""])
    text = " ".join(str(fit).split())
    assert "compiled no: " in text
    assert told in text
    assert fit.compiles_from == compiles_from
    few = made(speed_of((9, 0.01), (0, 0.0)), batches=19, training=[one], why_not=[""])
    assert few.compiles_from is None
    assert "about" not in str(few)
    refused = made(speed_of((300, 0.01), (0, 0.0)), training=[one], why_not=["", "no g++"])
    assert refused.not_compiled == "no g++"
    assert refused.compiles_from is None


def test_beside_other_processes_there_is_no_estimate() -> None:
    fit = made(speed_of((300, 0.01), (0, 0.0)), why_not=["no g++"], was_busy=True)
    assert "Lightning  no estimate: other processes had the cores" in str(fit)
    assert "pays" not in str(fit)


def test_other_shapes_and_other_processes_have_their_words() -> None:
    fit = made(speed_of((0, 0.0), (300, 0.01)), training=[cost(loaded_s=0.1)], shapes=(7, 90))
    assert "7 more than are compiled: 90 batches ran without a program" in str(fit)
    assert "other processes" not in str(fit)
    assert "0.75 s of the steps, 25%, for other processes" in str(replace(fit, waits_s=0.75))


@pytest.mark.fits
def test_entry_points_that_are_not_compiled_say_why() -> None:
    trainer = make_trainer(True, max_epochs=1, accumulate_grad_batches=2)
    trainer.fit(Classifier(mlp()), loader(64))
    step: Any = trainer.strategy.training  # type: ignore[attr-defined]
    assert step.why_not_compiled() == ["autogen_policy='disabled'"] * 2
    for one in step.executables():
        one.loaded.compiling = True
    assert step.why_not_compiled() == ["", ""]
    for one in step.executables():
        one.loaded.compiled = True
    assert step.why_not_compiled() == []


def test_peak_memory_is_the_process_s_own() -> None:
    assert 50 << 20 < fit_table.peak_memory_bytes() < 1 << 40


class Raises(pl.Callback):
    """Raises an exception after the third step."""

    def __init__(self, exception: BaseException) -> None:
        self.exception = exception

    def on_train_batch_end(self, *args: Any) -> None:
        if args[-1] == 2:
            raise self.exception


@pytest.mark.fits
def test_seconds_are_those_of_each_kind() -> None:
    class Slow(TensorDataset):
        def __getitem__(self, index: Any) -> Any:
            time.sleep(0.004)
            return super().__getitem__(index)

    class Waits(pl.Callback):
        def on_train_epoch_end(self, *args: Any) -> None:
            time.sleep(0.3)

    data = Slow(torch.randn(64, 8), torch.arange(64) % 3)
    for profiler in (None, "simple"):  # Lightning's own loop around the step too
        trainer = make_trainer(True, max_epochs=1, callbacks=[Waits()], profiler=profiler)
        trainer.fit(Classifier(mlp()), DataLoader(data, batch_size=16))
        fit = summary_of(trainer)
        assert fit.data_s >= 0.25
        assert fit.other_s >= 0.3
        assert sum(parts_of(fit)) == pytest.approx(fit.total_s, abs=0.2)


@pytest.mark.fits
@pytest.mark.parametrize("options", [{"max_epochs": 2}, {"max_steps": 8, "max_epochs": -1}])
def test_a_fit_ends_with_the_table(lines: list[str], options: dict[str, Any]) -> None:
    trainer = make_trainer(True, **options)
    assert trainer.fit_summary is None
    trainer.fit(Measured(), loader(64), loader(32))
    assert sum(bool(HEAD.match(line)) for line in lines) == 1
    fit = trainer.fit_summary
    assert lines[-1] == str(fit)
    assert fit.batches == fit.steps == 8
    assert 0 < fit.captured_s <= fit.total_s
    assert fit.programs == 2
    assert fit.as_dict()["other_s"] == fit.other_s


@pytest.mark.fits
@pytest.mark.parametrize(
    ("options", "head"),
    [
        ({"accumulate_grad_batches": 2}, "CSX: 4 batches (2 optimizer steps) in "),
        ({}, "CSX: 4 batches in "),
    ],
)
def test_batches_and_optimizer_steps(lines: list[str], options: dict[str, Any], head: str) -> None:
    make_trainer(True, max_epochs=1, **options).fit(Classifier(mlp()), loader(64))
    assert lines[-1].startswith(head)


@pytest.mark.fits
def test_steps_of_several_optimizers(lines: list[str]) -> None:
    make_trainer(True, max_epochs=1).fit(GAN(), loader(64))
    assert lines[-1].startswith("CSX: 4 batches (8 optimizer steps) in ")


@pytest.mark.fits
@pytest.mark.long
def test_a_second_fit_counts_its_own_steps_and_programs(lines: list[str]) -> None:
    trainer, module = make_trainer(True, max_epochs=1), Measured()
    trainer.fit(module, loader(64), loader(32))
    first, began = summary_of(trainer), trainer.strategy.audit_budget.began  # type: ignore[attr-defined]
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, loader(64), loader(32))
    second = summary_of(trainer)
    assert (first.steps, second.steps) == (4, 8)
    assert trainer.strategy.audit_budget.began > began  # type: ignore[attr-defined]
    [new] = [one for one in trainer.strategy.programs if one.stage == "training"]  # type: ignore[attr-defined]
    assert second.captured_s == pytest.approx(new.cost.captured_s, abs=0.06)
    # the first table of a process has all of it, others are short
    assert lines[-1] == second.brief()
    assert "a batch" not in lines[-1]


@pytest.mark.fits
def test_the_report_has_it_too(tmp_path: Path) -> None:
    trainer = make_trainer(True, max_epochs=1, backend={"artifact_dir": str(tmp_path)})
    trainer.fit(Classifier(mlp()), loader(64))
    [program] = json.loads((tmp_path / "report.json").read_text())["programs"]
    assert program["fit"] == summary_of(trainer).as_dict()


@pytest.mark.fits
def test_a_ctrl_c_ends_with_the_table(lines: list[str]) -> None:
    trainer = make_trainer(True, max_epochs=1, callbacks=[Raises(KeyboardInterrupt())])
    with pytest.raises(SystemExit):
        trainer.fit(Classifier(mlp()), loader(64))
    assert summary_of(trainer).steps == 3
    assert lines[-1] == str(summary_of(trainer))


@pytest.mark.fits
def test_an_error_is_the_last_that_is_said(lines: list[str]) -> None:
    trainer = make_trainer(True, max_epochs=1, callbacks=[Raises(ValueError("mine"))])
    with pytest.raises(ValueError, match="mine"):
        trainer.fit(Classifier(mlp()), loader(64))
    assert not any(HEAD.match(line) for line in lines)


@pytest.mark.fits
def test_where_nothing_was_trained_nothing_is_said(lines: list[str]) -> None:
    trainer, module = make_trainer(True, max_epochs=0), Measured()
    trainer.fit(module, loader(64))
    trainer.validate(module, loader(32), verbose=False)
    assert not any(HEAD.match(line) for line in lines)


@pytest.mark.fits
@pytest.mark.parametrize("bar", [pl.callbacks.TQDMProgressBar, pl.callbacks.RichProgressBar])
def test_the_table_comes_with_every_progress_bar(
    bar: type[pl.Callback], capsys: pytest.CaptureFixture[str]
) -> None:
    """A bar of tqdm's is closed by then, and would print nothing."""
    torch.manual_seed(0)
    make_trainer(True, max_epochs=1, callbacks=[bar()], enable_progress_bar=True).fit(
        Classifier(mlp()), loader(64)
    )
    printed = capsys.readouterr().out
    assert len(HEAD.findall(printed)) == 1
