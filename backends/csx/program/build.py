"""Build a program: trace the entry points, describe them, load them, bind them to their tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from time import perf_counter, thread_time
from typing import Any

import torch.utils._pytree as pytree

from fulgurite.backends.csx.capture import (
    CapturedStep,
    Scope,
    capture,
    result_of,
    run_as_lightning,
    undo_on_failure,
)
from fulgurite.backends.csx.compile.fabric import Fabric, Loaded, Shown, Wanted
from fulgurite.backends.csx.compile.store.measured import note_measured
from fulgurite.backends.csx.config import CSXBackend
from fulgurite.backends.csx.contract import Access, valueless
from fulgurite.backends.csx.costs.build_record import BuildRecord
from fulgurite.backends.csx.diagnostics.trace_errors import StateChanged
from fulgurite.backends.csx.graph.votes import votes_of
from fulgurite.backends.csx.objects import pass_through_values
from fulgurite.backends.csx.program.announcements import (
    announce,
    building,
    recording_for_report,
    say_compiled,
    say_threads,
    script,
    show_progress,
    shown,
)
from fulgurite.backends.csx.program.description import Cost, Program, make_program
from fulgurite.backends.csx.program.executable import Executable
from fulgurite.backends.csx.program.guards import Conditions, Guards, ParamGroups, mode_of
from fulgurite.backends.csx.program.offline import BuiltOnly
from fulgurite.backends.csx.program.speed import (
    CAPTURE,
    COMPILE,
    COMPILING,
    Gain,
    Payback,
    Speed,
    profiled,
    profiler_of,
)
from fulgurite.backends.patches import tracing
from fulgurite.backends.runtime import interrupted_once, young_alone

EntryPoints = dict[str, Callable[[Any], Any]]
"""Lightning's own code for each entry point by its name; the one that ends a step is the last."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BoundProgram:
    """A program that is loaded, and bound to the tensors that it works on."""

    guards: Guards  # say whether it fits a batch
    entries: dict[str, Executable]
    never: str = ""  # why it is not compiled, where that is not to be


@dataclass(frozen=True, slots=True, kw_only=True)
class Builder:
    """Builds the programs of one stage."""

    stage: str  # its name in messages
    scope: Scope  # what the step works on
    backend: CSXBackend
    fabric: Fabric
    speed: Speed  # of its steps
    programs: list[Program] = field(default_factory=list)  # descriptions of those built so far
    changes: dict[tuple[int, str], Access] = field(default_factory=dict)  # scalars that they keep

    @building()
    @young_alone()
    def build(
        self,
        entries: EntryPoints,
        batch: Any,
        conditions: Callable[[], Conditions],
        groups: ParamGroups,
        reason: str = "",
        never: str = "",
    ) -> BoundProgram:
        """Build a program for a batch.

        Args:
            entries: the code of its entry points.
            batch: the first that it is for.
            conditions: reads those that hold now.
            groups: the optimizers' param groups.
            reason: why those that there are do not fit.
            never: why it is not compiled; such a one runs once, and is not announced.

        Raises:
            TraceError: the step is not static; all is as before.
            BuiltOnly: the backend asks for no more; all is as before.
        """
        scope, before = self.scope, {one: one.training for one in self.scope.module.modules()}
        began, cpu_s = perf_counter(), thread_time()
        self.speed.leave_out()  # which this step would tell nothing of
        profiler = profiler_of(scope.trainer)
        recording = recording_for_report(self.stage, self.backend)
        with interrupted_once(), undo_on_failure(scope), recording as record:
            with tracing():
                new_state = scope.make_optimizer_state()
                captured = profiled(profiler, CAPTURE, self._capture)(entries, batch)
                live = [tensor for one in captured.values() for tensor in one.state_tensors()]
                # else checkpoints had state of parameters that the step leaves alone
                for one in new_state:
                    one.forget_unused(live)
            if changed := [one for one, trains in before.items() if one.training != trains]:
                raise StateChanged(
                    f"The step put {type(changed[0]).__name__} into {mode_of(changed[0])} mode,"
                    " which the program would not do again.",
                    remedy="set the mode before the step, in a hook such as on_train_epoch_start",
                )
            program = make_program(self.stage, captured)
            captured_s, cpu_s = perf_counter() - began, thread_time() - cpu_s
            payback = Payback(scope.trainer, cpu_s, lambda: self.speed.alike_s)
            load = profiled(profiler, COMPILE, self._load)
            loads = load(program, captured, payback, never)
            cost = _cost(began, captured_s, cpu_s, loads.values(), None if never else payback)
            program = replace(program, cost=cost, reason=reason)
            self._tell(program, [*loads.values()], record, bool(never))
            if self.backend.only_builds:
                raise BuiltOnly(_without_values(captured, batch))  # inside: all is put back
        every = [one for step in captured.values() for one in (step, *_firsts(step))]
        guards = Guards(every, conditions(), scope, groups)
        if self.backend.retrace_every_iteration:
            guards.batch.read.clear()  # what is made of them is compared
        executables = _executables(self, captured, loads, entries)
        return BoundProgram(guards=guards, entries=executables, never=never)

    def run_without(self, entries: EntryPoints, entry: str, batch: Any) -> Any:
        """Run an entry point's code as Lightning does; no program is built for the batch."""
        began = perf_counter()
        result = run_as_lightning(self.scope, entries[entry], batch, self.changes.values())
        self.speed.add(perf_counter() - began)
        return result

    def _capture(self, entries: EntryPoints, batch: Any) -> dict[str, CapturedStep]:
        captured: dict[str, CapturedStep] = {}
        for name, run in entries.items():
            _undo_changes(captured)  # which happen once, not once for each entry point
            captured[name] = capture(self.scope, run, batch)
            for one in captured[name].changes:
                self.changes[id(one.module), one.name] = one
        # before the stage's first step all processes are here. A program for another shape of batch
        # one of them may build alone, and would wait for the others
        if not self.programs:
            self.scope.compare(self.stage, captured)
        return captured

    def _tell(
        self, program: Program, loads: list[Loaded], record: BuildRecord | None, runs_once: bool
    ) -> None:
        """Keep what a program is, and say it, unless it runs once."""
        if runs_once:
            return
        self.programs.append(program)
        announce(self.scope.trainer, self.fabric, self.backend, program, loads, record)
        if loads and self.stage == "training" and len(self.programs) == 1:
            loads[-1].threads.tell = functools.partial(say_threads, self.scope.trainer)
        assert program.cost is not None
        self._tell_later(loads, program.cost)

    def _tell_later(self, loads: list[Loaded], cost: Cost) -> None:
        """Say that the last entry point is compiled, which is done in the background.

        Where there were enough steps until then, it is said some steps later, with what it gained.
        With several programs nobody knows which steps were whose.
        """
        which = f" number {len(self.programs)}" if len(self.programs) > 1 else ""
        say = functools.partial(
            say_compiled, self.scope.trainer, f"{self.stage} program{which}", loads
        )

        def gained(gain: Gain | None) -> None:
            cost.gain = gain if len(self.programs) == 1 else None
            say(cost.first_compiled_step, cost.gain)

        compiling = [load for load in loads if load.compiling]
        hide = show_progress(self.scope.trainer, self.stage, compiling) if compiling else None

        def told() -> None:
            if any(load.compiling for load in loads):
                return
            if hide is not None:
                hide()
            if not all(load.compiled for load in loads):
                cost.compiled_s, cost.first_compiled_step = 0.0, 0
                self.speed.switch_back()
                return say()
            cost.compiled_s = sum(load.seconds for load in loads)
            note_measured(COMPILING, sum(load.cpu_s for load in loads) / cost.capture_cpu_s)
            cost.first_compiled_step = self.speed.steps + 1
            self.speed.switch_to_compiled(gained)

        for load in compiling:
            load.when_settled = told

    def _load(
        self,
        program: Program,
        captured: dict[str, CapturedStep],
        worth: Callable[[float], bool],
        never: str,
    ) -> dict[str, Loaded]:
        if self.backend.validate_only:
            return {}
        what = f"the {self.stage} program, {program.operations} operations"
        trainer, one_of = self.scope.trainer, " ({})" if len(captured) > 1 else ""

        def telling(entry: str) -> Shown:
            return lambda doing: shown(trainer, f"{doing} {what}{one_of.format(entry)}")

        # the sanity check comes first, but the training's program is the one that is waited for
        urgent = trainer is None or not trainer.sanity_checking
        whose = f"{type(self.scope.module).__name__} of {script()}: {what}"
        return {
            name: self.fabric.load(
                one.graph,
                telling(name),
                Wanted(urgent, worth, votes_of(one.outputs.calls), never, whose),
            )
            for name, one in captured.items()
        }


def _executables(
    builder: Builder,
    captured: dict[str, CapturedStep],
    loads: dict[str, Loaded],
    entries: EntryPoints,
) -> dict[str, Executable]:
    """The entry points, each with the steps that make state, which run operation by operation."""
    fabric, once = builder.fabric, Wanted(never="it runs once")
    of_all = fabric, builder.scope, builder.speed
    made: dict[str, Executable] = {}
    for name, step in captured.items():
        made[name] = Executable(step, loads[name], *of_all)
        for first in step.births:
            loaded = fabric.load(first.captured.graph, lambda doing: nullcontext(), once)
            executable = Executable(first.captured, loaded, *of_all)
            executable.filled.append(first.is_due.fill)
            made[name].firsts.append((first.is_due, executable))
    return made


def _firsts(captured: CapturedStep) -> list[CapturedStep]:
    return [one.captured for one in captured.births]


def _undo_changes(captured: dict[str, CapturedStep]) -> None:
    for change in [change for one in captured.values() for change in one.changes]:
        change.undo()


def _cost(
    began: float,
    captured_s: float,
    capture_cpu_s: float,
    loads: Collection[Loaded],
    payback: Payback | None,
) -> Cost:
    """What a program took that is built now."""
    return Cost(
        began=began,
        captured_s=captured_s,
        capture_cpu_s=capture_cpu_s,
        compiled_s=sum(load.seconds for load in loads if load.built),
        loaded_s=sum(load.seconds for load in loads if load.compiled and not load.built),
        waited_s=perf_counter() - began,
        payback=payback,
    )


def _without_values(captured: dict[str, CapturedStep], batch: Any) -> Any:
    """The result of a step that is not run."""
    [*_, last] = captured.values()
    nodes = pytree.tree_leaves(last.graph.runs.module.graph.output_node().args[0])
    passed = pass_through_values(last.outputs.passed, batch, batch, lambda name: 0)
    return result_of(last.outputs)([*[valueless(node.meta["val"]) for node in nodes], *passed])
