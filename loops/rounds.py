"""Rounds of loaders within an epoch: from which random states each began.

Of several loaders, Lightning begins a short one anew when it is through (``max_size_cycle``, which
is what it does with a dict or list of loaders). Its order is drawn then, in the middle of an epoch,
from random states that steps have drawn from before: a run that fetches an epoch's batches again
needs the states of that moment. Those of each loader's last two rounds are kept, for a batch may be
fetched ahead: of earlier rounds nothing but their number of batches matters later.

Private parts are those of Lightning 2.6.6.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from typing import Any

from lightning.pytorch.utilities.combined_loader import CombinedLoader, _MaxSizeCycle

from fulgurite.backends.csx.graph.rng import collect_with, restore_with

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
            restore_with(states, [self._loader])
        states = collect_with([self._loader])
        self._positions[key] = {**states, _ROUND: self._round, _LOADER: self._number}
        return iter(self._loader)


def forget(positions: dict[str, Any]) -> None:
    """Another epoch begins: none of its loaders is in a later round."""
    for key in [key for key in positions if key.startswith(_ROUND)]:
        del positions[key]


def follow(combined: CombinedLoader, positions: dict[str, Any], wanted: dict[str, Any]) -> None:
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


def are_same(
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
