"""What was built, in one line on the screen and, where asked for, as text in a folder."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import lightning.pytorch as pl
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm, TQDMProgressBar
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_only

from fulgurite.backends.csx.compile.fabric import Fabric, Loaded
from fulgurite.backends.csx.config import CSXBackend
from fulgurite.backends.csx.graph.passes import looking
from fulgurite.backends.csx.graph.verify import writing_graphs
from fulgurite.backends.csx.program.summary import Cost, Program


def headline(fabric: Fabric, program: Program, loads: list[Loaded]) -> str:
    """``CSX on host fabric (AMD EPYC, 2 threads): training program, 312 operations, ...``

    Args:
        fabric: what runs the program.
        program: the program.
        loads: its entry points; none where it was only checked.
    """
    names = {"accumulate": "accumulate", "step": "accumulate and step"}
    several = len(program.entries) > 1
    entries = " and ".join(repr(names[entry.name]) for entry in program.entries)
    how = max(loads, key=lambda load: load.built).how if loads else "checked"
    if loads and loads[0].compiled:
        how += f" in {_in_words(sum(load.seconds for load in loads))}"
    where = fabric.describe([entry.graph for entry in program.entries])
    return (
        f"CSX on {where}: {program.stage} program, {program.operations} operations"
        f"{f' in entry points {entries}' if several else ''}, {how}{_why(program)}"
    )


def _why(program: Program) -> str:
    """Why there is another program than the stage's first."""
    if not program.reason:
        return ""
    return f"; {program.reason}. A wafer would refuse it (max_programs=1)"


def _in_words(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 0.1 else f"{seconds:.2f} s"


UNFINISHED = (
    "; a program was not compiled by then: a run with compile_only=True, or background=False,"
    " does that once for all that follow"
)
"""Of a fit that ended while its program was being compiled in the background."""

_TELLING = 10  # steps: their speed says something


def pace(steps: int, seconds: float, costs: Iterable[Cost]) -> str:
    """What a fit took: ``CSX: 300 steps in 12.3 s; waited 11.1 s for programs (...), ...``

    Args:
        steps: how many steps were done.
        seconds: from its begin to its end.
        costs: of the programs that were built in it.
    """
    costs = list(costs)
    parts = {
        "captured": sum(cost.captured_s for cost in costs),
        "compiled": sum(cost.compiled_s for cost in costs if not cost.taken_over),
        "loaded from the cache": sum(cost.loaded_s for cost in costs),
    }
    did = ", ".join(f"{what} in {_in_words(part_s)}" for what, part_s in parts.items() if part_s)
    waited_s = sum(cost.waited_s for cost in costs)
    per_s = steps / max(seconds - waited_s, 1e-9)
    rate = f"{per_s:,.0f}" if per_s >= 10 else f"{per_s:.2g}"
    return (
        f"CSX: {steps:,} step{'s' * (steps != 1)} in {_in_words(seconds)}; waited"
        f" {_in_words(waited_s)} for programs ({did}), {rate} steps/s without that"
    )


def gain(cost: Cost, steps: int, ended: float) -> str:
    """What compiling in the background gained: ``; compiled meanwhile in 7.9 s, ...``

    Args:
        cost: of the program that most steps were of.
        steps: how many it did.
        ended: when the last one was done.
    """
    first_s = cost.taken_over_at - cost.began - cost.waited_s
    first, later = cost.taken_over - 1, steps - cost.taken_over + 1
    told = f"; compiled meanwhile in {_in_words(cost.compiled_s)}, from batch {cost.taken_over} on"
    if min(first, later) < _TELLING:
        return told
    times = first_s / first / ((ended - cost.taken_over_at) / later)
    return f"{told} {times:.1f} times as fast"


def announce(
    trainer: pl.Trainer | None,
    fabric: Fabric,
    backend: CSXBackend,
    program: Program,
    loads: list[Loaded],
) -> None:
    """Say that a program was built, and write it down where asked to."""
    line = headline(fabric, program, loads)
    say(trainer, f"{line}\n{summary(program)}" if backend.only_builds else line)
    if backend.artifact_dir is not None:
        _write(Path(backend.artifact_dir), program, line)


def say_compiled(trainer: pl.Trainer | None, stage: str, loads: list[Loaded], step: int) -> None:
    """Say what came of compiling a program in the background.

    Args:
        trainer: whose screen it is.
        stage: the program's name in messages.
        loads: its entry points.
        step: the batch that is under way, from 1, as the stage counts them in this run.
    """
    failed = [load.how for load in loads if not load.compiled]
    seconds = sum(load.seconds for load in loads)
    how = f"is {failed[0]}" if failed else f"compiled in {seconds:.1f} s, from batch {step} on"
    say(trainer, f"CSX: {stage} program {how}")


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
        return f"{option}: nothing was trained. The next run loads these programs."
    return f"{option}: the model is static. Nothing was compiled or trained."


def say(trainer: pl.Trainer | None, line: str) -> None:
    """Print a line above the progress bar, or, where there is none, to the log."""
    bar = None if trainer is None else trainer.progress_bar_callback
    if bar is not None and getattr(bar, "is_enabled", False):
        # a bar of tqdm's that is closed, as after a training, prints nothing by itself
        show = Tqdm.write if isinstance(bar, TQDMProgressBar) else bar.print
        show(line)
    else:
        rank_zero_info(line)


def passes_of(stage: str, backend: CSXBackend) -> AbstractContextManager[None]:
    """Entered while a program is built: each pass's graph is written and verified, if asked for."""
    if backend.artifact_dir is None:
        return nullcontext()
    return looking(writing_graphs(Path(backend.artifact_dir) / f"{_stem(stage)}_passes"))


def _stem(stage: str) -> str:
    return stage.replace(" ", "_")


@rank_zero_only
def _write(folder: Path, program: Program, line: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    stem = _stem(program.stage)
    taken = len(list(folder.glob(f"{stem}*.txt")))
    name = f"{stem}.txt" if not taken else f"{stem}_{taken + 1}.txt"
    (folder / name).write_text(f"{line}\n\n{program.text()}\n")
