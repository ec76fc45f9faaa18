"""The data position of a run: which batch comes next, and from which random states.

A shuffled loader gives the same order again when the random states of two moments are restored:
when its iterator was made (with workers, the order is drawn then) and when its first batch was
fetched (without, then). The batches already seen are then skipped.
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch.loops.fetchers import _DataFetcher

from fulgurite.backends.csx.rng import collect_with, restore_with

ITERATOR, FIRST_BATCH = "iterator", "first_batch"


def replay(restored: dict[str, Any], fetcher: _DataFetcher, seen: int) -> dict[str, Any]:
    """Make the fetcher's next batch the one after ``seen`` batches of the saved epoch.

    Returns:
        The states of that epoch's moments, as a later checkpoint of it needs them.
    """
    loaders = fetcher.combined_loader.flattened
    if not seen or ITERATOR not in restored or FIRST_BATCH not in restored:
        restore_with(restored, loaders)
        moments = {ITERATOR: collect_with(loaders)}
        iter(fetcher)
        return moments
    restore_with(restored[ITERATOR], loaders)
    iter(fetcher)
    restore_with(restored[FIRST_BATCH], loaders)
    for _ in range(seen):
        next(fetcher)
    restore_with(restored, loaders)
    return {moment: restored[moment] for moment in (ITERATOR, FIRST_BATCH)}
