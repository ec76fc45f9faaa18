"""What a step works on: modules and optimizers; and how a failed trace is undone."""

from __future__ import annotations

import contextlib
import operator
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import lightning.pytorch as pl
import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.optim import Optimizer

from fulgurite.backends.csx.capture.discovery import discover
from fulgurite.backends.csx.capture.host_reads import TRACED_HOOKS
from fulgurite.backends.csx.capture.leaves import Trees, holders_in
from fulgurite.backends.csx.capture.python_state import PythonState
from fulgurite.backends.csx.capture.trainer_writes import check_trainer
from fulgurite.backends.csx.contract.constants import Source
from fulgurite.backends.csx.diagnostics.errors import StateChanged
from fulgurite.backends.csx.diagnostics.user_lines import UserLine, belongs_to_library, line_naming
from fulgurite.backends.csx.graph import rng
from fulgurite.backends.csx.state.carried_gradients import Carried
from fulgurite.backends.csx.state.first_update import DeferredState
from fulgurite.backends.csx.state.gradients import OtherPrograms
from fulgurite.backends.csx.state.optimizer_init import NewState, check_optimizer, init_state
from fulgurite.backends.csx.state.places import Place, StateTensor
from fulgurite.backends.csx.state.snapshot import Snapshot
from fulgurite.backends.schedules import program_schedulers


def _counter() -> Tensor:
    with torch.inference_mode(False):  # it is written in other modes too
        return torch.zeros((), dtype=torch.int64)


@dataclass(slots=True, kw_only=True)
class Scope(ABC):
    """What a step works on; the base of Lightning's and of a plain function's.

    Evaluation stages have no optimizers.
    """

    root: ClassVar[str]  # how the step's code reaches ``module``
    module: nn.Module  # every module of the step is in it
    optimizers: list[Optimizer] = field(default_factory=list)
    schedulers: list[Any] = field(default_factory=list)
    trains: bool = False  # whether the step computes gradients
    deferred: list[DeferredState] = field(default_factory=list)
    carried: dict[str, Carried] = field(default_factory=dict)  # gradients for the next step
    other_programs: OtherPrograms = field(default_factory=OtherPrograms)
    freezes: bool = True  # the step's Python runs once: the values that it reads stay
    looks_again: bool = False  # whether traces are kept, to compare later ones with them
    gradients_on_host: ClassVar[bool] = False  # whether the host sees them between steps

    _steps: Tensor = field(default_factory=_counter)

    def global_step(self) -> Tensor:
        """How many steps were done, as a program's input: int64, without dimensions.

        Always the same tensor: making one takes 5 µs, filling it 1 (measured).
        """
        return self._steps.fill_(self.steps_done())

    @property
    def trainer(self) -> pl.Trainer | None:
        """Whose step it is, where Lightning runs it."""
        return None

    @property
    def backward_is_lightnings(self) -> bool:
        """Whether Lightning calls ``backward`` (automatic optimization)."""
        return False

    @property
    def shows_gradients(self) -> bool:
        """Whether gradients that are state are in ``p.grad`` between steps."""
        return self.keeps_gradients

    @property
    def keeps_gradients(self) -> bool:
        """Whether all gradients are, for the host reads them."""
        return False

    @property
    def fp16_type(self) -> str | None:
        """The run's 16-bit type by name, where it has one."""
        return None

    def outside_tensors(self) -> list[Source]:
        """Tensors that no module holds, and the places where the step's code finds them."""
        return []

    def outside_state(self) -> Iterator[Place]:
        """Places of state that neither modules nor optimizers hold."""
        return iter(())

    def check(self) -> None:  # noqa: B027  # nothing to verify where nobody replaces them
        """Verify, after host code ran, that the step still works on these."""

    def check_trace(self, before: Snapshot) -> None:  # noqa: B027
        """Say what a trace changed that would not change again."""

    def refresh(self) -> None:  # noqa: B027
        """Find them again, before the first trace."""

    def named_optimizers(self) -> dict[str, Optimizer]:
        """The optimizers as messages call them."""
        return {f"optimizers[{i}]": optimizer for i, optimizer in enumerate(self.optimizers)}

    def leaf_name(self, path: Any) -> str:
        """How messages call a leaf of the batch, by its path in it."""
        return f"batch{pytree.keystr(path)}"

    def parameters(self) -> dict[str, nn.Parameter]:
        """Every parameter by its name: the modules', then those only an optimizer knows."""
        found = dict(self.module.named_parameters())
        known = {id(p) for p in found.values()}
        for owner, optimizer in self.named_optimizers().items():
            for g, group in enumerate(optimizer.param_groups):
                for i, p in enumerate(group["params"]):
                    if id(p) not in known:
                        known.add(id(p))
                        found[f"{owner}.param_groups[{g}]['params'][{i}]"] = p
        return found

    def make_optimizer_state(self) -> list[NewState]:
        """Make the optimizer state that there is not yet: once for all entry points of a program.

        Raises:
            UnsupportedState: an optimizer, or its state, cannot be a program's.
        """
        made_at, new_state = self.line_of("configure_optimizers"), []
        for optimizer in self.optimizers:
            check_optimizer(optimizer, made_at)
            one = init_state(optimizer, made_at)
            new_state += [] if one is None else [one]
        self.deferred = [one for one in self.deferred if one.waits()]
        self.deferred += [DeferredState(one) for one in new_state if one.of_gradient]
        return new_state

    def forget_unused(self, new_state: list[NewState], live: list[StateTensor]) -> None:
        """Delete new state that no entry point updates.

        Args:
            new_state: what ``make_optimizer_state`` made.
            live: the tensors that the program works on.
        """
        for one in new_state:
            one.forget_unused(live)
        self.deferred = [one for one in self.deferred if one.state.keys() & set(one.new_state.keys)]

    def groups(self) -> list[dict[str, Any]]:
        """The param groups in which a trace puts numbers: a scheduler's optimizer need not step."""
        scheduled = (scheduler.optimizer for scheduler in program_schedulers(self.schedulers))
        optimizers = {id(one): one for one in (*self.optimizers, *scheduled)}
        return [group for optimizer in optimizers.values() for group in optimizer.param_groups]

    def show_numbers(self) -> None:
        """Let the param groups show the numbers that the next step computes itself."""
        for scheduler in program_schedulers(self.schedulers):
            scheduler.show()

    def objects(self) -> Iterator[object]:
        """Whatever traced code may change on the host."""
        yield from self.module.modules()
        yield from self.optimizers
        yield from self.schedulers

    def holders(self) -> Iterator[tuple[str, object]]:
        """What may hold state in its lists, dicts and objects, and what the step calls it."""
        yield from holders_in(self.module, self.root)

    def trees(self) -> Trees:
        """The lists, dicts and objects that the holders hold, as they are now."""
        registered = {*map(id, self.module.modules()), *map(id, self.module.parameters())}
        return Trees(self.holders(), registered)

    def python_state(self) -> PythonState:
        """What the step's code can reach besides tensors."""
        return PythonState(self.module, self.root, [*self.functions(), *self.objects()])

    def python_read(self) -> PythonState:
        """The same without what other code has for itself: callbacks without hooks in the step."""
        return self.python_state()

    def functions(self) -> Iterator[Any]:
        """Functions that are the step, where it is no module's."""
        return iter(())

    @abstractmethod
    def steps_done(self) -> int:
        """How many steps were done before this one."""

    @abstractmethod
    def line_of(self, hook: str) -> UserLine | None:
        """Where the user wrote one of Lightning's hooks, or the function that stands for all."""

    def line_naming(self, names: Collection[str], *, stored: bool = False) -> UserLine | None:
        """The first line of the user's host code with one of these names; None where unknown."""
        return None

    @abstractmethod
    def line_now(self) -> UserLine | None:
        """Where the user wrote what now runs without a frame of theirs."""


@dataclass(slots=True, kw_only=True)
class LightningScope(Scope):
    """What a LightningModule's step works on."""

    root = "self"
    module: pl.LightningModule
    run_by: pl.Trainer
    strategy: pl.strategies.Strategy
    gradients_read: bool = False  # code on the host reads .grad
    _seen: tuple[Any, Any] | None = None  # the lists of optimizers and schedulers in ``refresh``

    @property
    def trainer(self) -> pl.Trainer:
        """Whose step it is."""
        return self.run_by

    @property
    def backward_is_lightnings(self) -> bool:
        """Whether the module has automatic optimization."""
        return self.module.automatic_optimization

    @property
    def shows_gradients(self) -> bool:
        """Under manual optimization too; a window of accumulation would be slower for it."""
        return self.trains and (self.keeps_gradients or not self.backward_is_lightnings)

    @property
    def keeps_gradients(self) -> bool:
        """What was found when the run began."""
        return self.trains and self.gradients_read

    @property
    def fp16_type(self) -> str | None:
        """What the precision plugin says."""
        found: str | None = getattr(self.strategy.precision_plugin, "fp16_type", None)
        return found

    def objects(self) -> Iterator[object]:
        """Whatever traced code may change on the host."""
        yield from Scope.objects(self)
        yield from self.trainer.callbacks  # type: ignore[attr-defined]
        yield self.trainer
        yield self.trainer._logger_connector
        yield from self.trainer.strategy._lightning_optimizers
        if self._loss_scale is not None:
            yield self._loss_scale

    def holders(self) -> Iterator[tuple[str, object]]:
        """The modules, and callbacks of the user's with hooks inside the step."""
        yield from Scope.holders(self)
        for callback in self._traced_callbacks():
            if not belongs_to_library(type(callback)):
                yield type(callback).__name__, callback

    def python_read(self) -> PythonState:
        """Those that are callbacks with hooks in the step, and no others."""
        objects = [*Scope.objects(self), *self._traced_callbacks()]
        return PythonState(self.module, self.root, [*self.functions(), *objects])

    def _traced_callbacks(self) -> Iterator[pl.Callback]:
        for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
            kind = type(callback)
            if any(getattr(kind, n) is not getattr(pl.Callback, n) for n in TRACED_HOOKS):
                yield callback

    @property
    def _loss_scale(self) -> Any:
        return getattr(self.strategy.precision_plugin, "scaler", None)

    def outside_state(self) -> Iterator[Place]:
        """The loss scale, where the step has one."""
        if self.trains and self._loss_scale is not None:
            yield from self._loss_scale.places()

    def outside_tensors(self) -> list[Source]:
        """What the globals, closures and objects that the step's code names hold."""
        return discover(getattr(self.module, self._step_name), {}).tensors

    @property
    def _step_name(self) -> str:
        """Which of the module's steps it is."""
        return {"test": "test_step", "predict": "predict_step"}.get(
            str(self.trainer.state.stage), "training_step" if self.trains else "validation_step"
        )

    def refresh(self) -> None:
        """Take the strategy's, which Lightning's learning-rate finder replaces."""
        if self.trains:
            self.optimizers, configs = self.strategy.optimizers, self.strategy.lr_scheduler_configs
            self.schedulers = [config.scheduler for config in configs]
            self._seen = self.optimizers, configs

    def check(self) -> None:
        """Verify that optimizers and schedulers are those of the trace.

        Raises:
            StateChanged: the trainer has others.
        """
        optimizers, configs = self.strategy._optimizers, self.strategy.lr_scheduler_configs
        if self._seen is None or (optimizers is self._seen[0] and configs is self._seen[1]):
            return
        now = [config.scheduler for config in configs]
        pairs: dict[str, tuple[list[Any], list[Any]]] = {
            "optimizers": (self.optimizers, optimizers),
            "schedulers": (program_schedulers(self.schedulers), program_schedulers(now)),
        }
        for what, (before, after) in pairs.items():
            if len(before) != len(after) or not all(map(operator.is_, before, after)):
                raise StateChanged(
                    f"The trainer's {what} were replaced while a program works on them.",
                    remedy="change their param_groups, or call fit again",
                )

    def check_trace(self, before: Snapshot) -> None:
        """Say what the step set on the Trainer, or would set on another batch."""
        names = ["training_step", *sorted(TRACED_HOOKS)] if self.trains else [self._step_name]
        owners = [self.module, *self.trainer.callbacks]  # type: ignore[attr-defined]
        hooks = [getattr(one, name) for one in owners for name in names if hasattr(one, name)]
        check_trainer(self.trainer, before.before(vars(self.trainer)), hooks)

    def steps_done(self) -> int:
        """Lightning's ``global_step``."""
        return self.trainer.global_step

    def line_of(self, hook: str) -> UserLine | None:
        """Where the user wrote one of Lightning's hooks."""
        return UserLine.of_method(type(self.module), hook)

    def line_naming(self, names: Collection[str], *, stored: bool = False) -> UserLine | None:
        """The same in the methods of the module, its callbacks and its layers."""
        holders = (self.module, *self.trainer.callbacks, *self.module.modules())  # type: ignore[attr-defined]
        kinds = dict.fromkeys(kind for holder in holders for kind in type(holder).__mro__)
        return line_naming(
            (kind for kind in kinds if not belongs_to_library(kind)), names, stored=stored
        )

    def line_now(self) -> UserLine | None:
        """Where the user wrote the hook that now runs."""
        hook = self.module._current_fx_name or ""
        made_at = self.line_of("configure_optimizers") if hook == "optimizer_step" else None
        return made_at or self.line_of(hook) or self.line_of(self._step_name)


class Before:
    """Module, optimizers, counters and random states as they are before a trace."""

    def __init__(self, scope: Scope) -> None:
        self._scope, self._deferred = scope, scope.deferred
        self._snapshot, self._trees = Snapshot(scope.objects()), scope.trees()
        self._random_states = rng.collect()

    def restore(self) -> None:
        """Put them back."""
        self._snapshot.restore()
        self._trees.restore()
        rng.restore(self._random_states)
        self._scope.deferred = self._deferred


@contextlib.contextmanager
def undone_on_failure(scope: Scope) -> Iterator[None]:
    """If the block raises, put module, optimizers, counters and random states back as they were."""
    before = Before(scope)
    try:
        yield
    except BaseException:
        before.restore()
        raise


@contextlib.contextmanager
def undone(scope: Scope) -> Iterator[PythonState]:
    """Put all that back in any case, and whatever Python state the step's code can reach.

    Yields that state as it was.
    """
    state, before = scope.python_state(), Before(scope)
    try:
        yield state
    finally:
        before.restore()
        state.restore()
