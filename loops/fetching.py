"""Batches from the training loader: fetched without overhead, and timed in the first epoch.

Lightning zips several loaders into one, also where there is one, and torch opens a span of its
profiler for each batch: 12 of 21 µs for a preloaded batch (measured). ``shorten`` leaves both out,
where no profiler runs. Checked against Lightning 2.6.6 and torch 2.13.

Fetching a batch of 32 rows costs 103 µs where the loader collates them, 33 µs as one indexed fetch
and 12 µs preloaded (measured, torch 2.13); the program of a small model costs 140. So whether the
loader keeps up is said once: the times of SAMPLE batches are taken around the fetcher's iterator,
which then is as it was, and by a timer of the fabric.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator
from typing import Any

from lightning.pytorch.loops.fetchers import _DataFetcher, _PrefetchDataFetcher, _profile_nothing
from lightning.pytorch.utilities.combined_loader import CombinedLoader, _MaxSizeCycle
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    _DatasetKind,
    default_collate,
)
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

from fulgurite.backends.csx import StaticGraph


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


SAMPLE, FEWEST = 256, 8  # batches timed at most; no hint from fewer
WORKERS_PAY_US = 1000  # what a batch of 32 rows from 2 workers cost on two busy cores (measured)
AHEAD = "Batches that are made ahead, or that cost less, make this run faster."
_SAMPLERS: dict[type, str] = {
    RandomSampler: "RandomSampler",
    SequentialSampler: "SequentialSampler",
}
clock = time.perf_counter


class FeedingTimes:
    """Seconds that batches took to fetch, and programs to run on them."""

    def __init__(self) -> None:
        self.fetch_s: list[float] = []
        self.program_s: list[float] = []
        self._fetched = False
        self._began: float | None = None

    def fetch(self, batches: Iterator[Any]) -> Any:
        """The next batch, timed."""
        began = clock()
        batch = next(batches)
        self.fetch_s.append(clock() - began)
        self._fetched = True
        return batch

    def begin(self) -> None:
        """A program is about to run: time it if it is the first after a fetch, not validation's."""
        self._began = clock() if self._fetched else None
        self._fetched = False

    def end(self) -> None:
        """The program has run."""
        if self._began is not None:
            self.program_s.append(clock() - self._began)

    def medians_us(self) -> tuple[float, float] | None:
        """Of a fetch and of a run, without the first ones; None where there are too few."""
        # the first fetch starts workers, the first run builds the program
        fetch_s, program_s = self.fetch_s[1:], self.program_s[1:]
        if min(len(fetch_s), len(program_s)) < FEWEST:
            return None
        return statistics.median(fetch_s) * 1e6, statistics.median(program_s) * 1e6


class _TimedIterator(Iterator[Any]):
    """A fetcher's iterator; it takes itself out after SAMPLE batches."""

    def __init__(self, fetcher: _DataFetcher, times: FeedingTimes) -> None:
        assert fetcher.iterator is not None
        self._fetcher, self._times, self.iterator = fetcher, times, fetcher.iterator

    def __next__(self) -> Any:
        if len(self._times.fetch_s) >= SAMPLE:
            self.remove()
            return next(self.iterator)
        return self._times.fetch(self.iterator)

    def remove(self) -> None:
        """Put the iterator back, unless another one is there by now."""
        if self._fetcher.iterator is self:
            self._fetcher.iterator = self.iterator


@contextlib.contextmanager
def timed(fetcher: _DataFetcher, strategy: StaticGraph) -> Iterator[FeedingTimes]:
    """Time the fetcher's batches and the programs that run on them."""
    times = FeedingTimes()
    iterator = _TimedIterator(fetcher, times)
    fetcher.iterator, strategy.fabric.timer = iterator, times
    try:
        yield times
    finally:
        iterator.remove()
        strategy.fabric.timer = None


def hint(times: FeedingTimes, loaders: list[Any]) -> str | None:
    """What to say where fetching takes longer than the program; None where it does not.

    Args:
        times: of one epoch.
        loaders: those that made its batches.
    """
    medians = times.medians_us()
    if medians is None or medians[0] <= medians[1]:
        return None
    took = f"fetching a batch took {medians[0]:.0f} µs, the program {medians[1]:.0f} µs."
    return f"DataLoader: {took} {_remedy(loaders, medians[0])}"


def _remedy(loaders: list[Any], fetch_us: float) -> str:
    [loader, *others] = loaders
    known = isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
    if others or not known:
        return AHEAD
    if loader.num_workers:
        return (
            f"The program waits for {loader.num_workers} workers: more of them help where samples"
            " cost much, num_workers=0 where they cost little."
        )
    workers = "DataLoader(..., num_workers=2, persistent_workers=True) fetches beside the program. "
    remedies = workers * (fetch_us >= WORKERS_PAY_US) + _indexed_fetch(loader)
    return remedies.rstrip() or AHEAD


def _indexed_fetch(loader: DataLoader[Any]) -> str:
    """One fetch for all samples of a batch, as code; empty where the loader does something else."""
    sampler = _SAMPLERS.get(type(loader.sampler))
    if sampler is None or loader.batch_size is None or loader.collate_fn is not default_collate:
        return ""
    one = "One"
    if type(loader.dataset) is not TensorDataset:
        one = "Where dataset[[0, 1]] gives a batch of two, one"
    return (
        f"{one} indexed fetch costs less than collating samples:\n"
        f"    DataLoader(dataset, batch_size=None, sampler=BatchSampler({sampler}(dataset),"
        f" {loader.batch_size}, drop_last={loader.drop_last}))"
    )
