"""Torch's own code in the form that traces: eager optimizer formulas, no opaque kernels."""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._dynamo.config
import torch.utils.checkpoint
from torch import Tensor
from torch.distributions import Distribution
from torch.nn.modules import batchnorm
from torch.optim import Optimizer, _adafactor, asgd, radam

from fulgurite.backends.csx.hyperparams.torch_functions import as_tensor
from fulgurite.backends.csx.hyperparams.traced_float import as_number, is_traced
from fulgurite.backends.csx.state.optimizer_init import plain_options
from fulgurite.backends.patches import patched

TRACEABLE: dict[Any, Any] = {
    torch.ops.aten._efficientzerotensor.default: torch.ops.aten.zeros.default
}
"""Operations by one that gives the same numbers. The tangents that forward mode need not compute
are zero tensors without memory; their products are laid out on the device "meta", from which second
derivatives (``torch.func.hessian`` in a loss) then do not come back under fakes (torch 2.13)."""


@contextlib.contextmanager
def without_mkldnn() -> Iterator[None]:
    """For ``torch.lstm``, which takes an opaque oneDNN path that does not trace.

    Not for a whole trace: the layout of a convolution's result (``channels_last``) rests on it.
    """
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


@contextlib.contextmanager
def eager_updates(optimizers: list[Optimizer]) -> Iterator[None]:
    """Let torch's optimizers run their eager formulas on traced numbers.

    They read their step count with ``_get_value`` or ``.item()``, a host read (``host_value``). In
    RAdam and ASGD values then decide Python branches; there torch's capturable form of the same
    formula stands in. Adafactor's ``min`` and ``max`` become torch's. ``BatchNorm(momentum=None)``
    reads a count too, by ``float()``. Checked against torch 2.13.
    """
    readers = [
        module
        for name, module in list(sys.modules.items())
        if name.startswith("torch.optim.") and hasattr(module, "_get_value")
    ]
    devices = {
        p.device.type for o in optimizers for group in o.param_groups for p in group["params"]
    }
    changes = [
        *((module, "_get_value", host_value) for module in readers),
        *(
            (module, "_get_capturable_supported_devices", lambda **_: devices)
            for module in (radam, asgd)
        ),
        (radam, "_single_tensor_radam", _in_double(radam._single_tensor_radam, 4)),
        (asgd, "_single_tensor_asgd", _in_double(asgd._single_tensor_asgd, 3, 4, 5)),
        (_adafactor, "min", _of_numbers(min, torch.minimum)),
        (_adafactor, "max", _of_numbers(max, torch.maximum)),
        (batchnorm, "float", lambda count: host_value(count)),
    ]
    with patched(changes), plain_options(optimizers):
        yield


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


@contextlib.contextmanager
def plain_library_code() -> Iterator[None]:
    """Run what only pays eagerly in its plain form.

    ``torch.utils.checkpoint`` runs its function once and stores nothing twice: traced as it is, a
    dropout inside would get two masks and silently wrong gradients. ``torch.distributions`` checks
    the values of its arguments. ``torch.compile`` refuses to run under a trace. ``logging`` prints
    the errors of formatting a tensor instead of raising them: the trace raises them at its end.
    """

    def plain(*args: Any, **kwargs: Any) -> Iterator[None]:
        yield

    class Plain:
        @staticmethod
        def apply(function: Any, preserve: bool, *args: Any) -> Any:
            return function(*args)

    log = logging.getLogger("torch._subclasses.fake_tensor")  # prints its own stack of user errors
    level = log.level
    changes = [
        (torch.utils.checkpoint, "_checkpoint_without_reentrant_generator", plain),
        (torch.utils.checkpoint, "CheckpointFunction", Plain),
        (Distribution, "_validate_args", False),
        (logging, "raiseExceptions", False),
    ]
    with patched(changes), torch._dynamo.config.patch(error_on_nested_fx_trace=False):
        log.setLevel(logging.CRITICAL)  # a method, which also forgets cached answers
        try:
            yield
        finally:
            log.setLevel(level)
