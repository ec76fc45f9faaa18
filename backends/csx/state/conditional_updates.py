"""Updates of an optimizer that may not count, or are others the first time.

Eagerly the host decides whether ``optimizer.step()`` is called. Here it always runs, and a tensor
can cancel it: every state that it wrote becomes ``torch.where(skip, before, after)``: parameters,
the optimizer's state, and what hooks on the step changed (``skipped_where``). What was written is
read off the recorded operations, so it does not matter through which tensor (``p``, ``p.data``, a
view) that happened.

State that comes from the first gradient: SGD with dampening starts its buffer as the first
gradient, and many a user's optimizer has ``if "buf" not in state: state["buf"] = p.grad.clone()``.
While such a step is traced it runs twice after one backward pass: as the first update, without that
state, and as any later one, with it (``first_updates``). A flag in the program's state,
``updated``, chooses between the two results. State from a checkpoint is not new, so it needs none
of this.

Gradients that are used in the step after the one that computed them: in the first step of
``opt.step(); opt.zero_grad(); manual_backward(loss)`` every ``p.grad`` is None, and the optimizer
leaves such parameters and their state alone. A flag for each of them (``GradientFlag``), which is
state of the program, tells whether there is a gradient; where there is none, what the optimizer
wrote is taken back. The host sets the flag where it clears a gradient or puts one there.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.optim import Optimizer

from fulgurite.backends.csx.diagnostics.trace_errors import UnsupportedState
from fulgurite.backends.csx.diagnostics.user_lines import UserLine
from fulgurite.backends.csx.graph.graph import storage_of
from fulgurite.backends.csx.graph.op_schema import written_nodes
from fulgurite.backends.csx.graph.recorder import recorder
from fulgurite.backends.csx.state.optimizer_state import NewState, around_steps
from fulgurite.backends.csx.state.python_objects import refill, remember
from fulgurite.backends.csx.state.storage import Place, StateTensor, brief, tensors_in
from fulgurite.backends.torch_versions import last_node


@contextlib.contextmanager
def skipped_where(skip: Tensor, state: Iterable[StateTensor]) -> Iterator[None]:
    """Let what the block writes hold only where ``skip``, a bool without dimensions, is False.

    Args:
        skip: whether the block does not count.
        state: the tensors of the program.
    """
    graph = recorder().graph
    first = last_node(graph)
    # the forward pass may have put another tensor into a place: that one counts
    places = [place for held in state for place in held.places]
    tensors = [held.tensor for held in state for _ in held.places]
    values = [place.get() for place in places]
    found = [v if isinstance(v, Tensor) else t for v, t in zip(values, tensors, strict=True)]
    with torch.no_grad():
        # of all, for nobody knows yet what the block writes; what it does not is dropped at the end
        before = {id(t): (t, t.detach().clone(), storage_of(t)) for t in found}
    last = last_node(graph)
    yield
    written = _written_after(last)
    with torch.no_grad():
        for tensor, value, storage in before.values():
            # written in place, or moved to other memory by ``tensor.data = value``
            if storage in written or storage_of(tensor) != storage:
                tensor.copy_(torch.where(skip, value, tensor))
        _choose_replacements(
            skip, [(place, t, before[id(t)][1]) for place, t in zip(places, found, strict=True)]
        )
    _drop_unused(first, last)


def _choose_replacements(skip: Tensor, places: list[tuple[Place, Tensor, Tensor]]) -> None:
    """Let what the block put into places hold only where ``skip`` is False.

    Each of ``places`` comes with its tensor before the block, and a copy of that tensor.
    """
    chosen: dict[int, Tensor] = {}  # by what was put there: tied places stay one tensor
    for place, tensor, before in places:
        now = place.get()
        if now is tensor or not isinstance(now, Tensor):
            continue
        if (now.shape, now.dtype) == (before.shape, before.dtype):  # else an error, at the end
            if id(now) not in chosen:
                chosen[id(now)] = torch.where(skip, before, now)
            place.put(chosen[id(now)])


def _drop_unused(first: fx.Node, last: fx.Node) -> None:
    """Erase the copies after ``first`` up to ``last`` that nobody needed.

    A copy that stayed would count as a read of the state that it is of.
    """
    while last is not first:
        node, last = last, last.prev
        if not node.users:
            node.graph.erase_node(node)


def _written_after(node: fx.Node) -> set[int]:
    """The memory that operations after ``node`` write."""
    memory: set[int] = set()
    while (node := node.next).op != "root":
        values = [written.meta.get("val") for written in written_nodes(node)]
        memory |= {storage_of(value) for value in values if isinstance(value, Tensor)}
    return memory


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
def hide_deferred_state(deferred: list[DeferredState]) -> Iterator[None]:
    """Keep state that still waits for the first gradient out of a checkpoint.

    Eagerly an optimizer has none before its first update. A run that goes on from the checkpoint
    would take the zeros for state, and make a later update of what is the first.
    """
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
        # once for both updates: a second backward pass would add to the gradients
        closure = self._evaluated(*args[1:], **kwargs)
        restore = remember(optimizer)
        gradients = [p.grad for p in self._everyone]
        values = [None if one is None else (one.clone(), one._version) for one in gradients]
        for key in self._keys & optimizer.state.keys():
            del optimizer.state[key]
        with torch.no_grad():
            # past torch's hooks and the count of schedulers: the second update runs them
            inspect.unwrap(type(optimizer).step)(optimizer, closure=closure)
            self._weights = {id(p): p.detach().clone() for p in self._parameters}
            self._states = {k: v for k, v in optimizer.state.items() if k in self._keys}
            restore()
            for p, gradient, before in zip(self._everyone, gradients, values, strict=True):
                p.grad = gradient  # the tensor itself: the step may have another name for it
                # an update may change gradients in place (weight decay, clipping by hand)
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
            # the loss was computed before either update: with other weights it would be another
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


IS_THERE = "is there"
Waiting = Callable[[Optimizer], dict[nn.Parameter, Tensor]]


class GradientFlag:
    """A flag in the program's state: has this parameter a gradient from the step before?

    Args:
        name: the parameter's.
        there: the flag's first value.
    """

    def __init__(self, name: str, there: bool) -> None:
        self._name, self._there = name, there
        self.flag = {IS_THERE: torch.tensor(there)}

    def place(self) -> Place:
        """Where the flag is kept."""
        return Place(self.flag, IS_THERE, f"whether {self._name}.grad is there")

    def set_from_host(self, there: bool) -> None:
        """Tell the program whether the host left a gradient there or cleared it."""
        if there is not self._there:  # every step comes here, and writing a tensor takes 1 µs
            self.put(there)

    def is_there(self) -> bool:
        """Whether there is a gradient now, asked on the host."""
        return bool(self.flag[IS_THERE])

    def put(self, there: bool) -> None:
        """The host has computed or cleared the gradient, wherever it is kept."""
        self._there = there
        self.flag[IS_THERE].fill_(there)

    def note_set_by_program(self, there: bool) -> None:
        """Note what the program itself has written into the flag, without reading a tensor."""
        self._there = there


@contextlib.contextmanager
def skipping_without_gradient(
    optimizers: Iterable[Optimizer], deferred: list[DeferredState], waiting: Waiting
) -> Iterator[None]:
    """Let each optimizer's step leave parameters alone where they have no gradient.

    Args:
        optimizers: those of the step.
        deferred: their state that waits for the first gradient.
        waiting: of an optimizer, the parameters that no backward pass has reached in this step but
            perhaps in the one before, each with its flag.
    """
    with contextlib.ExitStack() as stack:
        for optimizer in optimizers:
            own = [one for one in deferred if one.new_state.optimizer is optimizer]
            step = _Step(optimizer, own, waiting)
            stack.enter_context(around_steps(optimizer, step.before, step.after))
        yield


class _Step:
    """One optimizer's steps."""

    def __init__(
        self, optimizer: Optimizer, deferred: list[DeferredState], waiting: Waiting
    ) -> None:
        self._optimizer, self._deferred, self._waiting = optimizer, deferred, waiting

    def before(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Copy the parameters and the state that the step may write without a gradient."""
        places = {p: list(tensors_in(optimizer.state, p)) for p in self._waiting(optimizer)}
        with torch.no_grad():
            self._updated = [one.flag[UPDATED].clone() for one in self._deferred]
            self._before = {
                p: (p.detach().clone(), [(place, place.get().detach().clone()) for place in found])
                for p, found in places.items()
            }

    def after(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Take back what was written where even the step's closure gave no gradient."""
        now = self._waiting(optimizer)
        without = {p: now[p] for p in self._before if p in now}
        with torch.no_grad():
            for p, there in without.items():
                weight, places = self._before[p]
                p.copy_(torch.where(there, p, weight))
                for place, before in places:
                    value = place.get()
                    if isinstance(value, Tensor) and value.shape == before.shape:
                        place.put(torch.where(there, value, before))
            for one, updated in zip(self._deferred, self._updated, strict=True):
                self._take_back_update(one, updated, without)

    def _take_back_update(
        self, one: DeferredState, before: Tensor, without: dict[nn.Parameter, Tensor]
    ) -> None:
        """Let state that waits for the first gradient go on waiting where there was none."""
        # one flag, ``updated``, serves all of them: they must get their first gradient together
        own: list[Any] = [p for p in one.new_state.parameters if p.grad is not None]
        flags = [without[p] for p in own if p in without]
        if flags and len(flags) < len(own):
            raise UnsupportedState(
                f"{type(self._optimizer).__name__} makes state from the first gradient, which some"
                " of its parameters get in this step and others have from the step before.",
                remedy="an optimizer for each; or zero_grad() before the backward pass",
            )
        if flags:
            updated = one.flag[UPDATED]
            updated.copy_(torch.where(torch.stack(flags).any(), updated, before))
