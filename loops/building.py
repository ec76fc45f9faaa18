"""Loops that only build: each stage's first batch comes, its program is built, nothing is run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.loops.progress import _BaseProgress

from fulgurite.backends.csx.plugins.strategy import strategy_of
from fulgurite.backends.csx.program import report


def only_builds(trainer: pl.Trainer) -> bool:
    """Whether a Trainer's backend asks for programs alone (compile_only, validate_only)."""
    return strategy_of(trainer).backend.only_builds


def at_most_one(batches: list[Any]) -> list[Any]:
    """Limits of batches per loader: the first of each tells all that a program is built from."""
    return [min(1, limit) for limit in batches]


def close(trainer: pl.Trainer) -> None:
    """Say that this was all."""
    strategy = strategy_of(trainer)
    report.say(trainer, report.closing(strategy.backend, strategy.programs))


@contextlib.contextmanager
def uncounted(loop: _Loop) -> Iterator[None]:
    """Put the progress counters of a loop and of those inside it back: nothing was done."""
    before = [(progress, progress.state_dict()) for progress in _progresses(loop)]
    try:
        yield
    finally:
        for progress, state in before:
            progress.load_state_dict(state)


def _progresses(loop: _Loop) -> Iterator[_BaseProgress]:
    for value in vars(loop).values():
        if isinstance(value, _BaseProgress):
            yield value
        elif isinstance(value, _Loop):
            yield from _progresses(value)
