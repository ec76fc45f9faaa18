"""Optimizer state before the first step.

A program's state must exist before it is traced, and most optimizers make theirs in their first
``step``. So that step is run on trial, with made-up gradients, each state tensor is kept with its
*initial value*, that of the moment it was made, and everything else is put back. (Running the step
and zeroing the state instead gives wrong weights: NAdam 2 %, Adagrad 8 %, Rprop 36 %; measured,
torch 2.13.)

An initial value that differs between two trials comes from the *first gradient*. Where the first
update does the same from zeros (SGD's momentum), it is zeros; else only that update itself can tell
it: first_update.py.
"""

from __future__ import annotations

import inspect
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer, SparseAdam

from fulgurite.backends.csx.diagnostics.errors import UnsupportedState
from fulgurite.backends.csx.diagnostics.user_lines import UserLine, belongs_to_library
from fulgurite.backends.csx.graph.dtypes import wide
from fulgurite.backends.csx.state.optimizer_trial import begin_counts, copied, equal, trial
from fulgurite.backends.csx.state.places import StateTensor


def check_optimizer(optimizer: Optimizer, line: UserLine | None = None) -> None:
    """Refuse optimizers that no static program can hold.

    One of torch's that only reads values on the host can be supported: ``hyperparams/torch_optim``.

    Raises:
        UnsupportedState: LBFGS, SparseAdam, or one with another optimizer inside.
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
    for key, value in vars(optimizer).items():
        if isinstance(value, Optimizer):
            raise UnsupportedState(
                f"{name} keeps another optimizer, in .{key}; that one's state would be none of the"
                " program's.",
                line=line,
                remedy="both from configure_optimizers(), as a list, and what the outer one does in"
                " a manual training_step",
            )


@dataclass(frozen=True, slots=True)
class NewState:
    """What ``init_state`` made.

    Args:
        optimizer: whose state it is.
        parameters: those that had no state.
        keys: of their state in ``optimizer.state``.
        of_gradient: it comes from the first gradient: shapes are right, values mean nothing yet.
    """

    optimizer: Optimizer
    parameters: list[Tensor]
    keys: list[Any]
    of_gradient: bool

    def forget_unused(self, live: list[StateTensor]) -> None:
        """Delete the state of what no program updates; ``live`` are the tensors of one."""
        places = {id(place.container) for held in live for place in held.places}
        tensors = {id(held.tensor) for held in live}
        for key in self.keys:
            values = self.optimizer.state.get(key)
            if isinstance(values, dict):
                inner = [values, *(value for value in values.values() if isinstance(value, dict))]
                used = any(id(c) in places for c in inner) if values else id(key) in tensors
                if not used:
                    del self.optimizer.state[key]


def init_state(optimizer: Optimizer, line: UserLine | None = None) -> NewState | None:
    """Make the state of every parameter that has none; None where there is no such parameter.

    Raises:
        UnsupportedState: the optimizer keeps its state in a form that no program can hold.
    """
    parameters = [
        p
        for group in optimizer.param_groups
        for p in group["params"]
        if p.requires_grad and not optimizer.state.get(p)
    ]
    if not parameters:
        return None
    of_gradient = False
    if callable(getattr(optimizer, "preinitialize", None)):
        initial = _preinitialized(optimizer)
        line = UserLine.of_method(type(optimizer), "preinitialize") or line
    else:
        known = _known(optimizer)
        first = begin_counts(optimizer, known, trial(optimizer, known, seed=1))
        second = trial(optimizer, known, seed=2)
        initial = first.initial
        if not first.seen or not equal(initial, second.initial):
            zeros = _zeros_like(initial)
            again = [trial(optimizer, {**known, **copied(zeros)}, seed) for seed in (1, 2)]
            of_gradient = not equal([first.after, second.after], [one.after for one in again])
            initial = initial if of_gradient else zeros
    for values in initial.values():
        _check(optimizer, values, line)
    optimizer.state.update(initial)
    return NewState(optimizer, parameters, list(initial), of_gradient)


def _known(optimizer: Optimizer) -> dict[Any, Any]:
    """The state that there is: not the empty dicts that are left where somebody only looked."""
    states = optimizer.state.items()
    return {key: values for key, values in states if not isinstance(values, dict) or values}


def _preinitialized(optimizer: Any) -> dict[Any, Any]:
    """What the optimizer's own ``preinitialize`` makes, beside the state that there is.

    It sees no state: many a one begins with zeros for every parameter, whatever was loaded.
    """
    known, state = _known(optimizer), optimizer.state
    optimizer.state = defaultdict(dict)
    try:
        with torch.no_grad():
            optimizer.preinitialize()
        made = dict(optimizer.state)
    finally:
        optimizer.state = state
    return {key: values for key, values in made.items() if key not in known}


def _zeros_like(value: Any) -> Any:
    """States with zeros in the place of every tensor."""
    if isinstance(value, Tensor):
        return torch.zeros_like(value)
    return {key: _zeros_like(item) for key, item in value.items()} if type(value) is dict else value


def _check(optimizer: Optimizer, values: Any, line: UserLine | None) -> None:
    for key, value in values.items() if isinstance(values, dict) else ():
        if isinstance(value, dict):
            _check(optimizer, value, line)
            continue
        try:
            _check_value(optimizer, key, value)
        except UnsupportedState as error:
            raise error.replaced(line=_where_made(type(optimizer), key) or line) from None


def _check_value(optimizer: Optimizer, key: Any, value: Any) -> None:
    name = type(optimizer).__name__
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        raise UnsupportedState(
            f"{name} keeps state['{key}'] as a Python number ({value!r}); the program would"
            " freeze it.",
            remedy=f"state['{key}'] = torch.tensor({float(value)!r}), changed in place",
        )
    if isinstance(value, (list, tuple, set)) and any(isinstance(v, Tensor) for v in value):
        raise UnsupportedState(
            f"{name} keeps tensors in a {type(value).__name__}, state['{key}'].",
            remedy=f"one key for each: state['{key}_0'], state['{key}_1'], ...",
        )
    if isinstance(value, Tensor):
        params = [p for group in optimizer.param_groups for p in group["params"]]
        _check_tensor(f"{name} keeps state['{key}']", value, params)


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
                return UserLine(code.co_filename, first + i, code.co_name)
    return None


def _check_tensor(keeps: str, value: Tensor, params: Sequence[Tensor]) -> None:
    """Refuse what no program can hold, before it fails in the middle of a trace."""
    double = any(wide(p.dtype) for p in params)
    found = {
        f"on the device {value.device}": value.device.type != params[0].device.type,
        f"as a {value.layout} tensor": value.layout is not torch.strided,
        f"in {value.dtype}": wide(value.dtype) and not double,
    }
    for how, wrong in found.items():
        if wrong:
            raise UnsupportedState(
                f"{keeps} {how}; a program's state lies with the parameters, dense, in float32, a"
                " 16-bit type or integers.",
                remedy="torch.zeros_like(p); for a count torch.zeros((), device=p.device)",
            )
