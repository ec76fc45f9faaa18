"""Whether the training loader keeps up with the program: timed in the first epoch, said once.

Fetching a batch of 32 rows costs 103 µs where the loader collates them, 33 µs as one indexed fetch
and 12 µs preloaded (measured, torch 2.13); the program of a small model costs 140. The times of
SAMPLE batches are taken around the fetcher's iterator, which then is as it was, and by a timer of
the fabric.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator
from typing import Any

from lightning.pytorch.loops.fetchers import _DataFetcher
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    default_collate,
)

from fulgurite.backends.csx.compile.fabric import Fabric

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
def timed(fetcher: _DataFetcher, fabric: Fabric) -> Iterator[FeedingTimes]:
    """Time the fetcher's batches and the programs that run on them."""
    times = FeedingTimes()
    iterator = _TimedIterator(fetcher, times)
    fetcher.iterator, fabric.timer = iterator, times
    try:
        yield times
    finally:
        iterator.remove()
        fabric.timer = None


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
        f" {loader.batch_size}, drop_last=True))"
    )
