"""How a trace is undone: the first one if it fails, those that only compare in any case."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

from torch import nn

from fulgurite.backends.csx.capture.python_state import PythonState
from fulgurite.backends.csx.capture.recording import Recording
from fulgurite.backends.csx.capture.scope import Scope
from fulgurite.backends.csx.capture.trees import Regrown
from fulgurite.backends.csx.contract.replay import Reads
from fulgurite.backends.csx.graph import rng
from fulgurite.backends.csx.state.python_objects import Snapshot
from fulgurite.backends.interrupts import shielded


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
        self.is_recorded = first is None and scope.looks_again and scope.freezes
        self.reads = Reads() if first is None else first.reads
        self.snapshot, self.trees = Snapshot(scope.objects()), scope.trees()
        self.modules = list(scope.module.modules())
        self.python = scope.python_state() if self.is_recorded else None
        self.states = [(optimizer.state, dict(optimizer.state)) for optimizer in scope.optimizers]
        self.outside = scope.outside_tensors()

    def grows_anew(self) -> set[str]:
        """The places whose lists the first trace made anew and longer."""
        lists = () if self.first is None else self.first.outputs.lists
        return {one.name for one in lists if isinstance(one.container, Regrown)}


class Before:
    """Module, optimizers, counters and random states as they are before a trace."""

    def __init__(self, scope: Scope) -> None:
        self._scope, self._deferred = scope, scope.deferred
        self._snapshot, self._trees = Snapshot(scope.objects()), scope.trees()
        self._random_states = rng.Undrawn()

    def restore(self) -> None:
        """Put them back."""
        with shielded():
            self._snapshot.restore()
            self._trees.restore()
            self._random_states.restore()
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
def restored(scope: Scope) -> Iterator[None]:
    """Put all that back when the block ends, however it ends."""
    before = Before(scope)
    try:
        yield
    finally:
        before.restore()


@contextlib.contextmanager
def flat_weights_kept(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Put back what recurrent layers listed anew: they hold their weights a second time.

    Each call lists them again where one is another object than in the last call, which
    ``functional_call`` and ``weight_norm`` make it: after a step that is none of ours to repeat.
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
def undone(scope: Scope) -> Iterator[PythonState]:
    """``restored``, and with it whatever Python state the step's code can reach.

    Yields that state as it was.
    """
    state = scope.python_state()
    try:
        with restored(scope):
            yield state
    finally:
        state.restore()
