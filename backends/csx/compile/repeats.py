"""Which stretches of a sequence come again: layers, time steps, an optimizer's equal updates.

A *stretch* is a start and a length; its *occurrences* are stretches of equal symbols that do not
overlap. Numbers in, numbers out: what a symbol stands for is the caller's business (``parts``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

CALL_SYMBOLS = 8  # assumed: a call costs as much as it costs to compile so many operations
LEAST = 3 * CALL_SYMBOLS  # symbols that are saved, for it to be worth a call
_SHIFTS = 24  # distances that are looked at, the most frequent first

Symbols = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Repeat:
    """Equal stretches: where each starts, in order, and how many symbols each has."""

    starts: tuple[int, ...]
    length: int

    @property
    def saved(self) -> int:
        """Symbols that need not be compiled, less what the calls cost."""
        return (len(self.starts) - 1) * self.length - len(self.starts) * CALL_SYMBOLS


def repeats(symbols: Sequence[int], cut_costs: Sequence[float]) -> list[Repeat]:
    """The stretches that come again, none overlapping another, those that save most first.

    Args:
        symbols: equal numbers mean equal operations.
        cut_costs: of a cut before each symbol and after the last one: where a layer may begin
            anywhere (``abcabcab`` is ``abc`` twice, or ``bca``), it begins where cuts cost least.
    """
    s = np.asarray(symbols, dtype=np.int64)
    costs = np.asarray(cut_costs, dtype=np.float64)
    free = np.ones(len(s), dtype=bool)
    found: list[Repeat] = []
    while True:
        best = max(_candidates(s, free, costs), key=lambda one: one.saved, default=None)
        if best is None or best.saved < LEAST:
            return found
        found.append(best)
        for start in best.starts:
            free[start : start + best.length] = False


def _candidates(s: Symbols, free: NDArray[np.bool_], costs: NDArray[np.float64]) -> list[Repeat]:
    found = []
    for shift in _distances(s, free):
        equal = (s[:-shift] == s[shift:]) & free[:-shift] & free[shift:]
        for start, length in _runs(equal):
            if length >= shift:
                found.append(_periods(start, start + length + shift, shift, costs))
            elif length > CALL_SYMBOLS:
                found.append(_everywhere(s, free, start, length))
    return found


def _distances(s: Symbols, free: NDArray[np.bool_]) -> list[int]:
    """How far apart equal windows of ``CALL_SYMBOLS`` symbols lie, the most frequent first."""
    if len(s) <= CALL_SYMBOLS:
        return []
    windows = np.lib.stride_tricks.sliding_window_view(s, CALL_SYMBOLS)
    allowed = np.lib.stride_tricks.sliding_window_view(free, CALL_SYMBOLS).all(axis=1)
    last: dict[bytes, int] = {}
    counts: Counter[int] = Counter()
    for i in np.flatnonzero(allowed):
        window = windows[i].tobytes()
        if window in last:
            counts[int(i) - last[window]] += 1
        last[window] = int(i)
    return [shift for shift, _ in counts.most_common(_SHIFTS)]


def _runs(equal: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Start and length of each longest run of True."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], equal, [False])).astype(np.int8)))
    return [(int(a), int(b - a)) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def _periods(begin: int, end: int, period: int, costs: NDArray[np.float64]) -> Repeat:
    """Of a stretch that repeats itself after each ``period``: how it is best cut into equal ones.

    Several periods make one stretch where many small calls would cost more than is saved.
    """
    times, rest = divmod(end - begin, period)
    first = min(
        range(begin, begin + rest + 1),
        key=lambda start: _excess(range(start, start + times * period + 1, period), costs),
    )
    choices = [
        Repeat(tuple(range(first, first + times // k * k * period, k * period)), k * period)
        for k in range(1, times + 1)
    ]
    return max(choices, key=lambda one: one.saved)


def _excess(cuts: range, costs: NDArray[np.float64]) -> float:
    """How much dearer cuts are than those around them: all grow in a forward pass."""
    excess = []
    for cut in cuts:
        half = min(cuts.step // 2, cut, len(costs) - 1 - cut)
        excess.append(costs[cut] - costs[cut - half : cut + half + 1].mean())
    return float(np.mean(excess))


def _everywhere(s: Symbols, free: NDArray[np.bool_], start: int, length: int) -> Repeat:
    """All free occurrences of a stretch."""
    windows = np.lib.stride_tricks.sliding_window_view(s, length)
    allowed = np.lib.stride_tricks.sliding_window_view(free, length).all(axis=1)
    starts: list[int] = []
    for i in np.flatnonzero((windows == s[start : start + length]).all(axis=1) & allowed):
        if not starts or i >= starts[-1] + length:
            starts.append(int(i))
    return Repeat(tuple(starts), length)
