"""The file's optimizer and schedulers in place of a module's own."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.rank_zero import rank_zero_info

from fulgurite.config.arguments import Call


def with_optimizer(module: pl.LightningModule, init: dict[str, Any]) -> None:
    """Make ``configure_optimizers`` give what the file says, if it says anything."""
    optimizer, schedulers = init.get("optimizer"), init.get("schedulers") or []
    if optimizer is None:
        return
    if is_overridden("configure_optimizers", module, pl.LightningModule):
        rank_zero_info(
            f"The file's optimizer, {optimizer.name}, is used;"
            f" {type(module).__name__}.configure_optimizers is not."
        )

    def configure_optimizers() -> Any:
        made = optimizer(module.parameters())
        scheduled = [
            {"scheduler": _scheduler(call, made), "interval": "step"} for call in schedulers
        ]
        return [made], scheduled

    module.configure_optimizers = configure_optimizers  # type: ignore[method-assign]


def _scheduler(call: Call, optimizer: Any) -> Any:
    nested = {
        name: [_scheduler(inner, optimizer) for inner in calls]
        for name, calls in call.nested.items()
    }
    return call(optimizer, **nested)
