"""How fast steps are, what compiling gained or can gain, and their rows in the Trainer's profiler.

Means of *stretches*, which are some steps and some time long: beside other processes a long step is
held up every time and a short one now and then, so that a median would tell of the short one alone.

A program that is compiled when its run has ended has helped nobody, and took a core meanwhile. So
has one whose time is nearly all in calls of a library that compiled code makes too.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

import lightning.pytorch as pl
from lightning.pytorch.profilers import PassThroughProfiler, Profiler
from lightning.pytorch.trainer.states import TrainerFn

from fulgurite.backends.csx.compile.store.measured import measured_before
from fulgurite.backends.csx.compile.threads import in_ms
from fulgurite.backends.csx.graph.collectives import Waits

STRETCH_S, STRETCH_STEPS = 0.5, 10  # at least


@dataclass(frozen=True, slots=True)
class Gain:
    """Seconds a batch, operation by operation and compiled."""

    before_s: float
    after_s: float

    @property
    def times(self) -> float:
        """How many times as fast a batch is."""
        return self.before_s / max(self.after_s, 1e-9)

    def __str__(self) -> str:
        before, after = in_ms(self.before_s), in_ms(self.after_s)
        return f"{after} ms a batch, {before} before ({self.times:.1f} times as fast)"


@dataclass(slots=True)
class Pace:
    """How many steps there were, and the seconds of all of them."""

    steps: int = 0
    seconds: float = 0.0

    @property
    def batch_s(self) -> float | None:
        """The mean; None: there were none."""
        return self.seconds / self.steps if self.steps else None


class Speed:
    """How long the steps of a stage took.

    Attributes:
        steps: how many there were.
        in_steps_s: how long all of them took.
        compiled_steps: how many of them compiled code did.
        alike_s: as ``in_steps_s``, without those that did what others do not.
        alike_steps: how many these are.
        alike_waits_s: how long these waited for other processes.
        paces: of these, operation by operation and compiled: of steps without a program, and of
            each entry point.
        waits: for other processes, in all steps.
    """

    def __init__(self) -> None:
        self.steps, self.in_steps_s, self.compiled_steps, self.alike_s = 0, 0.0, 0, 0.0
        self.paces = [(Pace(), Pace())]
        self.alike_steps, self.alike_waits_s, self.waits = 0, 0.0, Waits()
        self._waited_s = 0.0  # by the latest step's end
        self._count, self._seconds = 0, 0.0  # of the stretch that is under way
        self._is_unlike = False
        self._step_s: float | None = None  # in the latest stretch
        self._tell: Callable[[Gain | None], None] | None = None

    def add(
        self, seconds: float, paces: tuple[Pace, Pace] | None = None, compiled: bool = False
    ) -> None:
        """Note a step; every step does.

        Args:
            seconds: how long it took.
            paces: of its entry point; None: it had no program.
            compiled: whether compiled code did it.
        """
        self.steps += 1
        self.in_steps_s += seconds
        self.compiled_steps += compiled
        waited_s, self._waited_s = self.waits.seconds - self._waited_s, self.waits.seconds
        if self._is_unlike:
            self._is_unlike = False
            return
        self.alike_s += seconds
        self.alike_steps += 1
        pace = (paces or self.paces[0])[compiled]
        pace.steps += 1
        pace.seconds += seconds
        self.alike_waits_s += waited_s
        self._count += 1
        self._seconds += seconds
        if self._seconds >= STRETCH_S and self._count >= STRETCH_STEPS:
            self._end_stretch()

    def leave_out(self) -> None:
        """The step that is under way also does what others do not, such as being traced."""
        self._is_unlike = True

    def switch_to_compiled(self, tell: Callable[[Gain | None], None]) -> None:
        """Measure compiled steps from here on: this one compares compiled code, the next run it.

        Args:
            tell: called after a stretch of them with what that gained; at once, and with None,
                where there was none until now, or another program comes to be compiled meanwhile.
        """
        self.leave_out()
        self._count, self._seconds = 0, 0.0
        before, self._tell = self._tell, None
        if before is not None:
            before(None)
        if self._step_s is None:
            tell(None)
        else:
            self._tell = tell

    def switch_back(self) -> None:
        """Compiled code was wrong and runs no more steps: there is no gain to tell of."""
        self._tell = None

    def pace(self, compiled: bool) -> Pace:
        """Of all entry points: operation by operation, or compiled."""
        found = [one[compiled] for one in self.paces]
        return Pace(sum(one.steps for one in found), math.fsum(one.seconds for one in found))

    def _end_stretch(self) -> None:
        before_s, self._step_s = self._step_s, self._seconds / self._count
        self._count, self._seconds = 0, 0.0
        if self._tell is not None and before_s is not None:
            tell, self._tell = self._tell, None
            tell(Gain(before_s, self._step_s))


TIMES = 12.0
"""Compiling takes so many times as much of a processor as capturing, at least: 12 to 45 times
(measured), where this machine has compiled nothing yet."""
COMPILING = "seconds of compiling by those of capturing"

NEARLY_ALL = 0.95
"""The share of a step from which on what can become faster is too little."""

_FEW = 2  # batches, by which one knows how long they take


class Payback:
    """Says whether compiling a program pays; once it did, it does.

    Args:
        trainer: whose run it is part of; None: of one whose end nobody knows.
        captured_s: processor seconds that capturing the program took, which other processes do not
            make longer.
        in_steps_s: how long its steps took so far, without building and audits.

    Attributes:
        pays: what was said last.
        compiling_s: how long compiling takes where a core is free, by what it took before.
        fixed: the share of a run that stays as it is, as it was given last.
    """

    def __init__(
        self, trainer: pl.Trainer | None, captured_s: float, in_steps_s: Callable[[], float]
    ) -> None:
        before = measured_before(COMPILING)
        self.compiling_s = (statistics.median(before) if before else TIMES) * captured_s
        self._trainer, self._in_steps_s = trainer, in_steps_s
        self.pays, self.fixed = False, 0.0
        self._first: tuple[float, float] | None = None  # seconds in its steps, and batches by then

    def __call__(self, fixed: float) -> bool:
        """Whether compiling may begin; asked at each step until it has (3 µs).

        Args:
            fixed: the share of a run (0 to 1) that stays as it is.
        """
        self.fixed = fixed
        if not self.pays and self.can_gain:
            self.pays = (1 - fixed) * self._left_s() >= self.compiling_s
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
