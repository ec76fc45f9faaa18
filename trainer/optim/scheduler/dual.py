"""Functions of Python's numbers and of float64 tensors alike: a formula is written once for both.

The host looks ahead with a tensor of many counts, and asks for a single one with Python's numbers;
a program computes with tensors []. All are float64. ``where`` and ``piecewise`` compute every
branch on tensors: one that is not taken may be infinite or NaN there, but on the host it must not
raise.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from fulgurite.backends.csx.diagnostics.trace_errors import ConditionalOnTensor, HostRead
from fulgurite.backends.program_scheduler import Number

Function = Callable[[Tensor], Any]
"""A user's: from a count, float64 [], to a number or a tensor [], in tensor code."""


def cos(x: Number) -> Number:
    """The cosine."""
    return torch.cos(x) if isinstance(x, Tensor) else math.cos(x)


def sqrt(x: Number) -> Number:
    """The square root."""
    return torch.sqrt(x) if isinstance(x, Tensor) else math.sqrt(x)


def log(x: Number) -> Number:
    """The natural logarithm."""
    return torch.log(x) if isinstance(x, Tensor) else math.log(x)


def floor(x: Number) -> Number:
    """The next whole number below."""
    return torch.floor(x) if isinstance(x, Tensor) else math.floor(x)


def ceil(x: Number) -> Number:
    """The next whole number above."""
    return torch.ceil(x) if isinstance(x, Tensor) else math.ceil(x)


def nearest(x: Number) -> Number:
    """The nearest whole number."""
    return torch.round(x) if isinstance(x, Tensor) else round(x)


def at_most(x: Number, bound: float) -> Number:
    """The lesser of the two."""
    return torch.clamp(x, max=bound) if isinstance(x, Tensor) else min(x, bound)


def at_least(x: Number, bound: float) -> Number:
    """The greater of the two."""
    return torch.clamp(x, min=bound) if isinstance(x, Tensor) else max(x, bound)


def power(base: Number, exponent: Number) -> Number:
    """``base ** exponent``; infinite, as tensors are, where Python's own would be an error."""
    try:
        return base**exponent
    except OverflowError:
        return math.inf


def where(condition: bool | Tensor, one: Number, other: Number) -> Number:
    """``one`` where the condition holds, else ``other``."""
    if not isinstance(condition, Tensor):
        return one if condition else other
    # of two Python numbers torch.where would make float32
    return torch.where(condition, torch.as_tensor(one, dtype=torch.float64), other)


def piecewise(count: Number, milestones: Sequence[int], numbers: Sequence[Number]) -> Number:
    """``numbers[i]`` after ``i`` of the milestones have been reached."""
    if not isinstance(count, Tensor):
        return numbers[bisect_right(milestones, count)]
    value = numbers[0]
    for milestone, number in zip(milestones, numbers[1:], strict=True):
        value = where(count >= milestone, number, value)
    return value


_TENSOR_CODE = """tensor code, for t has no value in a program:
      torch.clamp(t / 100, max=1)  # for min(t / 100, 1)
      torch.where(t < 100, t / 100, 1.0)  # for if t < 100
      torch.exp(-t), torch.cos(t)  # for math.exp(-t), math.cos(t)
      {"scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, function), "interval": "step"}
      # runs any Python, for learning rates: on the host"""


def call(function: Function, x: Number) -> Number:
    """What a user's function makes of a number: on the host it gets a tensor as well.

    Its own one, which it may change in place: other groups and schedulers get the same number.
    """
    if isinstance(x, Tensor):
        try:
            made: Number = function(x.clone())
        except (ConditionalOnTensor, HostRead) as error:  # whose remedies are those of a step
            raise type(error)(error.what, line=error.line, remedy=_TENSOR_CODE) from None
        return made
    value = function(torch.tensor(float(x), dtype=torch.float64))
    if not isinstance(value, Real) and not (isinstance(value, Tensor) and value.ndim == 0):
        raise TypeError(
            "A function of a scheduler returns a number or a tensor without dimensions; got"
            f" {value!r} from {getattr(function, '__qualname__', function)} at step {x}."
        )
    return float(value)
