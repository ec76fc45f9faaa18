"""Gradients between steps.

``p.grad`` starts as an input of its own, zero before the first step. Where the step clears it first
(``zero_grad``) nobody reads that input and it is dropped; where gradients accumulate over steps, it
is state. Eagerly the gradient of a parameter that no backward reaches is None, and its optimizer
leaves it alone, so such a zero is hidden from the optimizer.

Lightning's steps keep gradients to themselves (``Buffers``). A function of a hand-written loop
finds them in ``p.grad`` and leaves them there (``OnHost``), so that the loop may clear them, or
another function may use them; only those that an optimizer has used and nobody reads again are not
worth writing down.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fulgurite.backends.csx.graph import Input, Kind
from fulgurite.backends.csx.stand_ins import on_gradient


@dataclass(slots=True, kw_only=True)
class Handover:
    """What a step found in ``p.grad`` and left there; by the parameters' names."""

    parameters: dict[str, nn.Parameter]
    on_host: bool  # whether the host sees it
    was_none: frozenset[str] = frozenset()  # before the trace
    decided_by: set[str] = field(default_factory=set)  # whether these were None matters
    left: dict[str, bool] = field(default_factory=dict)  # False: None; absent: as it was
    unused: set[str] = field(default_factory=set)  # computed, and not used by an optimizer since

    def broken(self) -> str | None:
        """A text where a gradient that must be None no longer is, or the other way round."""
        for name in self.decided_by:
            is_none, was_none = self.parameters[name].grad is None, name in self.was_none
            if is_none != was_none:
                words = {True: "None", False: "a tensor"}
                return f"{name}.grad was {words[was_none]}, and now is {words[is_none]}"
        return None


def broken_gradient(handovers: list[Handover]) -> str | None:
    """What one of them says is broken."""
    return next((why for why in (one.broken() for one in handovers) if why), None)


class Gradients:
    """The gradients of one trace.

    Args:
        parameters: all parameters by name; those that require no gradient are left out.
        on_host: whether the host sees them between steps.
    """

    def __init__(self, parameters: dict[str, nn.Parameter], on_host: bool) -> None:
        self.parameters = {name: p for name, p in parameters.items() if p.requires_grad}
        self.handover = Handover(parameters=self.parameters, on_host=on_host)
        if on_host:
            none = (name for name, p in self.parameters.items() if p.grad is None)
            self.handover.was_none = frozenset(none)
        self._names = {id(p): name for name, p in self.parameters.items()}
        self._inputs: dict[str, Tensor] = {}
        self._reached: set[str] = set()

    def watch(self, parameter: Tensor, stand_in: Tensor) -> None:
        """Note when a backward pass reaches a parameter, by its stand-in."""
        name = self._names.get(id(parameter))

        def note(p: Tensor) -> None:
            assert name is not None
            self._reached.add(name)
            self.handover.unused.add(name)

        if name is not None:
            on_gradient(stand_in, note)

    def put(self, inputs: list[Tensor]) -> None:
        """Make the inputs the parameters' gradients; one for each, in order."""
        for (name, p), gradient in zip(self.parameters.items(), inputs, strict=True):
            self._inputs[name] = p.grad = gradient.detach()

    def hide_unreached(self, among: list[Any] | None = None) -> None:
        """Make ``p.grad`` None where no backward has reached the parameter, and none was there."""
        wanted = None if among is None else {id(p) for p in among}
        known, on_host = self.handover, self.handover.on_host
        for name, gradient in self._inputs.items():
            p = self.parameters[name]
            if (wanted is None or id(p) in wanted) and p.grad is gradient:
                if name in self._reached:
                    continue
                if on_host:
                    known.decided_by.add(name)
                if not on_host or name in known.was_none:
                    p.grad = None

    @contextlib.contextmanager
    def hidden_from_steps(self, automatic: bool) -> Iterator[None]:
        """Hide unreached gradients from each optimizer's step.

        Under automatic optimization the backward pass is inside the step: there they are hidden
        right after it (``CSXPrecision.backward``).
        """
        if automatic:
            yield
            return

        def hide(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            own = [p for group in optimizer.param_groups for p in group["params"]]
            self.hide_unreached(own)
            self.handover.unused -= {self._names.get(id(p), "") for p in own}

        handle = register_optimizer_step_pre_hook(hide)
        try:
            yield
        finally:
            handle.remove()

    def keep(self, cleared: bool) -> None:
        """Write each final gradient into its input; inputs that nobody reads are pruned later."""
        for name, gradient in self._inputs.items():
            p, left = self.parameters[name], self.handover.left
            untouched = name in self.handover.decided_by and name not in self._reached
            if cleared or p.grad is None:
                if not (untouched and name in self.handover.was_none):
                    left[name] = False
                gradient.copy_(torch.zeros(gradient.shape, dtype=gradient.dtype))
            elif p.grad is not gradient:
                left[name] = True
                gradient.copy_(p.grad)
            elif name in self._reached:
                left[name] = True
            p.grad = None

    def marked(self, inputs: list[Input]) -> list[Input]:
        """A trace's inputs, with what was learned of the gradients among them."""
        handover, names = self.handover, list(self.parameters)
        if not handover.on_host:
            return inputs
        stay_none = {name for name in handover.was_none if handover.left.get(name) is False}
        handover.decided_by |= stay_none

        def mark(item: Input) -> Input:
            if item.kind is not Kind.GRADIENT:
                return item
            name = names[item.index]
            return replace(item, kept=name in handover.unused, zero=name in stay_none)

        return [mark(item) for item in inputs]


class Held(Protocol):
    """The gradients that a program takes as inputs, in order."""

    def before(self) -> list[Tensor]:
        """Those to be given to it."""

    def after(self, gradients: list[Tensor]) -> None:
        """Keep what it made of them."""


class Buffers:
    """Gradients that only programs see.

    Args:
        inputs: a program's.
        known: tensors by name; entry points of a program share them.
    """

    def __init__(self, inputs: list[Input], known: dict[str, Tensor]) -> None:
        self._tensors = [known.setdefault(item.name, _zeros(item.example)) for item in inputs]

    def before(self) -> list[Tensor]:
        """The buffers."""
        return self._tensors

    def after(self, gradients: list[Tensor]) -> None:
        """They were updated in place."""


class OnHost:
    """Gradients that the host sees in ``p.grad``.

    Args:
        inputs: a program's.
        handover: what its step found there, and left.
    """

    def __init__(self, inputs: list[Input], handover: Handover) -> None:
        names = list(handover.parameters)
        self._parameters = [handover.parameters[names[item.index]] for item in inputs]
        self._left = [handover.left.get(names[item.index]) for item in inputs]
        self._examples = [item.example for item in inputs]
        self._spare: list[Tensor | None] = [None] * len(inputs)  # zeros

    def before(self) -> list[Tensor]:
        """What is in ``p.grad``; zeros for None."""
        found = []
        for i, p in enumerate(self._parameters):
            gradient, example = p.grad, self._examples[i]
            if gradient is None:
                gradient = self._spare[i]
                gradient = _zeros(example) if gradient is None else gradient
            elif gradient.stride() != example.stride() or gradient.dtype != example.dtype:
                gradient = _zeros(example).copy_(gradient)
            found.append(gradient)
        return found

    def after(self, gradients: list[Tensor]) -> None:
        """Put them into ``p.grad``, or None where the step cleared them, which made them zero."""
        for i, (p, gradient) in enumerate(zip(self._parameters, gradients, strict=True)):
            left = self._left[i]
            if left is False:
                p.grad, self._spare[i] = None, gradient
            elif left or p.grad is not None:
                p.grad, self._spare[i] = gradient, None


def _zeros(example: Tensor) -> Tensor:
    return torch.empty_strided(example.shape, example.stride(), dtype=example.dtype).zero_()


def held_gradients(
    inputs: tuple[Input, ...], handover: Handover, known: dict[str, Tensor]
) -> Held | None:
    """The gradients among a program's inputs; None where there are none.

    Args:
        inputs: all of the program's.
        handover: what its step found in ``p.grad``, and left there.
        known: buffers that are shared by name.
    """
    gradients = [item for item in inputs if item.kind is Kind.GRADIENT]
    if not gradients:
        return None
    return OnHost(gradients, handover) if handover.on_host else Buffers(gradients, known)
