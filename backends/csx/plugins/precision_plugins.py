"""Precision on CSX: what runs in which type.

"32-true" is as the model has it. Under "*-mixed" torch's autocast is on while the step is traced,
so its casts become operations of the program; weights and optimizer state stay float32. Under
"bf16-true" all of them are bfloat16, under "64-true" float64. Each plugin is Lightning's own with
little more.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.fabric.utilities.types import Steppable
from lightning.pytorch.plugins.precision import (
    DoublePrecision,
    HalfPrecision,
    MixedPrecision,
    Precision,
)
from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector
from torch import Tensor
from torch.optim import Optimizer

from fulgurite.backends.csx.compile.fabrics import fabric_devices
from fulgurite.backends.csx.diagnostics.trace_errors import NoLoss
from fulgurite.backends.csx.plugins.loss_scale import LossScale
from fulgurite.backends.mixed import NAMES, LoggedScale
from fulgurite.backends.step_context import clip_by_norm, step_context


class CSXPrecision(Precision):
    """Lightning's "32-true", inside a program; the base of the others.

    Attributes:
        fp16_type: the run's 16-bit type: "bfloat16", "float16", "cbfloat16"; None without one.
    """

    fp16_type: str | None = None

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        """Clip, and keep the norm for ``fulgurite.gradient_norm()``."""
        clip_by_norm(self, optimizer, clip_val)

    def backward(  # type: ignore[override]
        self,
        tensor: Tensor,
        model: pl.LightningModule,
        optimizer: Steppable | None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Differentiate; parameters that it does not reach keep ``grad`` None, as eagerly."""
        trace = step_context.get().trace
        automatic = trace is not None and model.automatic_optimization
        if automatic and not tensor.requires_grad:
            raise NoLoss(
                "training_step returned a loss that no gradient goes through: it was detached, or"
                " computed without the parameters.",
                remedy="return it as it was computed, without .detach() and outside of"
                " torch.no_grad()",
            )
        reducing: Any = contextlib.nullcontext()
        if trace is not None:
            strategy: Any = model.trainer.strategy
            reducing = strategy.reducing(trace.inputs.gradients)
        with reducing:  # several processes exchange gradients while the pass goes on
            super().backward(tensor, model, optimizer, *args, **kwargs)


class CSXMixedPrecision(CSXPrecision, LoggedScale):
    """Mixed precision: float32 state, and autocast of the fabric's devices while tracing.

    Args:
        fp16_type: "float16", "bfloat16" or "cbfloat16", which is traced as bfloat16.
        scale: scales the loss; None does not.
        logs_scale: whether to log it as "loss_scale".
    """

    __qualname__ = "MixedPrecision"  # Lightning's: the key of the scale in a checkpoint

    def __init__(
        self, fp16_type: str = "bfloat16", scale: LossScale | None = None, logs_scale: bool = False
    ) -> None:
        device = fabric_devices()[0].type
        super().__init__("bf16-mixed", device=device)  # the name that makes no scaler
        self.precision, self.fp16_type = NAMES[fp16_type], fp16_type  # type: ignore[assignment]
        self.scaler, self.logs_scale = scale, logs_scale  # type: ignore[assignment]

    def autocast_context_manager(self) -> torch.autocast:
        """Casts to the 16-bit type, or to the one that stands in for it."""
        dtype = torch.float16 if self.fp16_type == "float16" else torch.bfloat16
        return torch.autocast(self.device, dtype=dtype, cache_enabled=False)


class CSXHalfPrecision(CSXPrecision, HalfPrecision):
    """Lightning's "bf16-true": parameters, buffers, inputs and optimizer state in bfloat16."""

    fp16_type = "bfloat16"

    def __init__(self) -> None:
        super().__init__("bf16-true")


class CSXDoublePrecision(CSXPrecision, DoublePrecision):
    """Lightning's "64-true": parameters, buffers, inputs and optimizer state in float64."""


_SUPPORTED = ("32-true", "64-true", "bf16-mixed", "bf16-true", "16-mixed", "cb16-mixed")


def csx_precision(plugin: Precision) -> CSXPrecision:
    """What CSX runs in place of one of Lightning's precision plugins.

    Raises:
        MisconfigurationException: CSX does not have this precision.
    """
    if isinstance(plugin, CSXPrecision):
        return plugin
    made: dict[tuple[type, str], Callable[[], CSXPrecision]] = {
        (Precision, "32-true"): CSXPrecision,
        (DoublePrecision, "64-true"): CSXDoublePrecision,
        (HalfPrecision, "bf16-true"): CSXHalfPrecision,
        (MixedPrecision, "bf16-mixed"): CSXMixedPrecision,
        (MixedPrecision, "16-mixed"): lambda: CSXMixedPrecision("float16", _scale_like(plugin)),
    }
    # Lightning's own classes alone: what a subclass of somebody's does besides would be lost
    if (kind := (type(plugin), str(plugin.precision))) in made:
        return made[kind]()
    known = ", ".join(map(repr, _SUPPORTED))
    raise MisconfigurationException(
        f"CSX does not support {type(plugin).__name__} of precision {plugin.precision!r}. Use one"
        f" of these: precision={known}, or fulgurite.MixedPrecision(...)."
    )


def _scale_like(plugin: Any) -> LossScale | None:
    """A loss scale with the numbers of the scaler in Lightning's plugin."""
    scaler = plugin.scaler
    if scaler.is_enabled():
        return LossScale(
            scaler.get_scale(),
            growth_factor=scaler.get_growth_factor(),
            backoff_factor=scaler.get_backoff_factor(),
            growth_interval=scaler.get_growth_interval(),
        )
    # one for "cuda", which Lightning makes for unknown accelerators, is disabled without a GPU
    return None if plugin.device == "cpu" else LossScale()


def refuse_replaced_precision() -> None:
    """Raise where Lightning is about to make "bf16-mixed" of the "16-mixed" it was asked for.

    ``lightning.Trainer(strategy="csx", precision="16-mixed")`` is a CPU to Lightning's connector,
    which makes the strategy, then replaces the precision, and leaves no trace of it (2.6.6): so its
    call is looked up. To be called where strategies are made.

    Raises:
        MisconfigurationException: it is.
    """
    frame = inspect.currentframe()
    while frame is not None:
        connector = frame.f_locals.get("self")
        if isinstance(connector, _AcceleratorConnector):
            on_cpu = connector._accelerator_flag == "cpu"
            if on_cpu and connector._precision_flag == "16-mixed":
                raise MisconfigurationException(
                    "lightning.Trainer(strategy='csx', precision='16-mixed') would compute in"
                    " bfloat16: Lightning replaces float16 on a CPU, which CSX is to it. Use"
                    " fulgurite.Trainer(device='CSX', precision='16-mixed'), or"
                    " plugins=lightning.pytorch.plugins.MixedPrecision('16-mixed', 'cpu')."
                )
            return
        frame = frame.f_back
