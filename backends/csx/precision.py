"""Precision on CSX: what runs in which type.

"32-true" is as the model has it. Under "bf16-mixed" torch's autocast is on while the step is
traced, so its casts become operations of the program; weights and optimizer state stay float32.
Under "bf16-true" all of them are bfloat16. Each plugin is Lightning's own with one method more.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.fabric.utilities.types import Steppable
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
from torch import Tensor

from fulgurite.backends.csx.capture import Trace
from fulgurite.backends.csx.errors import NoLoss


class CSXPrecision(Precision):
    """Lightning's "32-true", inside a program; the base of the others.

    Attributes:
        fp16_type: the run's 16-bit type: "bfloat16", "float16", "cbfloat16"; None without one.
    """

    fp16_type: str | None = None

    def backward(  # type: ignore[override]
        self,
        tensor: Tensor,
        model: pl.LightningModule,
        optimizer: Steppable | None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Differentiate; parameters that it does not reach keep ``grad`` None, as eagerly."""
        automatic = Trace.current is not None and model.automatic_optimization
        if automatic and not tensor.requires_grad:
            raise NoLoss(
                "training_step returned a loss that no gradient goes through: it was detached, or"
                " computed without the parameters.",
                remedy="return it as it was computed, without .detach() and outside of"
                " torch.no_grad()",
            )
        super().backward(tensor, model, optimizer, *args, **kwargs)
        if automatic:
            assert Trace.current is not None
            Trace.current.gradients.hide_unreached()


class CSXMixedPrecision(CSXPrecision, MixedPrecision):
    """Lightning's "bf16-mixed": float32 state, and autocast of the host's while tracing."""

    fp16_type = "bfloat16"

    def __init__(self) -> None:
        super().__init__("bf16-mixed", device="cpu")


class CSXHalfPrecision(CSXPrecision, HalfPrecision):
    """Lightning's "bf16-true": parameters, buffers, inputs and optimizer state in bfloat16."""

    fp16_type = "bfloat16"

    def __init__(self) -> None:
        super().__init__("bf16-true")


_PLUGINS: dict[tuple[type[Precision], str], type[CSXPrecision]] = {
    (Precision, "32-true"): CSXPrecision,
    (MixedPrecision, "bf16-mixed"): CSXMixedPrecision,
    (HalfPrecision, "bf16-true"): CSXHalfPrecision,
}


def csx_precision(plugin: Precision) -> CSXPrecision:
    """What CSX runs in place of one of Lightning's precision plugins.

    Raises:
        MisconfigurationException: CSX does not have this precision.
    """
    if isinstance(plugin, CSXPrecision):
        return plugin
    kind = _PLUGINS.get((type(plugin), str(plugin.precision)))
    if kind is None:
        known = " or ".join(repr(precision) for _, precision in _PLUGINS)
        raise MisconfigurationException(
            f"CSX does not support {type(plugin).__name__} of precision {plugin.precision!r}. Use"
            f" one of Lightning's own: precision={known}."
        )
    return kind()
