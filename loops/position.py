"""The data position of a run: which batch comes next, and from which random states.

A shuffled loader gives the same order again when the random states of two moments are restored:
when its iterator was made (with workers, the order is drawn then) and when its first batch was
fetched (without, then). The batches already seen are then skipped.

A loader with ``state_dict`` and ``load_state_dict`` knows its own position: Lightning saves it and
gives it back, and nothing of it is skipped here.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from typing import Any

from lightning.fabric.utilities.types import _Stateful
from lightning.pytorch.loops.fetchers import _DataFetcher, _PrefetchDataFetcher
from lightning.pytorch.utilities.combined_loader import CombinedLoader

from fulgurite.backends.csx.graph.rng import (
    collect_with,
    generators_of,
    restore,
    restore_loaders,
    restore_with,
)

ITERATOR, FIRST_BATCH = "iterator", "first_batch"
MADE = "made"  # when the iterator of loaders with a state had been made, in the run that goes on


def restore_for_iterator(restored: dict[str, Any], loader: CombinedLoader, ended: bool) -> None:
    """Restore the random states from which the iterator of loaders with a state is made.

    It is made once: a second ``iter`` of such a loader would begin without the state.

    Args:
        restored: the states of a checkpoint.
        loader: all loaders; nothing happens where none has a state.
        ended: the checkpoint was written at the end of an epoch, so this is the next one's.
    """
    if any(map(has_state, loader.flattened)):
        now = restored if ended else restored.get(ITERATOR, restored)
        _restore_some(now, loader.flattened)


def has_state(loader: object) -> bool:
    """Whether Lightning saves the loader's own position."""
    return isinstance(loader, _Stateful)


def replay(restored: dict[str, Any], fetcher: _DataFetcher, seen: int) -> dict[str, Any]:
    """Make the fetcher's next batch the one after ``seen`` batches of the saved epoch.

    Returns:
        The states of that epoch's moments, as a later checkpoint of it needs them.
    """
    loaders = fetcher.combined_loader.flattened
    if any(map(has_state, loaders)):
        return _replay_those_without_state(restored, fetcher, seen)
    once = any(isinstance(loader, Iterator) for loader in loaders)  # iter() would lose a batch
    if not seen or ITERATOR not in restored or FIRST_BATCH not in restored:
        restore_with(restored, loaders)
        moments = {ITERATOR: collect_with(loaders)}
        if not once:
            iter(fetcher)
        return moments
    restore_with(restored[ITERATOR], loaders)
    if once:
        fetcher.fetched -= seen  # Lightning has counted them
    else:
        iter(fetcher)
    restore_with(restored[FIRST_BATCH], loaders)
    for _ in range(seen):
        next(fetcher)
    restore_with(restored, loaders)
    return {moment: restored[moment] for moment in (ITERATOR, FIRST_BATCH)}


def _replay_those_without_state(
    restored: dict[str, Any], fetcher: _DataFetcher, seen: int
) -> dict[str, Any]:
    """``replay`` where a loader has a state, with the iterator that ``setup_data`` made."""
    combined = fetcher.combined_loader
    loaders, mode = combined.flattened, combined._iterator
    if not seen or ITERATOR not in restored or FIRST_BATCH not in restored:
        _restore_some(restored[MADE], loaders)
        return {ITERATOR: {name: restored[name] for name in ("rng", "generators")}}
    if not all(map(has_state, loaders)):
        ahead = isinstance(fetcher, _PrefetchDataFetcher) and fetcher.batches
        if ahead:
            warnings.warn(
                "Some of the training loaders have a state_dict() and go on where the checkpoint"
                " left them; the others begin with their first batch. Give all of them state_dict()"
                " and load_state_dict(), or none.",
                stacklevel=2,
            )
        else:
            _restore_some(restored[FIRST_BATCH], loaders)
            _skip_those_without_state(mode, loaders, seen)
    _restore_some(restored, loaders)
    return {moment: restored[moment] for moment in (ITERATOR, FIRST_BATCH)}


def _skip_those_without_state(mode: Any, loaders: list[Any], seen: int) -> None:
    """Take batches of the other loaders, as Lightning's iterator over all of them does."""
    states, own = list(map(has_state, loaders)), mode.iterators
    mode.iterators = [
        itertools.repeat(None) if state else iterator
        for state, iterator in zip(states, own, strict=True)
    ]
    for _ in range(seen):
        next(mode)
    pairs = zip(states, own, mode.iterators, strict=True)
    mode.iterators = [before if state else now for state, before, now in pairs]


def _restore_some(states: dict[str, Any], loaders: list[Any]) -> None:
    """Put back what ``collect_with`` returned, but the generators of loaders with a state."""
    restore(states["rng"])
    owners = [loader for loader in loaders for _ in generators_of(loader)]
    if len(owners) == len(states["generators"]):
        pairs = zip(owners, states["generators"], strict=True)
        plain = [state for owner, state in pairs if not has_state(owner)]
        restore_loaders([loader for loader in loaders if not has_state(loader)], plain)
