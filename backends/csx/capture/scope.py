"""What a step works on: modules, optimizers and schedulers; and how a trace is undone on them.

The first trace is undone if it fails, those that only compare in any case.
"""

from __future__ import annotations

import contextlib
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fulgurite.backends.csx.capture.recording import Recording
from fulgurite.backends.csx.contract import ConstantSource, Reads
from fulgurite.backends.csx.diagnostics.user_lines import UserLine
from fulgurite.backends.csx.graph import rng
from fulgurite.backends.csx.hyperparams.counts import Counts, CountSlot
from fulgurite.backends.csx.hyperparams.run_numbers import BEGINS, COUNTERS, INDEX, STEPS
from fulgurite.backends.csx.hyperparams.slots import NumberSlot
from fulgurite.backends.csx.objects import (
    PythonState,
    ReadableState,
    RebuiltList,
    Trees,
    holders_in,
    keystr,
)
from fulgurite.backends.csx.state import (
    NewState,
    Place,
    Snapshot,
    StageGradients,
    check_optimizer,
    init_state,
    keep_within_budget,
    with_inner,
)
from fulgurite.backends.csx.streaming.residency import residency
from fulgurite.backends.program_scheduler import program_schedulers
from fulgurite.backends.runtime import shielded

if TYPE_CHECKING:
    from fulgurite.backends.csx.capture.births import EmptyPlaces


def _counters() -> dict[str, Tensor]:
    with torch.inference_mode(False):  # they are written in other modes too
        return {name: torch.zeros((), dtype=torch.int64) for name in COUNTERS}


@dataclass(frozen=True, slots=True)
class Exchange:
    """What has to be the same in all processes that run a program.

    Args:
        reduced: the parameters whose gradients become the mean of all, in this order.
        updated: the parameters that change.
        own: those that other operations change than updates: in each process as its batch has it.
        numbers: of param groups, that the program takes.
    """

    reduced: tuple[str, ...]
    updated: tuple[str, ...]
    own: frozenset[str]
    numbers: tuple[NumberSlot | CountSlot, ...]


@dataclass(slots=True, kw_only=True)
class Scope(ABC):
    """What a step works on. Evaluation stages have no optimizers."""

    root: ClassVar[str]  # how the step's code reaches ``module``, which holds all of its modules
    module: nn.Module
    optimizers: list[Optimizer] = field(default_factory=list)  # those in others, too
    named_optimizers: dict[str, Optimizer] = field(default_factory=dict)  # as messages call them
    asked_optimizers: dict[str, Optimizer] = field(default_factory=dict)  # by an evaluation, too
    schedulers: list[Any] = field(default_factory=list)
    trains: bool = False  # whether the step computes gradients
    born: list[EmptyPlaces] = field(default_factory=list)  # of state that first steps make
    entries: dict[Any, Any] = field(default_factory=dict)  # of optimizers' state (OptimizerEntry)
    counts: Counts = field(default_factory=Counts)  # numbers of optimizers outside of their groups
    stage_gradients: StageGradients = field(default_factory=StageGradients)
    python_runs_once: bool = True  # not with retrace_every_iteration; what it reads is frozen
    compares_traces: bool = False  # each is recorded, for later ones to be compared with it
    gradients_on_host: ClassVar[bool] = False  # whether the host sees them between steps
    batch_idx: int | None = None  # of the batch that the step is called with
    _counters: dict[str, Tensor] = field(default_factory=_counters)

    def asked(self, name: str) -> Any:
        """What a step finds now that asks for one of ``COUNTERS``, for ``LAST`` or ``BEGINS``."""
        if name == STEPS:
            return self.steps_done()
        if name == INDEX:
            return self.batch_idx
        if name == BEGINS:
            return self.begins_window
        trainer = self.trainer
        return 0 if trainer is None else getattr(trainer, name)

    def counter(self, name: str) -> Tensor:
        """One of ``COUNTERS``, int64: always the same tensor, for making one takes 5 µs."""
        return self._counters[name].fill_(self.asked(name))

    @property
    def trainer(self) -> pl.Trainer | None:
        """The Trainer that runs the step, where Lightning does."""
        return None

    @property
    def backward_is_lightnings(self) -> bool:
        """Whether Lightning calls ``backward`` (automatic optimization)."""
        return False

    @property
    def begins_window(self) -> bool:
        """Whether a window of accumulation begins with this step."""
        return False

    @property
    def ends_window(self) -> bool:
        """Whether one ends with it."""
        return False

    @property
    def shows_gradients(self) -> bool:
        """Whether gradients that are state are in ``p.grad`` between steps."""
        return self.keeps_gradients

    @property
    def keeps_gradients(self) -> bool:
        """Whether all gradients are state, because code on the host reads them."""
        return False

    @property
    def fp16_type(self) -> str | None:
        """The run's 16-bit type by name, where it has one."""
        return None

    def outside_tensors(self) -> list[ConstantSource]:
        """Tensors that no module holds, and the places where the step's code finds them."""
        return []

    def outside_state(self) -> Iterator[Place]:
        """Places of state that neither modules nor optimizers hold."""
        return iter(())

    def is_replaced(self) -> bool:
        """Whether there are other optimizers or schedulers than were looked up."""
        return False

    def check_trace(self, before: Snapshot) -> None:  # noqa: B027
        """Say what a trace changed that would not change again."""

    def ask_for_audit(self) -> bool:
        """Have other processes audit their step after the next, too; False: there are none."""
        return False

    def compare(self, stage: str, captured: Any) -> None:  # noqa: B027
        """Verify that other processes have traced the same step."""

    def announcer(self) -> Callable[[Exchange, Tensor | None], None] | None:
        """What tells other processes what a run exchanges with them, and its numbers."""
        return None

    def note_audit(self) -> None:  # noqa: B027
        """Tell other processes that the next step is traced again."""

    def refresh(self) -> None:  # noqa: B027
        """Look up optimizers and schedulers once more, before the first trace."""

    def take_optimizers(self, named: Mapping[str, Optimizer]) -> None:
        """The step works on these, and on those that they keep inside, as Lookahead does."""
        self.named_optimizers = self.asked_optimizers = with_inner(named)
        self.optimizers = [*self.named_optimizers.values()]

    def leaf_name(self, path: Any) -> str:
        """How messages call a leaf of the batch, by its path in it."""
        return f"batch{keystr(path)}"

    def parameters(self) -> dict[str, nn.Parameter]:
        """Every parameter by its name: the modules', then those only an optimizer knows."""
        found = dict(self.module.named_parameters())
        known = {id(p) for p in found.values()}
        for owner, optimizer in self.named_optimizers.items():
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
        keep = functools.partial(keep_within_budget, self.parameters(), self.optimizers)
        for optimizer in self.optimizers:
            check_optimizer(optimizer, made_at)
            one = init_state(optimizer, made_at, keep if residency.is_open else None)
            new_state += [] if one is None else [one]
        keep()
        return new_state

    def forget_state(self) -> None:
        """The state of optimizers is another one: no first step waits for it any more."""
        self.born = [one for one in self.born if not one.is_optimizers]
        self.entries.clear()
        self.counts.forget()
        self.refresh()

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

    def readable(self) -> ReadableState:
        """What the step's code may read besides tensors."""
        others = [*self.optimizers, *self.schedulers]
        functions = [*self.functions(), *(one.step for one in self.optimizers)]
        return ReadableState(functions, self.module, self.root, others)

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
        """The user's line to blame while no code of theirs is on the stack: the hook that runs."""


class HostState:
    """What a trace finds on the host, to tell afterwards what the step did there.

    Args:
        scope: what the step works on.
        first: the trace that this one is to be compared with.

    Attributes:
        is_recorded: whether later traces are compared with this one.
        reads: the frozen values that the step reads, those of ``first`` again.
        snapshot: the attributes of all objects, and the containers in them.
        trees: the lists, dicts and objects that may hold state.
        modules: all of them.
        outside: tensors that no module holds.
        states: each optimizer's state, and what was in it.
        python: whatever else the step's code can reach, where this trace is recorded.
    """

    def __init__(self, scope: Scope, first: Recording | None) -> None:
        self.scope, self.first = scope, first
        self.is_recorded = first is None and scope.compares_traces and scope.python_runs_once
        self.reads = Reads() if first is None else first.reads
        self.snapshot, self.trees = Snapshot(scope.objects()), scope.trees()
        self.modules = list(scope.module.modules())
        self.python = scope.python_state() if self.is_recorded else None
        self.states = [(optimizer.state, dict(optimizer.state)) for optimizer in scope.optimizers]
        self.outside = scope.outside_tensors()

    def rebuilt_lists(self) -> set[str]:
        """The places whose lists the first trace made anew and longer."""
        lists = () if self.first is None else self.first.outputs.lists
        return {one.name for one in lists if isinstance(one.container, RebuiltList)}


class BeforeTrace:
    """Module, optimizers, counters and random states as they are before a trace.

    Random states are left alone where the step drew nothing and other threads run: what those drew
    must not come again.
    """

    def __init__(self, scope: Scope) -> None:
        self._scope = scope
        self._snapshot, self._trees = Snapshot(scope.objects()), scope.trees()
        self._random_states = rng.Undrawn()

    def restore(self) -> None:
        """Put them back."""
        with shielded():
            self._snapshot.restore()
            self._trees.restore()
            self._random_states.restore()


@contextlib.contextmanager
def undo_on_failure(scope: Scope) -> Iterator[None]:
    """If the block raises, put module, optimizers, counters and random states back as they were."""
    before = BeforeTrace(scope)
    try:
        yield
    except BaseException:
        before.restore()
        raise


@contextlib.contextmanager
def restore_afterwards(scope: Scope) -> Iterator[None]:
    """Put back all that ``BeforeTrace`` remembers when the block ends, however it ends."""
    before = BeforeTrace(scope)
    try:
        yield
    finally:
        before.restore()


@contextlib.contextmanager
def keep_flat_weights(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Put back the lists in which recurrent layers hold their weights a second time.

    A call lists the weights again where one is another object than in the call before, which it is
    under ``functional_call`` and ``weight_norm``. What a trace lists so are its fakes.
    """
    before = [
        (one, one._flat_weights, list(one._flat_weights), one._flat_weight_refs)
        for one in modules
        if isinstance(one, nn.RNNBase)
    ]
    try:
        yield
    finally:
        for layer, weights, content, references in before:
            if layer._flat_weight_refs is not references:
                weights[:] = content
                vars(layer).update(_flat_weights=weights, _flat_weight_refs=references)


@contextlib.contextmanager
def undo_afterwards(scope: Scope) -> Iterator[PythonState]:
    """Do as ``restore_afterwards``, and put back too what Python state the step's code can reach.

    Yields that state as it was.
    """
    state = scope.python_state()
    try:
        with restore_afterwards(scope):
            yield state
    finally:
        state.restore()
