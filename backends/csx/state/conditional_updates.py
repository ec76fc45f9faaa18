"""Updates of an optimizer that may not count.

Eagerly the host decides whether ``optimizer.step()`` is called. Here it always runs, and a tensor
can cancel it: every state that it wrote becomes ``torch.where(skip, before, after)``: parameters,
the optimizer's state, and what hooks on the step changed (``skipped_where``). What was written is
read off the recorded operations, so it does not matter through which tensor (``p``, ``p.data``, a
view) that happened.

Gradients that are used in the step after the one that computed them: in the first step of
``opt.step(); opt.zero_grad(); manual_backward(loss)`` every ``p.grad`` is None, and the optimizer
leaves such parameters and their state alone. A flag for each of them (``GradientFlag``), which is
state of the program, tells whether there is a gradient; where there is none, what the optimizer
wrote is taken back. The host sets the flag where it clears a gradient or puts one there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.optim import Optimizer

from fulgurite.backends.csx.diagnostics.trace_errors import UnsupportedState
from fulgurite.backends.csx.graph.graph import storage_of
from fulgurite.backends.csx.graph.op_schema import written_nodes
from fulgurite.backends.csx.graph.recorder import recorder
from fulgurite.backends.csx.state.optimizer_state import around_steps
from fulgurite.backends.csx.state.storage import Place, StateTensor, tensors_in
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
    optimizers: Iterable[Optimizer], counts: dict[int, Tensor], waiting: Waiting
) -> Iterator[None]:
    """Let each optimizer's step leave parameters alone where they have no gradient.

    Args:
        optimizers: those of the step.
        counts: receives, by the identity of a parameter, whether an update of it counts.
        waiting: of an optimizer, the parameters that no backward pass has reached in this step but
            perhaps in the one before, each with its flag.
    """
    with contextlib.ExitStack() as stack:
        for optimizer in optimizers:
            step = _Step(counts, waiting)
            stack.enter_context(around_steps(optimizer, step.before, step.after))
        yield


class _Step:
    """One optimizer's steps."""

    def __init__(self, counts: dict[int, Tensor], waiting: Waiting) -> None:
        self._counts, self._waiting = counts, waiting

    def before(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Copy the parameters and the state that the step may write without a gradient."""
        places = {p: list(tensors_in(optimizer.state, p)) for p in self._waiting(optimizer)}
        with torch.no_grad():
            self._before = {
                p: (p.detach().clone(), [(place, place.get().detach().clone()) for place in found])
                for p, found in places.items()
            }

    def after(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Take back what was written where even the step's closure gave no gradient."""
        now = self._waiting(optimizer)
        without = {p: now[p] for p in self._before if p in now}
        parameters = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if without and any(id(key) not in parameters for key in optimizer.state):
            raise UnsupportedState(
                f"{type(optimizer).__name__} keeps state that is no parameter's, and steps where"
                " some parameters may have no gradient yet.",
                remedy="zero_grad() and the backward pass before optimizer.step(), in one step",
            )
        with torch.no_grad():
            for p, there in without.items():
                weight, places = self._before[p]
                p.copy_(torch.where(there, p, weight))
                for place, before in places:
                    value = place.get()
                    if isinstance(value, Tensor) and value.shape == before.shape:
                        place.put(torch.where(there, value, before))
                self._counts[id(p)] = there.clone()  # the step may leave another gradient there
