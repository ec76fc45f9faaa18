"""The last line of a fit: what it did, and how long it waited for programs."""

from __future__ import annotations

import re
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from harness import make_trainer
from models import Classifier, Measured, loader, mlp

from fulgurite.backends.csx.program import report
from fulgurite.backends.csx.program.summary import Cost

LINE = re.compile(
    r"CSX: ([\d,]+) steps? in ([\d.]+) s; waited ([\d.]+) s for programs"
    r" \(captured in ([\d.]+) s\), ([\d,.e+]+) steps/s without that"
)


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was said."""
    said: list[str] = []
    monkeypatch.setattr(report, "rank_zero_info", said.append)
    return said


def told(line: str) -> list[float]:
    """Steps, seconds, seconds waited and captured, and steps/s of a line."""
    found = LINE.fullmatch(line)
    assert found, line
    return [float(part.replace(",", "")) for part in found.groups()]


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


def test_the_line_adds_up_what_all_programs_took() -> None:
    first = cost(captured_s=1.0, compiled_s=9.75, waited_s=10.75)
    second = cost(captured_s=0.25, loaded_s=0.05, waited_s=0.3)
    assert report.pace(3000, 12.25, [first, second]) == (
        "CSX: 3,000 steps in 12.2 s; waited 11.1 s for programs (captured in 1.2 s, compiled in"
        " 9.8 s, loaded from the cache in 0.05 s), 2,500 steps/s without that"
    )
    assert report.pace(1, 1.0, [cost(captured_s=0.5, waited_s=0.5)]) == (
        "CSX: 1 step in 1.0 s; waited 0.5 s for programs (captured in 0.5 s), 2 steps/s without"
        " that"
    )


def test_what_was_compiled_meanwhile_is_not_waited_for() -> None:
    one = cost(began=10.0, captured_s=1.0, compiled_s=8.0, waited_s=1.0)
    one.taken_over, one.taken_over_at = 101, 21.0
    assert report.pace(300, 13.0, [one]) == (
        "CSX: 300 steps in 13.0 s; waited 1.0 s for programs (captured in 1.0 s), 25 steps/s"
        " without that"
    )
    assert report.gain(one, 300, ended=23.0) == (
        "; compiled meanwhile in 8.0 s, from batch 101 on 10.0 times as fast"
    )
    assert report.gain(one, 102, ended=21.1) == "; compiled meanwhile in 8.0 s, from batch 101 on"


@pytest.mark.parametrize("options", [{"max_epochs": 2}, {"max_steps": 8, "max_epochs": -1}])
def test_a_fit_ends_with_the_line(lines: list[str], options: dict[str, Any]) -> None:
    make_trainer(True, **options).fit(Measured(), loader(64), loader(32))
    assert sum(bool(LINE.match(line)) for line in lines) == 1
    steps, seconds, waited_s, captured_s, per_s = told(lines[-1])
    assert steps == 8
    assert 0 < captured_s <= waited_s <= seconds
    assert per_s > 0


def test_steps_are_the_optimizers(lines: list[str]) -> None:
    make_trainer(True, max_epochs=1, accumulate_grad_batches=2).fit(Classifier(mlp()), loader(64))
    assert told(lines[-1])[0] == 2


def test_a_second_fit_counts_its_own_steps_and_programs(lines: list[str]) -> None:
    trainer, module = make_trainer(True, max_epochs=1), Measured()
    trainer.fit(module, loader(64), loader(32))
    began = trainer.strategy.audit_budget.began  # type: ignore[attr-defined]
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, loader(64), loader(32))
    assert [told(line)[0] for line in lines if LINE.match(line)] == [4, 8]
    assert trainer.strategy.audit_budget.began > began  # type: ignore[attr-defined]
    [new] = [one for one in trainer.strategy.programs if one.stage == "training"]  # type: ignore[attr-defined]
    assert told(lines[-1])[3] == pytest.approx(new.cost.captured_s, abs=0.06)


def test_a_ctrl_c_ends_with_the_line(lines: list[str]) -> None:
    trainer = make_trainer(True, max_epochs=1, callbacks=[Raises(KeyboardInterrupt())])
    with pytest.raises(SystemExit):
        trainer.fit(Classifier(mlp()), loader(64))
    assert told(lines[-1])[0] == 3


def test_an_error_is_the_last_that_is_said(lines: list[str]) -> None:
    trainer = make_trainer(True, max_epochs=1, callbacks=[Raises(ValueError("mine"))])
    with pytest.raises(ValueError, match="mine"):
        trainer.fit(Classifier(mlp()), loader(64))
    assert not any(LINE.match(line) for line in lines)


def test_where_nothing_was_trained_nothing_is_said(lines: list[str]) -> None:
    trainer, module = make_trainer(True, max_epochs=0), Measured()
    trainer.fit(module, loader(64))
    trainer.validate(module, loader(32), verbose=False)
    assert not any(LINE.match(line) for line in lines)


@pytest.mark.parametrize("bar", [pl.callbacks.TQDMProgressBar, pl.callbacks.RichProgressBar])
def test_the_line_comes_with_every_progress_bar(
    bar: type[pl.Callback], capsys: pytest.CaptureFixture[str]
) -> None:
    """A bar of tqdm's is closed by then, and would print nothing."""
    torch.manual_seed(0)
    make_trainer(True, max_epochs=1, callbacks=[bar()], enable_progress_bar=True).fit(
        Classifier(mlp()), loader(64)
    )
    printed = " ".join(capsys.readouterr().out.split())
    assert len(LINE.findall(printed)) == 1
