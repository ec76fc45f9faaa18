"""Gradients between steps.

``p.grad`` starts as an input of its own, zero before the first step. Where the step clears it first
(``zero_grad``) nobody reads that input and it is dropped; where gradients accumulate over steps, it
is state. Eagerly the gradient of a parameter that no backward reaches is None, and its optimizer
leaves it alone, so such a zero is hidden from the optimizer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fulgurite.backends.csx.stand_ins import on_gradient


class Gradients:
    """The gradients of one trace.

    Args:
        parameters: all parameters by name; those that require no gradient are left out.
    """

    def __init__(self, parameters: dict[str, nn.Parameter]) -> None:
        self.parameters = {name: p for name, p in parameters.items() if p.requires_grad}
        self._names = {id(p): name for name, p in self.parameters.items()}
        self._inputs: dict[str, Tensor] = {}
        self._reached: set[str] = set()

    def watch(self, parameter: Tensor, stand_in: Tensor) -> None:
        """Note when a backward pass reaches a parameter, by its stand-in."""
        name = self._names.get(id(parameter))
        if name is not None:
            on_gradient(stand_in, lambda p: self._reached.add(name))

    def put(self, inputs: list[Tensor]) -> None:
        """Make the inputs the parameters' gradients; one for each, in order."""
        for (name, p), gradient in zip(self.parameters.items(), inputs, strict=True):
            self._inputs[name] = p.grad = gradient.detach()

    def hide_unreached(self, among: list[Any] | None = None) -> None:
        """Make ``p.grad`` None where no backward has reached the parameter."""
        wanted = None if among is None else {id(p) for p in among}
        for name, gradient in self._inputs.items():
            p = self.parameters[name]
            chosen = wanted is None or id(p) in wanted
            if chosen and name not in self._reached and p.grad is gradient:
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
            self.hide_unreached([p for group in optimizer.param_groups for p in group["params"]])

        handle = register_optimizer_step_pre_hook(hide)
        try:
            yield
        finally:
            handle.remove()

    def keep(self, cleared: bool) -> None:
        """Write each final gradient into its input; inputs that nobody reads are pruned later."""
        for name, gradient in self._inputs.items():
            p = self.parameters[name]
            if cleared or p.grad is None:
                gradient.copy_(torch.zeros(gradient.shape, dtype=gradient.dtype))
            elif p.grad is not gradient:
                gradient.copy_(p.grad)
            p.grad = None
