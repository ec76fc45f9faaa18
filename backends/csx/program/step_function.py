"""The step of one stage as a function: traced and compiled on its first batch, then only fed.

batch -> which program? (shapes, requires_grad, param groups, guards)
      -> first time: capture -> passes -> load
      -> run: state inputs, gradients, numbers, batch
      -> outputs into attributes, host calls done again, the step's result
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from operator import attrgetter, is_
from typing import Any

import torch.utils._pytree as pytree
from torch import Tensor

from fulgurite.backends.csx.capture.batch_changes import Path, without
from fulgurite.backends.csx.capture.batch_spec import BatchSpec
from fulgurite.backends.csx.capture.captured import Captured
from fulgurite.backends.csx.capture.logs import begin_step
from fulgurite.backends.csx.capture.outputs import passed_on, result_of
from fulgurite.backends.csx.capture.retrace import retrace
from fulgurite.backends.csx.capture.scope import Scope, undone_on_failure
from fulgurite.backends.csx.capture.trace import capture
from fulgurite.backends.csx.capture.trainer_state import Answers, hold
from fulgurite.backends.csx.compile.fabric import HostFabric, Loaded
from fulgurite.backends.csx.config import CSXBackend
from fulgurite.backends.csx.contract.attributes import FrozenScalars
from fulgurite.backends.csx.contract.leaks import valueless
from fulgurite.backends.csx.contract.watched import EPOCH, INDEX
from fulgurite.backends.csx.diagnostics.errors import InputChanged, StateChanged, TraceError
from fulgurite.backends.csx.diagnostics.user_lines import UserLine
from fulgurite.backends.csx.hyperparams.schedules import ShownNumbers, of_computed, show_all
from fulgurite.backends.csx.hyperparams.slots import (
    NumberSlot,
    are_fixed,
    as_vector,
    group_options,
    read_numbers,
    unused_guards,
)
from fulgurite.backends.csx.hyperparams.traced_float import Guard
from fulgurite.backends.csx.program.audit import Audits, Budget
from fulgurite.backends.csx.program.conditions import Conditions
from fulgurite.backends.csx.program.executable import Executable
from fulgurite.backends.csx.program.offline import BuiltOnly
from fulgurite.backends.csx.program.summary import Program, make_program
from fulgurite.backends.csx.program.waiting import shown
from fulgurite.backends.csx.state.first_update import DeferredState
from fulgurite.backends.csx.state.gradients import Handover, broken_gradient
from fulgurite.backends.schedules import ProgramScheduler, program_schedulers

STEP, ACCUMULATE = "step", "accumulate"
EntryPoints = Callable[[], dict[str, Callable[[Any], Any]]]
"""Makes Lightning's own code for each entry point, asked when it is traced."""
_requires_grad, _training = attrgetter("requires_grad"), attrgetter("training")


@dataclass(slots=True)
class Built:
    """A program and its entry points, ready to run."""

    program: Program
    conditions: Conditions
    batch: BatchSpec
    numbers: tuple[NumberSlot, ...]
    guards: tuple[Guard, ...]
    ready: dict[str, Executable]
    scalars: FrozenScalars
    computed_guards: tuple[Guard, ...]  # of numbers that the program computes
    states: list[Any]  # the optimizers': kept, so that no identity is used twice
    state_sizes: list[int]
    gradients: list[Handover]
    answers: Answers  # what the step asked of the trainer's state
    held_for: list[float] | None = None  # numbers for which the guards were found to hold


@dataclass(slots=True)
class HostCode:
    """How often code of the user's ran on the host, which may have changed what steps read.

    ``ends`` is whether the next step is the last of an epoch.
    """

    runs: int = 0
    ends: bool = False


class StepFunction:
    """One stage's step.

    Args:
        stage: its name in messages.
        scope: what the step works on.
        backend: its options.
        fabric: what runs the programs.
        announce: called with each program and how its entry points were loaded, none of them
            where the backend only validates.
        settings: Python values that a program is built on (the accumulation window).
        host_code: tells when the step's scalars are to be compared; None: whoever drives it calls
            ``check_scalars``.
        budget: of the run's audits; None: these are the only ones.

    Attributes:
        programs: those built so far.
    """

    def __init__(
        self,
        stage: str,
        scope: Scope,
        backend: CSXBackend,
        fabric: HostFabric,
        announce: Callable[[Program, list[Loaded]], None],
        settings: Callable[[], tuple[Any, ...]] = tuple,
        host_code: HostCode | None = None,
        budget: Budget | None = None,
    ) -> None:
        self.stage, self.runs = stage, 0
        self._host_code = host_code or HostCode()
        self._compared_at = -1  # runs of host code when scalars were last compared
        self._scope, self._backend, self._fabric = scope, backend, fabric
        self._audits = Audits(stage, scope, budget or Budget())
        self._announce, self._settings = announce, settings
        self.programs: list[Program] = []
        self._built: list[Built] = []
        self._added: list[tuple[Path, Any]] = []  # keys of the batch that programs add
        self._latest: Built | None = None  # the one that ran last
        self._gradients: dict[str, Tensor] = {}
        self._group_values: list[Any] = []  # of all param groups, when they were last read
        self._options: tuple[Any, ...] = ()
        self._numbers: list[float] = []
        self._numbers_are_read = False
        self._vector: Tensor | None = None
        self._schedulers: list[ProgramScheduler] = []
        self._shown: ShownNumbers | None = None
        self._collect_conditions()

    @property
    def deferred(self) -> list[DeferredState]:
        """Optimizer state that waits for the first gradient."""
        return self._scope.deferred

    def __call__(
        self, batch: Any, entries: EntryPoints, entry: str = STEP, batch_idx: int | None = None
    ) -> Any:
        """Run the step on a batch.

        Args:
            batch: the batch.
            entries: makes Lightning's own code for each entry point.
            entry: which of them to run.
            batch_idx: its number, where the step passes that on.

        Raises:
            TraceError: the step is not static, or batch or model changed.
            BuiltOnly: the program is built, and the backend asks for no more; nothing has changed.
        """
        try:
            if not self._built:
                self._scope.refresh()
                self._schedulers = program_schedulers(self._scope.schedulers)
            if self._host_code.runs != self._compared_at:
                if not all(map(is_, map(dict.get, *self._places), self._descendants)):
                    self.check_state()  # a hook replaced a module
                self.check_scalars()
            conditions = self._conditions()
            whole = batch
            if self._added:
                batch = without(batch, self._added)
            built, tensors = self._select(conditions, batch)
            if built is None:
                show_all(self._schedulers)
                built = self._build(conditions, batch, entries())
                accepted = built.batch.accept(batch)
                assert accepted is not None
                tensors = accepted
                self._update_numbers(built)
            elif self._backend.retrace_every_iteration:
                self._retrace(
                    built, entry, entries()[entry], built.batch.with_tensors(batch, tensors)
                )
            elif self._audits.due:
                self._audits.look(
                    built.ready[entry],
                    entries()[entry],
                    built.batch.with_tensors(batch, tensors),
                    step=self.runs + 1,
                    clears=self._clears_gradients(entry, built.ready),
                )
            ready = built.ready[entry]
            if built is not self._latest:
                self._switch_to(built)
            given = built.batch.tensors(batch) if ready.writes_batch else tensors
            if ready.logs and self._scope.trainer is not None:
                begin_step(self._scope.trainer, ready.logs)
            passed: Sequence[Any] = ()
            if ready.passed:
                passed = passed_on(ready.passed, batch, whole, self._arguments(batch_idx))
            result, calls, values = ready.run(self._vector, tensors, given, passed)
        except TraceError as error:
            if error.line is not None:
                raise
            line = self._scope.line_naming(error.named) if error.named else None
            placed = type(error)(error.what, line=line or self._line(), remedy=error.remedy)
            for note in getattr(error, "__notes__", ()):
                placed.add_note(note)
            raise placed from None
        self.runs += 1
        for scheduler, steps in ready.counted:
            scheduler.count_on(steps)
        if calls:
            if ready.runs_users_code:
                self._scope.show_numbers()
            for call, value in zip(calls, values, strict=True):
                call(value)
        return result

    def _switch_to(self, built: Built) -> None:
        """Another program ran before: what it left in ``p.grad`` is not this one's."""
        self._latest = built
        for ready in built.ready.values():
            ready.tells_unkept = True

    def _retrace(self, built: Built, entry: str, run: Callable[[Any], Any], batch: Any) -> None:
        """Run an entry point's Python again; it must still be the program that was built."""
        ready = built.ready[entry]
        assert ready.recording is not None
        clears = self._clears_gradients(entry, built.ready)
        now = retrace(
            self._scope, run, batch, ready.recording, step=self.stage, clears_gradients=clears
        )
        ready.follow(now.constants, now.outputs)

    def _arguments(self, batch_idx: int | None) -> dict[str, Any]:
        """The arguments of hooks in the step that it may pass on."""
        trainer = self._scope.trainer
        return {INDEX: batch_idx, EPOCH: None if trainer is None else trainer.current_epoch}

    def _line(self) -> UserLine | None:
        """Where the user's step begins: the line of errors that no other line is to blame for."""
        return self._scope.line_of(f"{self.stage.partition(' ')[0]}_step")

    def clear_gradients(self, parameters: set[int]) -> None:
        """``zero_grad()`` on the host: gradients that the programs keep to themselves become zero.

        Args:
            parameters: whose, by their identity.
        """
        for built in self._built:
            for ready in built.ready.values():
                ready.tells_unkept = True
        for name, p in self._scope.parameters().items():
            kept = self._gradients.get(f"{name}.grad")
            if kept is not None and id(p) in parameters:
                kept.zero_()

    def check_modules(self) -> None:
        """``check_state`` where a module was added, removed or replaced: quick, for every call."""
        now = [child for children in self._children for child in children.values()]
        if len(now) != len(self._descendants) or not all(map(is_, now, self._descendants)):
            self.check_state()

    def check_state(self) -> None:
        """Verify that modules and tensors are those the programs were built on."""
        before, now = self._modules, list(self._scope.module.modules())
        changed = [a for a, b in zip(before, now, strict=False) if a is not b]
        if self._built and (changed or len(before) != len(now)):
            name = type(changed[0]).__name__ if changed else "one more or less"
            raise StateChanged(
                f"The modules of the model changed after the {self.stage} program was built"
                f" ({name}).",
                remedy="replace modules before the first step, for instance in setup() or"
                " configure_model()",
                line=self._scope.line_naming(self._changed_children(), stored=True),
            )
        self._collect_conditions()
        for built in self._built:
            for ready in built.ready.values():
                ready.check()
        self.check_scalars(at_an_end=True)

    def _changed_children(self) -> set[str]:
        """The attributes in which there are other modules than before."""
        known = {id(child) for child in self._descendants}
        gone = {name for held, name in zip(*self._places, strict=True) if name not in held}
        return gone | {
            name for held in self._children for name in held if id(held[name]) not in known
        }

    def check_scalars(self, at_an_end: bool = False) -> None:
        """Compare what host code may have changed with what the programs were built on.

        Args:
            at_an_end: of an epoch, or its beginning: then whatever that takes.
        """
        self._scope.check()
        for built in self._built:
            built.scalars.check()
            for state, size in zip(built.states, built.state_sizes, strict=True):
                if len(state) < size:
                    self._refuse_lost_state()
        self._compared_at = self._host_code.runs
        self._audits.wake(compare=at_an_end or self._host_code.ends)
        self._host_code.ends = False

    @staticmethod
    def _refuse_lost_state() -> None:
        raise StateChanged(
            "The state of an optimizer was replaced (load_state_dict) or cleared while the program"
            " works on it.",
            remedy="load it before the first step, or by fit(ckpt_path=...)",
        )

    def _clears_gradients(self, entry: str, entries: Collection[str]) -> bool:
        """Whether an entry point ends an accumulation window, and the host does not look."""
        return entry == STEP and ACCUMULATE in entries and not self._scope.keeps_gradients

    # -- which program -----------------------------------------------------------------------

    def _collect_conditions(self) -> None:
        self._modules = list(self._scope.module.modules())
        self._children = [module._modules for module in self._modules if module._modules]
        self._descendants = [child for one in self._children for child in one.values()]
        pairs = [(one, name) for one in self._children for name, _ in one.items()]
        self._places = [one for one, _ in pairs], [name for _, name in pairs]
        self._parameters = list(self._scope.module.parameters()) if self._scope.trains else []

    def _conditions(self) -> Conditions:
        groups = [group for o in self._scope.optimizers for group in o.param_groups]
        values = [value for group in groups for value in group.values()]
        if self._schedulers and self._built:
            if self._shown is None or self._shown.length != len(values):
                self._shown = ShownNumbers(self._schedulers, groups)
            self._shown.leave_out(values)
        if len(values) != len(self._group_values) or not all(map(is_, values, self._group_values)):
            # another object somewhere: a scheduler's new number, or an option
            self._group_values = values if are_fixed(groups) else []
            self._options = tuple(group_options(self._scope.optimizers))
            self._numbers_are_read = False
        return Conditions(
            tuple(map(_requires_grad, self._parameters)),
            tuple(map(_training, self._modules)),
            tuple([len(group["params"]) for group in groups]),
            self._options,
            tuple([id(o.state) for o in self._scope.optimizers]),
            self._settings(),
        )

    def _select(self, conditions: Conditions, batch: Any) -> tuple[Built | None, list[Tensor]]:
        """The program that fits; (None, []) where another one may be built."""
        why, error = "", TraceError
        others = 0  # programs that are right when the trainer's state is another
        for built in self._built:
            if built.answers and not hold(built.answers, self._scope.trainer):
                others += 1
                continue
            if built.conditions != conditions:
                why, error = self._changed(built.conditions, conditions), StateChanged
                continue
            tensors = built.batch.accept(batch)
            if tensors is None:
                why, error = built.batch.difference(batch), InputChanged
                continue
            broken = built.gradients and broken_gradient(built.gradients)
            broken = broken or self._update_numbers(built)
            if broken is not None:
                why, error = broken, StateChanged
                continue
            return built, tensors
        if why and len(self._built) - others >= self._backend.max_programs:
            self._refuse(error, why)
        return None, []

    def _changed(self, before: Conditions, now: Conditions) -> str:
        if before.states != now.states:
            self._refuse_lost_state()
        names = [name for name, _ in self._scope.module.named_parameters()]
        return before.difference(now, self.stage, self._modules, names)

    def _refuse(self, error: type[TraceError], why: str) -> None:
        limit = self._backend.max_programs
        advice = "DataLoader(drop_last=True), or padding; or " if error is InputChanged else ""
        raise error(
            f"The {self.stage} step needs another program: {why}. The backend allows {limit} per"
            " stage.",
            remedy=f"{advice}backend('CSX', max_programs={limit + 1})",
        )

    def _update_numbers(self, built: Built) -> str | None:
        """Bring the numbers up to date; a text where a guard of ``built`` no longer holds."""
        for guard in built.computed_guards:
            broken = guard.broken(self._numbers)
            if broken is not None:
                return broken
        if not built.numbers:
            return None
        if self._numbers_are_read and self._vector is not None and built.held_for is self._numbers:
            return None
        now = read_numbers(built.numbers, self._scope.optimizers)
        if built.held_for != now:
            for guard in built.guards:
                broken = guard.broken(now)
                if broken is not None:
                    return broken
        if self._vector is None or self._numbers != now:
            self._numbers, self._vector = now, as_vector(now)
        built.held_for, self._numbers_are_read = self._numbers, True
        return None

    # -- building ----------------------------------------------------------------------------

    def _build(
        self, conditions: Conditions, batch: Any, entries: dict[str, Callable[[Any], Any]]
    ) -> Built:
        modes, carried = conditions.training, len(self._scope.carried)
        with undone_on_failure(self._scope):
            new_state = self._scope.make_optimizer_state()
            captured: dict[str, Captured] = {}
            for name, run in entries.items():
                for change in [change for one in captured.values() for change in one.changes]:
                    change.undo()  # Python's changes happen once, not once for each entry point
                clears = self._clears_gradients(name, entries)
                captured[name] = capture(self._scope, run, batch, clears_gradients=clears)
            self._scope.forget_unused(
                new_state, [t for one in captured.values() for t in one.state_tensors()]
            )
            if self._conditions().training != modes:
                self._changed(conditions, self._conditions())
            program = make_program(self.stage, captured)
            loads = {} if self._backend.validate_only else self._load(program, captured)
            self.programs.append(program)
            self._announce(program, list(loads.values()))
            if self._backend.only_builds:
                raise BuiltOnly(_without_values(captured, batch))
        first = next(iter(captured.values()))
        used = frozenset().union(*(one.used_numbers for one in captured.values()))
        now = read_numbers(first.numbers, self._scope.optimizers)
        guards = [guard for one in captured.values() for guard in one.guards]
        unused = unused_guards(first.numbers, used, now, self._scope.optimizers)
        built = Built(
            program=program,
            conditions=self._conditions(),  # the optimizers' state may be new
            batch=first.batch,
            numbers=first.numbers,
            states=[optimizer.state for optimizer in self._scope.optimizers],
            state_sizes=[len(optimizer.state) for optimizer in self._scope.optimizers],
            gradients=[one.gradients for one in captured.values() if one.gradients.decided_by],
            answers={k: v for one in captured.values() for k, v in one.answers.items()},
            guards=(*guards, *unused),
            computed_guards=tuple(guard for guard in guards if of_computed(guard, now)),
            ready={
                name: Executable(
                    one, loads[name], self._fabric, self._gradients, self._scope.global_step
                )
                for name, one in captured.items()
            },
            scalars=FrozenScalars(read for one in captured.values() for read in one.reads),
        )
        for one in captured.values():
            first.batch.read |= one.batch.read
        if self._backend.retrace_every_iteration:
            first.batch.read.clear()  # what is made of them is compared
        if self._backend.audits:
            self._audits.built(list(built.ready.values()), self.runs + 1)
        self._added += [place for ready in built.ready.values() for place in ready.added]
        if len(self._scope.carried) != carried:
            self._built.clear()  # those before keep too few gradients: built again when needed
        self._built.append(built)
        self._vector = None
        return built

    def _load(self, program: Program, captured: dict[str, Captured]) -> dict[str, Loaded]:
        what = f"the {self.stage} program, {program.operations} operations"
        return {
            name: self._fabric.load(
                one.graph, lambda doing: shown(self._scope.trainer, f"{doing} {what}")
            )
            for name, one in captured.items()
        }


def _without_values(captured: dict[str, Captured], batch: Any) -> Any:
    """The result of a step that is not run."""
    [*_, last] = captured.values()
    nodes = pytree.tree_leaves(last.graph.module.graph.output_node().args[0])
    passed = passed_on(last.outputs.passed, batch, batch, {INDEX: 0, EPOCH: 0})
    return result_of(last.outputs)([*[valueless(node.meta["val"]) for node in nodes], *passed])
