"""``fulgurite.MixedPrecision``: mixed precision by the keys of parameter files, as plain data."""

from __future__ import annotations

import math
from dataclasses import dataclass

CB16_MIXED = "cb16-mixed"
"""``Trainer(precision=...)``: cbfloat16 with a dynamic loss scale."""
FP16_TYPES = ("float16", "bfloat16", "cbfloat16")
_SCALES = ("initial_loss_scale", "min_loss_scale", "max_loss_scale")
_LIMITS = ("max_gradient_norm", "max_gradient_value")


@dataclass(frozen=True, kw_only=True)
class MixedPrecision:
    """``Trainer(precision=MixedPrecision(...))``: a 16-bit type, loss scaling, clipping.

    Weights, gradients and optimizer state are float32; what runs in 16 bits is torch's autocast's
    choice (docs/precision.md).

    >>> precision = MixedPrecision(fp16_type="float16", loss_scaling_factor="dynamic")
    >>> precision.dynamic, precision.first_scale
    (True, 32768.0)

    Args:
        enabled: False is "32-true", without loss scaling; gradients are clipped all the same.
        fp16_type: "float16", "bfloat16" or "cbfloat16".
        precision_opt_level: 0, 1 or 2: how exact sums are on the system that has this key. No
            effect here, where sums are always accumulated in float32.
        loss_scaling_factor: what the loss is multiplied by: a positive number, or "dynamic". 1.0
            means no loss scaling. "cbfloat16" needs "dynamic".
        initial_loss_scale: the first dynamic scale; None is the type's largest.
        steps_per_increase: good steps in a row after which a dynamic scale doubles.
        min_loss_scale: the least dynamic scale; None is 2**-14.
        max_loss_scale: the largest dynamic scale; None is 2**31 for "cbfloat16", else 2**15.
        max_gradient_norm: clip gradients by norm: Trainer's ``gradient_clip_val``.
        max_gradient_value: clip gradients by value: the same with
            ``gradient_clip_algorithm="value"``.
        log_loss_scale: whether to log the scale of each step as "loss_scale".

    Raises:
        ValueError: a value outside its range, or values that exclude each other.
    """

    enabled: bool = True
    fp16_type: str = "bfloat16"
    precision_opt_level: int | None = None
    loss_scaling_factor: float | str = 1.0
    initial_loss_scale: float | None = None
    steps_per_increase: int = 2000
    min_loss_scale: float | None = None
    max_loss_scale: float | None = None
    max_gradient_norm: float | None = None
    max_gradient_value: float | None = None
    log_loss_scale: bool | None = None

    def __post_init__(self) -> None:
        self._check_types()
        if self.max_gradient_norm is not None and self.max_gradient_value is not None:
            raise ValueError(
                f"max_gradient_norm={self.max_gradient_norm} and"
                f" max_gradient_value={self.max_gradient_value} exclude each other: give one."
            )
        given = [name for name in _SCALES if getattr(self, name) is not None]
        if given and not self.dynamic:
            raise ValueError(
                f"{given[0]}={getattr(self, given[0])} is for a dynamic scale;"
                f" loss_scaling_factor={self.loss_scaling_factor!r} is static. Give"
                " loss_scaling_factor='dynamic', or leave it out."
            )
        if self.enabled and self.fp16_type == "cbfloat16" and not self.dynamic:
            raise ValueError(
                "fp16_type='cbfloat16' needs dynamic loss scaling; got loss_scaling_factor="
                f"{self.loss_scaling_factor!r}. Give loss_scaling_factor='dynamic'."
            )
        if not self.least_scale <= self.first_scale <= self.largest_scale:
            raise ValueError(
                "min_loss_scale <= initial_loss_scale <= max_loss_scale does not hold:"
                f" {self.least_scale}, {self.first_scale}, {self.largest_scale}"
                f" (min_loss_scale={self.min_loss_scale},"
                f" initial_loss_scale={self.initial_loss_scale},"
                f" max_loss_scale={self.max_loss_scale}; None is the default)."
            )

    def _check_types(self) -> None:
        def check(name: str, holds: bool, allowed: str) -> None:
            if not holds:
                raise ValueError(f"{name} must be {allowed}; got {getattr(self, name)!r}.")

        check("enabled", isinstance(self.enabled, bool), "True or False")
        check("fp16_type", self.fp16_type in FP16_TYPES, f"one of {FP16_TYPES}")
        level = self.precision_opt_level
        check("precision_opt_level", level is None or level in (0, 1, 2), "0, 1, 2 or None")
        factor = self.loss_scaling_factor
        allowed = "a number from 2**-126 to 2**126, or 'dynamic'"
        check("loss_scaling_factor", factor == "dynamic" or _is_scale(factor), allowed)
        steps = self.steps_per_increase
        check("steps_per_increase", type(steps) is int and steps > 0, "a positive integer")
        for name in _SCALES:
            value = getattr(self, name)
            check(
                name, value is None or _is_scale(value), "a number from 2**-126 to 2**126, or None"
            )
        for name in _LIMITS:
            value = getattr(self, name)
            check(name, value is None or _is_positive(value), "a positive number or None")
        check("log_loss_scale", self.log_loss_scale in (None, True, False), "True, False or None")

    @property
    def dynamic(self) -> bool:
        """Whether the scale changes."""
        return self.loss_scaling_factor == "dynamic"

    @property
    def scales(self) -> bool:
        """Whether the loss is scaled."""
        return self.enabled and self.loss_scaling_factor != 1.0

    @property
    def first_scale(self) -> float:
        """The scale of the first step."""
        if isinstance(self.loss_scaling_factor, (int, float)):
            return float(self.loss_scaling_factor)
        initial = self.initial_loss_scale
        return self.largest_scale if initial is None else float(initial)

    @property
    def least_scale(self) -> float:
        """The least scale."""
        if not self.dynamic:
            return self.first_scale
        return 2.0**-14 if self.min_loss_scale is None else float(self.min_loss_scale)

    @property
    def largest_scale(self) -> float:
        """The largest scale."""
        if not self.dynamic:
            return self.first_scale
        largest = 2.0**31 if self.fp16_type == "cbfloat16" else 2.0**15
        return largest if self.max_loss_scale is None else float(self.max_loss_scale)


def _is_positive(value: object) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and 0 < value < math.inf  # type: ignore[operator]


def _is_scale(value: object) -> bool:
    """Whether float32, in which losses are scaled, has a number and what gradients are divided by.

    Beyond, one is infinity or zero: each step is skipped, or weights become NaN.
    """
    return _is_positive(value) and 2.0**-126 <= value <= 2.0**126  # type: ignore[operator]
