"""The step of one stage as a function: traced and compiled on its first batch, then only fed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from torch import Tensor

from fulgurite.backends.csx.capture import (
    Scope,
    begin_step,
    can_run,
    retrace,
)
from fulgurite.backends.csx.compile.fabric import Fabric
from fulgurite.backends.csx.config import CSXBackend
from fulgurite.backends.csx.diagnostics.trace_errors import TraceError
from fulgurite.backends.csx.hyperparams.scheduled_numbers import show_all
from fulgurite.backends.csx.objects import (
    BatchObjects,
    Path,
    pass_through_values,
    without_added_keys,
)
from fulgurite.backends.csx.program.audit import Audits, Budget
from fulgurite.backends.csx.program.build import BoundProgram, Builder, EntryPoints
from fulgurite.backends.csx.program.description import STEP
from fulgurite.backends.csx.program.executable import Executable, Results
from fulgurite.backends.csx.program.selection import Selection
from fulgurite.backends.csx.program.speed import (
    CAPTURE,
    HOST,
    PROGRAM,
    Speed,
    profiled,
    profiler_of,
)
from fulgurite.backends.program_scheduler import program_schedulers
from fulgurite.backends.runtime import interrupted_once


@dataclass(slots=True)
class HostCode:
    """How often code of the user's ran on the host, which may have changed what steps read.

    Attributes:
        ends: whether the next step is the last of an epoch.
        last: whether it is the run's last, as far as that is known before it.
        hooks: names of those that the user wrote and that run between steps.
        firsts: how often a program ran for the first time, and may have changed what others read.
        filler: the latest that put tensors into dicts, lists or objects where it found none.
    """

    runs: int = 0
    ends: bool = False
    last: bool = False
    hooks: frozenset[str] = frozenset()
    firsts: int = 0
    filler: BoundProgram | None = None

    def note_first_run(self, program: BoundProgram, fills_objects: bool) -> None:
        """A program runs for the first time, and may fill dicts, lists or objects."""
        self.firsts += 1
        self.filler = program if fills_objects else self.filler


class StepFunction:
    """One stage's step.

    Args:
        stage: its name in messages.
        scope: what the step works on.
        backend: its options.
        fabric: what runs the programs.
        host_code: tells when the step's scalars are to be compared; None: whoever drives it calls
            ``check_scalars``.
        budget: of the run's audits; None: these are the only ones.

    Attributes:
        gradients: those that programs keep between steps.
        programs: those built so far.
        runs: how many steps were done.
        speed: how long they took, with the building of programs.
    """

    def __init__(
        self,
        stage: str,
        scope: Scope,
        backend: CSXBackend,
        fabric: Fabric,
        host_code: HostCode | None = None,
        budget: Budget | None = None,
    ) -> None:
        self.stage, self.runs, self.speed = stage, 0, (speed := Speed())
        self.gradients = scope.stage_gradients
        self._host_code, self._compared_at = host_code or HostCode(), -1  # runs when compared last
        self._compared_firsts, self._filler = 0, self._host_code.filler  # likewise
        self._scope, self._backend = scope, backend
        audits = self._audits = Audits(stage, scope, budget or Budget())
        builder = self._builder = Builder(
            stage=stage, scope=scope, backend=backend, fabric=fabric, speed=speed
        )
        chosen = self._selection = Selection(stage, scope, backend.max_programs)
        self.programs, self.executables = builder.programs, chosen.executables
        self.audit_all, self.warn_of_unseen = audits.audit_all, audits.warn_of_unseen
        self.why_not_compiled, self.uncompiled = chosen.why_not_compiled, chosen.uncompiled
        self.forget_pruned, self.begin_run = chosen.forget_pruned, chosen.begin_run
        self._latest: BoundProgram | None = None  # the one that ran last
        self._added: list[tuple[Path, Any]] = []  # keys of the batch that programs add
        self._objects, self._rows = BatchObjects(), profiler_of(scope.trainer)

    def __call__(
        self,
        given: Any,
        entries: Callable[[], EntryPoints],
        entry: str = STEP,
        batch_idx: int | None = None,
    ) -> Any:
        """Run the step on a batch.

        Args:
            given: the batch.
            entries: makes Lightning's own code for each entry point; asked when it is traced.
            entry: which of them to run.
            batch_idx: the batch's number, where the step takes it.

        Raises:
            TraceError: the step is not static, or batch or model changed.
            BuiltOnly: the program is built, and the backend asks for no more; nothing has changed.
        """
        began, self._scope.batch_idx = perf_counter(), batch_idx
        try:
            if not self._selection.programs:
                self._scope.refresh()
            self._compare()
            opened, users, written = self._objects.open(given), given, entries
            if opened is not None:
                given, entries = opened.batch, functools.partial(opened.steps, entries)
            # a loader that gives the same dict again gives it with what the step added to it
            batch = without_added_keys(given, self._added) if self._added else given
            program, tensors = self._selection.select(batch)
            if program is None and self._selection.why[1] and can_run(self._scope):
                self.runs += 1
                self._host_code.firsts += 1  # its Python runs
                return self._builder.run_without(written(), entry, users)
            if program is None:
                program, tensors = self._build(entries(), batch)
            elif self._backend.retrace_every_iteration or self._audits.due:
                self._trace_again(program, entry, entries(), batch, tensors)
            self._latest = program
            # run
            results = (executable := program.entries[entry].due()).results
            if results.logs and self._scope.trainer is not None:
                begin_step(self._scope.trainer, results.logs)
            passed = _passed_values(results, batch, given, self._scope, opened)
            as_given = program.guards.batch.tensors(batch) if executable.written else tensors
            run, groups = profiled(self._rows, PROGRAM, executable.run), self._selection.groups
            result, calls, values = run(groups.vector, tensors, as_given, passed)
        except TraceError as error:
            if error.line is not None:
                raise
            raise _with_line(error, self._scope, self.stage) from None
        self.runs += 1
        profiled(self._rows, HOST, _count_and_call)(executable, calls, values, self._scope)
        if opened is not None:  # a batch that is an object: the step set attributes of it
            opened.write_back()
        self.speed.add(perf_counter() - began, executable.paces, executable.loaded.compiled)
        return result

    def _build(self, entries: EntryPoints, batch: Any) -> tuple[BoundProgram, list[Tensor]]:
        """Build a program for a batch; returns the batch's tensors too."""
        scope, chosen = self._scope, self._selection
        show_all(schedulers := program_schedulers(scope.schedulers))
        self._audits.builds()
        program = self._builder.build(entries, batch, chosen.conditions, chosen.groups, *chosen.why)
        executables = list(program.entries.values())
        for executable in executables:
            executable.tell_first_run(functools.partial(self._host_code.note_first_run, program))
        if self._backend.audits and not program.never:
            self._audits.built(executables, self.runs + 1)
        self._added += [place for one in executables for place in one.results.added]
        chosen.add(program)
        chosen.groups.begin(schedulers, program.guards.numbers)
        tensors = program.guards.batch.accept(batch)
        assert tensors is not None
        return program, tensors

    @interrupted_once()
    def _trace_again(
        self, program: BoundProgram, entry: str, entries: EntryPoints, batch: Any, tensors: Any
    ) -> None:
        """Run an entry point's Python again; it must still be the program that was built."""
        executable, run = program.entries[entry], entries[entry]
        batch = program.guards.batch.with_tensors(batch, tensors)
        if self._backend.retrace_every_iteration:
            trace = functools.partial(_follow, executable, run, batch, self._scope, self.stage)
        else:
            self.speed.leave_out()
            trace = functools.partial(self._audits.audit, executable, run, batch, self.runs + 1)
        profiled(self._rows, CAPTURE, trace)()

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """A copied or pickled Trainer has None: programs work on tensors of this one's module."""
        return type(None), ()

    def first_not_finite(self, batch: Any, entry: str = STEP) -> str | None:
        """What was not finite first in the step that ran last (see ``first_bad``), in words."""
        if (program := self._latest) is None:
            return None
        if (opened := self._objects.open(batch)) is not None:
            batch = opened.batch
        tensors = program.guards.batch.accept(without_added_keys(batch, self._added)) or []
        return program.entries[entry].first_not_finite(self._selection.groups.vector, tensors)

    def clear_gradients(self, parameters: set[int], set_to_none: bool) -> None:
        """``zero_grad()`` on the host: so are the gradients that programs keep to themselves.

        Args:
            parameters: whose, by their identity.
            set_to_none: else they are zero.
        """
        known = self._scope.parameters().items()
        if names := frozenset(name for name, p in known if id(p) in parameters):
            self.gradients.clear(names, set_to_none)
            self.gradients.shown = None

    def check_modules(self) -> None:
        """``check_state`` where a module was added, removed or replaced: quick, for every call."""
        if self._selection.modules.is_changed():
            self.check_state()

    def check_state(self) -> None:
        """Verify that modules and tensors are those the programs were built on."""
        self._selection.check_state()
        self.check_scalars(at_an_end=True)

    def check_scalars(self, at_an_end: bool = False) -> None:
        """Compare what host code may have changed with what the programs were built on.

        Args:
            at_an_end: of an epoch, or its beginning: then whatever that takes.
        """
        self._selection.forget_replaced()
        for program in self._selection.programs:
            program.guards.check(self._selection.conditions)
        self._compared_at = self._host_code.runs
        code = self._host_code
        self._audits.wake(at_an_end or code.ends, code.hooks if code.last else frozenset())
        code.ends = code.last = False

    def _compare(self) -> None:
        """Look for what the programs were built on, where something may have changed it.

        A program's first run may; who has looked into a dict or an object then cannot be seen.
        """
        code, selection = self._host_code, self._selection
        if code.filler is not self._filler:
            selection.programs[:] = [one for one in selection.programs if one is code.filler]
        if code.runs != self._compared_at:
            self.check_modules()
            self.check_scalars()
        elif code.firsts != self._compared_firsts:
            for program in selection.programs:
                program.guards.check(selection.conditions)
        self._compared_firsts, self._filler = code.firsts, code.filler


def _passed_values(results: Results, batch: Any, given: Any, scope: Scope, opened: Any) -> Any:
    """What a step only passes on, of this batch; of a batch that is an object, the user's own."""
    if not results.passed:
        return ()
    values = pass_through_values(results.passed, batch, given, scope.asked)
    return values if opened is None else opened.with_users_objects(results.passed, values)


def _follow(
    executable: Executable, run: Callable[[Any], Any], batch: Any, scope: Scope, stage: str
) -> None:
    """Trace a step again whose Python runs on every batch, for the values that it made there."""
    if executable.due() is not executable:
        return  # a step that makes state runs in its place
    assert executable.recording is not None
    now = retrace(scope, run, batch, executable.recording, step=stage)
    executable.follow(now.constants, now.outputs)


def _count_and_call(executable: Executable, calls: Any, values: Any, scope: Scope) -> None:
    """What happens on the host after a step: schedulers count, logs and closures get values."""
    for scheduler, steps in executable.counted:
        scheduler.count_on(steps)
    if calls and executable.results.runs_users_code:
        scope.show_numbers()
    for call, value in zip(calls, values, strict=True):
        call(value)


def _with_line(error: TraceError, scope: Scope, stage: str) -> TraceError:
    """An error with the line that is to blame: one it names, or where the step begins."""
    line = scope.line_naming(error.named) if error.named else None
    return error.replaced(line=line or scope.line_of(f"{stage.split()[0]}_step"))
