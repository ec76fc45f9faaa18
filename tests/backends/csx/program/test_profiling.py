"""Lightning's profilers have rows for what a step does on CSX, beside Lightning's own."""

from __future__ import annotations

import re
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
from harness import make_trainer
from lightning.pytorch.profilers import AdvancedProfiler, PyTorchProfiler, SimpleProfiler
from models import Classifier, loader, mlp
from torch import Tensor, nn

from fulgurite import step_closure
from fulgurite.errors import HostRead

pytestmark = pytest.mark.fits

ROWS = {f"[Fulgurite]{row}" for row in ("capture", "compile", "program", "host")}
INSIDE = (  # of a program: Lightning's code for them runs while it is traced
    *("training_step", "backward", "optimizer_step", "optimizer_zero_grad", "on_before_backward"),
    *("on_after_backward", "on_before_optimizer_step", "on_before_zero_grad"),
    *("configure_gradient_clipping", "validation_step"),
)


class Net(Classifier):
    """Trains in 10 batches and validates in 2."""

    def __init__(self) -> None:
        super().__init__(mlp())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))


def fitted(profiler: Any, static: bool = True, module: Any = None, **backend: Any) -> Any:
    trainer = make_trainer(static, None, backend, profiler=profiler, max_epochs=1)
    trainer.fit(module or Net(), loader(160), loader(32))
    return trainer


@pytest.mark.numbers
def test_the_simple_profiler_has_lightning_s_rows_and_four_of_the_step() -> None:
    calls = []
    for static in (True, False):
        profiler = SimpleProfiler()
        fitted(profiler, static, audit=False)  # which traces it again
        calls.append({row: len(times) for row, times in profiler.recorded_durations.items()})
        assert not profiler.current_actions  # all were ended
    ours, stock = calls
    stock = {row.replace("SingleDevice", "CSX"): count for row, count in stock.items()}
    assert set(ours) - set(stock) == ROWS
    assert set(stock) <= set(ours)
    outside = {row for row in stock if not row.endswith(INSIDE)}
    assert {row: ours[row] for row in outside} == {row: stock[row] for row in outside}
    # training and validation; 10 batches, and 2 before and after them
    assert [ours[f"[Fulgurite]{row}"] for row in ("capture", "compile")] == [2, 2]
    assert [ours[f"[Fulgurite]{row}"] for row in ("program", "host")] == [14, 14]


def test_a_step_that_is_traced_again_is_a_row_of_capture() -> None:
    profiler = SimpleProfiler()
    fitted(profiler, audit=True)
    assert len(profiler.recorded_durations["[Fulgurite]capture"]) >= 3  # the second batch too


def test_what_closures_take_is_host() -> None:
    slept_s = 0.01

    class Sleeps(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            self.show(loss)
            return loss

        @step_closure
        def show(self, loss: Tensor) -> None:
            time.sleep(slept_s)

    profiler = SimpleProfiler()
    fitted(profiler, module=Sleeps())
    assert sum(profiler.recorded_durations["[Fulgurite]host"]) >= 10 * slept_s
    assert max(profiler.recorded_durations["[Fulgurite]program"]) < 1


def test_a_row_ends_where_the_step_is_no_program() -> None:
    class Reads(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step(batch, batch_idx) * float(batch[0].sum())

    profiler = SimpleProfiler()
    with pytest.raises(HostRead):
        fitted(profiler, module=Reads())
    assert not {"[Fulgurite]capture", "[Fulgurite]compile"} & set(profiler.current_actions)
    fitted(SimpleProfiler())


@pytest.mark.long
@pytest.mark.compiler
def test_compile_is_what_the_run_waited_for(tmp_path: Path) -> None:
    profiler = SimpleProfiler()
    options = {"autogen_policy": "default", "compile_dir": tmp_path}
    trainer = fitted(profiler, **options)
    programs = trainer.strategy.programs
    [first, second] = profiler.recorded_durations["[Fulgurite]compile"]
    assert first + second == pytest.approx(sum(p.cost.compiled_s for p in programs), rel=0.2)


def test_the_advanced_profiler_shows_what_is_inside_the_rows(tmp_path: Path) -> None:
    fitted(AdvancedProfiler(dirpath=tmp_path, filename="rows", line_count_restriction=1.0))
    text = (tmp_path / "fit-rows.txt").read_text()
    parts = dict(re.findall(r"Profile stats for: (\S+)(.*?)(?=\nProfile stats|\Z)", text, re.S))
    assert set(parts) >= ROWS
    assert "executable.py" in parts["[Fulgurite]program"]
    assert "discovery.py" in parts["[Fulgurite]capture"]


def test_pytorch_s_profiler_has_the_rows_with_their_operations(tmp_path: Path) -> None:
    profiler = PyTorchProfiler(dirpath=tmp_path, filename="rows", export_to_chrome=False)
    warnings.filterwarnings("ignore", message="The PyTorch Profiler default schedule")
    fitted(profiler)
    events = [event for event in profiler.function_events if "[Fulgurite]" in event.name]
    assert {event.name.rpartition("]")[2] for event in events} >= {"program", "host"}
    within = {child.name for event in events for child in event.cpu_children}
    assert "aten::addmm" in within
