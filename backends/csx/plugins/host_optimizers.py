"""Optimizers that code on the host touches between steps, while gradients live in programs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from fulgurite.backends.csx.diagnostics.trace_errors import UnsupportedState
from fulgurite.backends.csx.diagnostics.user_lines import user_line
from fulgurite.backends.csx.program.step_function import StepFunction
from fulgurite.backends.csx.state import before_steps, forget_dropped
from fulgurite.backends.patches import Patch, Shared, patches_of
from fulgurite.backends.step_context import step_context
from fulgurite.backends.torch_versions import CHECKED

_guarded: Any = WeakIdKeyDictionary()  # optimizers that refuse a step on the host


def refuse_host_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    """Raise where an optimizer is stepped on the host (a hook of the optimizer)."""
    if step_context.get().is_on_host:
        raise UnsupportedState(
            f"{type(optimizer).__name__}.step() was called on the host during fit. Gradients live"
            " inside the program there, so it would do nothing.",
            line=user_line(),
            remedy="step it in training_step, under manual optimization",
        )


def refuse_useless_steps(optimizer: Optimizer) -> None:
    """Let an optimizer raise where it is stepped on the host and has no gradient to use."""
    if optimizer in _guarded:
        return
    _guarded[optimizer] = True

    def check(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        # one gradient is enough: what no optimizer in a traced function has used is in p.grad, for
        # the loop to step
        on_host = step_context.get().is_on_host
        if on_host and all(p.grad is None for g in optimizer.param_groups for p in g["params"]):
            raise UnsupportedState(
                f"{type(optimizer).__name__}.step() was called on the host, where no parameter has"
                " a gradient: the traced function that computes them keeps them to itself.",
                line=user_line(),
                remedy="call optimizer.step() in the traced function",
            )

    before_steps(optimizer, check)


class ZeroGradObserver:
    """Until it is removed, ``zero_grad()`` reaches the gradients that a step's programs keep.

    A plain object, unlike a context manager, which nobody could copy together with the Trainer.
    """

    def __init__(self, step: Callable[[], StepFunction | None]) -> None:
        self._step = step
        _observers.append(self)
        _PATCHES.put()

    def _clear(self, parameters: set[int], set_to_none: bool) -> None:
        training = self._step()
        if training is not None and step_context.get().is_on_host:
            training.clear_gradients(parameters, set_to_none)

    def remove(self) -> None:
        """Observe no more; a copy never did."""
        if self in _observers:
            _observers.remove(self)
            _PATCHES.remove()


_observers: list[ZeroGradObserver] = []  # of all fits: threads may have one each


def _patches() -> Iterator[Patch]:
    of_optimizer, of_module = Optimizer.zero_grad, nn.Module.zero_grad

    def tell(parameters: Iterable[nn.Parameter], set_to_none: bool) -> None:
        cleared = set(map(id, parameters))
        for observer in tuple(_observers):
            observer._clear(cleared, set_to_none)

    def optimizer_zero_grad(self: Optimizer, set_to_none: bool = True) -> None:
        parameters = [p for group in self.param_groups for p in group["params"]]
        forget_dropped(parameters)
        of_optimizer(self, set_to_none)
        tell(parameters, set_to_none)

    def module_zero_grad(self: nn.Module, set_to_none: bool = True) -> None:
        forget_dropped(self.parameters())
        of_module(self, set_to_none)
        tell(self.parameters(), set_to_none)

    why = "gradients that programs keep to themselves would not be cleared"
    cleared: Any = {"zero_grad": optimizer_zero_grad}
    yield from patches_of(Optimizer, cleared, why=why, checked=CHECKED)
    cleared = {"zero_grad": module_zero_grad}
    yield from patches_of(nn.Module, cleared, why=why, checked=CHECKED)


_PATCHES = Shared(_patches)
