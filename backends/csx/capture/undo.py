"""How a trace is undone: the first one if it fails, those that only compare in any case."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

from torch import nn

from fulgurite.backends.csx.capture.python_state import PythonState
from fulgurite.backends.csx.capture.scope import Scope
from fulgurite.backends.csx.graph import rng
from fulgurite.backends.csx.state.python_objects import Snapshot
from fulgurite.backends.interrupts import shielded


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
