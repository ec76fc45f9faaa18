"""How many threads compute a program: one or all, whichever is faster here and now.

Which it is no formula says: on two cores of an AMD EPYC a compiled step of a GPT took 38 ms with
one thread and 21 with two, one of a ConvNet 2.2 and 2.4, and a step of 5 ms took 480 with two
threads beside two busy processes, for a thread that waits for a core makes the others wait. So a
few steps are run with one thread and with all, in turns, and the faster number is kept; now and
then, and where steps have become slow, that is done again. Compiled code is measured anew.

Sums round as they are divided among threads. So there is nothing to choose where somebody has set
the number, where torch's algorithms are to be deterministic, and where several processes have to
compute the same.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import statistics
from collections.abc import Callable
from pathlib import Path

import torch

from fulgurite.backends.torch_compiler import options

# through torch's own library: a process may hold several OpenMP pools (scikit-learn brings one),
# and two that take turns cost 12 ms a step (measured)
TORCH_CPU = str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")
VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")

_PAIRS, _ENOUGH_S = (3, 16), 0.05  # of runs: one thread, all threads; at least this long, or 16
_CLEAR_S = 0.5  # by which one number is better: more pairs would only take longer
_WORTH = 0.95  # of one thread's time: what all of them take at most to be kept
_AGAIN_S, _SHARE = 5.0, 0.01  # of steps, after which they are compared again; of them, for that
_SLOW, _RUNS = 3.0, 3  # times as long as measured, in so many runs one after the other


class Threads:
    """How many threads compute a program.

    Args:
        is_fixed: whether it is torch's number, for another one would round otherwise.

    Attributes:
        most: torch's number, for which loops are compiled.
        number: with how many the next run computes.
        is_fixed: whether it stays that number.
        run_s: seconds that a run took with each number, by the latest comparison.
        tell: called once, after the first comparison, with what it found, in words.
    """

    def __init__(self, is_fixed: bool = False) -> None:
        self.most = torch.get_num_threads()
        if options.cpp.threads > 0:  # set by the user
            self.most, is_fixed = min(self.most, options.cpp.threads), True
        self.is_fixed = is_fixed or self.most == 1 or _openmp() is None or is_set()
        self.number = self.most if self.is_fixed else 1
        self.run_s: dict[int, float] = {}
        self.tell: Callable[[str], None] | None = None
        self._took: dict[int, list[float]] = {}
        self._left_s, self._slow_runs = 0.0, 0
        self._compares = not self.is_fixed
        self._skips = 1

    @property
    def is_chosen(self) -> bool:
        """Whether it is known which number is the faster."""
        return not self._compares

    def begin(self) -> None:
        """Compare again, after the next run: from now on other code computes the program."""
        if not self.is_fixed:
            self.number, self._took, self._skips = 1, {}, 1
            self._compares = True

    def note(self, seconds: float) -> None:
        """A run with ``number`` threads took so long."""
        if self._compares:
            self._compare(seconds)
        elif not self.is_fixed:
            self._left_s -= seconds
            slow = self.number > 1 and seconds > _SLOW * self.run_s[self.number]
            self._slow_runs = self._slow_runs + 1 if slow else 0
            if self._left_s < 0 or self._slow_runs == _RUNS:
                self.begin()

    def _compare(self, seconds: float) -> None:
        if self._skips:  # it has memory and code to load
            self._skips -= 1
            return
        self._took.setdefault(self.number, []).append(seconds)
        one, every = self._took[1], self._took.get(self.most, [])
        least, most = _PAIRS
        enough = len(one) == most or (len(one) >= least and sum(one) + sum(every) > _ENOUGH_S)
        if len(one) == len(every) and (enough or abs(sum(one) - sum(every)) > _CLEAR_S):
            self._choose(one, every)
        else:
            self.number = self.most if self.number == 1 else 1

    def _choose(self, one: list[float], every: list[float]) -> None:
        self.run_s = {1: statistics.median(one), self.most: statistics.median(every)}
        self.number = self.most if self.run_s[self.most] < _WORTH * self.run_s[1] else 1
        cost_s = sum(one) + sum(every) - 2 * len(one) * self.run_s[self.number]
        self._left_s, self._slow_runs = max(_AGAIN_S, cost_s / _SHARE), 0
        self._compares = False
        if self.tell is not None:
            tell, self.tell = self.tell, None
            tell(self._words())

    def _words(self) -> str:
        """``1 thread: 0.91 ms a step (2 threads: 1.4 ms)``."""
        other = self.most if self.number == 1 else 1
        kept, beside = (in_ms(self.run_s[number]) for number in (self.number, other))
        return f"{counted(self.number)}: {kept} ms a step ({counted(other)}: {beside} ms)"


def in_ms(seconds: float) -> str:
    """Milliseconds: two digits of them, or all before the point."""
    milliseconds = seconds * 1e3
    digits = 0 if milliseconds >= 9.95 else 1 if milliseconds >= 0.995 else 2
    return f"{milliseconds:,.{digits}f}"


def counted(threads: int) -> str:
    """``1 thread``, ``2 threads``."""
    return f"{threads} thread{'s' * (threads > 1)}"


def is_set() -> bool:
    """Whether somebody has set torch's number of threads: it is another than torch's own choice.

    That is the number of cores that this process may use, each counted once or as often as it runs
    threads.
    """
    if any(name in os.environ for name in VARIABLES):
        return True
    return torch.get_num_threads() not in _by_default(tuple(sorted(os.sched_getaffinity(0))))


@functools.cache
def _by_default(processors: tuple[int, ...]) -> set[int]:
    cores = set()
    for one in processors:
        topology = Path(f"/sys/devices/system/cpu/cpu{one}/topology/thread_siblings_list")
        with contextlib.suppress(OSError):
            cores.add(topology.read_text())
    return {len(processors), len(cores)}


class _OpenMP:
    """The number of threads that torch's OpenMP gives to the Python thread that asks.

    ``torch.set_num_threads`` would change it for threads that begin meanwhile too. MKL has a number
    of its own once that was called. Compiled loops name the number that they were compiled for, and
    run in one thread where no level of parallel regions is active.
    """

    def __init__(self) -> None:
        library = ctypes.PyDLL(TORCH_CPU)  # holds the GIL: 0.24 µs a call, not 0.36 (measured)
        self.set_openmp = library.omp_set_num_threads
        self.set_levels = library.omp_set_max_active_levels
        self.set_mkl = getattr(library, "MKL_Set_Num_Threads_Local", lambda number: 0)
        self.set_openmp.restype = self.set_levels.restype = None
        self.levels: int = library.omp_get_max_active_levels()

    def is_torchs(self) -> bool:
        """Whether torch follows; a preloaded OpenMP may have taken its place."""
        # a number that is not torch's already, or nothing would be seen to change
        own = torch.get_num_threads()
        self.set_openmp(own + 1)
        follows = torch.get_num_threads() == own + 1
        self.set_openmp(own)
        return follows


@functools.cache
def _openmp() -> _OpenMP | None:
    """None where its number cannot be set (not Linux): programs then use torch's, as ever."""
    try:
        openmp = _OpenMP()
    except (OSError, AttributeError):
        return None
    return openmp if openmp.is_torchs() else None


def threads_beside_another() -> int:
    """How many threads leave a core to a compiler; 0 where none do, or none can be set.

    A ConvNet's step of two threads on two cores took 14 ms beside one, 2.5 with one thread; without
    a compiler 2.8 (measured).
    """
    return 0 if _openmp() is None else len(os.sched_getaffinity(0)) - 1


def set_threads(threads: int) -> int:
    """Let this Python thread compute with so many threads, 1.2 µs (measured).

    Returns:
        What MKL had, for ``reset_threads``; 0 where it follows the environment and OpenMP.
    """
    openmp = _openmp()
    assert openmp is not None
    openmp.set_openmp(threads)
    openmp.set_levels(0 if threads == 1 else openmp.levels)
    return int(openmp.set_mkl(threads))


def reset_threads(threads: int, mkl: int) -> None:
    """Let this Python thread compute with torch's number of threads again, and MKL with its."""
    openmp = _openmp()
    assert openmp is not None
    openmp.set_openmp(threads)
    openmp.set_levels(openmp.levels)
    openmp.set_mkl(mkl)
