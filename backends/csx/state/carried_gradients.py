"""Gradients that an optimizer uses in the step after the one that computed them.

``opt.step(); opt.zero_grad(); manual_backward(loss)``: in the first step every ``p.grad`` is None,
and the optimizer leaves such parameters and their state alone. A flag for each of them, state of
the program, tells whether there is a gradient; where there is none, what the optimizer wrote is
taken back. The host sets the flag where it clears a gradient or puts one there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fulgurite.backends.csx.diagnostics.errors import UnsupportedState
from fulgurite.backends.csx.state.first_update import UPDATED, DeferredState
from fulgurite.backends.csx.state.optimizer_hooks import around_steps
from fulgurite.backends.csx.state.places import Place
from fulgurite.backends.csx.state.storage import tensors_in

IS_THERE = "is there"
Waiting = Callable[[Optimizer], dict[nn.Parameter, Tensor]]


class Carried:
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

    def is_now(self, there: bool) -> None:
        """Tell the program what the host made of the gradient."""
        if there is not self._there:
            self._there = there
            self.flag[IS_THERE].fill_(there)

    def was_left(self, there: bool) -> None:
        """The program itself has set its flag to this."""
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
