"""The scale of the loss, as state of the program: no step waits for the host.

A float16 gradient below 6e-8 is zero, so the loss is multiplied by a scale and the gradients are
divided by it before the optimizer sees them. Where a scaled gradient is not finite the step is
skipped. A dynamic scale then shrinks; after a number of good steps in a row it grows. The numbers
are those of ``torch.amp.GradScaler``, step by step.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fulgurite.backends.csx.diagnostics.trace_errors import NoLoss
from fulgurite.backends.csx.diagnostics.user_lines import user_line
from fulgurite.backends.csx.state import Place, skipped_where
from fulgurite.backends.step_context import step_context


class LossScale:
    """What Lightning's ``MixedPrecision`` calls its ``scaler``, in tensor operations.

    Args:
        initial: the scale of the first step.
        dynamic: whether the scale changes.
        growth_factor: what it is multiplied by after ``growth_interval`` good steps in a row.
        backoff_factor: what it is multiplied by after a skipped step.
        growth_interval: a number of steps.
        minimum: the least dynamic scale; None sets no bound.
        maximum: the largest dynamic scale; None: as large as float32 can be.
    """

    def __init__(
        self,
        initial: float = 2.0**16,
        *,
        dynamic: bool = True,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        minimum: float | None = None,
        maximum: float | None = None,
    ) -> None:
        self._dynamic, self._bounds = dynamic, (minimum, maximum)
        self._growth_factor, self._backoff_factor = growth_factor, backoff_factor
        self._growth_interval = growth_interval
        self._state = {
            "scale": torch.tensor(initial, dtype=torch.float32),
            "growth_tracker": torch.tensor(0, dtype=torch.int32),  # good steps in a row
            "skipped_steps": torch.tensor(0, dtype=torch.int64),
        }
        self._overflows: dict[int, Tensor] = {}  # by optimizer, from unscale_ to update
        self._has_scaled = False

    def places(self) -> Iterator[Place]:
        """Where its tensors are."""
        for name in self._state:
            yield Place(self._state, name, f"loss_scale[{name!r}]")

    @property
    def skipped_steps(self) -> int:
        """How many steps were skipped; to be asked between steps."""
        return int(self._state["skipped_steps"])

    def get_scale(self) -> float:
        """The scale of the next step; to be asked between steps."""
        return float(self._state["scale"])

    def scale(self, loss: Tensor) -> Tensor:
        """The loss to differentiate."""
        self._has_scaled = self._has_scaled or loss.requires_grad
        return loss * self._state["scale"]

    @torch.no_grad()
    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide an optimizer's gradients by the scale, and see whether they were finite.

        Raises:
            NoLoss: no loss was scaled before.
            RuntimeError: they were divided already.
            ValueError: a gradient is float16, whose small values are lost by now.
        """
        if id(optimizer) in self._overflows:
            raise RuntimeError(
                "unscale_() has already been called on this optimizer since the last update()."
            )
        if not self._has_scaled:  # as in torch: divided by 2^16 or more, nothing would be learned
            raise NoLoss(
                "An optimizer stepped before any loss was scaled: its gradients would be divided by"
                " a scale that they do not have.",
                line=user_line(),
                remedy="self.manual_backward(loss) in place of loss.backward(); or a precision"
                ' without loss scaling, such as "bf16-mixed"',
            )
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        gradients = [p.grad for p in parameters if p.grad is not None]
        if any(gradient.dtype is torch.float16 for gradient in gradients):
            raise ValueError("Attempting to unscale FP16 gradients.")
        self._overflows[id(optimizer)] = _any_not_finite(gradients)
        inverse = self._state["scale"].reciprocal()
        for gradient in gradients:
            gradient.mul_(inverse)

    def step(self, optimizer: Optimizer, **options: Any) -> Any:
        """``optimizer.step()``, of which nothing remains where a gradient is not finite."""
        if id(optimizer) not in self._overflows:  # Lightning leaves it to fused optimizers
            self.unscale_(optimizer)
        trace = step_context.get().trace
        trace.updates.trace_whole()
        skipped, before = self._overflows[id(optimizer)], [*map(dict, optimizer.param_groups)]
        counted = trace.inputs.counts.now()
        with skipped_where(skipped, trace.inputs.state_tensors()):
            result = optimizer.step(**options)
        counts, there = trace.inputs.gradients.counts, skipped.logical_not()
        for p in [p for group in optimizer.param_groups for p in group["params"]]:
            counts[id(p)] = counts[id(p)] & there if id(p) in counts else there
        noted: list[Any] = optimizer.param_groups
        for group, numbers in zip(noted, before, strict=True):
            group.take_where(skipped, numbers)
        trace.inputs.counts.take_where(skipped, counted)
        return result

    @torch.no_grad()
    def update(self) -> None:
        """Count a skipped step; if the scale is dynamic, choose that of the next step."""
        skipped = torch.stack(list(self._overflows.values())).any()
        self._overflows.clear()
        self._state["skipped_steps"].add_(skipped)
        if not self._dynamic:
            return
        scale, tracker = self._state["scale"], self._state["growth_tracker"]
        streak = tracker + 1
        grows = streak == self._growth_interval
        grown = _times(scale, self._growth_factor)
        # torch leaves a scale as it is that would become infinite, and counts anew all the same
        grown = torch.where(grows & grown.isfinite(), grown, scale)
        changed = torch.where(skipped, _times(scale, self._backoff_factor), grown)
        if self._bounds != (None, None):
            changed = changed.clamp(*self._bounds)
        scale.copy_(changed)
        tracker.copy_(torch.where(skipped | grows, 0, streak))

    def state_dict(self) -> dict[str, Any]:
        """The keys of torch's scaler, and ``skipped_steps``."""
        return {
            "scale": self.get_scale(),
            "growth_factor": self._growth_factor,
            "backoff_factor": self._backoff_factor,
            "growth_interval": self._growth_interval,
            "_growth_tracker": int(self._state["growth_tracker"]),
            "skipped_steps": self.skipped_steps,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state, torch's or ours; a static scale stays what it was set to."""
        self._state["skipped_steps"].fill_(state_dict.get("skipped_steps", 0))
        if self._dynamic:
            self._state["scale"].fill_(state_dict["scale"])
            self._state["growth_tracker"].fill_(state_dict["_growth_tracker"])
            self._growth_factor = state_dict["growth_factor"]
            self._backoff_factor = state_dict["backoff_factor"]
            self._growth_interval = state_dict["growth_interval"]


def _any_not_finite(gradients: list[Tensor]) -> Tensor:
    """Whether there is an infinity or NaN: only these times zero are not zero."""
    checks = [(gradient * 0).sum(dtype=torch.float32) for gradient in gradients]
    return torch.stack(checks).sum() != 0 if checks else torch.zeros((), dtype=torch.bool)


def _times(scale: Tensor, factor: float) -> Tensor:
    """As torch's kernel multiplies: in float64, rounded to float32."""
    return (scale.to(torch.float64) * factor).to(torch.float32)
