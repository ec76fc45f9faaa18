"""The last line of a fit: its steps, and how long they waited for programs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import lightning.pytorch as pl

from fulgurite.backends.csx.plugins.strategy import strategy_of
from fulgurite.backends.csx.program import report


@contextlib.contextmanager
def told(trainer: pl.Trainer) -> Iterator[None]:
    """Say it when the block has trained and ends: by itself, by Ctrl-C or by SIGTERM."""
    first = trainer.global_step
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        _tell(trainer, first)
        raise
    _tell(trainer, first)


def _tell(trainer: pl.Trainer, first: int) -> None:
    """Say what was done since the run began, after ``first`` steps."""
    strategy, steps = strategy_of(trainer), trainer.global_step - first
    if steps <= 0:
        return
    began = strategy.audit_budget.began
    costs = [one.cost for one in strategy.programs if one.cost and one.cost.began >= began]
    now, training = time.perf_counter(), strategy.training
    line = report.pace(steps, now - began, costs)
    assert training is not None
    for cost in [program.cost for program in training.programs][:1]:
        if cost and cost.taken_over and cost.compiled_s:
            line += report.gain(cost, training.runs, now)
    if any(one.loaded.compiling for one in training.executables()):
        line += report.UNFINISHED
    report.say(trainer, line)
