"""Torch's own code in the form that traces: eager optimizer formulas, no opaque kernels."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.distributions import Distribution
from torch.optim import Optimizer


@contextlib.contextmanager
def without_mkldnn() -> Iterator[None]:
    """nn.LSTM takes an opaque oneDNN path that does not trace."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


@contextlib.contextmanager
def eager_formulas(optimizers: list[Optimizer]) -> Iterator[None]:
    """Let torch's optimizers run their eager formulas on traced numbers.

    They read their step count with ``_get_value``, a host read; here it stays a tensor, in float64
    as Python's float is. The fused and foreach variants compute the same, and do not trace.
    """
    modules: list[Any] = [
        module
        for name, module in list(sys.modules.items())
        if name.startswith("torch.optim.") and hasattr(module, "_get_value")
    ]
    originals = [(module, module._get_value) for module in modules]
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    flags = [
        (group, key, group[key]) for group in groups for key in ("foreach", "fused") if key in group
    ]

    def get_value(x: Any) -> Any:
        return x.to(torch.float64) if isinstance(x, Tensor) else x

    try:
        for module in modules:
            module._get_value = get_value
        for group, key, _ in flags:
            group[key] = False
        yield
    finally:
        for module, original in originals:
            module._get_value = original
        for group, key, value in flags:
            group[key] = value


@contextlib.contextmanager
def plain_library_code() -> Iterator[None]:
    """Run what only pays eagerly in its plain form.

    ``torch.utils.checkpoint`` runs its function once and stores nothing twice: traced as it is, a
    dropout inside would get two masks and silently wrong gradients. ``torch.distributions`` checks
    the values of its arguments.
    """

    def plain(*args: Any, **kwargs: Any) -> Iterator[None]:
        yield

    class Plain:
        @staticmethod
        def apply(function: Any, preserve: bool, *args: Any) -> Any:
            return function(*args)

    checkpoint: Any = torch.utils.checkpoint
    replaced = {"_checkpoint_without_reentrant_generator": plain, "CheckpointFunction": Plain}
    originals = {name: getattr(checkpoint, name) for name in replaced}
    validate = Distribution._validate_args
    log = logging.getLogger("torch._subclasses.fake_tensor")  # prints its own stack of user errors
    level = log.level
    try:
        for name, replacement in replaced.items():
            setattr(checkpoint, name, replacement)
        Distribution._validate_args = False
        log.setLevel(logging.CRITICAL)
        yield
    finally:
        Distribution._validate_args = validate
        log.setLevel(level)
        for name, original in originals.items():
            setattr(checkpoint, name, original)
