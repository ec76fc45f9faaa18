"""The data position of a run: which batch comes next, and from which random states.

A shuffled loader gives the same order again when the random states of two moments are restored: when
its iterator was made (with workers, the order is drawn then) and when its first batch was fetched
(without, then). The batches already seen are then skipped. Holds for 0 and 2 workers (measured).
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch.loops.fetchers import _DataFetcher

from fulgurite.backends.csx import rng

ITERATOR, FIRST_BATCH = "iterator", "first_batch"


def collect(loaders: list[Any]) -> dict[str, Any]:
    """The random states of the process, and of the generators that loaders own."""
    return {"rng": rng.collect(), "generators": rng.collect_loaders(loaders)}


def restore(states: dict[str, Any], loaders: list[Any]) -> None:
    """Put back what ``collect`` returned."""
    rng.restore(states["rng"])
    rng.restore_loaders(loaders, states["generators"])


def replay(restored: dict[str, Any], fetcher: _DataFetcher, seen: int) -> None:
    """Make the fetcher's next batch the one after ``seen`` batches of the saved epoch."""
    loaders = fetcher.combined_loader.flattened
    if seen and ITERATOR in restored and FIRST_BATCH in restored:
        restore(restored[ITERATOR], loaders)
        iter(fetcher)
        restore(restored[FIRST_BATCH], loaders)
        for _ in range(seen):
            next(fetcher)
        restore(restored, loaders)
    else:
        restore(restored, loaders)
        iter(fetcher)
