"""The worker processes of loaders, where a ``cluster_config`` says how many each system has."""

from __future__ import annotations

import contextlib
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

BATCHES_AHEAD = 2
"""What each worker has ready: the default of DataLoader(num_workers=...)."""


def give_workers(loader: object, count: int, until: contextlib.ExitStack) -> None:
    """Have a DataLoader without workers fetch its batches in some, until a stack is closed.

    Args:
        loader: of any kind; one that has workers of its own keeps them. A stream has none: each
            would go through all of it, unless it is written for them.
        count: workers; 0 leaves every loader as it is.
        until: puts the loader back, which is the user's.
    """
    if not count or not isinstance(loader, DataLoader) or loader.num_workers:
        return
    if isinstance(loader.dataset, IterableDataset):
        return
    _set(loader, count, loader.prefetch_factor or BATCHES_AHEAD)
    until.callback(_set, loader, 0, None)


def _set(loader: DataLoader[Any], count: int, ahead: int | None) -> None:
    loader.num_workers, loader.prefetch_factor = count, ahead
