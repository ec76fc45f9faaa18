"""Rows of a step in the Trainer's profiler, beside those that Lightning writes.

capture    a step is traced, also when it is looked at again
compile    programs are loaded, or compiled while the run waits; not what is compiled meanwhile
program    a program runs
host       what is done after it: schedulers, logged values and closures of the step
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import lightning.pytorch as pl
from lightning.pytorch.profilers import PassThroughProfiler, Profiler

_P = ParamSpec("_P")
_R = TypeVar("_R")

CAPTURE, COMPILE, PROGRAM, HOST = (
    f"[Fulgurite]{row}" for row in ("capture", "compile", "program", "host")
)


def profiler_of(trainer: pl.Trainer | None) -> Profiler | None:
    """The profiler of a Trainer that was given one."""
    profiler: Profiler | None = getattr(trainer, "profiler", None)
    return None if isinstance(profiler, PassThroughProfiler) else profiler


def profiled(profiler: Profiler | None, row: str, function: Callable[_P, _R]) -> Callable[_P, _R]:
    """A function whose calls are in a row; the function itself where there is no profiler."""
    if profiler is None:
        return function

    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with profiler.profile(row):
            return function(*args, **kwargs)

    return call
