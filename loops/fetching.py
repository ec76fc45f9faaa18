"""Batches from one ordinary loader, without what Lightning and torch do around each fetch.

Lightning zips several loaders into one, also where there is one, and torch opens a span of its
profiler for each batch: 12 of 21 µs for a preloaded batch (measured). Used where no profiler runs.
Checked against Lightning 2.6.6 and torch 2.13.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lightning.pytorch.loops.fetchers import _DataFetcher, _PrefetchDataFetcher, _profile_nothing
from lightning.pytorch.utilities.combined_loader import CombinedLoader, _MaxSizeCycle
from torch.utils.data import _DatasetKind
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter


class OneLoader(Iterator[Any]):
    """A ``CombinedLoader`` that has one map-style DataLoader without workers."""

    def __init__(self, mode: _MaxSizeCycle) -> None:
        self._mode = mode
        self._loader: Any = mode.iterators[0]

    def __getstate__(self) -> dict[str, Any]:
        """Without the loader's iterator, as Lightning's own: a Trainer is copied in mid-epoch."""
        return {**vars(self), "_loader": None}

    def __next__(self) -> Any:
        """(batch, its index, the loader's index)."""
        mode, loader = self._mode, self._loader
        try:
            batch = loader._next_data()
        except StopIteration:
            mode._consumed[0] = True
            raise
        loader._num_yielded += 1
        index = mode._idx
        mode._idx = index + 1
        return batch, index, 0


def shorten(fetcher: _DataFetcher) -> None:
    """Let a fetcher take its batches straight from its loader, where it has one such loader."""
    fetcher._start_profiler = fetcher._stop_profiler = _profile_nothing
    combined: Any = fetcher.combined_loader
    mode = combined._iterator
    if type(fetcher.iterator) is OneLoader:  # a loop that began again within an epoch
        return
    one = (
        type(fetcher) is _PrefetchDataFetcher
        and type(combined) is CombinedLoader
        and type(mode) is _MaxSizeCycle
        and combined._spec.is_leaf()
        and type(mode.iterators[0]) is _SingleProcessDataLoaderIter
        and mode.iterators[0]._dataset_kind == _DatasetKind.Map
    )
    holder: Any = fetcher if fetcher.iterator is combined else fetcher.iterator  # a timed one
    if one and holder.iterator is combined:
        holder.iterator = OneLoader(mode)
