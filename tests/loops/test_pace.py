"""The table at the end of a fit: what it did, and what that took."""

from __future__ import annotations

import re
import time
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from harness import make_trainer
from models import Classifier, Measured, loader, mlp
from torch.utils.data import DataLoader, TensorDataset

from fulgurite.backends.csx.program import announcements, fit_table
from fulgurite.backends.csx.program.description import Cost
from fulgurite.backends.csx.program.fit_table import Fit
from fulgurite.backends.csx.program.speed import Gain

HEAD = re.compile(r"CSX: ([\d,]+) steps? in ([\d.]+) s$", re.MULTILINE)
ROW = re.compile(r"^  (\S+(?: \S+)*)  +([\d,.e+]+) ?(.*)$")
KINDS = ("captured", "compiled", "loaded", "waited for data", "stepped", "other")


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was said."""
    said: list[str] = []
    monkeypatch.setattr(announcements, "rank_zero_info", said.append)
    return said


def told(text: str) -> dict[str, float]:
    """The numbers of a table, and its "steps" and "seconds"."""
    head, *rows = text.split("\n")
    found = HEAD.fullmatch(head)
    assert found, text
    numbers = {"steps": found[1], "seconds": found[2]}
    for row in rows:
        match = ROW.fullmatch(row)
        assert match, row
        assert len(row) <= 80
        numbers[match[1]] = match[2]
    return {what: float(number.replace(",", "")) for what, number in numbers.items()}


def cost(**seconds: float) -> Cost:
    parts = dict.fromkeys(("began", "captured_s", "compiled_s", "loaded_s", "waited_s"), 0.0)
    return Cost(**{**parts, **seconds})


class Raises(pl.Callback):
    """Raises an exception after the third step."""

    def __init__(self, exception: BaseException) -> None:
        self.exception = exception

    def on_train_batch_end(self, *args: Any) -> None:
        if args[-1] == 2:
            raise self.exception


def made(**given: Any) -> Fit:
    fields: dict[str, Any] = {"steps": 300, "total_s": 13.0, "data_s": 0.5, "in_steps_s": 11.0}
    return Fit(**{**fields, "costs": [], "training": [], "batches": 300, **given})


def test_the_table_adds_up_what_all_programs_took(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit_table, "peak_memory_bytes", lambda: 612 << 20)
    first = cost(captured_s=1.0, compiled_s=9.75, waited_s=10.75)
    second = cost(captured_s=0.25, loaded_s=0.05, waited_s=0.3)
    fit = made(steps=3000, total_s=13.05, in_steps_s=12.0, costs=[first, second], training=[first])
    assert fit_table.table(fit) == (
        "CSX: 3,000 steps in 13.1 s\n"
        "  steps/s          1,500 without the seconds that building programs took\n"
        "  captured           1.2 s\n"
        "  compiled           9.8 s\n"
        "  loaded             0.1 s\n"
        "  waited for data    0.5 s\n"
        "  stepped            1.2 s\n"
        "  other              0.2 s: validation, hooks, logging, checkpoints\n"
        "  programs             2 (1 compiled, 1 from the cache)\n"
        "  peak memory        612 MiB: of the process since it began, resident"
    )


def test_what_was_compiled_meanwhile_is_in_no_sum_and_paid_after_some_steps() -> None:
    one = cost(began=10.0, captured_s=1.0, compiled_s=8.0, waited_s=1.0)
    one.first_compiled_step, one.gain = 101, Gain(0.05, 0.005)
    fit = made(in_steps_s=7.0, costs=[one], training=[one])
    numbers = told(fit_table.table(fit))
    assert "compiled" not in numbers
    assert sum(numbers.get(kind, 0) for kind in KINDS) == pytest.approx(13.0, abs=0.3)
    text = fit_table.table(fit)
    assert "8.0 s of compiling; from batch 101 on 10.0 times as fast" in text
    assert "200 compiled steps; this fit ran 200" in text  # 9 s at 0.045 s a step


@pytest.mark.parametrize("why", ["unknown", "no gain", "two programs"])
def test_where_it_cannot_be_said_when_compiling_paid_nothing_is(why: str) -> None:
    one = cost(captured_s=1.0, compiled_s=8.0, waited_s=1.0)
    one.first_compiled_step, one.gain = 101, Gain(0.05, 0.06 if why == "no gain" else 0.005)
    if why == "unknown":
        one.gain = None
    fit = made(costs=[one], training=[one, one] if why == "two programs" else [one])
    text = fit_table.table(fit)
    assert "in background" in text
    assert "paid" not in text


def test_waiting_for_other_processes_is_a_part_of_the_steps() -> None:
    training = cost(waited_s=3.0)
    text = fit_table.table(made(in_steps_s=11.0, training=[training], waits_s=2.0))
    assert (told(text)["stepped"], told(text)["waiting"]) == (8.0, 2.0)
    assert "s of these, for other processes: 25%\n" in text
    assert "waiting" not in fit_table.table(made())


@pytest.mark.fits
def test_what_is_not_compiled_is_counted_in_programs(lines: list[str]) -> None:
    """Not in entry points, of which a program has two where gradients accumulate."""
    trainer = make_trainer(True, max_epochs=1, accumulate_grad_batches=2)
    trainer.fit(Classifier(mlp()), loader(64))
    step: Any = trainer.strategy.training  # type: ignore[attr-defined]
    entries = list(step.executables())
    assert len(entries) == 2
    for one in entries:
        one.loaded.compiling = True
    assert step.compiling() == 1


def test_peak_memory_is_the_process_s_own() -> None:
    assert 50 << 20 < fit_table.peak_memory_bytes() < 1 << 40


@pytest.mark.fits
def test_seconds_are_those_of_each_kind(lines: list[str]) -> None:
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
    tables = [told(line) for line in lines if HEAD.match(line)]
    assert len(tables) == 2
    for numbers in tables:
        assert numbers["waited for data"] >= 0.25
        assert numbers["other"] >= 0.3
        assert sum(numbers.get(kind, 0) for kind in KINDS) == pytest.approx(
            numbers["seconds"], abs=0.2
        )


@pytest.mark.fits
@pytest.mark.parametrize("options", [{"max_epochs": 2}, {"max_steps": 8, "max_epochs": -1}])
def test_a_fit_ends_with_the_table(lines: list[str], options: dict[str, Any]) -> None:
    make_trainer(True, **options).fit(Measured(), loader(64), loader(32))
    assert sum(bool(HEAD.match(line)) for line in lines) == 1
    numbers = told(lines[-1])
    assert numbers["steps"] == 8
    assert 0 < numbers["captured"] <= numbers["seconds"]
    assert numbers["steps/s"] > 0
    assert numbers["programs"] == 2


@pytest.mark.fits
def test_steps_are_the_optimizers(lines: list[str]) -> None:
    make_trainer(True, max_epochs=1, accumulate_grad_batches=2).fit(Classifier(mlp()), loader(64))
    assert told(lines[-1])["steps"] == 2


@pytest.mark.fits
@pytest.mark.long
def test_a_second_fit_counts_its_own_steps_and_programs(lines: list[str]) -> None:
    trainer, module = make_trainer(True, max_epochs=1), Measured()
    trainer.fit(module, loader(64), loader(32))
    began = trainer.strategy.audit_budget.began  # type: ignore[attr-defined]
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, loader(64), loader(32))
    assert [told(line)["steps"] for line in lines if HEAD.match(line)] == [4, 8]
    assert trainer.strategy.audit_budget.began > began  # type: ignore[attr-defined]
    [new] = [one for one in trainer.strategy.programs if one.stage == "training"]  # type: ignore[attr-defined]
    assert told(lines[-1])["captured"] == pytest.approx(new.cost.captured_s, abs=0.06)


@pytest.mark.fits
def test_a_ctrl_c_ends_with_the_table(lines: list[str]) -> None:
    trainer = make_trainer(True, max_epochs=1, callbacks=[Raises(KeyboardInterrupt())])
    with pytest.raises(SystemExit):
        trainer.fit(Classifier(mlp()), loader(64))
    assert told(lines[-1])["steps"] == 3


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
