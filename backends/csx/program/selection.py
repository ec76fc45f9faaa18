"""The programs of one stage: which of them fits a step, and whether they still may run.

``torch.nn.utils.prune``, as ModelPruning calls it between steps, puts ``weight_orig``, which is the
same parameter, and ``weight_mask`` in the place of a layer's ``weight``, and each step computes
``weight`` of them: that is another program.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from operator import attrgetter, is_
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils.prune import BasePruningMethod

from fulgurite.backends.csx.capture import Scope
from fulgurite.backends.csx.contract import HostChange
from fulgurite.backends.csx.diagnostics.trace_errors import InputChanged, StateChanged, TraceError
from fulgurite.backends.csx.objects import (
    SHAPES,
    VaryingDimension,
    shapes_of,
    told_of_shapes,
    too_many_shapes,
    varying_dimensions,
)
from fulgurite.backends.csx.program.announcements import say
from fulgurite.backends.csx.program.build import BoundProgram
from fulgurite.backends.csx.program.executable import Executable
from fulgurite.backends.csx.program.guards import Conditions, Misfit, ParamGroups, settings_of
from fulgurite.backends.csx.state import OptimizerStates, dotted_name

ANSWERS = 16
"""How many programs there may be for what a step asks of ``batch_idx`` and its kin: a branch has
two, and one for each value would be one for each epoch or batch."""

VALUES = 8
"""How many programs there may be for what hooks set and Python reads (``self.kl_weight``): a stage
of the training has one, and one that changes on every batch would be traced on every batch."""

_requires_grad, _training = attrgetter("requires_grad"), attrgetter("training")
_tracking = attrgetter("track_running_stats")


class ModuleTree:
    """The modules of a scope's model now, to be compared with those that are there later."""

    def __init__(self, scope: Scope) -> None:
        self._scope = scope
        self.modules = list(scope.module.modules())
        self.look_up_parameters()
        self.norms = [module for module in self.modules if isinstance(module, _NormBase)]
        held = [module._modules for module in self.modules]
        self._all = [one for one in held if isinstance(one, dict)]  # a scripted module's is none
        self._children = [held for held in self._all if held]
        places = [(held, *item) for held in self._children for item in held.items()]
        self._owners = [owner for owner, _, _ in places]
        self._names = [name for _, name, _ in places]
        self._descendants = [child for _, _, child in places]

    def look_up_parameters(self) -> None:
        """Those that there are now: a hook may give a module another."""
        self.parameters = list(self._scope.module.parameters()) if self._scope.trains else []

    def is_changed(self) -> bool:
        """Whether a module was added, removed or replaced; asked after every hook."""
        return sum(map(len, self._all)) != len(self._descendants) or self.is_replaced()

    def is_replaced(self) -> bool:
        """Whether another module, or none, is in the place of one."""
        return not all(map(is_, map(dict.get, self._owners, self._names), self._descendants))

    def difference(self, stage: str) -> str:
        """In words, what is there now, or gone; empty: nothing. ``stage`` is whose programs it has.

        Raises:
            StateChanged: modules with parameters, which optimizers may hold, are gone or replaced.
        """
        before, now = self.modules, list(self._scope.module.modules())
        if len(before) == len(now) and all(map(is_, before, now)):
            return ""
        known, found = {*map(id, before)}, {*map(id, now)}
        new = [one for one in now if id(one) not in known]
        gone = [one for one in before if id(one) not in found]
        kinds = [type(one).__name__ for one in (*new, *gone)] or ["in another order"]
        if not (new or gone) or any(list(one.parameters()) for one in gone):
            raise StateChanged(
                f"The modules of the model changed after the {stage} program was built"
                f" ({kinds[0]}).",
                remedy="replace modules before the first step, for instance in setup() or"
                " configure_model()",
                line=self._scope.line_naming(self._changed_names(), stored=True),
            )
        more = f", and {len(kinds) - 1} more" if len(kinds) > 1 else ""
        return f"{kinds[0]} was {'put into' if new else 'taken out of'} the model{more}"

    def _changed_names(self) -> set[str]:
        """The attributes in which there are other modules than before."""
        known = {id(child) for child in self._descendants}
        pairs = zip(self._owners, self._names, strict=True)
        gone = {name for owner, name in pairs if name not in owner}
        return gone | {name for held in self._all for name in held if id(held[name]) not in known}


class Selection:
    """The programs of one stage.

    Args:
        stage: its name in messages.
        scope: what the step works on.
        limit: how many there may be for each state of the trainer; "auto": one for each phase (what
            is frozen, how much is accumulated, whether a scheduled number is zero), in each for
            ``SHAPES`` shapes of batches, and for one value of a number that Python read as such;
            for ``VALUES`` values that hooks set. Batches of other shapes, and others, have none.

    Attributes:
        programs: those built so far.
        why: none fitted the last batch that needed another, and why none is kept for it, or "".
    """

    def __init__(self, stage: str, scope: Scope, limit: int | str) -> None:
        self._stage, self._scope, self._limit = stage, scope, limit
        self._trainer = scope.trainer if scope.trains else None
        self.programs: list[BoundProgram] = []
        self.why, self._since = ("", ""), ""
        self._others: set[Any] = set()  # shapes without a program of their own
        self._told_of_values, self._steps_of_others = False, 0
        self._pruned, self._forgotten, self._built = pruned(scope.module), 0, 0
        self.modules, self.groups = ModuleTree(scope), ParamGroups(scope)
        self._states = OptimizerStates([])  # those of the programs
        self._earlier: set[int] = set()  # programs of runs before this one, not used in this one

    def begin_run(self) -> None:
        """A loop runs anew, as for each size that a tuner tries: what it needs counts from here.

        Programs of earlier runs are kept as long as there is room for them, and the modules are the
        same: Lightning itself takes ``sync_batchnorm``'s out when a fit ends.
        """
        if self.modules.is_changed():
            self._forget()
            self.modules = ModuleTree(self._scope)
        self._earlier = (
            {id(one) for one in self.programs} if isinstance(self._limit, str) else set()
        )

    def select(self, batch: Any) -> tuple[BoundProgram | None, list[Tensor]]:
        """The program that fits, and the batch's tensors for it; (None, []) if one has to be built.

        Raises:
            TraceError: no program may be built for this.
        """
        misfits: list[Misfit] = []
        now = self.conditions()
        for program in self.programs:
            found = program.guards.accept(now, batch)
            if isinstance(found, list):
                self._earlier.discard(id(program))
                return program, found
            if found is not None:
                misfits.append(found)
        # programs of a tuner's earlier runs make room, and only then: one of them may fit
        limit, counted = self._counted(misfits)
        if self._earlier and len(counted) >= limit:
            self.programs[:] = [one for one in self.programs if id(one) not in self._earlier]
            self._earlier.clear()
            return self.select(batch)
        self._allow(misfits, limit, counted, batch)
        self.modules.look_up_parameters()
        return None, []

    def _counted(self, misfits: list[Misfit]) -> tuple[int, list[Misfit]]:
        """The limit on programs that applies now, and the programs that count towards it."""
        if not isinstance(self._limit, str):
            return self._limit, misfits
        if len(of_run := [one for one in misfits if one.is_of_run]) >= ANSWERS:
            return ANSWERS, of_run
        # what the user asked for (to unfreeze layers, to end weight decay) comes to an end, and so
        # needs no limit; shapes and numbers read in Python may change at every step
        counted = [one for one in misfits if not (one.is_phase or one.is_of_earlier_phase())]
        numbers = [one for one in counted if one.error is StateChanged]
        return (1, numbers) if numbers else (SHAPES, counted)

    def _allow(self, misfits: list[Misfit], limit: int, counted: list[Misfit], batch: Any) -> None:
        """Raise where there may be no more programs than those that do not fit."""
        self.why, self._since = (self._since, ""), ""  # of pruning, which left none to misfit
        if not misfits:
            return
        misfit = _nearest(counted or misfits)
        most = ""
        if misfit.error is InputChanged:
            most = f" (shape {len(counted) + 1} of at most {limit})"
        reason = f"number {self._built + 1}{most}, since {_in_short(misfit.why)}"
        self.why = reason, ""
        if isinstance(self._limit, str) and (change := _of_too_many(misfits)):
            self.why = reason, f"{VALUES} values that hooks set have programs"
            if not self._told_of_values:
                say(self._scope.trainer, _told_of_values(self._stage, change))
            self._told_of_values = True
            return
        if len(counted) + (0 if isinstance(self._limit, str) else self._forgotten) < limit:
            return
        seen, shapes = [], shapes_of(batch, self._scope.leaf_name)
        of_shape = misfit.error is InputChanged
        if of_shape and not self._others:
            known = [program.guards.batch.shapes() for program in self.programs]
            seen = varying_dimensions([shapes, *known])
        if of_shape and isinstance(self._limit, str):
            self.why = reason, f"{limit} shapes of batches are compiled"
            if not self._others:
                say(self._scope.trainer, f"CSX: {told_of_shapes(self._stage, seen, limit)}")
            self._others.add(tuple(shapes.items()))
            self._steps_of_others += 1
            return
        raise _refusal(self._stage, misfit, limit, seen)

    def conditions(self) -> Conditions:
        """Those that hold now."""
        groups, modules, trainer = self.groups.read(), self.modules, self._trainer
        return Conditions(
            tuple(map(_requires_grad, modules.parameters)),
            tuple(map(_training, modules.modules)),
            tuple(map(_tracking, modules.norms)),
            tuple([len(group["params"]) for group in groups]),
            self.groups.options,
            tuple([id(optimizer.state) for optimizer in self._scope.optimizers]),
            () if trainer is None else settings_of(trainer),
        )

    def add(self, program: BoundProgram) -> None:
        """Take a program that was built now; those that froze a number that it counts go."""
        self.programs[:] = [p for p in self.programs if p.guards.knows_counts_of(program.guards)]
        if not program.never:
            self._built += 1
            self.programs.append(program)
            self._note_states()
            for _, first in [one for each in program.entries.values() for one in each.firsts]:
                first.filled.append(self._note_states)

    def _note_states(self) -> None:
        """There is more state of optimizers: what may have asked for it has to be built anew."""
        self._states, born = OptimizerStates(self._scope.optimizers), self._scope.born
        made = [one for empty in born if not empty() for one in empty.made]
        self.programs[:] = [p for p in self.programs if not p.guards.overlooks(made)]

    def forget_replaced(self) -> None:
        """Build programs anew where an optimizer or its state was replaced, or that was cleared."""
        if self._states.are_replaced() or self._scope.is_replaced():
            self._forget()
            self._scope.forget_state()

    def forget_pruned(self) -> None:
        """Where parameters were pruned, or no longer are, build programs anew.

        Raises:
            StateChanged: there may be no more programs.
        """
        before, now = self._pruned, pruned(self._scope.module)
        self._pruned = now
        if set(before) != set(now) and self.programs:
            self._begin_anew(_pruning(before, now), "prune in configure_model(); or ")
            self._scope.stage_gradients.rename(_new_names(before, now))

    def _begin_anew(self, why: str, advice: str) -> None:
        """Another program takes the place of those that there are, if there may be one more."""
        self._forgotten += len(self.programs)
        self._since = f"number {self._built + 1}, since {why}"
        if isinstance(self._limit, int) and self._forgotten >= self._limit:
            raise _no_more(self._stage, StateChanged, why, self._limit, advice)
        self._forget()

    def _forget(self) -> None:
        self.programs.clear()
        self._states = OptimizerStates([])

    def executables(self) -> Iterator[Executable]:
        """The entry points of all programs."""
        return (one for program in self.programs for one in program.entries.values())

    def uncompiled(self) -> tuple[int, int]:
        """How many shapes of batches have no program, and how many steps these were."""
        return len(self._others), self._steps_of_others

    def why_not_compiled(self) -> list[str]:
        """Of each entry point that is not compiled, why: "" as long as it may be."""
        kept = [one.entries.values() for one in self.programs if not one.never]
        each = (one.loaded.why_not for entries in kept for one in entries)
        return [why for why in each if why is not None]

    def check_state(self) -> None:
        """Verify that modules and tensors are those that the programs were built on."""
        self.forget_pruned()
        # what came may have taken tensors over: these say more
        if self.modules.is_changed() and not self.modules.is_replaced():
            self._check_tensors()
        if self.programs and (why := self.modules.difference(self._stage)):
            self._begin_anew(why, "change modules before the first step; or ")
        self.modules = ModuleTree(self._scope)
        self._check_tensors()

    def _check_tensors(self) -> None:
        for program in self.programs:
            if not program.guards.is_emptied():
                for executable in program.entries.values():
                    executable.check()


def _nearest(misfits: list[Misfit]) -> Misfit:
    """The last of those that came nearest: what another program would need is the reason."""
    return max(reversed(misfits), key=attrgetter("held"))


def _of_too_many(misfits: Iterable[Misfit]) -> HostChange | None:
    """The first change of a value that hooks set, if as many values as may be have programs."""
    changes = {one.change.what: one.change for one in misfits if one.change is not None}
    return next(iter(changes.values())) if len(changes) >= VALUES else None


def _told_of_values(stage: str, change: HostChange) -> str:
    """What becomes of steps with more values than there may be programs for."""
    return (
        f"CSX: {change.what}: the {stage} step has programs for {VALUES} values that hooks set;"
        " with others it runs as in Lightning, at its speed (in several processes, with a loss"
        f" scale and under weight streaming it is traced each time). Faster: {change.error.remedy}"
    )


def _refusal(stage: str, misfit: Misfit, limit: int, seen: list[VaryingDimension]) -> TraceError:
    """The error for a step that needs a program too many; ``seen`` is how its batches vary."""
    if seen and limit > 1:
        return too_many_shapes(stage, seen, limit)
    if misfit.change is not None:
        error, more = misfit.change.error, f"backend('CSX', max_programs={limit + 1})"
        return error.replaced(line=error.line, remedy=f"{error.remedy}; or {more}")
    advice = "DataLoader(drop_last=True), or padding; or " if seen else ""
    return _no_more(stage, misfit.error, misfit.why, limit, advice)


def _no_more(stage: str, error: type[TraceError], why: str, limit: int, advice: str) -> TraceError:
    return error(
        f"The {stage} step needs another program: {why}. The backend allows {limit} per stage.",
        remedy=f"{advice}backend('CSX', max_programs={limit + 1})",
    )


def _in_short(why: str) -> str:
    """Two of the tensors that have another shape, and how many more have."""
    first, *others = why.split("; ")
    return why if len(others) < 2 else f"{first}; {others[0]}; {len(others) - 1} more differ"


def pruned(module: nn.Module) -> tuple[str, ...]:
    """The names that pruned parameters had, of a module and those in it."""
    return tuple(
        dotted_name(path, hook._tensor_name)
        for path, one in module.named_modules()
        for hook in one._forward_pre_hooks.values()
        if isinstance(hook, BasePruningMethod)
    )


def _pruning(before: tuple[str, ...], now: tuple[str, ...]) -> str:
    """In words, what was pruned, or no longer is."""
    new = [name for name in now if name not in before]
    first, *others = new or [name for name in before if name not in now]
    more = f" ({len(others) + 1} in all)" if others else ""
    return f"{first} {'was pruned' if new else 'is no longer pruned'}{more}"


def _new_names(before: tuple[str, ...], now: tuple[str, ...]) -> dict[str, str]:
    """The names that parameters have, by those that they had."""
    new, gone = set(now) - set(before), set(before) - set(now)
    return {name: f"{name}_orig" for name in new} | {f"{name}_orig": name for name in gone}
