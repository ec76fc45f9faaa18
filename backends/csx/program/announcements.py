"""What is built, and was: in a line on the screen and, where asked for, as files in a folder."""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import rich
from lightning.pytorch.callbacks import ProgressBar, RichProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm, TQDMProgressBar
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_only
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from fulgurite.backends.csx.compile.fabric import Fabric, Loaded
from fulgurite.backends.csx.compile.programs.progress import Course, listening
from fulgurite.backends.csx.config import CSXBackend
from fulgurite.backends.csx.costs.build_record import BuildRecord, recording_build
from fulgurite.backends.csx.graph.collectives import processes
from fulgurite.backends.csx.graph.passes import observing_passes
from fulgurite.backends.csx.graph.verify import writing_graphs
from fulgurite.backends.csx.program.description import Program
from fulgurite.backends.csx.program.fit_table import FitSummary
from fulgurite.backends.csx.program.speed import Gain, Speed
from fulgurite.backends.supported import newer_than_tested

_said: set[str] = set()  # what is said once in a process
_kinds: dict[str, weakref.ref[pl.Trainer]] = {}  # kinds of lines, and who has said them first
_TABLE = "the table of a fit"
_MANY = ". A wafer would refuse it (max_programs=1)"


def headline(fabric: Fabric, program: Program, loads: list[Loaded]) -> str:
    """``CSX on host fabric (AMD EPYC, 2 threads): training program, 312 operations, ...``

    Args:
        fabric: what runs the program.
        program: the program.
        loads: its entry points; none where it was only checked.
    """
    names = {"accumulate": "accumulate", "step": "accumulate and step"}
    entries = " and ".join(repr(names[entry.name]) for entry in program.entries)
    entries = f" in entry points {entries}" if len(program.entries) > 1 else ""
    how = max(loads, key=lambda load: load.built).how if loads else "checked"
    if len({load.compiled for load in loads}) > 1:  # one that waits for others is, before it runs
        pairs = zip(program.entries, loads, strict=True)
        how = "; ".join(f"{names[entry.name]!r} {load.how}" for entry, load in pairs)
        entries = " in two entry points"
    elif loads and loads[0].compiled:
        seconds = sum(load.seconds for load in loads)
        how += f" in {seconds:.1f} s" if seconds >= 0.1 else f" in {seconds:.2f} s"
    where = fabric.describe(loads)
    why = f"; {program.reason}" if program.reason else ""
    return (
        f"CSX on {where}: {program.stage} program, {program.operations} operations{entries},"
        f" {how}{why}"
    )


def announce(
    trainer: pl.Trainer | None,
    fabric: Fabric,
    backend: CSXBackend,
    program: Program,
    loads: list[Loaded],
    record: BuildRecord | None,
) -> None:
    """Say that a program was built, and write it down where asked to.

    Before the first of the process: that torch is newer than what was tested, if it is.
    """
    line, newer = headline(fabric, program, loads), newer_than_tested()
    if newer is not None and newer not in _said:
        _said.add(newer)
        say(trainer, newer)
    _, _, since = program.reason.partition("since ")
    again = f"{program.stage} since {since}"  # as where a metric is added in each epoch
    told_before, is_new = since and again in _said, any(one.built for one in loads)
    _said.add(again)
    if program.reason and _MANY not in _said:
        _said.add(_MANY)
        line += _MANY
    if backend.only_builds:
        say(trainer, f"{line}\n{summary(program)}")
    elif (not told_before or is_new) and _is_new_kind(trainer, line):
        say(trainer, line)
    if backend.artifact_dir is not None and record is not None:
        _write(trainer or backend, fabric, backend, program, loads, record, line)


def script() -> str:
    """What was typed to start this process: the script, and those of its arguments that are files.

    No others: they may be secret.
    """
    command, *arguments = sys.argv or [""]
    name = "python" if command in ("", "-c") else Path(command).name
    return " ".join([name, *(Path(one).name for one in arguments if Path(one).is_file())])


def say_compiled(
    trainer: pl.Trainer | None,
    program: str,
    loads: list[Loaded],
    step: int = 0,
    gain: Gain | None = None,
) -> None:
    """Say what came of compiling a program in the background.

    Args:
        trainer: whose screen it is.
        program: its name in messages.
        loads: its entry points.
        step: the first that compiled code did, from 1, as the stage counts them in this run.
        gain: what it gained, where that is known.
    """
    failed = [load.how for load in loads if not load.compiled]
    seconds = sum(load.seconds for load in loads)
    how = f"is {failed[0]}" if failed else f"compiled in {seconds:.1f} s, from batch {step:,} on"
    say(trainer, f"CSX: {program} {how}{'' if gain is None else f': {gain}'}")


def say_threads(trainer: pl.Trainer | None, found: str) -> None:
    """Say with how many threads the training's steps go on, once for all Trainers of a module."""
    line = f"CSX: training uses {found}. OMP_NUM_THREADS sets it"
    if _is_new_kind(trainer, line):
        say(trainer, line)


def show_progress(
    trainer: pl.Trainer | None, stage: str, loads: list[Loaded]
) -> Callable[[], None]:
    """Show in Lightning's progress bar how far compiling in the background is.

    It is among the bar's metrics: ``compiling training=21 kernels in C++, 8 s, about 4 s to go``.

    Returns:
        What ends it.
    """
    bar: Any = None if trainer is None else trainer.progress_bar_callback
    if not isinstance(bar, ProgressBar) or "get_metrics" in vars(bar):
        return lambda: None
    stock = bar.get_metrics

    def get_metrics(*args: Any) -> dict[str, Any]:
        told = next((text for load in loads if (text := load.progress())), "")
        return {**stock(*args), **({f"compiling {stage}": told} if told else {})}

    vars(bar)["get_metrics"] = get_metrics
    return functools.partial(vars(bar).pop, "get_metrics", None)


def say_fit(trainer: pl.Trainer | None, fit: FitSummary) -> None:
    """Say what a fit took: the first of a process in a table, others in a line of each kind."""
    if _TABLE not in _said:
        say(trainer, str(fit))
        _is_new_kind(trainer, fit.brief())
    elif _is_new_kind(trainer, fit.brief()):
        say(trainer, fit.brief())
    _said.add(_TABLE)


def _is_new_kind(trainer: pl.Trainer | None, line: str) -> bool:
    """Whether no other Trainer of this process has said the same of its module, but for numbers.

    A sweep says each kind of line once.
    """
    if trainer is None:
        return True
    kind = f"{type(trainer.lightning_module).__name__}: {re.sub(r'[0-9][0-9.,]*', '0', line)}"
    return _kinds.setdefault(kind, weakref.ref(trainer))() is trainer


def summary(program: Program) -> str:
    """What a program takes and keeps, in two lines."""
    layouts = [state.layout for state in program.state]
    size_bytes = sum(layout.shape.numel() * layout.dtype.itemsize for layout in layouts)
    inputs = ", ".join(map(str, program.inputs))
    return f"  inputs: {inputs}\n  state: {len(layouts)} tensors, {size_bytes:,} bytes"


def closing(backend: CSXBackend, programs: list[Program]) -> str:
    """The last line of a run that only builds."""
    option = "compile_only" if backend.compile_only else "validate_only"
    if not programs:
        return f"{option}: no batch came to a step, so there was nothing to build."
    if backend.compile_only:
        return (
            f"{option}: nothing was trained. The next run loads these programs; others that later"
            " batches need it compiles."
        )
    return f"{option}: the model is static. Nothing was compiled or trained."


def say(trainer: pl.Trainer | None, line: str) -> None:
    """Print lines above the progress bar, or, where there is none, to the log.

    Rich would break a line at the terminal's width, so that it is found and copied in parts. In a
    notebook what it prints is a display of its own for each line: there it is the log.
    """
    bar = None if trainer is None else trainer.progress_bar_callback
    in_notebook = isinstance(bar, RichProgressBar) and rich.get_console().is_jupyter
    if bar is not None and getattr(bar, "is_enabled", False) and not in_notebook:
        show: Callable[[str], None] = bar.print
        if isinstance(bar, TQDMProgressBar):
            show = Tqdm.write  # a bar that is closed, as after a training, prints nothing by itself
        elif isinstance(bar, RichProgressBar):
            show = functools.partial(rich.get_console().out, highlight=False)
        for one in line.splitlines():
            show(one)
    else:
        rank_zero_info(line)


@contextmanager
def recording_for_report(stage: str, backend: CSXBackend) -> Iterator[BuildRecord | None]:
    """Entered while a program is built: what its report tells is noted, if there is to be one.

    Each pass's graph is written down and verified too.
    """
    if backend.artifact_dir is None:
        yield None
        return
    folder = Path(backend.artifact_dir) / f"{_stem(stage)}_passes"
    with observing_passes(writing_graphs(folder)), recording_build() as record:
        yield record


def _stem(stage: str) -> str:
    return stage.replace(" ", "_")


@rank_zero_only
def _write(
    run: object,
    fabric: Fabric,
    backend: CSXBackend,
    program: Program,
    loads: list[Loaded],
    record: BuildRecord,
    line: str,
) -> None:
    """Write a program into the folder, and add it to the report there."""
    folder, stem = Path(backend.artifact_dir or ""), _stem(program.stage)
    folder.mkdir(parents=True, exist_ok=True)
    taken = len(list(folder.glob(f"{stem}*.txt")))
    name = f"{stem}.txt" if not taken else f"{stem}_{taken + 1}.txt"
    (folder / name).write_text(f"{line}\n\n{program.text()}\n")

    # what a report needs is imported here alone: few runs have one
    from fulgurite.backends.csx.costs.entry_data import entry_data
    from fulgurite.backends.report import report_file

    cost = program.cost
    assert cost is not None
    batch_size = next((leaf.shape[0] for leaf in program.inputs if leaf.shape), 1)
    data = {
        "stage": program.stage,
        "headline": line,
        "fabric": fabric.describe(loads),
        "reason": program.reason,
        "inputs": [str(one) for one in program.inputs],
        "state": [str(one) for one in program.state],
        "seconds": {
            "captured": cost.captured_s,
            "compiled": cost.compiled_s,
            "loaded": cost.loaded_s,
            "waited": cost.waited_s,
        },
        "warnings": [asdict(one) for one in record.warnings],
        "entries": [
            entry_data(
                *(one.name, one.graph, one.products, loaded, record),
                *(batch_size, processes(), backend.max_resident_bytes),
            )
            # a program that was only checked has no loads
            for one, loaded in itertools.zip_longest(program.entries, loads)
        ],
    }
    report_file.add(folder, run, data, _options(backend))


@rank_zero_only
def add_measured(
    run: object, backend: CSXBackend, stage: str, speed: Speed, fit: FitSummary
) -> None:
    """Add how long the steps of a stage took to the report, where there is one."""
    if backend.artifact_dir is None or not speed.alike_steps:
        return
    from fulgurite.backends.report import report_file

    count = speed.alike_steps
    measured = {"step_s": speed.alike_s / count, "waits_s": speed.alike_waits_s / count}
    steps = {"steps": count, **measured}
    report_file.add_measured(Path(backend.artifact_dir), run, stage, steps, fit.as_dict())


def _options(backend: CSXBackend) -> dict[str, str]:
    """The policy, and what else is not as by default, but for folders."""
    changed = {
        item.name: str(value)
        for item in fields(backend)
        if (value := getattr(backend, item.name)) != item.default and not item.name.endswith("_dir")
    }
    return {"autogen_policy": backend.autogen_policy, **changed}


PATIENCE_S = 2.0
_under_way: list[None] = []  # whose methods are atomic: several threads may build


@contextlib.contextmanager
def building() -> Iterator[None]:
    """Let ``is_building`` be true while the block runs: it traces and compiles a program."""
    _under_way.append(None)
    try:
        yield
    finally:
        _under_way.pop()


def is_building() -> bool:
    """Whether a program is being traced or compiled, in any thread."""
    return bool(_under_way)


@contextlib.contextmanager
def shown(trainer: pl.Trainer | None, doing: str) -> Iterator[None]:
    """Show ``doing`` while the block runs, if it runs for more than two seconds.

    Below Lightning's Rich progress bar on a terminal it is a line with the part that is compiled
    and the seconds that passed, gone with the block. Else it is one plain line: above another kind
    of bar, or in the log.
    A block that Ctrl-C stops, or a signal handler that exits, ends with a line too.
    """
    live = None if trainer is None else _line_below(trainer.progress_bar_callback, doing)
    course = Course()
    listener: AbstractContextManager[None] = contextlib.nullcontext()
    if live is not None:

        def heard(*told: Any) -> None:
            course.note(*told)
            live.update(live.task_ids[0], description=f"CSX: {doing}: {course.what}")

        listener = listening(heard)
    tell = functools.partial(say, trainer, f"CSX: {doing} ...")
    timer = threading.Timer(PATIENCE_S, tell if live is None else live.start)
    stopped = False
    timer.daemon = True  # a process that ends meanwhile does not wait for it
    timer.start()
    try:
        with listener:
            yield
    except (KeyboardInterrupt, SystemExit):
        stopped = True
        raise
    finally:
        timer.cancel()
        timer.join()  # or it would begin to show the line when it is gone
        if live is not None:
            live.stop()
        if stopped:
            say(trainer, f"CSX: stopped while {doing}")


def _line_below(bar: ProgressBar | None, doing: str) -> Progress | None:
    """A line for the display that Lightning's bar drives (rich 14.1 draws one inside another)."""
    if not isinstance(bar, RichProgressBar) or bar.progress is None:
        return None
    console = bar.progress.console
    if not (bar.progress.live.is_started and console.is_interactive):
        return None
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    line = Progress(*columns, console=console, transient=True)
    line.add_task(f"CSX: {doing}", total=None)
    return line
