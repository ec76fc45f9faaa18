"""The models of ``examples/zoo``: other people's, and they train as in stock Lightning.

python tests/tools/compiled.py -k zoo    the same, compiled
"""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
import warnings
from pathlib import Path
from types import ModuleType

import pytest
from harness import assert_close, both

from fulgurite import FrozenValueWarning
from fulgurite.errors import MiscompiledWarning

ZOO = Path(__file__).parents[1] / "examples/zoo"
TRANSFORMERS = ("gpt2", "llama", "bert", "t5", "patchtst", "vit", "swin", "convnext")
NEEDS = {
    **dict.fromkeys(TRANSFORMERS, "transformers"),
    **dict.fromkeys(("graph", "gat"), "torch_geometric"),
    "resnet18": "timm",
}
STEPS = 6


def loaded(name: str) -> ModuleType:
    """A file of the zoo."""
    spec = importlib.util.spec_from_file_location(f"zoo_{name}", ZOO / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


compare = loaded("compare")


def test_the_command_knows_every_file() -> None:
    assert {*compare.ZOO, "compare"} == {path.stem for path in ZOO.glob("*.py")}


@pytest.mark.numbers
@pytest.mark.parametrize("name", compare.ZOO)
def test_a_model_trains_as_in_stock_lightning(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of packages, which a user would see too
        if name in NEEDS:
            try:
                importlib.import_module(NEEDS[name])
            except (ImportError, RuntimeError) as error:  # the second: another torch's operators
                pytest.skip(f"{NEEDS[name]}, of the extra zoo, cannot be imported: {error}")
        for wrong in (FrozenValueWarning, MiscompiledWarning):
            warnings.simplefilter("error", wrong)
        file = loaded(name)
        loaders = [file.loader] if hasattr(file, "loader") else []
        ours, stock = both(
            getattr(file, compare.ZOO[name]),
            lambda: tuple(make() for make in loaders),
            max_steps=STEPS,
            max_epochs=-1,
        )
    assert len(set(stock.losses)) == STEPS
    assert_close(ours.losses, stock.losses, 1e-5, "losses")
    assert_close(ours.metrics, stock.metrics, 1e-5, "metrics")


@pytest.mark.parametrize(
    ("behind_s", "ours_ms", "steps"),
    [(10.0, 1.0, "10,001"), (0.1, 1.9, "1,001"), (10.0, 3.0, "never"), (-1.0, 1.0, "1")],
)
def test_it_pays_from_the_step_on_that_is_done_sooner(
    behind_s: float, ours_ms: float, steps: str
) -> None:
    assert compare.pays_after(behind_s, stock_ms=2.0, ours_ms=ours_ms) == steps


def test_a_loss_that_is_no_number_is_not_equal() -> None:
    assert compare.apart([1.0, 2.2], [1.0, 2.0]) == pytest.approx(0.1)
    assert compare.apart([1.0, float("nan"), 3.0], [1.0, 2.0, 3.0]) != pytest.approx(0.0)


@pytest.mark.long
@pytest.mark.compiler
def test_the_command_prints_a_table() -> None:
    done = subprocess.run(
        [sys.executable, str(ZOO / "compare.py"), "vae", "--steps=3", "--seconds=0.1"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    heads, line, row = (part.strip("| ").split(" | ") for part in done.stdout.splitlines())
    assert heads == [*compare.HEADS]
    assert len(line) == len(row) == len(heads)
    values = dict(zip(heads, row, strict=True))
    assert float(values["losses apart"]) < 1e-4
    assert float(values["times faster"]) > 0
