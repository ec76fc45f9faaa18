"""The programs of one stage: which of them fits a step, and whether they still may run."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from typing import Any

from torch import Tensor

from fulgurite.backends.csx.capture.scope import Scope
from fulgurite.backends.csx.diagnostics.errors import InputChanged
from fulgurite.backends.csx.program.build import BoundProgram
from fulgurite.backends.csx.program.executable import Executable
from fulgurite.backends.csx.program.guards import Conditions, Misfit, settings_of
from fulgurite.backends.csx.program.modules import ModuleTree
from fulgurite.backends.csx.program.param_groups import ParamGroups

_requires_grad, _training = attrgetter("requires_grad"), attrgetter("training")


class Selection:
    """The programs of one stage.

    Args:
        stage: its name in messages.
        scope: what the step works on.
        limit: how many programs there may be for one state of the trainer.

    Attributes:
        programs: in the order in which they are asked.
        modules: those of the scope's model when they were last checked.
        groups: the param groups of the scope's optimizers.
    """

    def __init__(self, stage: str, scope: Scope, limit: int) -> None:
        self._stage, self._scope, self._limit = stage, scope, limit
        self._trainer = scope.trainer if scope.trains else None
        self.programs: list[BoundProgram] = []
        self.modules, self.groups = ModuleTree(scope), ParamGroups(scope)

    def select(self, batch: Any) -> tuple[BoundProgram | None, list[Tensor]]:
        """The program that fits, and the batch's tensors for it; None where one may be built.

        Raises:
            TraceError: no program may be built for this.
        """
        misfits: list[Misfit] = []
        now = self.conditions()
        for program in self.programs:
            found = program.guards.accept(now, batch)
            if isinstance(found, list):
                return program, found
            if found is not None:
                misfits.append(found)
        if misfits and misfits[-1].why and len(misfits) >= self._limit:
            error, why = misfits[-1]
            advice = "DataLoader(drop_last=True), or padding; or " if error is InputChanged else ""
            raise error(
                f"The {self._stage} step needs another program: {why}. The backend allows"
                f" {self._limit} per stage.",
                remedy=f"{advice}backend('CSX', max_programs={self._limit + 1})",
            )
        return None, []

    def conditions(self) -> Conditions:
        """Those that hold now."""
        groups, modules, trainer = self.groups.read(), self.modules, self._trainer
        return Conditions(
            tuple(map(_requires_grad, modules.parameters)),
            tuple(map(_training, modules.modules)),
            tuple([len(group["params"]) for group in groups]),
            self.groups.options,
            tuple([id(optimizer.state) for optimizer in self._scope.optimizers]),
            () if trainer is None else settings_of(trainer),
        )

    def executables(self) -> Iterator[Executable]:
        """The entry points of all programs."""
        return (one for program in self.programs for one in program.entries.values())

    def check_state(self) -> None:
        """Verify that modules and tensors are those that the programs were built on.

        Raises:
            StateChanged: they are not.
        """
        if self.programs:
            self.modules.check(self._stage)
        self.modules = ModuleTree(self._scope)
        for executable in self.executables():
            executable.check()

    def check_scalars(self) -> None:
        """Verify the Python values that the programs were built on (see ``Guards.check``)."""
        self._scope.check()
        for program in self.programs:
            program.guards.check()
