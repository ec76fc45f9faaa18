"""Taking turns: contenders run one after another, round by round, so that noise meets them all.

A *contender* is called with a number of steps and returns microseconds a step. A fit is one too: it
runs in a thread of its own, which sleeps until its next turn, so that it is set up, traced and
compiled only once.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import lightning.pytorch as pl

Contender = Callable[[int], float]

WARM_UP = 50
M_ARENA_MAX = -8  # malloc.h of glibc


def one_arena() -> None:
    """Let all threads allocate as the main thread does.

    An arena of its own gives a thread's large blocks back to the system after each step: that cost
    a fit of the GPT 1 to 10 ms of 55 (measured).
    """
    ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)


def timed(step: Callable[[int], object]) -> Contender:
    """A loop over ``step(i)`` as a contender."""

    def run(steps: int) -> float:
        began = time.perf_counter()
        for i in range(steps):
            step(i)
        return (time.perf_counter() - began) / steps * 1e6

    return run


class FitInTurns(pl.Callback):
    """A ``Trainer.fit`` as a contender: the callback that pauses it, and the thread it runs in.

    Args:
        fit: starts the fit with this object among the callbacks; called in the thread.
    """

    def __init__(self, fit: Callable[[pl.Callback], None]) -> None:
        self._fit = fit
        self._go, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._pool = ThreadPoolExecutor(1)
        self._future: Future[None] | None = None
        self._left = self._steps = 0
        self._ends = False
        self.us = 0.0

    def __call__(self, steps: int) -> float:
        self._left = self._steps = steps
        if self._future is None:
            self._future = self._pool.submit(self._fit, self)
            self._future.add_done_callback(lambda _: self._done.release())
        else:
            self._go.release()
        self._done.acquire()
        if self._future.done():
            self._future.result()
            raise RuntimeError("a fit ended before its last turn")
        return self.us

    def on_train_start(self, *args: object) -> None:
        self._began = time.perf_counter()

    def on_train_batch_end(self, trainer: pl.Trainer, *args: object) -> None:
        self._left -= 1
        if self._left > 0:
            return
        self.us = (time.perf_counter() - self._began) / self._steps * 1e6
        self._done.release()
        self._go.acquire()
        trainer.should_stop = self._ends
        self._began = time.perf_counter()

    def close(self) -> None:
        """End the fit, and free what it holds."""
        self._ends, self._left = True, 0
        self._go.release()
        self._pool.shutdown()
        if self._future is not None:
            self._future.result()


def rounds(contenders: Mapping[str, Contender], steps: int, count: int) -> dict[str, list[float]]:
    """Microseconds a step of every contender, ``count`` rounds of ``steps`` steps each."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    try:
        for run in contenders.values():
            run(min(steps, WARM_UP))
        for _ in range(count):
            for name, run in contenders.items():
                times[name].append(run(steps))
    finally:
        for run in contenders.values():
            if isinstance(run, FitInTurns):
                run.close()
    return times
