"""State that comes from the first gradient: the first update runs as eager's, in the same program.

SGD with dampening starts its buffer as the first gradient, and many a user's optimizer has ``if
"buf" not in state: state["buf"] = p.grad.clone()``. While such a step is traced it runs twice after
one backward pass: as the first update, without that state, and as any later one, with it. A flag in
the program's state, ``updated``, chooses between the two results. State from a checkpoint is not
new, so it needs none of this.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fulgurite.backends.csx.diagnostics.errors import UnsupportedState
from fulgurite.backends.csx.diagnostics.user_lines import UserLine
from fulgurite.backends.csx.state.optimizer_hooks import around_steps
from fulgurite.backends.csx.state.optimizer_init import NewState
from fulgurite.backends.csx.state.places import Place
from fulgurite.backends.csx.state.python_objects import refill, remember
from fulgurite.backends.csx.state.storage import brief

UPDATED = "updated"
_CHANGES = "changes parameters before it evaluates its closure"


@dataclass(frozen=True, slots=True, eq=False)
class DeferredState:
    """New state whose values mean nothing until its optimizer's first update."""

    new_state: NewState
    flag: dict[str, Tensor] = field(default_factory=lambda: {UPDATED: torch.tensor(False)})

    @property
    def state(self) -> dict[Any, Any]:
        """The state of its optimizer."""
        return self.new_state.optimizer.state

    def place(self) -> Place:
        """Where the flag is kept."""
        return Place(
            self.flag, UPDATED, f"whether {type(self.new_state.optimizer).__name__} has updated"
        )

    def waits(self) -> bool:
        """Whether the first update is still to come; asked on the host."""
        return not self.flag[UPDATED]


@contextlib.contextmanager
def hidden(deferred: list[DeferredState]) -> Iterator[None]:
    """Keep state that still waits for the first gradient out of a checkpoint."""
    before = [(one.state, dict(one.state)) for one in deferred if one.waits()]
    try:
        for one in deferred:
            for key in one.new_state.keys if one.waits() else ():
                one.state.pop(key, None)
        yield
    finally:
        for state, values in before:
            refill(state, values)


@contextlib.contextmanager
def first_updates(deferred: list[DeferredState]) -> Iterator[None]:
    """Let the optimizers of ``deferred`` run their first update beside a later one."""
    optimizers = {id(one.new_state.optimizer): one.new_state.optimizer for one in deferred}
    with contextlib.ExitStack() as stack:
        for optimizer in optimizers.values():
            own = [one for one in deferred if one.new_state.optimizer is optimizer]
            both = _BothUpdates(optimizer, own)
            stack.enter_context(around_steps(optimizer, both.first, both.choose))
        yield


class _BothUpdates:
    """The two updates of one optimizer's step."""

    def __init__(self, optimizer: Optimizer, deferred: list[DeferredState]) -> None:
        self._optimizer, self._deferred = optimizer, deferred
        self._keys = {key for one in deferred for key in one.new_state.keys}
        self._parameters = [p for one in deferred for p in one.new_state.parameters]
        states = [optimizer.state[key] for key in self._keys & optimizer.state.keys()]
        names = {str(name) for state in states if isinstance(state, dict) for name in state}
        self._names = ", ".join(f"state[{name!r}]" for name in sorted(names)) or "state"
        self._everyone = [p for group in optimizer.param_groups for p in group["params"]]

    def first(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        """Before the step: evaluate the closure, make the first update, keep it and undo it."""
        closure = self._evaluated(*args[1:], **kwargs)
        restore = remember(optimizer)
        gradients = [p.grad for p in self._everyone]
        values = [None if one is None else (one.clone(), one._version) for one in gradients]
        for key in self._keys & optimizer.state.keys():
            del optimizer.state[key]
        with torch.no_grad():
            inspect.unwrap(type(optimizer).step)(optimizer, closure=closure)
            self._weights = {id(p): p.detach().clone() for p in self._parameters}
            self._states = {k: v for k, v in optimizer.state.items() if k in self._keys}
            restore()
            for p, gradient, before in zip(self._everyone, gradients, values, strict=True):
                p.grad = gradient  # the tensor itself: the step may have another name for it
                if gradient is not None and before is not None and gradient._version != before[1]:
                    gradient.copy_(before[0])
        self._versions, self._asked = self._versions_now(), False
        return (optimizer,), {"closure": closure}

    def choose(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """After the step, which was a later update: take the first one where that is due."""
        with torch.no_grad():
            for one in self._deferred:
                updated = one.flag[UPDATED]
                for p in one.new_state.parameters:
                    p.copy_(torch.where(updated, p, self._weights[id(p)]))
                for key in one.new_state.keys:
                    if key in self._states:
                        self._choose(updated, optimizer.state, key, self._states[key])
                updated.fill_(True)

    def _choose(self, updated: Tensor, now: Any, key: Any, first: Any) -> None:
        """``now[key]`` becomes ``first`` before the first update; dicts one by one."""
        later = now.get(key)
        if isinstance(first, dict) and isinstance(later, dict) and first.keys() == later.keys():
            for name in first:
                self._choose(updated, later, name, first[name])
        elif _alike(first, later):
            now[key] = torch.where(updated, later, first)
        elif isinstance(first, Tensor) or type(first) is not type(later) or first != later:
            raise UnsupportedState(
                f"The first update of {type(self._optimizer).__name__} leaves {brief(first)} in"
                f" state[...][{key!r}], later ones {brief(later)}.",
                remedy="make every state a tensor of its final shape at once",
            )

    def _evaluated(self, closure: Callable[[], Any] | None = None) -> Callable[[], Any]:
        """Evaluate a closure now; returns one that gives its loss, once in each update."""
        loss, self._asked = None, False
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._versions = self._versions_now()

        def again() -> Any:
            if self._asked or self._versions_now() != self._versions:
                how = "evaluates its closure twice" if self._asked else _CHANGES
                raise UnsupportedState(
                    f"{type(self._optimizer).__name__} {how}, and makes {self._names} from the"
                    " first gradient.",
                    line=UserLine.of_method(type(self._optimizer), "step"),
                    remedy="state that is zero at first: torch.zeros_like(p)",
                )
            self._asked = True
            return loss

        return again

    def _versions_now(self) -> list[int]:
        return [p._version for p in self._everyone]


def _alike(a: Any, b: Any) -> bool:
    tensors = isinstance(a, Tensor) and isinstance(b, Tensor)
    return tensors and (a.shape, a.dtype) == (b.shape, b.dtype)
