"""Tensors kept where no step leaves a value are told of before the program is compiled."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
from harness import fit, make_trainer
from misuses.program import Code, data, load, run
from models import Classifier, loader, mlp
from torch import Tensor

from fulgurite.backends.csx.capture import captured_step
from fulgurite.backends.csx.diagnostics.trace_errors import LeakedTensor

pytestmark = pytest.mark.fits

MADE = """
class Made:
    def __init__(self, x):
        self.x = x
"""
READ = {  # by the next step: where it is kept
    "the global KEPT of model.py": Code(
        top="KEPT = {}",
        step="""
        if "out" in KEPT:
            loss = loss + KEPT["out"].mean()  # <-
        KEPT["out"] = out.detach()
        """,
    ),
    "the global LAST of model.py": Code(
        top="LAST = None",
        step="""
        global LAST
        if LAST is not None:
            loss = loss + LAST  # <-
        LAST = loss.detach()
        """,
    ),
    "the variable seen of make.<locals>.keep()": Code(
        top="""
        def make():
            seen = []
            def keep(x):
                seen.append(x)
                return torch.stack(seen).mean()  # <-
            return keep
        keep = make()
        """,
        step="loss = loss + keep(loss.detach())",
    ),
    "the class Model": Code(
        step="""
        last = getattr(type(self), "last", None)
        if last is not None:
            loss = loss + last  # <-
        type(self).last = loss.detach()
        """,
    ),
    "the attribute x of a Made": Code(
        top=MADE,
        init="self.last = None",
        step="""
        if self.last is not None:
            loss = loss + self.last.x  # <-
        self.last = Made(loss.detach())
        """,
    ),
}
HELD = {  # and read by no step
    "the global KEPT of model.py": Code(top="KEPT = []", step="KEPT.append(loss * 1)  # <-"),
    "the variable last of make.<locals>.keep()": Code(
        top="""
        def make():
            last = None
            def keep(x):
                nonlocal last
                last = x * 1  # <-
            return keep
        keep = make()
        """,
        step="keep(loss)",
    ),
    "the attribute x of a Box": Code(
        top="class Box: pass\nbox = Box()", step="box.x = loss * 1  # <-"
    ),
    "the attribute x of a Made": Code(
        top=MADE, init="self.last = None", step="self.last = Made(loss * 1)  # <-"
    ),
    "the function keep": Code(
        top="def keep(x):\n    keep.last = x * 1  # <-", step="keep(loss.detach())"
    ),
}
NOBODYS = {
    "written before it is read": Code(
        top="LAST = None", step="global LAST\nLAST = loss.detach()\nloss = loss + LAST\nLAST = None"
    ),
    "a cycle": Code(step="class A: pass\na = A()\na.itself, a.x = a, loss * 1"),
    "an exception that was caught": Code(
        top="SEEN = []", step="try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    SEEN.append(e)"
    ),
    "an attribute": Code(step="self.last = out"),
}


@pytest.mark.parametrize("holder", READ)
def test_state_that_nobody_would_find_is_an_error_before_the_program_is_built(
    holder: str, tmp_path: Path
) -> None:
    outcome = run(READ[holder], tmp_path)
    error = outcome.error
    assert isinstance(error, LeakedTensor)
    assert f" is kept in {holder}, and the next step reads it" in error.what
    assert outcome.losses == []
    assert error.line is not None
    assert (error.line.file, error.line.line) == (str(outcome.file), outcome.marked)


@pytest.mark.parametrize("holder", HELD)
def test_a_tensor_that_no_step_reads_is_a_warning_with_its_holder(
    holder: str, tmp_path: Path
) -> None:
    module, file = load(HELD[holder], tmp_path)
    trainer = make_trainer(True, max_epochs=1)
    with pytest.warns(UserWarning, match="is kept in") as seen:
        trainer.fit(module.Model(), data(HELD[holder]))
    [warning] = [one for one in seen if "is kept in" in str(one.message)]
    assert f" is kept in {holder}, where no step leaves a value" in str(warning.message)
    assert warning.filename == str(file)
    assert "# <-" in file.read_text(encoding="utf-8").splitlines()[warning.lineno - 1]


@pytest.mark.parametrize("name", NOBODYS)
def test_what_nobody_keeps_is_no_alarm(name: str, tmp_path: Path) -> None:
    module, _ = load(NOBODYS[name], tmp_path)
    trainer = make_trainer(True, max_epochs=1)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="(?s).*is kept in")
        trainer.fit(module.Model(), data(NOBODYS[name]))


@pytest.mark.long
@pytest.mark.numbers
def test_looking_again_leaves_everything_as_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    kept: list[Tensor] = []

    class Counting(Classifier):
        def training_step(self, batch: object, batch_idx: int) -> Tensor:
            print("traced")
            loss = super().training_step(batch, batch_idx)  # type: ignore[arg-type]
            kept.append(loss * 1)
            return loss

    with pytest.warns(UserWarning, match="the variable kept of"):
        ours = fit(lambda: Counting(mlp(0.5)), lambda: (loader(),), static=True)
    stock = fit(lambda: Classifier(mlp(0.5)), lambda: (loader(),), static=False)
    assert ours.losses == pytest.approx(stock.losses, rel=1e-5)
    assert capsys.readouterr().out.count("traced") == 1
    assert len(kept) == 1


def test_gradients_of_a_window_are_no_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    leaked: list[object] = []
    monkeypatch.setattr(captured_step, "report_leaks", lambda found, trace: leaked.extend(found))
    window = {"accumulate_grad_batches": 2}
    fit(lambda: Classifier(mlp()), lambda: (loader(64),), static=True, **window)
    assert leaked == []
