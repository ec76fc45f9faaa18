"""The data position of a run: which batch comes next, and from which random states.

A shuffled loader gives the same order again when the random states of two moments are restored:
when its iterator was made (with workers, the order is drawn then) and when its first batch was
fetched (without, then). The batches already seen are then fetched again and skipped, in the workers
where there are any; the last of them is compared with the one that was trained.

A loader with ``state_dict`` and ``load_state_dict`` knows its own position: Lightning saves it and
gives it back, and nothing of it is skipped here.

Of several loaders, Lightning begins a short one anew when it is through (``max_size_cycle``, which
is what it does with a dict or list of loaders): another *round*. Its order is drawn then, in the
middle of an epoch, from random states that steps have drawn from before, so a run that fetches an
epoch's batches again needs the states of that moment. Those of each loader's last two rounds are
kept, for a batch may be fetched ahead: of earlier rounds nothing but their number of batches
matters later. Private parts are those of Lightning 2.6.6.
"""

from __future__ import annotations

import hashlib
import itertools
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.utils._pytree as pytree
from lightning.fabric.utilities.types import _Stateful
from lightning.pytorch.loops.fetchers import _DataFetcher, _PrefetchDataFetcher
from lightning.pytorch.utilities.combined_loader import CombinedLoader, _MaxSizeCycle
from torch import Tensor

from fulgurite.backends.csx import rng

MOMENTS = ITERATOR, FIRST_BATCH = "iterator", "first_batch"
PROGRESS = "progress"  # the moment of the epoch, and what was accumulated (resuming.py)
SAMPLE = "sample"  # of the batch that was trained last
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
        restore_now(now, loader.flattened)


def has_state(loader: object) -> bool:
    """Whether Lightning saves the loader's own position."""
    return isinstance(loader, _Stateful)


def replay(
    positions: dict[str, Any],
    restored: dict[str, Any],
    fetcher: _DataFetcher,
    seen: int,
    *,
    first: bool,
    ended: bool,
) -> None:
    """Make the fetcher's next batch the one after ``seen`` batches of the saved epoch.

    Args:
        positions: gets the states of that epoch's moments, as a later checkpoint of it needs them.
        restored: the states of a checkpoint.
        fetcher: of the training loaders.
        seen: batches of the epoch that were trained.
        first: it is the first epoch.
        ended: these were all, so none needs to be fetched again.
    """
    combined, again = fetcher.combined_loader, dict(restored)
    loaders = combined.flattened
    if ended:
        restore_now(restored, loaders)
        positions |= {moment: restored[moment] for moment in MOMENTS if moment in restored}
        return
    if any(map(has_state, loaders)):
        follow_rounds(combined, positions, again)
        positions |= _replay_those_without_state(positions, restored, fetcher, seen)
        again.clear()
        return
    once = any(isinstance(loader, Iterator) for loader in loaders)  # iter() would lose a batch
    if not seen or ITERATOR not in restored or FIRST_BATCH not in restored:
        rng.restore_with(restored, loaders)
        positions[ITERATOR] = rng.collect_with(loaders)
        if not once:
            iter(fetcher)
        follow_rounds(combined, positions, {})
        return
    # the order is drawn at one of two moments: with workers when the iterator is made, without when
    # the first batch is fetched. So the states of both are put back, each at its moment
    rng.restore_with(restored[ITERATOR], loaders)
    if once:
        fetcher.fetched -= seen  # Lightning has counted them
    else:
        make_iterator(fetcher, first)
    rng.restore_with(restored[FIRST_BATCH], loaders)
    follow_rounds(combined, positions, again)
    last = _fetch_again(fetcher, seen)
    again.clear()
    if last is not None and _same_rounds(positions, restored):
        _compare(last[0], seen, restored.get(SAMPLE))
    rng.restore_with(restored, loaders)  # fetching has drawn; the next step draws as it would have
    positions |= {moment: restored[moment] for moment in MOMENTS}


def begin_first_epoch(restored: dict[str, Any], fetcher: _DataFetcher) -> None:
    """Make the iterator of the first epoch again, where a checkpoint was written before it."""
    loaders = fetcher.combined_loader.flattened
    made_once = any(isinstance(one, Iterator) or has_state(one) for one in loaders)
    if ITERATOR in restored and not made_once:
        rng.restore_with(restored[ITERATOR], loaders)
        make_iterator(fetcher, first=True)
        rng.restore_with(restored, loaders)


def make_iterator(fetcher: _DataFetcher, first: bool) -> None:
    """Make an epoch's iterator anew.

    Workers that persist are begun, and seeded, in the first epoch alone: there those which this run
    has begun from other random states are ended.
    """
    for loader in fetcher.combined_loader.flattened:
        if first and getattr(loader, "persistent_workers", False):
            loader._iterator = None
    iter(fetcher)


def sample(batch: Any) -> str:
    """A few thousand numbers of a batch, as a digest: equal batches have equal ones."""
    digest = hashlib.blake2b(digest_size=16)
    for leaf in pytree.tree_leaves(batch):
        if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
            some = leaf.detach().reshape(-1)[:: max(1, leaf.numel() // 4096)]
            digest.update(some.cpu().contiguous().view(torch.uint8).numpy().tobytes())
        elif isinstance(leaf, (str, bytes, int, float)):
            digest.update(repr(leaf).encode())
    return digest.hexdigest()


def _fetch_again(fetcher: _DataFetcher, seen: int) -> Any:
    """Take ``seen`` batches; returns what the fetcher gave last, None where there are fewer."""
    last: Any = None
    for i in range(seen):
        try:
            last = next(fetcher)
        except StopIteration:
            warnings.warn(
                f"The checkpoint was written after {seen} batches of an epoch, and the training"
                f" loader has {i}: this epoch ends here. Resume with the loader that the run began"
                " with.",
                stacklevel=2,
            )
            return None
    return last


def _compare(batch: Any, seen: int, wanted: str | None) -> None:
    """Say so where the last batch that was fetched again is not the one that was trained."""
    if wanted is not None and sample(batch) != wanted:
        warnings.warn(
            f"The run does not go on exactly: batch {seen - 1} of the epoch, fetched again to find"
            " the place in the data, is not the batch that was trained before the checkpoint, so"
            " the batches that follow, and with them losses and weights, will differ from those of"
            " an undisturbed run. The loader draws from random numbers that no checkpoint has"
            " (persistent_workers=True after the first epoch, a generator of the dataset's own, a"
            " shuffle buffer that shares torch's with the step), or data or arguments changed. Let"
            " the dataset draw from a generator seeded by the sample's index, or give the loader"
            " state_dict() and load_state_dict().",
            stacklevel=2,
        )


def _replay_those_without_state(
    positions: dict[str, Any], restored: dict[str, Any], fetcher: _DataFetcher, seen: int
) -> dict[str, Any]:
    """``replay`` where a loader has a state, with the iterator that ``setup_data`` made."""
    combined = fetcher.combined_loader
    loaders, mode = combined.flattened, combined._iterator
    if not seen or ITERATOR not in restored or FIRST_BATCH not in restored:
        restore_now(restored[MADE], loaders)
        return {ITERATOR: {name: restored[name] for name in ("rng", "generators")}}
    if not all(map(has_state, loaders)):
        # of a loader without a length a batch is fetched ahead, from its beginning: that cannot be
        # undone
        ahead = isinstance(fetcher, _PrefetchDataFetcher) and fetcher.batches
        if ahead:
            warnings.warn(
                "Some of the training loaders have a state_dict() and go on where the checkpoint"
                " left them; the others begin with their first batch. Give all of them state_dict()"
                " and load_state_dict(), or none.",
                stacklevel=2,
            )
        else:
            restore_now(restored[FIRST_BATCH], loaders)
            _skip_those_without_state(mode, loaders, seen)
            own = [i for i, loader in enumerate(loaders) if has_state(loader)]
            _same_rounds(positions, restored, own)
    restore_now(restored, loaders)
    return {moment: restored[moment] for moment in MOMENTS}


def _skip_those_without_state(mode: Any, loaders: list[Any], seen: int) -> None:
    """Take batches of the other loaders, as Lightning's iterator over all of them does."""
    states, own = list(map(has_state, loaders)), mode.iterators
    # those with a state stand where the checkpoint left them, and must not be asked for a batch
    mode.iterators = [
        itertools.repeat(None) if state else iterator
        for state, iterator in zip(states, own, strict=True)
    ]
    for _ in range(seen):
        next(mode)
    pairs = zip(states, own, mode.iterators, strict=True)
    mode.iterators = [before if state else now for state, before, now in pairs]


def restore_now(states: dict[str, Any], loaders: list[Any]) -> None:
    """Put back what ``collect_with`` returned, but the generators of loaders with a state."""
    rng.restore(states["rng"])
    owners = [loader for loader in loaders for _ in rng.generators_of(loader)]
    if len(owners) == len(states["generators"]):
        pairs = zip(owners, states["generators"], strict=True)
        plain = [state for owner, state in pairs if not has_state(owner)]
        rng.restore_loaders([loader for loader in loaders if not has_state(loader)], plain)


_ROUND, _LOADER = "round", "loader"


class _Followed(Iterable[Any]):
    """A loader whose rounds are counted; that of the epoch's iterator, made before, is not.

    Args:
        loader: the loader.
        number: its place among all.
        positions: random states of the run, for checkpoints.
        wanted: those of a checkpoint, until its batches are fetched again.
    """

    def __init__(
        self, loader: Any, number: int, positions: dict[str, Any], wanted: dict[str, Any]
    ) -> None:
        self._loader, self._number, self._round = loader, number, 0
        self._positions, self._wanted = positions, wanted

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        """Begin a round."""
        self._round += 1
        key = f"{_ROUND} {self._number} {self._round % 2}"
        states = self._wanted.get(key)
        if states is not None and states[_ROUND] == self._round:
            rng.restore_with(states, [self._loader])
        states = rng.collect_with([self._loader])
        self._positions[key] = {**states, _ROUND: self._round, _LOADER: self._number}
        return iter(self._loader)


def forget_rounds(positions: dict[str, Any]) -> None:
    """Another epoch begins: none of its loaders is in a later round."""
    for key in [key for key in positions if key.startswith(_ROUND)]:
        del positions[key]


def follow_rounds(
    combined: CombinedLoader, positions: dict[str, Any], wanted: dict[str, Any]
) -> None:
    """Keep in ``positions`` from which states later rounds begin, with the iterator there is now.

    Args:
        combined: all loaders.
        positions: gets the states.
        wanted: of a checkpoint: its rounds begin from these states again. Empty it afterwards.
    """
    mode: Any = combined._iterator
    if type(mode) is not _MaxSizeCycle or len(combined.flattened) < 2:
        return
    mode.iterables = [
        _Followed(loader, i, positions, wanted) for i, loader in enumerate(combined.flattened)
    ]


def _same_rounds(
    positions: dict[str, Any], restored: dict[str, Any], without: Iterable[int] = ()
) -> bool:
    """Whether loaders are in the rounds in which they were in the checkpoint; else it is said.

    Args:
        positions: of the run that goes on, when the batches were fetched again.
        restored: of the checkpoint.
        without: loaders, by their number, that were not fetched from.
    """
    now, wanted = _rounds(positions), _rounds(restored)
    for number in sorted({*now, *wanted}.difference(without)):
        mine, kept = now.get(number, 0), wanted.get(number, 0)
        if mine != kept:
            warnings.warn(
                f"The run does not go on exactly: training loader {number} (counted from 0) has"
                f" begun anew {mine} times in the batches of the epoch that were fetched again, and"
                f" {kept} times says the checkpoint, whose random states its order is drawn from."
                " Loaders have other lengths now, or an earlier version wrote the checkpoint."
                " Resume with the loaders that the run began with, or from a checkpoint of an"
                " epoch's end.",
                stacklevel=3,
            )
            return False
    return True


def _rounds(positions: dict[str, Any]) -> dict[int, int]:
    """The last round of each loader that began anew."""
    found: dict[int, int] = {}
    for key, states in positions.items():
        if key.startswith(_ROUND):
            number = states[_LOADER]
            found[number] = max(states[_ROUND], found.get(number, 0))
    return found
