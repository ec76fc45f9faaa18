"""Rows of a step in the Trainer's profiler, beside those that Lightning writes.

capture    a step is traced, also when it is looked at again
compile    programs are loaded, or compiled while the run waits; not what is compiled meanwhile
program    a program runs
host       what is done after it: schedulers, logged values and closures of the step
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import lightning.pytorch as pl
from lightning.pytorch.profilers import PassThroughProfiler, Profiler

CAPTURE, COMPILE, PROGRAM, HOST = (
    f"[Fulgurite]{row}" for row in ("capture", "compile", "program", "host")
)


def profiler_of(trainer: pl.Trainer | None) -> Profiler | None:
    """The profiler of a Trainer that was given one."""
    profiler: Profiler | None = getattr(trainer, "profiler", None)
    return None if isinstance(profiler, PassThroughProfiler) else profiler


def timed(profiler: Profiler | None, row: str) -> AbstractContextManager[object]:
    """Entered while what a row is of is done."""
    return nullcontext() if profiler is None else profiler.profile(row)
