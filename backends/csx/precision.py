"""Precision on CSX: what runs in which type. So far everything runs as the model has it."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.types import Steppable
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor

from fulgurite.backends.csx.capture import Trace


class CSXPrecision(Precision):
    """Lightning's "32-true", inside a program."""

    def backward(  # type: ignore[override]
        self,
        tensor: Tensor,
        model: pl.LightningModule,
        optimizer: Steppable | None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Differentiate; parameters that it does not reach keep ``grad`` None, as eagerly."""
        super().backward(tensor, model, optimizer, *args, **kwargs)
        if Trace.current is not None and model.automatic_optimization:
            Trace.current.gradients.hide_unreached()
