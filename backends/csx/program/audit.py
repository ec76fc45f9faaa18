"""Audits: now and then a step is traced again, on the batch that it is about to run on.

A step's Python runs once, and what it read then stays. An audit looks whether it would read, and
do, the same today: on the second batch of each entry point of each program, and after that, as long
as audits take at most ``SHARE`` of the run's time, when host code ran that may have changed
something, on the first batch of an epoch and on its last. Where there is no time for that, the
Python values that the step can reach are compared, which takes microseconds; one that was changed
has the next step looked at all the same, once for each name. All that the second trace did is
undone. Processes that train together look at the same steps: one that has a reason asks the others,
one step before; the run's last step is the same in all of them.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from time import perf_counter
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from lightning.pytorch.profilers import PassThroughProfiler

from fulgurite.backends.csx.capture import (
    FinishedTrace,
    Recording,
    Scope,
    Trace,
    as_first_traced,
    check_results,
    check_same,
    undo_afterwards,
)
from fulgurite.backends.csx.contract import (
    RANDOM,
    FrozenValueWarning,
    explaining_errors,
    note_of_audit,
    retry_with_values,
)
from fulgurite.backends.csx.diagnostics.line_finder import LineFinder
from fulgurite.backends.csx.diagnostics.muted import muted
from fulgurite.backends.csx.diagnostics.trace_errors import (
    GraphChanged,
    LeakedTensor,
    TraceError,
)
from fulgurite.backends.csx.diagnostics.user_lines import UserLine, raised_at
from fulgurite.backends.csx.objects import Change, ReadableState
from fulgurite.backends.csx.program.executable import Executable
from fulgurite.backends.patches import Patch, applied, patched, tracing
from fulgurite.backends.runtime import young_alone

SHARE = 0.02
"""The part of a run's time that audits may take, besides those of the second batches."""

COMPARING = 0.01
"""The part of a run's time that comparing Python values may take."""

AT_EDGES = 0.1
"""The part where epochs begin and end, if it takes ``MUCH_S`` or more each time."""

MUCH_S = 0.02
"""Seconds: of a replay buffer, say; else it takes less than a millisecond (measured)."""

AT_FIRST_S = 0.05
"""What comparisons may take before they are rare: short runs, too, are seen to change at once."""

_HOOKS_REMEDY = (
    "register hooks in configure_model(), and leave them; what is to change is a buffer: lambda g:"
    " g * self.k, where on_train_epoch_start fills self.k; in a module's hook, torch.where(self.k,"
    " changed, out)"
)
_NAMED = 3  # values that changed, in a message
_NOTHING = contextlib.nullcontext()

EVERY_STEP = False
"""Whether every step is looked at again, whatever it takes; for tests."""

_Again = Callable[[Recording, bool], Trace]
"""Makes a second trace, to be compared with a recording; the bool leaves out updates."""


class Budget:
    """The time that the audits of one run take.

    Attributes:
        began: when the run began, by ``time.perf_counter``.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Begin a run."""
        self.began, self._spent = perf_counter(), 0.0

    def allows(self, seconds: float) -> bool:
        """Whether an audit that takes so long would leave all of them under their share."""
        return self._spent + seconds <= SHARE * (perf_counter() - self.began)

    def spend(self, seconds: float) -> None:
        """Note what an audit took."""
        self._spent += seconds


class _Values:
    """Comparisons of the Python values that a step may read, each with those of the last.

    Attributes:
        times: how often a value was another one, by its name.
        noticed: what was another value since the last audit.
    """

    def __init__(self) -> None:
        self.times, self.noticed = Counter[str](), list[str]()
        self._again_at = self._edge_at = 0.0  # not before, by time.perf_counter
        self._took_s = 0.0  # all so far

    def may_compare(self, at_edge: bool) -> bool:
        """Whether it is time for one; there is more of it where epochs begin and end."""
        not_before = self._edge_at if at_edge else self._again_at
        return self._took_s < AT_FIRST_S or perf_counter() >= not_before

    def compare(self, readable: ReadableState) -> bool:
        """Note what is another value now; whether one is news.

        The 1st, 2nd, 4th, 8th change of a name is: one that changes at every step, as a counter
        does, shall not have every step audited.
        """
        began = perf_counter()
        changed = readable.changed()
        self.times.update(changed)
        self.noticed += changed
        took_s = perf_counter() - began
        self._took_s += took_s
        self._again_at = began + took_s / COMPARING  # so rarely as that
        self._edge_at = began + (took_s / AT_EDGES if took_s >= MUCH_S else 0.0)
        return any((times := self.times[name]) & (times - 1) == 0 for name in changed)


class Audits:
    """The audits of one stage's step.

    Args:
        stage: its name in messages.
        scope: what the step works on.
        budget: of the run.

    Attributes:
        due: whether the next step is to be looked at again.
    """

    def __init__(self, stage: str, scope: Scope, budget: Budget) -> None:
        self._stage, self._scope, self._budget = stage, scope, budget
        # to be looked at, and whether code is checked then; programs are forgotten as they go
        self._new = WeakKeyDictionary[Executable, bool]()
        self._same_at = WeakKeyDictionary[Executable, int]()  # the step: they were last the same
        self._given_up = WeakSet[Executable]()
        self._takes_s = 0.0
        self._values = _Values()
        self._looked_in = -1  # epoch
        self._readable: ReadableState | None = None  # as the last audit found it
        self.due = False

    def builds(self) -> None:
        """A program is about to be built: what changed till now is no doing of its trace."""
        if self._readable is not None and self._values.compare(self._readable):
            self.audit_all(check=False)

    def built(self, executable: list[Executable], step: int) -> None:
        """Entry points are new: each is looked at again the next time that it runs."""
        for one in executable:
            self._same_at[one] = step
            self._new[one] = False
        if self._readable is not None:
            self._readable.changed()  # by the step's own code, which ran to be traced
        self.due = True

    def wake(self, compare: bool, last_hooks: Collection[str]) -> None:
        """Something may have changed: look at the next step, if there is time or reason for it.

        Args:
            compare: Python values, though they were compared a short while ago: at an edge.
            last_hooks: where the next step is the run's last: those that run between steps.
        """
        if all(one in self._new for one in self._same_at):  # all will be looked at anyway
            return
        if self._readable is None or self._budget.allows(self._takes_s):
            if last_hooks or not self._scope.ask_for_audit():
                self.due = True
            return
        # nothing comes after the run's last step by which a change would be found: it is looked at
        # whatever that takes, unless no hook ran since this epoch's audit but those of epochs
        if any(self._epoch != self._looked_in or "epoch" not in hook for hook in last_hooks):
            self.audit_all(check=False)
            return
        may_compare = last_hooks or self._values.may_compare(compare)
        names_new = may_compare and self._values.compare(self._readable)
        if names_new and (last_hooks or not self._scope.ask_for_audit()):
            self.audit_all(check=False)

    def warn_of_unseen(self) -> None:
        """Where a run ends early: warn of values that changed, for the first time, unseen."""
        if self._readable is not None and not self._new:
            names = [name for name in self._readable.changed() if not self._values.times[name]]
            if names:
                step = max(self._same_at.values())
                _warn(_UNSEEN.format(names=_some(names), stage=self._stage, step=step))

    def audit_all(self, check: bool = True) -> None:
        """Have every entry point looked at the next time that it runs, whatever that takes.

        Args:
            check: compiled code, too.
        """
        self._new.update(dict.fromkeys(self._same_at, check))
        self.due = True

    @property
    def _epoch(self) -> int:
        return 0 if self._scope.trainer is None else self._scope.trainer.current_epoch

    def audit(
        self, executable: Executable, run: Callable[[Any], Any], batch: Any, step: int
    ) -> None:
        """Trace an entry point again.

        Args:
            executable: the entry point.
            run: its code.
            batch: in the traced layout.
            step: the number of the step that is about to run, from 1.

        Raises:
            GraphChanged: it is another program now.
            TraceError: it is no longer static.
        """
        if executable.due() is not executable:
            return  # a step that makes state runs in its place
        if executable in self._new or EVERY_STEP or self._budget.allows(self._takes_s):
            began = perf_counter()
            self._scope.note_audit()
            if executable not in self._given_up:
                self._look(executable, functools.partial(Trace, self._scope, run, batch), step)
            self._new.pop(executable, None)
            self._readable, self._looked_in = self._scope.readable(), self._epoch
            self._values.noticed.clear()
            self._takes_s = perf_counter() - began
            self._budget.spend(self._takes_s)
        self.due = bool(self._new) or EVERY_STEP

    def _look(self, executable: Executable, again: _Again, step: int) -> None:
        first = executable.recording
        assert first is not None
        executable.check()  # another tensor than the program's is its own error
        when = f"between step {self._same_at[executable]} and step {step}"
        try:
            changes = self._changes(first, again)
        except LeakedTensor as error:
            if not error.is_constant:  # of constants alone it is a cache's, which is no misuse
                raise self._dated(error, when) from None
            self._give_up(executable, error, error.line)
        except TraceError as error:
            raise self._dated(error, when) from None
        except Exception as error:
            self._give_up(executable, error, raised_at(error))
        else:
            self._same_at[executable] = step
            check = executable.loaded.check_again
            if check is not None and self._new.get(executable, True):
                check()
            if changes:
                self._tell(first, again, changes)

    def _dated(self, error: TraceError, when: str) -> TraceError:
        """An error of an audit, which says when, and what changed on the host."""
        text = f"{error.what}\n  changed: {when}; the steps before it ran as the first one"
        found = [*self._values.noticed, *(self._readable.changed() if self._readable else ())]
        followed = {one.name for one in self._scope.counts.slots}  # by the program
        if found := [name for name in dict.fromkeys(found) if name not in followed]:
            text += f"\n  on the host: {_some(found)}"
        of_hooks = any(name.endswith(" hooks") for name in found)
        return error.replaced(what=text, line=error.line, remedy=_HOOKS_REMEDY if of_hooks else "")

    def _changes(self, first: Recording, again: _Again) -> list[Change]:
        """The Python values that the step changes, where it is the same program."""
        # an outline leaves optimizers' updates out, half of a trace
        if first.outline is not None:
            with contextlib.suppress(TraceError):  # the whole trace says what it is
                return self._trace(first.outline, again)
        return self._trace(first, again)

    def _trace(
        self, first: Recording, again: _Again, finder: LineFinder | None = None
    ) -> list[Change]:
        """Trace and compare; returns the Python values that it changed, which are put back."""
        with tracing(), young_alone(), _silence(self._scope), explaining_errors():
            return retry_with_values(
                lambda: self._trace_once(first, again, finder), contextlib.nullcontext
            )

    def _trace_once(
        self, first: Recording, again: _Again, finder: LineFinder | None
    ) -> list[Change]:
        with as_first_traced(first), undo_afterwards(self._scope) as state:
            trace = again(first, first.is_outline)
            with finder.watching(lambda: list(state.changes())) if finder else _NOTHING:
                module = trace.trace()
            changes = list(state.changes())
            if finder is None:
                now = FinishedTrace(trace, module).make_recording()
                try:
                    check_same(self._stage, first, now)
                    check_results(self._stage, first, now)
                except GraphChanged as error:
                    if draws := [change.name for change in changes if change.is_draw]:
                        remedy = f"{draws[0]} drew other numbers: use {RANDOM}"
                        raise error.replaced(line=error.line, remedy=remedy) from None
                    raise
        return changes

    def _tell(self, first: Recording, again: _Again, changes: list[Change]) -> None:
        """Note each Python value that the step changes every time it runs, with its line."""
        # in a trace of its own, for the finder compares everything after every line
        finder = LineFinder()
        self._trace(first, again, finder)
        for change in changes:
            line = finder.found.get(change.name) or self._scope.line_of(f"{self._stage}_step")
            if line is not None:
                note_of_audit(change.name, str(change), line, change.is_draw)

    def _give_up(self, executable: Executable, error: Exception, line: UserLine | None) -> None:
        self._given_up.add(executable)
        where = "" if line is None else f" (at {line})"
        text = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        _warn(_GIVEN_UP.format(stage=self._stage, text=f"{text}{where}"))


_GIVEN_UP = (
    "The {stage} step could not be traced again to see that it still is the program that was built:"
    " {text}. The run goes on with the program; what changes in the step's Python from here on is"
    " not seen. backend('CSX', audit=False) does not look."
)
_UNSEEN = (
    "{names} changed on the host since the {stage} step was looked at last, as step {step} began,"
    " and the run ended before it was again: where the step reads that, steps since kept the"
    " earlier value. Use a buffer that a host hook sets, or a tensor of the batch."
)


def _some(names: list[str]) -> str:
    """The first of some names, and how many others there are."""
    more = f", and {len(names) - _NAMED} others" if len(names) > _NAMED else ""
    return f"{', '.join(names[:_NAMED])}{more}"


def _warn(text: str) -> None:
    warnings.warn(text, FrozenValueWarning, stacklevel=3)


@contextlib.contextmanager
def _silence(scope: Scope) -> Iterator[None]:
    """Let what this thread prints, logs and warns go nowhere; it was said the first time."""
    profiler = [] if scope.trainer is None else [(scope.trainer, "profiler", PassThroughProfiler())]
    ignore: Any = ("ignore", None, Warning, None, 0)
    filters = warnings.filters
    filters.insert(0, ignore)  # type: ignore[attr-defined]  # without forgetting what was shown
    try:
        with muted("stdout", "stderr"), applied(_NO_LOGS), patched(profiler):
            yield
    finally:
        filters.remove(ignore)  # type: ignore[attr-defined]


_NO_LOGS = (
    Patch(
        owner=logging.Logger,
        name="isEnabledFor",
        replacement=lambda logger, level: False,
        why="what a second trace logs was logged by the first",
        checked="Python 3.11",
    ),
)
