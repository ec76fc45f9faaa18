"""Whether compiling a program can pay: what is left of its run, beside what compiling takes.

A program that is compiled when its run has ended has helped nobody, and took a core meanwhile. So
has one whose time is nearly all in calls of a library that compiled code makes too.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn

TIMES = 12.0
"""Compiling takes so many times as long as capturing, at least: 12 to 45 times (measured)."""

NEARLY_ALL = 0.95
"""The share of a step from which on what can become faster is too little."""

_FEW = 2  # batches, by which one knows how long they take


class Payback:
    """Says whether compiling a program pays; once it did, it does.

    Args:
        trainer: whose run it is part of; None: of one whose end nobody knows.
        captured_s: how long the program took to capture.
        in_steps_s: how long its steps took so far, without building and audits.

    Attributes:
        pays: what was said last.
        least_s: how long compiling takes at least.
        fixed: the share of a run that stays as it is, as it was given last.
    """

    def __init__(
        self, trainer: pl.Trainer | None, captured_s: float, in_steps_s: Callable[[], float]
    ) -> None:
        self._trainer, self.least_s, self._in_steps_s = trainer, TIMES * captured_s, in_steps_s
        self.pays, self.fixed = False, 0.0
        self._first: tuple[float, float] | None = None  # seconds in its steps, and batches by then

    def __call__(self, fixed: float) -> bool:
        """Whether compiling may begin; asked at each step until it has (3 µs).

        Args:
            fixed: the share of a run (0 to 1) that stays as it is.
        """
        self.fixed = fixed
        if not self.pays and self.can_gain:
            self.pays = (1 - fixed) * self._left_s() >= self.least_s
        return self.pays

    @property
    def can_gain(self) -> bool:
        """Whether enough of the run can become faster, by what was given last."""
        return self.fixed < NEARLY_ALL

    def _left_s(self) -> float:
        """Seconds that its steps have left, as batches went since this was asked first; 0 until
        known. Those of a validation count by the batches of the training that it goes with.
        """
        done, left = (0.0, math.inf) if self._trainer is None else _batches(self._trainer)
        if left == math.inf:
            return left
        now = self._in_steps_s()
        if self._first is None:
            self._first = now, done
        began, before = self._first
        return 0.0 if done < before + _FEW else left * (now - began) / (done - before)


def _batches(trainer: pl.Trainer) -> tuple[float, float]:
    """How many batches a run has done, and how many are left; the latter infinite if unknown."""
    if trainer.state.fn == TrainerFn.PREDICTING:
        done = trainer.predict_loop.batch_progress.total.ready
        return done, math.fsum(trainer.num_predict_batches) - done
    if trainer.state.fn != TrainerFn.FITTING:
        tests = trainer.state.fn == TrainerFn.TESTING
        done = trainer._evaluation_loop.batch_progress.total.ready
        return done, math.fsum(
            trainer.num_test_batches if tests else trainer.num_val_batches
        ) - done
    progress = trainer.fit_loop.epoch_loop.batch_progress
    done, left = progress.total.ready, math.inf
    if trainer.max_steps >= 0:
        each: float = trainer.accumulate_grad_batches
        if not trainer.lightning_module.automatic_optimization:
            each = done / max(1, trainer.global_step)  # steps are the optimizers'
        left = (trainer.max_steps - trainer.global_step) * each
    if trainer.max_epochs is not None and trainer.max_epochs >= 0:
        epochs = trainer.max_epochs - trainer.current_epoch
        left = min(left, epochs * trainer.num_training_batches - progress.current.ready)
    return done, left
