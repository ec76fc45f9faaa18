"""What a test needs beyond imports, seen while it runs, and the markers that say so.

A test that trains, or starts a process, says so by a marker: what needs nothing is quick and runs
in every ``make test``. ``Watch`` counts both; a test that lacks its marker fails
(``tests/conftest.py``). ``pytest --costs=FILE`` writes what each test took, a line of JSON a test.
"""

from __future__ import annotations

import json
import multiprocessing.process
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn, TrainerState

from fulgurite.backends.csx.capture.trace import Trace

MARKERS = {
    "fits": "trains, on CSX or in stock Lightning",
    "numbers": "trains on CSX and in stock Lightning, and compares",
    "process": "starts a process",
    "several": "trains in several processes at once, which meet on the loopback",
    "compiler": "compiles C++ kernels (a C++ compiler and Python.h are needed)",
    "browser": "opens a page in Chromium",
    "packaging": "builds and installs the package",
    "notebook": "runs cells in a Jupyter kernel",
}
"""What a test may need; the first two say how it trains, the others that it starts a process."""
TRAINS = {"fits", "numbers"}
STARTS = MARKERS.keys() - TRAINS
QUIET_STARTS = {"ldconfig", "uname", "lscpu"}
"""Programs that Python and torch themselves ask about the machine, once a process."""
QUIET_CODE = "import sys, json; print(json.dumps(sys.path))"
"""By which typeshed_client, for jsonargparse, asks Python where packages lie, once a process."""


@dataclass
class Watch:
    """Trainings and processes since ``begin``.

    Args:
        ours: fits by Trainers of this project.
        stock: fits by Lightning's own, recorded ones too.
        traces: steps that were traced.
        started: names of the programs that were started.
    """

    ours: int = 0
    stock: int = 0
    traces: int = 0
    started: list[str] = field(default_factory=list)

    def begin(self) -> None:
        self.ours, self.stock, self.traces, self.started = 0, 0, 0, []

    def lacking(self, markers: set[str]) -> str | None:
        """What was seen that no marker says, with the marker to add; None if all is said."""
        if self.ours and self.stock and not markers & {"numbers"}:
            return "it trains on CSX and in stock Lightning: add @pytest.mark.numbers"
        if (self.ours or self.stock) and not markers & TRAINS:
            return "it trains: add @pytest.mark.fits"
        if self.started and not markers & STARTS:
            names = ", ".join(sorted(set(self.started)))
            return f"it starts a process ({names}): add @pytest.mark.process"
        return None


watch = Watch()


def note_start(program: str) -> None:
    """A process begins."""
    name = os.path.basename(program)
    if name not in QUIET_STARTS:
        watch.started.append(name)


def _audited(event: str, arguments: tuple[Any, ...]) -> None:
    if event in ("subprocess.Popen", "os.posix_spawn"):  # since Python 3.13 the one calls the other
        if QUIET_CODE not in str(arguments[1]):
            note_start(os.fsdecode(arguments[0]))
    elif event in ("os.fork", "os.forkpty", "os.system"):
        note_start(event)


def install() -> None:
    """Begin to watch this process; it cannot be undone, for audit hooks cannot be removed.

    What is watched calls nothing of this file while it runs: tests look at the frames of errors.
    """
    sys.addaudithook(_audited)
    set_attribute = TrainerState.__setattr__

    def state_changes(state: TrainerState, name: str, value: Any) -> None:
        if name == "fn" and value == TrainerFn.FITTING:  # assigned by Trainer.fit alone
            note_fit(sys._getframe(1).f_locals["self"])
        set_attribute(state, name, value)

    TrainerState.__setattr__ = state_changes
    begin = Trace.__init__

    def begins(trace: Trace, *arguments: Any, **named: Any) -> None:
        watch.traces += 1
        begin(trace, *arguments, **named)

    Trace.__init__ = begins
    start = multiprocessing.process.BaseProcess.start  # spawned, it raises no audit event

    def starts(process: Any) -> None:
        note_start(process.name)
        start(process)

    multiprocessing.process.BaseProcess.start = starts


def note_fit(trainer: pl.Trainer) -> None:
    """A training begins."""
    if type(trainer) is pl.Trainer:
        watch.stock += 1
    else:
        watch.ours += 1


def cpu_s() -> float:
    """CPU seconds of this process and of those it has waited for."""
    return sum(os.times()[:4])


@dataclass
class Cost:
    """What a test took, from its setup to its teardown.

    Args:
        test: its node id.
        cpu_s: CPU seconds, of processes it waited for too.
        wall_s: seconds.
        markers: of ``MARKERS``, those it has.
        ours: fits on CSX.
        stock: fits in stock Lightning.
        traces: steps that were traced.
        started: names of the programs that it started.
    """

    test: str
    cpu_s: float
    wall_s: float
    markers: list[str]
    ours: int
    stock: int
    traces: int
    started: list[str]


class Costs:
    """Writes the costs of tests to a file, for ``pytest --costs=FILE``; workers may share it."""

    def __init__(self, file: Path) -> None:
        self._file, self._began = file, (0.0, 0.0)

    def begin(self) -> None:
        self._began = cpu_s(), time.perf_counter()

    def end(self, test: str, markers: set[str]) -> None:
        cost = Cost(
            test=test,
            cpu_s=round(cpu_s() - self._began[0], 3),
            wall_s=round(time.perf_counter() - self._began[1], 3),
            markers=sorted(markers),
            **vars(watch),
        )
        with self._file.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(vars(cost)) + "\n")
