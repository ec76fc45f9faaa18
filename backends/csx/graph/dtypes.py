"""Dtypes: narrow floats, wide ones, and cbfloat16, which torch does not have.

A cbfloat16, a 16-bit float, is held in float32: (-1)^s * 2^(e - 31) * (1 + m / 512), with 1 bit of
sign, 6 of exponent, 9 of mantissa. The *grid* are the float32 values that a cbfloat16 can have;
every one is a float32. Where each fact is from: docs/cbfloat16.md.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fulgurite.backends.patches import Patch
from fulgurite.backends.torch_versions import CHECKED

NARROW = (torch.bfloat16, torch.float16)
STAND_IN = torch.bfloat16
"""The dtype that a step sees while it is traced: torch's autocast has its rules."""

EXPONENT_BITS = 0x7F800000  # of a float32
LOWEST, HIGHEST = (127 - 30) << 23, (127 + 31) << 23  # exponents of normal numbers, as float32's
SHIFT = (14 << 23) | (1 << 22)  # from 2^e to 1.5 * 2^(e + 14)
OVERFLOW = 2.0**96  # from 2^32, the first power that is too large, to float32's 2^128


def wide(dtype: torch.dtype) -> bool:
    """Whether a dtype is one that a program has only if its model does."""
    return dtype is torch.float64 or dtype is torch.complex128


def in_double(module: nn.Module) -> bool:
    """Whether a model is in float64: then its step may compute in it."""
    return any(wide(p.dtype) for p in module.parameters())


def rounded(x: Tensor) -> Tensor:
    """Float32 rounded to the nearest cbfloat16, ties to even; beyond the largest, infinity.

    Adding 1.5 * 2^(e + 14) to a number of exponent e leaves a last bit of 2^(e - 9), and taking it
    away again is exact. Subnormal numbers have the exponent of the smallest normal one.
    """
    exponents = x.view(torch.int32).bitwise_and(EXPONENT_BITS).clamp_(LOWEST, HIGHEST)
    shift = exponents.add_(SHIFT).view(torch.float32)
    return (x + shift).sub_(shift).mul_(OVERFLOW).mul_(1 / OVERFLOW).copysign_(x)


def representable(number: float) -> bool:
    """Whether a Python number is a cbfloat16; NaN is."""
    given = torch.tensor(number, dtype=torch.float64)
    return torch.allclose(rounded(given.float()).double(), given, 0, 0, equal_nan=True)


def moved_statistics(
    x: Tensor, mean: Tensor, var: Tensor, momentum: Tensor | float
) -> tuple[Tensor, Tensor]:
    """Running statistics in a narrow type after a batch, rounded as batch norm's kernels do.

    To the bit (torch 2.13). What is stored moves by so little in a step that other roundings make
    another value of it: 3 % of a variance after 20 steps (measured).

    Args:
        x: [N, C, ...], the batch, in the narrow type.
        mean, var: [C], the running ones.
        momentum: the share of the batch, a number or float64[].
    """
    kind, count = mean.dtype, x.numel() // x.shape[1]

    def rounded(value: Tensor) -> Tensor:
        return value.to(kind).float()  # the compiler keeps no other rounding than this

    def in_kind(value: Tensor | float) -> Tensor | float:
        if isinstance(value, Tensor):
            return rounded(value)
        return torch.tensor(value, dtype=kind).item()

    variance, average = torch.var_mean(x.detach().float(), [0, *range(2, x.ndim)], correction=0)
    total, is_dense = variance * count, _takes_as_it_is(x)
    if is_dense and kind is torch.bfloat16:
        share = in_kind(momentum)
        keep = in_kind(1 - share)
        spread = rounded(rounded(total) / in_kind(count - 1)) * share
        average = rounded(rounded(average) * share) + rounded(mean.float() * keep)
        return average, spread + rounded(var.float() * keep)

    def moved(new: Tensor, old: Tensor) -> Tensor:
        return new.double() * momentum + old.double() * (1 - momentum)

    average = average if is_dense else rounded(average)
    return moved(average, mean), moved(total / (count - 1), var)


def _takes_as_it_is(x: Tensor) -> bool:
    """Whether batch norm has a kernel for the layout; others go through another, slower one."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.ndim)
    return x.is_contiguous() or (last is not None and x.is_contiguous(memory_format=last))


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What ``torch.finfo`` says of a type, by the same names."""

    dtype: str = "cbfloat16"
    bits: int = 16
    eps: float = 2.0**-9
    max: float = 2.0**32 - 2.0**22
    min: float = -(2.0**32) + 2.0**22
    tiny: float = 2.0**-30
    smallest_normal: float = 2.0**-30
    resolution: float = 0.01


def cbfloat16_facts() -> Iterator[Patch]:
    """A patch by which ``torch.finfo`` of the stand-in is cbfloat16's."""
    finfo, facts = torch.finfo, Facts()

    @functools.wraps(finfo, updated=())
    def asked(*args: Any, **kwargs: Any) -> Any:
        return facts if STAND_IN in (*args, *kwargs.values()) else finfo(*args, **kwargs)

    why = "torch has no cbfloat16, and a step asks for its limits"
    yield Patch(owner=torch, name="finfo", replacement=asked, why=why, checked=CHECKED)
