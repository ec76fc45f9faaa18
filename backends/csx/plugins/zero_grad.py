"""``zero_grad()`` on the host, while gradients live in programs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator

from torch import nn
from torch.optim import Optimizer

from fulgurite.backends.csx.program.step_function import StepFunction
from fulgurite.backends.csx.state.dropped_gradient import forget
from fulgurite.backends.patches import patched
from fulgurite.backends.step_context import step_context


@contextlib.contextmanager
def zero_grad_noted(step: Callable[[], StepFunction | None]) -> Iterator[None]:
    """While the block runs, let ``zero_grad()`` reach the gradients that a step's programs keep."""

    def clear(parameters: Iterable[nn.Parameter]) -> None:
        training = step()
        if step_context.get().is_on_host and training is not None:
            training.clear_gradients(set(map(id, parameters)))

    of_optimizer, of_module = Optimizer.zero_grad, nn.Module.zero_grad

    def optimizer_zero_grad(self: Optimizer, set_to_none: bool = True) -> None:
        parameters = [p for group in self.param_groups for p in group["params"]]
        forget(parameters)
        of_optimizer(self, set_to_none)
        clear(parameters)

    def module_zero_grad(self: nn.Module, set_to_none: bool = True) -> None:
        forget(self.parameters())
        of_module(self, set_to_none)
        clear(self.parameters())

    changes = [(Optimizer, optimizer_zero_grad), (nn.Module, module_zero_grad)]
    with patched((owner, "zero_grad", value) for owner, value in changes):
        yield
