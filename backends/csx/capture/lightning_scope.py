"""What a LightningModule's step works on: the module, and what its Trainer has.

- Do hooks that run on the host between steps read ``.grad``? If so, programs write all gradients
  back; if not, they skip that. The hooks of module and callbacks are searched for ``.grad``, with
  the code of the user's that they name, and the functions that wait for ``fit`` to return.
- What a step's Python read of the trainer's state selects its program. One validation program
  serves the sanity check, fit and ``validate``, unless the step asks which of them it is: ``if
  self.trainer.sanity_checking``, ``f"{self.trainer.state.stage}/loss"``. Then each answer has a
  program of its own; graphs that are equal are compiled once, as ever. Only programs that asked
  compare.
- What a step sets on the Trainer while it is traced happens once. ``trainer.should_stop = True``
  stays set, so a step that always sets it stops the run, as eagerly. One that would set it on a
  later batch never does: its condition was False when it was traced.

Checked against Lightning 2.6.6.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from lightning.pytorch.trainer.states import TrainerState
from torch import Tensor
from torch.optim import Optimizer

from fulgurite.backends.csx.capture.scope import Exchange, Scope
from fulgurite.backends.csx.contract import (
    PLAIN_TYPES,
    ConstantSource,
    warn,
    warn_of_types,
    warned_in,
)
from fulgurite.backends.csx.diagnostics.mentions import mentions
from fulgurite.backends.csx.diagnostics.trace_errors import (
    StateChanged,
    UnsupportedState,
)
from fulgurite.backends.csx.diagnostics.user_lines import (
    UserLine,
    is_from_library,
    is_library,
    line_naming,
    top_package,
)
from fulgurite.backends.csx.hyperparams.run_numbers import BEGINS, only_follow
from fulgurite.backends.csx.objects import ReadableState, attributes_read, codes_reached, discover
from fulgurite.backends.csx.state import DroppedGradient, NewState, Place, Snapshot, owner_of
from fulgurite.backends.csx.streaming.residency import residency
from fulgurite.backends.patches import MISSING, Patch, caller, patches_of
from fulgurite.backends.program_scheduler import program_schedulers
from fulgurite.backends.step_context import step_context

_READERS = {"grad", "grad_norm", "clip_grad_norm_", "clip_grad_value_", "get_total_norm"}
_BEFORE_OR_AFTER = {
    *("on_fit_start", "on_train_start", "on_sanity_check_start", "on_sanity_check_end"),
    *("on_train_end", "on_fit_end", "teardown", "on_exception"),
}
"""Hooks that run before the first step of a run or after its last one."""
TRACED_HOOKS = {
    *("on_before_zero_grad", "on_before_backward", "on_after_backward"),
    "on_before_optimizer_step",
}
"""Hooks of modules and callbacks that run inside the step, and so are traced."""


def reads_gradients(trainer: Any, module: pl.LightningModule) -> bool:
    """Whether the code of a host hook, or of whoever called ``fit``, names ``.grad``.

    Lightning's StochasticWeightAveraging does where there is batch normalization: the epoch without
    a backward pass ends with an optimizer's step, by the gradients of the step before that epoch.
    """
    averaging = any(isinstance(one, StochasticWeightAveraging) for one in trainer.callbacks)
    if averaging and StochasticWeightAveraging.pl_module_contains_batch_norm(module):
        return True
    if not _READERS.isdisjoint(_names_of_callers()):
        return True
    names = _READERS | {"backward", "manual_backward"}  # which adds to what is there
    return not names.isdisjoint(attributes_read(hook for _, hook in _hooks(trainer, module)))


def set_by_hooks(trainer: Any, module: Any) -> set[str]:
    """The names of the attributes that the code of host hooks sets."""
    codes = codes_reached(hook for _, hook in _hooks(trainer, module))
    return {said.name for code in codes for said in mentions(code) if said.is_set}


def hooks_between_steps(trainer: Any, module: pl.LightningModule) -> frozenset[str]:
    """Names of the hooks that the user wrote and that run on the host between two steps."""
    written = {name for name, hook in _hooks(trainer, module) if not is_from_library(hook)}
    return frozenset(written - _BEFORE_OR_AFTER)


def overrides(owner: Any, name: str, base: type) -> bool:
    """Whether calling a hook runs other code than ``base``'s, which does nothing.

    The object is asked and not its class: ``LambdaCallback`` has its hooks as attributes.
    Lightning's ``is_overridden`` compares code objects, which a callable object does not have.
    """
    method = getattr(owner, name, None)
    return getattr(method, "__func__", method) is not getattr(base, name, None)


def _hooks(trainer: Any, module: pl.LightningModule) -> Iterator[tuple[str, Any]]:
    """The host hooks of the module and of all callbacks."""
    yield from _host_hooks(module, pl.LightningModule)
    for callback in trainer.callbacks:
        yield from _host_hooks(callback, pl.Callback)


def _host_hooks(owner: Any, base: type) -> Iterator[tuple[str, Any]]:
    """The hooks that run on the host and that somebody overrides, by name."""
    names = {name for name in dir(base) if name.startswith("on_")} - TRACED_HOOKS - {"on_gpu"}
    for name in sorted(names | {"lr_scheduler_step", "teardown"}):
        if overrides(owner, name, base):
            yield name, getattr(owner, name)


def _names_of_callers() -> Iterator[str]:
    frame = sys._getframe(1)
    while frame is not None:
        if not is_library(frame):
            yield from _names_here(frame.f_code)
        frame = frame.f_back  # type: ignore[assignment]


def _names_here(code: CodeType) -> Iterator[str]:
    """The names in code and in its comprehensions, which are functions before Python 3.12."""
    yield from code.co_names
    for one in code.co_consts:
        if isinstance(one, CodeType) and one.co_name.startswith("<"):
            yield from _names_here(one)


Answers = dict[tuple[str, str], Any]
"""What the trainer's state said, by where and which attribute."""

_TRAINER, _STATE = "trainer", "trainer.state"
_PROPERTIES = ("sanity_checking", "training", "validating", "testing", "predicting", "evaluating")
_FIELDS = ("stage", "fn")
_FRAMEWORKS = ("lightning", "fulgurite", "torchmetrics")


def note_answers(answers: Answers) -> Iterator[Patch]:
    """Patches that note what code other than Lightning's reads."""

    def note(where: str, name: str, value: Any) -> Any:
        if top_package(caller(sys._getframe(2))) not in _FRAMEWORKS:
            answers[where, name] = value
        return value

    def of_trainer(name: str) -> property:
        own: property = vars(Trainer)[name]
        get: Any = own.fget
        return property(lambda trainer: note(_TRAINER, name, get(trainer)), own.fset)

    def of_state(name: str) -> property:
        return property(
            lambda state: note(_STATE, name, vars(state)[name]),
            lambda state, value: vars(state).__setitem__(name, value),
        )

    why, checked = "a program holds for the answers that its step got", "lightning 2.6"
    asked = {name: of_trainer(name) for name in _PROPERTIES}
    yield from patches_of(Trainer, asked, why=why, checked=checked)
    asked = {name: of_state(name) for name in _FIELDS}
    yield from patches_of(TrainerState, asked, why=why, checked=checked)


def answers_hold(answers: Answers, trainer: Trainer | None) -> bool:
    """Whether the trainer's state still says the same."""
    assert trainer is not None
    asked = {_TRAINER: trainer, _STATE: trainer.state}
    return all(getattr(asked[at], name) == value for (at, name), value in answers.items())


_STOP = "should_stop"
_REMEDY = (
    "the same in on_train_batch_end, a host hook that runs on every batch; or"
    " Trainer(max_steps=n), max_time=..., EarlyStopping"
)


def check_trainer(trainer: Any, before: dict[str, Any], codes: list[CodeType]) -> None:
    """Say what the traced step set on the Trainer, or would set on another batch.

    ``before`` are its attributes before the trace, ``codes`` those of the functions in the step.

    Raises:
        UnsupportedState: the step would stop the run under a condition that is frozen.
    """
    now = vars(trainer)
    changed = {
        name
        for name, value in now.items()
        if isinstance(value, PLAIN_TYPES) and value is not before.get(name, MISSING)
    }
    for code, name, line in _writes(codes):
        if name == _STOP and not now[_STOP]:
            what = (
                "trainer.should_stop is set under a condition that was False when the step was"
                " traced: the program never sets it"
            )
            callers = [one for one in codes if code.co_name in one.co_names]
            around = (code, *callers)
            if any(warned_in(one, without="trainer.should_stop") for one in around):
                raise UnsupportedState(f"{what}.", line=line, remedy=_REMEDY)
            # a counter's condition is a guard: when it holds, another program sets it
            if not only_follow((one.co_filename, one.co_name) for one in around):
                warn("trainer.should_stop", what, line, _REMEDY)
        elif name in changed - {_STOP}:
            text = f"trainer.{name} was changed while the step was traced; that happens once"
            warn(f"trainer.{name}", text, line, "a host hook such as on_train_batch_end")


def _writes(codes: Iterable[CodeType]) -> Iterator[tuple[CodeType, str, UserLine]]:
    """Each ``trainer.name = ...`` in the code of functions, or what may be one.

    Without the source every name in a function with the word ``trainer`` is one.
    """
    for code in codes:
        if "trainer" in (*code.co_names, *code.co_varnames, *code.co_freevars):
            for said in mentions(code):
                if said.is_set and said.owner in ("trainer", None):
                    yield code, said.name, UserLine.at(code, said.line)


@dataclass(slots=True, kw_only=True)
class LightningScope(Scope):
    """What a LightningModule's step works on."""

    root = "self"
    module: pl.LightningModule
    run_by: pl.Trainer
    strategy: pl.strategies.Strategy
    gradients_read: bool = False  # code on the host reads .grad
    _seen: list[Any] | None = None  # optimizers, and programs' schedulers, in ``refresh``

    @property
    def trainer(self) -> pl.Trainer:
        """The Trainer that runs the step."""
        return self.run_by

    @property
    def backward_is_lightnings(self) -> bool:
        """Whether the module has automatic optimization."""
        return self.module.automatic_optimization

    @property
    def begins_window(self) -> bool:
        """Whether one does: Lightning then clears gradients, where it calls ``backward``."""
        loop, window = self.trainer.fit_loop.epoch_loop, self.trainer.accumulate_grad_batches
        if window == 1 or not self.trains or loop.automatic_optimization._skip_backward:
            return False
        return self.backward_is_lightnings and (self.batch_idx or 0) % window == 0

    @property
    def ends_window(self) -> bool:
        """Whether one does, in automatic optimization: none of its steps comes after this one."""
        window = self.trainer.accumulate_grad_batches
        return self.backward_is_lightnings and ((self.batch_idx or 0) + 1) % window == 0

    @property
    def shows_gradients(self) -> bool:
        """Whether they are: by hand, or where host code reads them; else accumulation is faster."""
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
        yield from self.strategy._lightning_optimizers
        if not self.trains:  # whose own are none
            yield from self.strategy._optimizers
        if self._loss_scale is not None:
            yield self._loss_scale

    def holders(self) -> Iterator[tuple[str, object]]:
        """The modules, and callbacks of the user's with hooks inside the step."""
        yield from Scope.holders(self)
        for callback in self._traced_callbacks():
            if not owner_of(type(callback)).is_library:
                yield type(callback).__name__, callback

    def readable(self) -> ReadableState:
        """What the step's code may read besides tensors, the Trainer's own attributes too."""
        callbacks = [*self._traced_callbacks()]
        steps = [one.step for one in self.optimizers]
        others = [*self.optimizers, *self.schedulers, *callbacks, self.trainer]
        return ReadableState([*self._hooks(), *steps], self.module, self.root, others)

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

    def outside_tensors(self) -> list[ConstantSource]:
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

    def announcer(self) -> Callable[[Exchange, Tensor | None], None] | None:
        """The strategy's, of a step that trains."""
        strategy: Any = self.strategy
        found: Callable[[Exchange, Tensor | None], None] | None = strategy.announcer()
        return found if self.trains else None

    def note_audit(self) -> None:
        """Have weights and optimizer state compared, if all processes look at their next step."""
        strategy: Any = self.strategy
        if self.trains:
            strategy.note_audit()

    def compare(self, stage: str, captured: Any) -> None:
        """Verify that other processes have traced the same step."""
        strategy: Any = self.strategy
        strategy.compare(stage, captured)

    def refresh(self) -> None:
        """Take those of the strategy now: Lightning's learning-rate finder replaces them."""
        self.asked_optimizers = named = _by_place(self.strategy.optimizers)
        if self.trains:
            if self._seen is None:
                found = {name: p.grad for name, p in self.parameters().items()}
                there = {name: g for name, g in found.items() if g is not None}
                lost = {name for name, g in there.items() if type(g) is DroppedGradient}
                stage = self.stage_gradients
                stage.there, stage.lost = stage.there.union(there), frozenset(lost)
            self.take_optimizers(named)
            self.schedulers = [one.scheduler for one in self.strategy.lr_scheduler_configs]
            self._seen = [*named.values(), *program_schedulers(self.schedulers)]

    def is_replaced(self) -> bool:
        """Whether the trainer has other optimizers, or schedulers that programs step, than then.

        Raises:
            StateChanged: it has, and the state of those that were is in files.
        """
        if self._seen is None:
            return False
        now: list[Any] = [one.optimizer for one in self.strategy._lightning_optimizers]
        now += program_schedulers(one.scheduler for one in self.strategy.lr_scheduler_configs)
        if [*map(id, now)] == [*map(id, self._seen)]:
            return False
        if residency.is_open:
            raise StateChanged(
                "Optimizers or schedulers were replaced; under weight streaming they cannot be.",
                remedy="change their param_groups, or call fit again",
            )
        return True

    def check_trace(self, before: Snapshot) -> None:
        """Say what the step set on the Trainer, or would set on another batch."""
        codes = codes_reached(self._hooks())
        warn_of_types(codes, [key for slot in self.counts.slots for _, key in slot.held])
        check_trainer(self.trainer, before.before(vars(self.trainer)), codes)

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
        """The first line with one of these names in methods of the module, callbacks and layers."""
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


def step_clears(trainer: pl.Trainer, optimizer: Optimizer, begins: bool) -> bool:
    """Whether a step clears gradients itself, where Lightning may do that: after ``training_step``.

    Args:
        trainer: whose step runs.
        optimizer: whose parameters' gradients.
        begins: whether a window of accumulation begins with the step.
    """
    trace, module = step_context.get().trace, trainer.lightning_module
    if trace is None:
        return True
    own = type(module).optimizer_zero_grad  # of the class: while it is traced it has another
    has_hooks = own is not pl.LightningModule.optimizer_zero_grad
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    for owner, base in [(module, pl.LightningModule), *((one, pl.Callback) for one in callbacks)]:
        has_hooks = has_hooks or overrides(owner, "on_before_zero_grad", base)
    gradients = trace.inputs.gradients
    if has_hooks:
        gradients.note_clearing()
    if trainer.accumulate_grad_batches == 1:
        return True
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    # a trace that is compared with another may be of any step of a window
    first = begins and trace.host.first is None
    if clears := bool(gradients.begin_window(parameters, first, has_hooks)):
        trace.note_answer(BEGINS, begins)  # a program for the steps that begin one
    return clears


def _divides_the_loss() -> bool:
    """Whether Lightning divides the loss that the step returned, for accumulation.

    By then its current hook is ``optimizer_step``, and what is wrong with the loss is the step's.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not _LOSS:
        frame = frame.f_back
    return frame is not None


_LOSS = ClosureResult.from_training_step_output.__func__.__code__  # type: ignore[attr-defined]


def _by_place(optimizers: list[Optimizer]) -> dict[str, Optimizer]:
    return {f"optimizers[{i}]": one for i, one in enumerate(optimizers)}
