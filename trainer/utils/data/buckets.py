"""Batches of a few sizes: what another collate function makes, padded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate

Number = int | float | bool


class PadToBuckets:
    """A ``collate_fn`` that pads the batches of another one to the next of a few sizes.

        DataLoader(texts, 32, collate_fn=PadToBuckets(collate, sizes=(16, 32, 64)))

    A program has one shape of batch, so texts of 40 lengths would need 40 of them; of these batches
    there are three. Where padding must not count, the model needs a mask, or a loss that ignores
    the filled-in value, as it needs them for the padding within a batch.

    Args:
        collate_fn: makes a batch of samples: a tensor, or a dict, list or (named) tuple of them; it
            pads samples to the longest, as for any DataLoader. None: ``default_collate``.
        sizes: those that batches may have, in ``dim``.
        dim: the dimension that is padded, at its end.
        value: what it is filled up with: a number for every tensor that has that dimension; or a
            number for each tensor that is to be padded, by its key in the dict, its position in the
            tuple or its field: ``{"input_ids": 0, "labels": -100}``. Others stay as they are.

    Raises:
        ValueError: no sizes, one that is not positive, or a negative ``dim``; and of a batch that
            is larger than all of them.
        KeyError: ``value`` names what the batch has not.
        TypeError: ``value`` names tensors of a batch that is a tensor alone, or no tensor.
    """

    def __init__(
        self,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        *,
        sizes: Iterable[int],
        dim: int = 1,
        value: Number | Mapping[str | int, Number] = 0,
    ) -> None:
        self.collate_fn = default_collate if collate_fn is None else collate_fn
        self.sizes = tuple(sorted(sizes))
        self.dim, self.value = dim, value
        if not self.sizes or self.sizes[0] < 1:
            raise ValueError(f"sizes must be one positive number or more; got {self.sizes}.")
        if dim < 0:
            raise ValueError(f"dim must not be negative, for tensors have other ranks; got {dim}.")

    def __call__(self, samples: list[Any]) -> Any:
        """Make a batch of samples, and pad it."""
        batch = self.collate_fn(samples)
        if isinstance(self.value, Mapping):
            return self._pad_some(batch, self.value)
        return self._pad_all(batch, self.value)

    def _pad_all(self, batch: Any, value: Number) -> Any:
        if isinstance(batch, Tensor):
            return self._pad(batch, value) if batch.ndim > self.dim else batch
        items = dict(_items(batch))
        return _with(batch, {key: self._pad_all(one, value) for key, one in items.items()})

    def _pad_some(self, batch: Any, values: Mapping[str | int, Number]) -> Any:
        items, padded = dict(_items(batch)), dict[str | int, Tensor]()
        if not items:
            raise TypeError(
                f"value={dict(values)} names tensors of a batch, and the batch is a"
                f" {type(batch).__name__}. Give a number."
            )
        for key, value in values.items():
            if key not in items:
                raise KeyError(f"value names {key!r}, and the batch has {list(items)}.")
            if not isinstance(items[key], Tensor):
                kind = type(items[key]).__name__
                raise TypeError(f"{key!r} of the batch is a {kind}, no tensor.")
            padded[key] = self._pad(items[key], value)
        return _with(batch, items | padded)

    def _pad(self, tensor: Tensor, value: Number) -> Tensor:
        length = tensor.shape[self.dim]
        size = next((one for one in self.sizes if one >= length), None)
        if size is None:
            raise ValueError(
                f"A batch has size {length} in dimension {self.dim}, and the largest of sizes is"
                f" {self.sizes[-1]}. Give sizes up to the largest there is, or cut samples."
            )
        if size == length:
            return tensor
        shape = list(tensor.shape)
        shape[self.dim] = size - length
        return torch.cat([tensor, tensor.new_full(shape, value)], self.dim)


def _items(batch: Any) -> Iterable[tuple[str | int, Any]]:
    """What is in a batch that is a dict, a list or a tuple, by key or position."""
    if isinstance(batch, Mapping):
        return batch.items()
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return zip(batch._fields, batch, strict=True)
    return enumerate(batch) if isinstance(batch, (list, tuple)) else ()


def _with(batch: Any, items: dict[str | int, Any]) -> Any:
    """A batch of the same kind with other tensors in it."""
    if not items:
        return batch
    if isinstance(batch, Mapping):
        return items if type(batch) is dict else type(batch)(items)  # type: ignore[call-arg]
    values: Sequence[Any] = list(items.values())
    return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
