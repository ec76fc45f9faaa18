"""What a LightningModule's step works on: the module, and what its Trainer has."""

from __future__ import annotations

import contextlib
import operator
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loops.optimization.automatic import ClosureResult

from fulgurite.backends.csx.capture.discovery import discover
from fulgurite.backends.csx.capture.host_reads import TRACED_HOOKS, overrides
from fulgurite.backends.csx.capture.readable import Readable
from fulgurite.backends.csx.capture.scope import Scope
from fulgurite.backends.csx.capture.trainer_writes import check_trainer
from fulgurite.backends.csx.contract.constants import Source
from fulgurite.backends.csx.diagnostics.errors import StateChanged
from fulgurite.backends.csx.diagnostics.user_lines import UserLine, line_naming
from fulgurite.backends.csx.state.optimizer_init import NewState
from fulgurite.backends.csx.state.places import Place
from fulgurite.backends.csx.state.python_objects import Snapshot, owner_of
from fulgurite.backends.schedules import program_schedulers


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
        """The Trainer that runs the step."""
        return self.run_by

    @property
    def backward_is_lightnings(self) -> bool:
        """Whether the module has automatic optimization."""
        return self.module.automatic_optimization

    @property
    def shows_gradients(self) -> bool:
        """Whether gradients are in ``p.grad`` between steps: in manual optimization, or if host
        code reads them. Else they are not: accumulation would be slower.
        """
        return self.trains and (self.keeps_gradients or not self.backward_is_lightnings)

    @property
    def keeps_gradients(self) -> bool:
        """Whether host code that reads ``.grad`` was found when the run began."""
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
            if not owner_of(type(callback)).is_library:
                yield type(callback).__name__, callback

    def readable(self) -> Readable:
        """What the step's code may read besides tensors, the Trainer's own attributes too."""
        callbacks = [*self._traced_callbacks()]
        steps = [one.step for one in self.optimizers]
        others = [*self.optimizers, *self.schedulers, *callbacks, self.trainer]
        return Readable([*self._hooks(), *steps], self.module, self.root, others)

    def _traced_callbacks(self) -> Iterator[pl.Callback]:
        for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
            if any(overrides(callback, name, pl.Callback) for name in TRACED_HOOKS):
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

    def ask_for_audit(self) -> bool:
        """Have other processes audit their training step after the next, too."""
        strategy: Any = self.strategy
        return self.trains and bool(strategy.ask_for_audit())

    def compare(self, stage: str, captured: Any) -> None:
        """Verify that other processes have traced the same step."""
        strategy: Any = self.strategy
        strategy.compare(stage, captured)

    def refresh(self) -> None:
        """Take those of the strategy now: Lightning's learning-rate finder replaces them."""
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
        check_trainer(self.trainer, before.before(vars(self.trainer)), self._hooks())

    def _hooks(self) -> list[Any]:
        """The step, and the hooks in it."""
        names = ["training_step", *sorted(TRACED_HOOKS)] if self.trains else [self._step_name]
        owners = [self.module, *self.trainer.callbacks]  # type: ignore[attr-defined]
        return [getattr(one, name) for one in owners for name in names if hasattr(one, name)]

    def make_optimizer_state(self) -> list[NewState]:
        """Eagerly a step under manual optimization makes it, with its default dtype."""
        automatic = self.module.automatic_optimization
        plugin = self.trainer.precision_plugin
        with contextlib.nullcontext() if automatic else plugin.forward_context():
            return Scope.make_optimizer_state(self)  # super() is another class with slots

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
            (kind for kind in kinds if not owner_of(kind).is_library), names, stored=stored
        )

    def line_now(self) -> UserLine | None:
        """Where the user wrote the hook that now runs."""
        hook = self.module._current_fx_name or ""
        if hook == "optimizer_step" and _divides_the_loss():
            return self.line_of(self._step_name)
        made_at = self.line_of("configure_optimizers") if hook == "optimizer_step" else None
        return made_at or self.line_of(hook) or self.line_of(self._step_name)


def _divides_the_loss() -> bool:
    """Whether Lightning works on the loss that the step returned; for it, that is the update."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not _LOSS:
        frame = frame.f_back
    return frame is not None


_LOSS = ClosureResult.from_training_step_output.__func__.__code__  # type: ignore[attr-defined]
