"""State that is put into files, behind the same Python objects, where a budget is less than all.

What is small stays in memory, and so does memory that somebody else holds too, by a tensor that is
no state: who holds it would go on with what it was. Both count against the budget.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fulgurite.backends.csx.streaming.mapped import over
from fulgurite.backends.csx.streaming.residency import LEAST_BYTES, residency
from fulgurite.backends.runtime import give_back_freed


def keep_within_budget(parameters: Mapping[str, Tensor], optimizers: Sequence[Optimizer]) -> None:
    """Put parameters and optimizer state into files, unless all of it fits into the budget.

    Args:
        parameters: by name.
        optimizers: whose state counts.

    Raises:
        ValueError: the budget is less than two layers, or than what has to be in memory.
        OSError: there is no room for the files, or they cannot be mapped.
    """
    limit = residency.limit_bytes
    if limit is None:
        return
    storages = _storages([*parameters.values(), *_states(optimizers)])
    sizes = {key: some[0].untyped_storage().nbytes() for key, some in storages.items()}
    if sum(sizes.values()) <= limit and not any(
        residency.is_in_file(some[0]) for some in storages.values()
    ):
        return
    _check_layers(parameters, optimizers, limit)
    moved = False
    in_files = beside = 0
    for key, some in storages.items():
        if residency.is_in_file(some[0]):
            in_files += sizes[key]
        elif sizes[key] >= LEAST_BYTES and _put_into_file(some):
            moved, in_files = True, in_files + sizes[key]
        else:
            beside += sizes[key]
    residency.count(in_files, beside, moved)
    if residency.room_bytes <= 0:
        raise ValueError(
            f"max_resident_bytes={limit} is less than the {beside:,} bytes of state that have to be"
            " in memory: tensors of less than 64 KiB, and those that something else than module and"
            " optimizers holds too. Give more."
        )
    give_back_freed()  # of trials of optimizers, too


def _put_into_file(tensors: list[Tensor]) -> bool:
    """Move tensors over one memory into a file; False where others hold that memory too."""
    storage = tensors[0].untyped_storage()
    # those tensors, and the storage's own object here
    if torch._C._storage_Use_Count(storage._cdata) > len(tensors) + 1:
        return False
    moved = residency.storage(storage.nbytes())
    new = [over(moved, one) for one in tensors]
    residency.use(new[0])
    moved.copy_(storage)
    for tensor, one in zip(tensors, new, strict=True):
        tensor.data = one
    return True


def _storages(tensors: Iterable[Tensor]) -> dict[int, list[Tensor]]:
    """Tensors by their memory, each once."""
    found: dict[int, dict[int, Tensor]] = {}
    for one in tensors:
        if one.layout is torch.strided and one.device.type == "cpu" and one.numel():
            found.setdefault(one.untyped_storage().data_ptr(), {})[id(one)] = one
    return {key: list(some.values()) for key, some in found.items()}


def _states(optimizers: Iterable[Optimizer]) -> Iterator[Tensor]:
    return (one for each in optimizers for state in each.state.values() for one in _within(state))


def _within(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from _within(one)


def _check_layers(
    parameters: Mapping[str, Tensor], optimizers: Sequence[Optimizer], limit: int
) -> None:
    """Refuse a budget that has no room for one layer and the one that is read meanwhile."""
    states: dict[int, int] = {}
    for each in optimizers:
        for p, state in each.state.items():
            states[id(p)] = sum(one.nbytes for one in _within(state))
    sizes = {name: p.nbytes + states.get(id(p), 0) for name, p in parameters.items()}
    largest = sorted(sizes, key=sizes.__getitem__)[-2:]
    least = sum(sizes[name] for name in largest)
    if least > limit:
        raise ValueError(
            f"max_resident_bytes={limit} is less than two layers: {' and '.join(largest)}, with"
            f" their optimizer state, have {least:,} bytes. Give at least that; more is faster."
        )
