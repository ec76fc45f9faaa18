"""How OpenMP's idle threads wait: spinning where cores are free, asleep where others need them.

libgomp's spin for 5 ms after each operation, and for as long in it when another thread is late, on
a core that others may need: a step of 5 ms took 480 with two threads on two busy cores, and 6 to 15
with threads that sleep. To wake them takes a while: on two idle cores a step of a GPT took 32 ms
with threads that sleep, and 22 with threads that spin (all measured, GNU's OpenMP). So one looks
now and then how often the system took a core away from this process while they spin.
"""

from __future__ import annotations

import _thread
import ctypes
import functools
import os
import resource
import threading
from collections.abc import Callable
from time import perf_counter

from fulgurite.backends.csx.compile.background.threads import TORCH_CPU

POLICIES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
"""Variables by which a user decides how threads wait."""

EVERY_S = 0.25
_PAUSE_S = 1.0
"""Without a step of several threads, after which one begins anew to look."""
_BUSY = 60.0
"""Involuntary context switches in a second of processor time, spinning: 15 to 25 on two idle cores,
120 to 290 beside one busy process or more (measured)."""
_ASLEEP_S = 2.0, 64.0
"""How long they sleep before spinning is tried again: at first, and at most; each time longer."""


class IdleThreads:
    """Those of this process.

    How long they spin is read from the environment before torch is there; but where OpenMP has more
    threads than there are processors, they hardly do. So while they are to sleep, a Python thread
    has a pool of that many, which never work.

    Attributes:
        asleep: whether they sleep.
    """

    def __init__(self) -> None:
        self.asleep = False
        self._ends = _thread.allocate_lock()  # held as long as there is a pool
        self._next_s, self._cpu_s, self._switches = 0.0, 0.0, 0
        self._nap_s = _ASLEEP_S[0]

    def adapt(self) -> None:
        """Let them sleep or spin from now on, as cores are free; to be called at each step."""
        now = perf_counter()
        if now < self._next_s:
            return
        used = resource.getrusage(resource.RUSAGE_SELF)
        cpu_s, switches = used.ru_utime + used.ru_stime, used.ru_nivcsw
        per_s = (switches - self._switches) / max(cpu_s - self._cpu_s, 1e-3)
        begins = now > self._next_s + _PAUSE_S  # what was meanwhile tells nothing
        self._cpu_s, self._switches = cpu_s, switches
        self._next_s = now + EVERY_S
        if self.asleep:
            self.spin()
        elif per_s > _BUSY and not begins:
            self.sleep()
            self._next_s = now + self._nap_s
            self._nap_s = min(2 * self._nap_s, _ASLEEP_S[1])
        else:
            self._nap_s = _ASLEEP_S[0]

    def sleep(self) -> None:
        """Let them sleep."""
        make_pool = _pool_maker()
        if self.asleep or make_pool is None:
            return
        ends = self._ends = _thread.allocate_lock()
        ends.acquire()
        made = threading.Event()

        def keep_a_pool() -> None:
            make_pool()
            made.set()
            ends.acquire()  # and OpenMP ends the pool with this thread

        _thread.start_new_thread(keep_a_pool, ())  # no threading.Thread: nobody waits for its end
        made.wait()
        self.asleep = True

    def spin(self) -> None:
        """Let them spin, as torch has it."""
        if self.asleep:
            self._ends.release()
            self.asleep = False


@functools.cache
def _pool_maker() -> Callable[[], object] | None:
    """What gives the thread that calls it a pool; None where that is not to be, or not possible."""
    if any(name in os.environ for name in POLICIES):
        return None  # the user has decided
    try:
        parallel = ctypes.CDLL(TORCH_CPU).GOMP_parallel
        nothing = ctypes.cast(ctypes.CDLL(None).abs, ctypes.c_void_p)
        processors = len(os.sched_getaffinity(0))
    except (OSError, AttributeError):  # not Linux
        return None
    return functools.partial(parallel, nothing, None, processors + 1, 0)


idle_threads = IdleThreads()
"""This process's."""

os.register_at_fork(after_in_child=idle_threads.__init__)  # type: ignore[misc]  # has none of them
