"""Nonlinearities by the names that parameter files have for them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from fulgurite.config.document.problems import nearest

NONLINEARITIES: dict[str, Callable[..., nn.Module]] = {
    "celu": nn.CELU,
    "elu": nn.ELU,
    "gelu": nn.GELU,
    "gelu_tanh": partial(nn.GELU, approximate="tanh"),
    "hardshrink": nn.Hardshrink,
    "hardsigmoid": nn.Hardsigmoid,
    "hardswish": nn.Hardswish,
    "hardtanh": nn.Hardtanh,
    "identity": nn.Identity,
    "leaky_relu": nn.LeakyReLU,
    "linear": nn.Identity,
    "logsigmoid": nn.LogSigmoid,
    "mish": nn.Mish,
    "prelu": nn.PReLU,
    "relu": nn.ReLU,
    "relu6": nn.ReLU6,
    "selu": nn.SELU,
    "sigmoid": nn.Sigmoid,
    "silu": nn.SiLU,
    "softplus": nn.Softplus,
    "softshrink": nn.Softshrink,
    "softsign": nn.Softsign,
    "swish": nn.SiLU,
    "tanh": nn.Tanh,
    "tanhshrink": nn.Tanhshrink,
}


def nonlinearity(name: str, **arguments: Any) -> nn.Module:
    """torch's module of a name.

    >>> nonlinearity("leaky_relu", negative_slope=0.2)
    LeakyReLU(negative_slope=0.2)

    Args:
        name: a key of ``NONLINEARITIES``.
        arguments: of the module; that of identity and linear ignores them, as torch's does.

    Raises:
        ValueError: there is no such name.
        TypeError: the module does not take these arguments.
    """
    if name not in NONLINEARITIES:
        raise ValueError(
            f"No nonlinearity is called {name!r}.{nearest(name, NONLINEARITIES)} Known are"
            f" {', '.join(NONLINEARITIES)}."
        )
    return NONLINEARITIES[name](**arguments)
