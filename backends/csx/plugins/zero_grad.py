"""``zero_grad()`` on the host, while gradients live in programs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from fulgurite.backends.csx.program.step_function import StepFunction
from fulgurite.backends.csx.state import forget
from fulgurite.backends.step_context import step_context


class ZeroGradNoted:
    """Until it is removed, ``zero_grad()`` reaches the gradients that a step's programs keep.

    A plain object, unlike a context manager, which nobody could copy together with the Trainer.
    """

    def __init__(self, step: Callable[[], StepFunction | None]) -> None:
        of_optimizer, of_module = Optimizer.zero_grad, nn.Module.zero_grad
        self._originals = of_optimizer, of_module

        def clear(parameters: Iterable[nn.Parameter]) -> None:
            training = step()
            if step_context.get().is_on_host and training is not None:
                training.clear_gradients(set(map(id, parameters)))

        def optimizer_zero_grad(self: Optimizer, set_to_none: bool = True) -> None:
            parameters = [p for group in self.param_groups for p in group["params"]]
            forget(parameters)
            of_optimizer(self, set_to_none)
            clear(parameters)

        def module_zero_grad(self: nn.Module, set_to_none: bool = True) -> None:
            forget(self.parameters())
            of_module(self, set_to_none)
            clear(self.parameters())

        self._put(optimizer_zero_grad, module_zero_grad)

    @staticmethod
    def _put(of_optimizer: Any, of_module: Any) -> None:
        setattr(Optimizer, "zero_grad", of_optimizer)  # noqa: B010  # mypy refuses the other form
        setattr(nn.Module, "zero_grad", of_module)  # noqa: B010

    def remove(self) -> None:
        """Put torch's own back."""
        self._put(*self._originals)
