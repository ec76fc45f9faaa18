"""How fast the steps of a stage are, and what compiling in the background gained.

Means of *stretches*, which are some steps and some time long: beside other processes a long step is
held up every time and a short one now and then, so that a median would tell of the short one alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

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
        before, after = _in_ms(self.before_s), _in_ms(self.after_s)
        return f"{after} ms a batch, {before} before ({self.times:.1f} times as fast)"


def _in_ms(seconds: float) -> str:
    """Two digits of it, or all before the point."""
    milliseconds = seconds * 1e3
    digits = 0 if milliseconds >= 9.95 else 1 if milliseconds >= 0.995 else 2
    return f"{milliseconds:,.{digits}f}"


class Speed:
    """How long the steps of a stage took.

    Attributes:
        steps: how many there were.
        in_steps_s: how long all of them took.
        alike_s: the same, without those that did what others do not.
        alike_steps: how many these are.
        alike_waits_s: how long these waited for other processes.
        waits: for other processes, in all steps.
    """

    def __init__(self) -> None:
        self.steps, self.in_steps_s, self.alike_s = 0, 0.0, 0.0
        self.alike_steps, self.alike_waits_s, self.waits = 0, 0.0, Waits()
        self._waited_s = 0.0  # by the latest step's end
        self._count, self._seconds = 0, 0.0  # of the stretch that is under way
        self._is_unlike = False
        self._step_s: float | None = None  # in the latest stretch
        self._tell: Callable[[Gain], None] | None = None

    def add(self, seconds: float) -> None:
        """Note a step; every step does."""
        self.steps += 1
        self.in_steps_s += seconds
        waited_s, self._waited_s = self.waits.seconds - self._waited_s, self.waits.seconds
        if self._is_unlike:
            self._is_unlike = False
            return
        self.alike_s += seconds
        self.alike_steps += 1
        self.alike_waits_s += waited_s
        self._count += 1
        self._seconds += seconds
        if self._seconds >= STRETCH_S and self._count >= STRETCH_STEPS:
            self._end_stretch()

    def leave_out(self) -> None:
        """The step that is under way also does what others do not, such as being traced."""
        self._is_unlike = True

    def taken_over(self, tell: Callable[[Gain], None]) -> bool:
        """Compiled code is compared in this step, and does those to come.

        Args:
            tell: called after a stretch of them with what that gained.

        Returns:
            Whether it will be: there was a stretch until now.
        """
        self.leave_out()
        self._count, self._seconds = 0, 0.0
        if self._step_s is None:
            return False
        self._tell = tell
        return True

    def given_back(self) -> None:
        """Compiled code, which was wrong, does no more of them."""
        self._tell = None

    def _end_stretch(self) -> None:
        before_s, self._step_s = self._step_s, self._seconds / self._count
        self._count, self._seconds = 0, 0.0
        if self._tell is not None and before_s is not None:
            tell, self._tell = self._tell, None
            tell(Gain(before_s, self._step_s))
