"""What optimizers no program can hold: they are refused before a trace fails in the middle."""

from __future__ import annotations

import inspect
import re
from collections import deque
from types import FunctionType
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.optim import LBFGS, Optimizer, SparseAdam

from fulgurite.backends.csx.diagnostics.trace_errors import UnsupportedState
from fulgurite.backends.csx.diagnostics.user_lines import UserLine, belongs_to_library
from fulgurite.backends.csx.graph.dtypes import wide


def check_optimizer(optimizer: Optimizer, line: UserLine | None = None) -> None:
    """Refuse optimizers that no static program can hold.

    One of torch's that only reads values on the host can be supported: ``hyperparams/torch_optim``.

    Raises:
        UnsupportedState: LBFGS or SparseAdam.
    """
    name = type(optimizer).__name__
    if isinstance(optimizer, LBFGS):
        raise UnsupportedState(
            f"{name} evaluates the step again and again, as often as values decide.",
            line=line,
            remedy="an optimizer with one update per step, such as torch.optim.AdamW",
        )
    if isinstance(optimizer, SparseAdam):
        raise UnsupportedState(
            f"{name} takes sparse gradients, whose shape depends on values.",
            line=line,
            remedy="nn.Embedding(sparse=False) and torch.optim.Adam",
        )


def check_state(
    optimizer: Optimizer,
    values: Any,
    line: UserLine | None,
    device: torch.device,
    with_double: bool,
) -> None:
    """Refuse new state of an optimizer that no program can hold.

    Args:
        optimizer: whose.
        values: the state of one parameter.
        line: the user's, for errors, where none is found that makes it.
        device: the parameters'.
        with_double: whether some of them are in float64.

    Raises:
        UnsupportedState: it is tensors in a set or deque, or one elsewhere.
    """
    for key, value in values.items() if isinstance(values, dict) else ():
        if isinstance(value, dict):
            check_state(optimizer, value, line, device, with_double)
            continue
        try:
            _check_value(optimizer, key, value, device, with_double)
        except UnsupportedState as error:
            raise error.replaced(line=_where_made(type(optimizer), key) or line) from None


def _check_value(
    optimizer: Optimizer, key: Any, value: Any, device: torch.device, with_double: bool
) -> None:
    name = type(optimizer).__name__
    if isinstance(value, (set, deque)) and any(isinstance(v, Tensor) for v in value):
        raise UnsupportedState(
            f"{name} keeps tensors in a {type(value).__name__}, state['{key}'].",
            remedy=f"a list, or one key for each: state['{key}_0'], state['{key}_1'], ...",
        )
    for tensor in [one for one in pytree.tree_leaves(value) if isinstance(one, Tensor)]:
        _check_tensor(f"{name} keeps state['{key}']", tensor, device, with_double)


def _where_made(kind: type, key: Any) -> UserLine | None:
    """The first line in an optimizer of the user's that puts something under a key."""
    sets = re.compile(rf"""\[["']{re.escape(str(key))}["']\]\s*=[^=]""")
    methods = (one for owner in kind.__mro__ for one in vars(owner).values())
    for method in methods:
        function = inspect.unwrap(method) if callable(method) else None
        if not isinstance(function, FunctionType) or belongs_to_library(function):
            continue
        try:
            lines, first = inspect.getsourcelines(function)
        except OSError:  # there is no file
            continue
        for i, text in enumerate(lines):
            if sets.search(text):
                code = function.__code__
                return UserLine.at(code, first + i)
    return None


def _check_tensor(keeps: str, value: Tensor, device: torch.device, with_double: bool) -> None:
    """Refuse what no program can hold, before it fails in the middle of a trace."""
    found = {
        f"on the device {value.device}": value.device.type != device.type,
        f"as a {value.layout} tensor": value.layout is not torch.strided,
        f"in {value.dtype}": wide(value.dtype) and not with_double,
    }
    for how, wrong in found.items():
        if wrong:
            raise UnsupportedState(
                f"{keeps} {how}; a program's state lies with the parameters, dense, in float32, a"
                " 16-bit type or integers.",
                remedy="torch.zeros_like(p); for a count torch.zeros((), device=p.device)",
            )
