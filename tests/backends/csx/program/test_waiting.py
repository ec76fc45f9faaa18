"""What is shown while a program is compiled: under a bar, above a bar, in a log."""

from __future__ import annotations

import io
import re
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from harness import csx
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from rich.console import Console
from rich.progress import Progress

import fulgurite
from fulgurite.backends.csx.program import announcements
from fulgurite.backends.csx.program.announcements import shown

DOING = "compiling the training program, 312 operations"


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(announcements, "PATIENCE_S", 0.01)


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The lines of the log."""
    lines: list[str] = []
    monkeypatch.setattr(announcements, "rank_zero_info", lines.append)
    return lines


class Terminal(io.StringIO):
    """A terminal that keeps what is written to it."""

    def isatty(self) -> bool:
        return True


def trainer_with(bar: Any) -> pl.Trainer:
    trainer: Any = SimpleNamespace(progress_bar_callback=bar)
    return trainer


def until(condition: Any) -> None:
    """Wait for what another thread does."""
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize(
    ("typed", "name"),
    [(["/x/cc.py", "-c"], "cc.py"), (["-c"], "python"), ([""], "python"), ([], "python")],
)
def test_a_script_has_its_own_name(
    typed: list[str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", typed)
    assert announcements.script() == name
    monkeypatch.setattr(sys, "argv", [*typed, __file__, "--password=secret"])
    assert announcements.script().endswith("test_waiting.py")


@pytest.mark.parametrize("bar", [TQDMProgressBar, RichProgressBar])
def test_a_bar_shows_how_far_compiling_beside_the_steps_is(bar: Any) -> None:
    told = ["", "code 2 of 7, 14 s, about 8 s to go"]
    loads: Any = [SimpleNamespace(progress=lambda text=text: text) for text in told]
    trainer: Any = SimpleNamespace(
        progress_bar_callback=bar(), progress_bar_metrics={"loss": 0.5}, loggers=[]
    )
    hide = announcements.show_progress(trainer, "training", loads)
    metrics = trainer.progress_bar_callback.get_metrics(trainer, None)
    assert metrics == {"loss": 0.5, "compiling training": told[1]}
    loads.clear()  # it has ended
    assert trainer.progress_bar_callback.get_metrics(trainer, None) == {"loss": 0.5}
    hide()
    assert "get_metrics" not in vars(trainer.progress_bar_callback)
    announcements.show_progress(trainer_with(None), "training", loads)()


def test_what_is_quick_is_not_shown(logged: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(announcements, "PATIENCE_S", 60.0)
    threads = threading.active_count()
    with shown(trainer_with(None), DOING):
        pass
    assert logged == []
    assert threading.active_count() == threads


def test_without_a_bar_it_is_one_line_of_the_log(logged: list[str]) -> None:
    threads = threading.active_count()
    with shown(trainer_with(None), DOING):
        until(lambda: logged)
    assert logged == [f"CSX: {DOING} ..."]
    assert threading.active_count() == threads


def test_above_a_tqdm_bar_it_is_one_line(
    logged: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    bar = TQDMProgressBar()
    bar.train_progress_bar = bar.init_predict_tqdm()
    bar.train_progress_bar.reset(total=4)
    with shown(trainer_with(bar), DOING):
        until(lambda: "compiling" in screen.getvalue())
    bar.train_progress_bar.update(4)
    bar.train_progress_bar.close()
    lines = [line.rpartition("\r")[2].strip() for line in screen.getvalue().split("\n")]
    assert lines[0] == f"CSX: {DOING} ..."
    assert "4/4" in lines[1]
    assert logged == []


def rich_bar(screen: io.StringIO) -> RichProgressBar:
    """Lightning's bar as it is while the first batch is trained on."""
    bar = RichProgressBar()
    console = Console(file=screen, width=100)
    bar._console, bar.progress = console, Progress(console=console, refresh_per_second=50)
    bar.progress.add_task("Epoch 0/2", total=4)
    bar.progress.start()
    return bar


def visible(screen: io.StringIO) -> str:
    """The text without control sequences."""
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", screen.getvalue())


def test_below_a_rich_bar_on_a_terminal_it_is_a_line_with_seconds_that_goes(
    logged: list[str],
) -> None:
    screen = Terminal()
    bar = rich_bar(screen)
    assert bar.progress is not None
    try:
        with shown(trainer_with(bar), DOING):
            until(lambda: f"CSX: {DOING} 0:00:00" in visible(screen))
            until(lambda: f"CSX: {DOING} 0:00:01" in visible(screen))
        screen.truncate(0)
        screen.seek(0)
        bar.progress.refresh()
        assert "Epoch 0/2" in visible(screen)
        assert "CSX" not in visible(screen)
    finally:
        bar.progress.stop()
    assert logged == []


def test_where_a_rich_bar_goes_to_a_file_it_is_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = io.StringIO()
    monkeypatch.setattr(sys, "stdout", file)
    bar = rich_bar(file)
    assert bar.progress is not None
    try:
        with shown(trainer_with(bar), DOING):
            until(lambda: "CSX" in file.getvalue())
    finally:
        bar.progress.stop()
    assert file.getvalue().count(f"CSX: {DOING} ...") == 1


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_exception_passes_and_leaves_terminal_and_threads_as_they_were(
    error: type[BaseException],
) -> None:
    screen = Terminal()
    bar = rich_bar(screen)
    assert bar.progress is not None
    threads = threading.active_count()
    streams = sys.stdout, sys.stderr

    def compile_and_fail() -> None:
        with shown(trainer_with(bar), DOING):
            until(lambda: "CSX" in visible(screen))
            raise error

    with pytest.raises(error):
        compile_and_fail()
    assert threading.active_count() == threads
    assert (sys.stdout, sys.stderr) == streams
    bar.progress.stop()
    assert screen.getvalue().rfind("\x1b[?25h") > screen.getvalue().rfind("\x1b[?25l")
    assert bar.progress.console._live_stack == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_what_is_stopped_is_one_line(error: type[BaseException], logged: list[str]) -> None:
    def compile_and_stop() -> None:
        with shown(trainer_with(None), DOING):
            until(lambda: logged)
            raise error

    with pytest.raises(error):
        compile_and_stop()
    assert logged == [f"CSX: {DOING} ...", f"CSX: stopped while {DOING}"]


def test_a_program_is_being_built_while_a_step_is_traced_and_not_when_it_runs() -> None:
    seen = []

    @fulgurite.trace
    def step(x: torch.Tensor) -> torch.Tensor:
        seen.append(announcements.is_building())
        return x + 1

    assert not announcements.is_building()
    csx(audit=False)
    for _ in range(2):
        step(torch.zeros(2))
        assert not announcements.is_building()
    assert set(seen) == {True}
