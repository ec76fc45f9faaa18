"""What a fit says at its end: its steps, and what they took."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from time import perf_counter

import lightning.pytorch as pl

from fulgurite.backends.csx.plugins.strategy import strategy_of
from fulgurite.backends.csx.program import fit_table, report


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
    training, began = strategy.training, strategy.audit_budget.began
    assert training is not None
    fit = fit_table.Fit(
        steps=steps,
        total_s=perf_counter() - began,
        data_s=trainer.fit_loop.epoch_loop.data_s,
        in_steps_s=training.speed.in_steps_s,
        waits_s=training.speed.waits.seconds,
        costs=[one.cost for one in strategy.programs if one.cost and one.cost.began >= began],
        training=[one.cost for one in training.programs if one.cost],
        batches=training.runs,
        compiling=sum(step.compiling() for step in strategy.step_functions.values()),
    )
    report.say(trainer, fit_table.table(fit))
    report.add_measured(trainer, strategy.backend, training.stage, training.speed)
