"""torch's own code in the form that traces: plain formulas of optimizers, no opaque kernels.

To support an optimizer of torch's that reads values on the host, give it a row in
``eager_updates``.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributions import Distribution
from torch.fx.experimental import proxy_tensor
from torch.nn.modules import batchnorm
from torch.optim import Optimizer, _adafactor, asgd, radam
from torch.utils import checkpoint

from fulgurite.backends.csx.hyperparams.torch_functions import as_tensor
from fulgurite.backends.csx.hyperparams.traced_float import as_number, is_traced
from fulgurite.backends.patches import Patch, patches_of
from fulgurite.backends.torch_versions import CHECKED, CHECKPOINTING

TRACEABLE: dict[Any, Any] = {
    torch.ops.aten._efficientzerotensor.default: torch.ops.aten.zeros.default
}
"""Operations that do not trace, each with one that gives the same numbers. Forward mode makes zero
tensors without memory of tangents that it need not compute; their products are on device "meta",
from which second derivatives (``torch.func.hessian``) do not come back under fakes (torch 2.13)."""


@contextlib.contextmanager
def without_mkldnn() -> Iterator[None]:
    """Turn oneDNN off for ``torch.lstm``, which would take an opaque path that does not trace.

    Not for a whole trace: the layout of a convolution's result (``channels_last``) rests on it.
    """
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


def eager_updates(optimizers: list[Optimizer]) -> Iterator[Patch]:
    """Patches by which torch's optimizers, and BatchNorm, run their eager formulas on numbers."""
    why = "a count of steps would be read on the host"
    for name, module in list(sys.modules.items()):
        if name.startswith("torch.optim.") and hasattr(module, "_get_value"):
            yield from patches_of(module, {"_get_value": host_value}, why=why, checked=CHECKED)
    why = "BatchNorm(momentum=None) would read its count of batches on the host"
    float_ = {"float": lambda count: host_value(count)}
    yield from patches_of(batchnorm, float_, why=why, checked=CHECKED)
    why = "values decide a Python branch; the capturable form, here on any device, has none"
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    devices = {p.device.type for group in groups for p in group["params"]}
    capturable: dict[Any, dict[str, Any]] = {
        radam: {"_single_tensor_radam": _in_double(radam._single_tensor_radam, 4)},
        asgd: {"_single_tensor_asgd": _in_double(asgd._single_tensor_asgd, 3, 4, 5)},
    }
    for module, formula in capturable.items():
        formula["_get_capturable_supported_devices"] = lambda **_: devices
        yield from patches_of(module, formula, why=why, checked=CHECKED)
    why = "Python's would choose by a traced number's value"
    choices = {"min": _of_numbers(min, torch.minimum), "max": _of_numbers(max, torch.maximum)}
    yield from patches_of(_adafactor, choices, why=why, checked=CHECKED)


def host_value(x: Any) -> Any:
    """A scalar that eagerly is read as a Python float: it stays a tensor, in Python's precision."""
    return as_number(x.to(torch.float64)) if isinstance(x, Tensor) else x


def _in_double(formula: Callable[..., None], *positions: int) -> Callable[..., None]:
    """The capturable form of a formula, with the scalars of its state in Python's precision.

    Args:
        formula: torch's, one list for each kind of state.
        positions: of the lists of scalars among its arguments.
    """

    @functools.wraps(formula)
    def capturable(*args: Any, **options: Any) -> None:
        lists = list(args)
        for position in positions:
            lists[position] = [as_number(x.to(torch.float64)) for x in args[position]]
        formula(*lists, **{**options, "capturable": True})
        for position in positions:
            for x, value in zip(args[position], lists[position], strict=True):
                x.copy_(value)

    return capturable


def _of_numbers(python: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    def choose(a: Any, b: Any) -> Any:
        return function(as_tensor(a), as_tensor(b)) if is_traced(b) else python(a, b)

    return choose


def _unchecked(is_all_true: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Any]:
    def checked(valid: Tensor) -> Any:
        return True if isinstance(valid, FakeTensor) else is_all_true(valid)

    return checked


def plain_library_code() -> Iterator[Patch]:
    """Patches by which library code that only pays eagerly runs in its plain form."""

    def plain(*args: Any, **kwargs: Any) -> Iterator[None]:
        yield

    class Plain:
        @staticmethod
        def apply(function: Any, preserve: bool, *args: Any) -> Any:
            return function(*args)

    why = "run twice in a trace, a dropout would get two masks, and gradients be silently wrong"
    once = {CHECKPOINTING: plain, "CheckpointFunction": Plain}
    yield from patches_of(checkpoint, once, why=why, checked=CHECKED)
    why = "a distribution would check the values of its arguments"
    yield from patches_of(Distribution, {"_validate_args": False}, why=why, checked=CHECKED)
    unchecked = {"_is_all_true": _unchecked(torch._is_all_true)}  # where it was asked to check
    yield from patches_of(torch, unchecked, why=why, checked=CHECKED)
    why = "an error that the user gets would be printed with a stack of torch's own"
    log = logging.getLogger("torch._subclasses.fake_tensor")
    yield from patches_of(log, {"disabled": True}, why=why, checked=CHECKED)
    why = "it would be noted of each operation for passes that never see it: 3 % of a trace's time"
    notes = {
        "_extract_tensor_metadata": lambda result: None,
        "_should_save_eager_input_vals": lambda target, arguments=None: False,
    }
    yield from patches_of(proxy_tensor, notes, why=why, checked=CHECKED)
    why = "the error of formatting a tensor would be printed; the trace raises it at its end"
    yield from patches_of(logging, {"raiseExceptions": False}, why=why, checked="Python 3.11")
