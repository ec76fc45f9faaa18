"""Indices with tensors in them, in a form that reads no value and has a static shape."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import DisableTorchFunction
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from fulgurite.backends.csx.hyperparams.traced_float import is_traced


class Split(NamedTuple):
    """An index in two: ``rest`` without its tensors, ``places`` of these in what that gives."""

    rest: tuple[Any, ...]
    places: list[Any]

    def rest_of(self, x: Tensor) -> Tensor:
        """``x[rest]``."""
        whole = all(type(item) is slice and item == slice(None) for item in self.rest)
        return x if whole else x[self.rest]


def without_scalars(x: Tensor, index: Any) -> Split | None:
    """``x[i]``, ``x[0, :, i]`` with integer tensors [] for i; None for any other index.

    torch reads such an ``i`` on the host; an index of tensors alone is an operation.
    """
    items = index if isinstance(index, tuple) else (index,)
    scalars = [isinstance(i, FakeTensor) and not i.ndim and not is_traced(i) for i in items]
    plain = [i is None or i is ... or type(i) is int or _is_plain_slice(i) for i in items]
    if not any(scalars) or not all(map(operator.or_, scalars, plain)):
        return None
    tensors = [i for i, scalar in zip(items, scalars, strict=True) if scalar]
    if any(i.is_floating_point() or i.dtype is torch.bool for i in tensors):
        return None
    unnamed = x.ndim - sum(i is not None and i is not ... for i in items)
    places: list[Any] = []
    for item, scalar in zip(items, scalars, strict=True):
        if scalar:
            places.append(item)
        elif item is ...:
            places += [None] * unnamed
        elif type(item) is not int:
            places.append(None)
    rest = [slice(None) if scalar else i for i, scalar in zip(items, scalars, strict=True)]
    return Split(tuple(rest), places)


def _is_plain_slice(item: object) -> bool:
    if type(item) is not slice:
        return False
    return not any(isinstance(bound, Tensor) for bound in (item.start, item.stop, item.step))


def at(places: list[Any], x: Tensor, *value: Any) -> Tensor:
    """``x[places]``, or with a value ``x[places] = value``."""
    if not value:
        found: Tensor = torch.ops.aten.index.Tensor(x, places)
        return found
    given = torch.as_tensor(value[0]).to(x.dtype)
    changed: Tensor = torch.ops.aten.index_put_.default(x, places, given)
    return changed


def without_known_masks(index: Any, value_of: Callable[[Tensor], Tensor | None]) -> Any:
    """An index with the places that its masks choose, where these have a value while tracing."""
    items: list[Any] = []
    for item in index if isinstance(index, tuple) else (index,):
        mask = isinstance(item, Tensor) and item.dtype == torch.bool and item.ndim > 0
        value = value_of(item) if mask else None
        if value is None:
            items.append(item)
        else:
            with DisableTorchFunction(), _disable_current_modes():
                items += value.nonzero(as_tuple=True)
    return tuple(items) if isinstance(index, tuple) or len(items) > 1 else items[0]
