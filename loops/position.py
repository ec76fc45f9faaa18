"""The data position of a run: which batch comes next, and from which random states.

A shuffled loader gives the same order again when the random states of two moments are restored:
when its iterator was made (with workers, the order is drawn then) and when its first batch was
fetched (without, then). The batches already seen are then skipped.
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


def replay(restored: dict[str, Any], fetcher: _DataFetcher, seen: int) -> dict[str, Any]:
    """Make the fetcher's next batch the one after ``seen`` batches of the saved epoch.

    Returns:
        The states of that epoch's moments, as a later checkpoint of it needs them.
    """
    loaders = fetcher.combined_loader.flattened
    if not seen or ITERATOR not in restored or FIRST_BATCH not in restored:
        restore(restored, loaders)
        moments = {ITERATOR: collect(loaders)}
        iter(fetcher)
        return moments
    restore(restored[ITERATOR], loaders)
    iter(fetcher)
    restore(restored[FIRST_BATCH], loaders)
    for _ in range(seen):
        next(fetcher)
    restore(restored, loaders)
    return {moment: restored[moment] for moment in (ITERATOR, FIRST_BATCH)}
