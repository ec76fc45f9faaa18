"""README.md and the pages of docs/ run as pasted; what people look for gives stock's results."""

from __future__ import annotations

import itertools
import json
import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from draw_speed import FIGURES, with_parts
from harness import QUIET, Recorder, assert_close, csx
from lightning.pytorch.callbacks import Checkpoint
from pasted import OPERATIONS, ROOT, changes, paste, program, quoted, save, screen, source
from pasted import run as run_python

import fulgurite
from fulgurite.backends import reset_backend

TRAINER = fulgurite.Trainer
DOCS = ROOT / "docs"
PAGES = (
    *(
        "finetuning",
        "gans",
        "generative_models",
        "reinforcement_learning",
        "variable_lengths",
        "ctc",
    ),
)


TEN_MINUTES = "first_ten_minutes"
MORE_IS_ASKED = {"README", "report", TEN_MINUTES}  # the last of which is wrong on purpose
WITH_A_PROGRAM = sorted({p.stem for p in DOCS.glob("*.md") if program(p.stem)} - MORE_IS_ASKED)


@pytest.mark.long
@pytest.mark.process
@pytest.mark.parametrize("page", WITH_A_PROGRAM)
def test_what_a_page_shows_runs_as_pasted(page: str, tmp_path: Path) -> None:
    """Programs whose operations the page counts on a screen are those that it prints."""
    said = paste(page, tmp_path)
    assert quoted(page) <= set(OPERATIONS.findall(said))


@pytest.mark.long
@pytest.mark.process
def test_the_readme_shows_what_its_script_prints(tmp_path: Path) -> None:
    said, shown = paste("README", tmp_path), "\n".join(screen("README"))
    assert quoted("README") <= set(OPERATIONS.findall(said))
    for form in (r"^CSX: [\d,]+ batches in ", r"^  compiled   "):
        [line] = re.findall(form, shown, re.M)
        assert re.findall(form, said, re.M) == [line]


@pytest.mark.process
def test_the_readmes_mistake_ends_as_it_says(tmp_path: Path) -> None:
    save("README", tmp_path)
    module = tmp_path / "net.py"
    [[(old, new)]] = changes("README")
    assert module.read_text().count(old) == 1
    module.write_text(module.read_text().replace(old, new))
    status, said = run_python(tmp_path, "page.py")
    lines = screen("README")
    first = next(i for i, line in enumerate(lines) if line.startswith("fulgurite.errors."))
    assert status == 1
    assert "\n".join(lines[first : first + 3]) in said


def test_the_readme_says_what_was_measured_and_shows_what_was_printed() -> None:
    readme = source("README").read_text(encoding="utf-8")
    assert with_parts(readme, json.loads(FIGURES.read_text())) == readme


OF_A_STEP = re.compile(r"^ +(\d+ operations), \d+ kernel calls, (.* a step), (.* written),", re.M)
OF_A_MODULE = re.compile(r"^ +(\w\S*(?: \(\w+\))?) +(\d+) +(0|[\d.]+ .FLOP) +([\d.]+ .iB) ", re.M)


@pytest.mark.long
@pytest.mark.compiler
def test_the_page_about_reports_shows_what_the_command_says(tmp_path: Path) -> None:
    assert quoted("report") <= set(OPERATIONS.findall(paste("report", tmp_path)))
    status, said = run_python(tmp_path, "-m", "fulgurite", "report", "built")
    assert status == 0
    shown = "\n".join(screen("report"))
    assert OF_A_STEP.findall(shown) == OF_A_STEP.findall(said)
    assert len(OF_A_MODULE.findall(shown)) == 5
    assert set(OF_A_MODULE.findall(shown)) == set(OF_A_MODULE.findall(said))


def test_each_page_begins_with_a_program_and_is_short() -> None:
    for page in (*PAGES, "checkpoints"):
        text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
        assert text.splitlines()[4] == "```python", page
        assert len(text.splitlines()) <= 120, page


def trainers(static: bool, recorders: list[Recorder]) -> Callable[..., pl.Trainer]:
    """What stands for Trainer in a page: on CSX if ``static``, else stock Lightning's."""

    def make(device: str = "CSX", backend: Any = None, **options: Any) -> pl.Trainer:
        recorders.append(Recorder())
        callbacks = options.pop("callbacks", [])
        saves = any(isinstance(callback, Checkpoint) for callback in callbacks)
        options = {**QUIET, "enable_checkpointing": saves, **options}
        options["callbacks"] = [recorders[-1], *callbacks]
        if not static:
            return pl.Trainer(accelerator="cpu", **options)
        reset_backend()
        given = {key: value for key, value in (backend or {}).items() if key != "backend_type"}
        return TRAINER(backend=csx(**given), **options)

    return make


def run(
    code: str, folder: Path, monkeypatch: pytest.MonkeyPatch, static: bool
) -> tuple[list[dict[str, list[float]]], dict[str, Any]]:
    """Losses and metrics of each fit of a program; the modules and tensors that it ends with."""
    recorders: list[Recorder] = []
    folder = folder / ("csx" if static else "stock")
    folder.mkdir()
    script = folder / "page.py"
    script.write_text(code, encoding="utf-8")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(fulgurite, "Trainer", trainers(static, recorders))
    left = runpy.run_path(str(script), run_name="__main__")
    modules = {k: v.state_dict() for k, v in left.items() if isinstance(v, torch.nn.Module)}
    tensors = {k: v for k, v in left.items() if isinstance(v, torch.Tensor)}
    return [columns(one) for one in recorders], {**modules, **tensors}


def columns(recorder: Recorder) -> dict[str, list[float]]:
    """A fit's losses, and each of its metrics, after every step."""
    names = sorted({name for metrics in recorder.metrics for name in metrics})
    steps = {name: [row[name] for row in recorder.metrics if name in row] for name in names}
    return {"losses": recorder.losses, **steps}


def assert_same_fits(fits: list[Any], wanted: list[Any], tolerance: float = 1e-5) -> None:
    """Each number is apart by at most ``tolerance`` of the largest of its column.

    A loss that crosses zero is a difference of larger numbers, and rounds as they do.
    """
    assert [list(fit) for fit in fits] == [list(fit) for fit in wanted]
    for i, fit in enumerate(wanted):
        assert len(fit) > 1, "a page's step logs something"
        for name, column in fit.items():
            right = torch.tensor(column, dtype=torch.float64)
            apart = tolerance * float(right.abs().max()) if column else 0.0
            got = torch.tensor(fits[i][name], dtype=torch.float64)
            torch.testing.assert_close(got, right, rtol=0, atol=apart, msg=f"fit {i}: {name}")


@pytest.mark.long
@pytest.mark.numbers
@pytest.mark.parametrize("page", PAGES)
def test_the_programs_of_a_page_give_the_results_of_stock(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fits, left = run(program(page), tmp_path, monkeypatch, static=True)
    stock_fits, stock_left = run(program(page), tmp_path, monkeypatch, static=False)
    assert_same_fits(fits, stock_fits)
    assert_close(left, stock_left, 2e-5, "left")


@pytest.mark.numbers
def test_a_run_resumed_as_the_page_says_ends_as_the_whole_run_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [whole, resumed], left = run(program("checkpoints"), tmp_path, monkeypatch, static=True)
    [stock], stock_left = run(program("checkpoints", 1), tmp_path, monkeypatch, static=False)
    assert_same_fits([whole], [stock])
    assert_close(left["model"], stock_left["model"], 2e-5, "model")
    assert resumed["losses"] == whole["losses"][20:]
    assert_close(left["resumed"], left["model"], 0.0, "resumed")


RESUMED = """
from lightning.pytorch.callbacks import ModelCheckpoint

def fitted(**options):
    seed_everything(2)
    net, saves = Classifier(), ModelCheckpoint("kept", save_top_k=-1, filename="{epoch}")
    ordered = DataLoader(loader.dataset, batch_size=32)
    trainer = Trainer(device="CSX", max_epochs=3, callbacks=[FromTheTop(), saves])
    trainer.fit(net, ordered, **options)
    return net

whole, again = fitted(), fitted(ckpt_path="kept/epoch=1.ckpt")
"""


@pytest.mark.fits
@pytest.mark.parametrize("static", [True, False], ids=["CSX", "stock"])
def test_a_run_that_goes_on_after_an_unfreezing_trains_what_was_trained(
    static: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = program("finetuning") + RESUMED
    fits, left = run(code, tmp_path, monkeypatch, static=static)
    assert fits[-1]["losses"] == fits[-2]["losses"][20:]
    assert_close(left["again"], left["whole"], 0.0, "again")


def changed(steps: int) -> str:
    """The program of the newcomer's page after its first steps."""
    text = program(TEN_MINUTES)
    for old, new in itertools.chain(*changes(TEN_MINUTES)[:steps]):
        assert text.count(old) == 1
        text = text.replace(old, new)
    return text.lstrip("\n")


@pytest.mark.process
@pytest.mark.parametrize("steps", range(4))
def test_the_newcomers_page_says_what_the_screen_shows(steps: int, tmp_path: Path) -> None:
    """Each step of it is typed, and run in a process of its own."""
    text = changed(steps).replace("max_epochs=60", "max_epochs=2")
    (tmp_path / "digits.py").write_text(text)
    status, said = run_python(tmp_path, "digits.py")
    assert ("ConditionalOnTensor" in said) is (steps == 0)
    assert ("DynamicShape" in said) is (steps == 1)
    assert ("FrozenValueWarning" in said) is (steps < 3)
    assert (status == 0) is (steps >= 2)
    shown = [one for one in screen(TEN_MINUTES) if re.match("fulgurite.errors|FrozenValue", one)]
    assert steps == 3 or shown[steps] in said
    assert (quoted(TEN_MINUTES) <= set(OPERATIONS.findall(said))) is (steps == 3)
