"""Mixed precision beyond Lightning's own, for eager devices; and what all devices share.

Lightning's plugin takes a scaler of the loss only with float16, and torch's scaler has no bounds
and no static scale.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import MixedPrecision

NAMES = {"float16": "16-mixed", "bfloat16": "bf16-mixed", "cbfloat16": "cb16-mixed"}
"""Lightning's name of mixed precision with a 16-bit type, and ours in its manner."""


class LoggedScale(MixedPrecision):
    """Lightning's mixed precision, which may log the scale of each step's loss."""

    logs_scale = False

    def optimizer_step(  # type: ignore[override]
        self, optimizer: Any, model: pl.LightningModule, closure: Callable[[], Any], **options: Any
    ) -> Any:
        """Step; before, log the scale that the gradients have."""
        if self.logs_scale:
            one = torch.ones((), device=model.device)
            model.log("loss_scale", one if self.scaler is None else self.scaler.scale(one))
        return super().optimizer_step(optimizer, model, closure, **options)


class EagerMixedPrecision(LoggedScale):
    """Lightning's mixed precision with any scaler, or none.

    Args:
        fp16_type: "float16" or "bfloat16".
        device: type of the device that autocast is for.
        scaler: scales the loss; None does not.
        logs_scale: whether to log it as "loss_scale".
    """

    __qualname__ = "MixedPrecision"  # Lightning's: the key of the scale in a checkpoint

    def __init__(
        self,
        fp16_type: str,
        device: str,
        scaler: torch.amp.GradScaler | None = None,
        logs_scale: bool = False,
    ) -> None:
        super().__init__("bf16-mixed", device)  # the name that makes no scaler
        self.precision = NAMES[fp16_type]  # type: ignore[assignment]
        self.scaler, self.logs_scale = scaler, logs_scale


class BoundedGradScaler(torch.amp.GradScaler):
    """torch's scaler of the loss, with bounds.

    Args:
        device: type of the device.
        initial: the scale of the first step.
        dynamic: whether the scale changes.
        growth_interval: good steps in a row after which it doubles.
        minimum: the least dynamic scale.
        maximum: the largest dynamic scale.
    """

    def __init__(
        self,
        device: str,
        initial: float,
        *,
        dynamic: bool,
        growth_interval: int,
        minimum: float,
        maximum: float,
    ) -> None:
        super().__init__(device, init_scale=initial, growth_interval=growth_interval)
        self._dynamic, self._initial, self._least, self._most = dynamic, initial, minimum, maximum

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Choose the scale of the next step."""
        if not self._dynamic:
            # torch would let it grow and shrink: each step sets it again
            return super().update(self._initial)
        super().update(new_scale)
        scale = self.get_scale()
        bounded = min(max(scale, self._least), self._most)
        if bounded != scale:
            super().update(bounded)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state; a static scale stays what it was set to."""
        if self._dynamic:
            super().load_state_dict(state_dict)
