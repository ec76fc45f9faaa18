"""The arguments of a traced function: which are data, which are static, and their names.

Data (tensors, numbers and strings, in any containers) is fed to the function's program; a static
argument (a module, an optimizer, any other object) is what the program is built for.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from typing import Any

import numpy as np
import torch
import torch.utils._pytree as pytree
from torch import Tensor

from fulgurite.backends.csx.capture import CONSTANTS, keystr
from fulgurite.backends.csx.diagnostics.errors import UnsupportedInput
from fulgurite.backends.csx.diagnostics.user_lines import UserLine

_DATA = (Tensor, *CONSTANTS)
_PLAIN = frozenset(_DATA)


def split_static(given: Any) -> tuple[Any, list[tuple[int, Any]]]:
    """Arguments with None for each static one, and these with their positions among the leaves."""
    statics: list[tuple[int, Any]] = []
    position = 0
    for value in given:  # pytree would take 30 µs (measured)
        kind = type(value)
        if kind in (list, tuple) and all(type(item) in _PLAIN for item in value):
            position += len(value)
            continue
        if kind in pytree.SUPPORTED_NODES or isinstance(value, tuple):
            return _split_deeply(given)
        if kind not in _PLAIN and not isinstance(value, _DATA):
            statics.append((position, value))
        position += 1
    if not statics:
        return given, statics
    static = {id(value) for _, value in statics}
    return tuple(None if id(value) in static else value for value in given), statics


def _split_deeply(given: Any) -> tuple[Any, list[tuple[int, Any]]]:
    leaves, tree = pytree.tree_flatten(given)
    statics = [(i, leaf) for i, leaf in enumerate(leaves) if not isinstance(leaf, _DATA)]
    for i, _ in statics:
        leaves[i] = None
    return (pytree.tree_unflatten(leaves, tree) if statics else given), statics


def argument_name(parameters: list[inspect.Parameter], has_keywords: bool, path: Any) -> str:
    """``inputs[0]``: a leaf of the arguments by its path in what ``split_static`` takes."""
    first, *rest = path[1:] if has_keywords else path
    if has_keywords and path[0].idx == 1:
        return f"{first.key}{keystr(rest)}"
    kinds = [parameter.kind for parameter in parameters]
    rests_at = len(kinds)
    if inspect.Parameter.VAR_POSITIONAL in kinds:
        rests_at = kinds.index(inspect.Parameter.VAR_POSITIONAL)
    part = "" if first.idx < rests_at else f"[{first.idx - rests_at}]"
    return f"{parameters[min(first.idx, rests_at)].name}{part}{keystr(rest)}"


def check_argument(name: str, value: Any, line: UserLine | None) -> None:
    """Refuse data that would be taken for a constant, and a gradient that would be lost."""
    if isinstance(value, Tensor):
        if value.requires_grad and torch.is_grad_enabled():
            raise UnsupportedInput(
                f"{name} requires a gradient; data of a traced function has none.",
                line=line,
                remedy=f"{name}.detach(); or pass the module or the optimizer that holds it",
            )
        return
    if isinstance(value, (np.ndarray, np.generic)) and not isinstance(value, _DATA):
        raise UnsupportedInput(
            f"{name} is a numpy {type(value).__name__}.",
            line=line,
            remedy=f"torch.as_tensor({name})",
        )
    if isinstance(value, Mapping) or is_dataclass(value):
        as_dict: Callable[[Any], dict[Any, Any]] = dict if isinstance(value, Mapping) else vars
        if any(isinstance(leaf, Tensor) for leaf in as_dict(value).values()):
            raise UnsupportedInput(
                f"{name} is a {type(value).__name__} with tensors in it, which would be constants.",
                line=line,
                remedy=f"a dict of tensors: {as_dict.__name__}({name})",
            )
