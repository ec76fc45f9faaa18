"""Signs of life of processes that train together: who is gone ends the run of all, with a line.

Each process counts up in the store where they met, from a thread of its own, so that a long hook of
the host is no loss of it; and looks whether the others still do. Where one is gone the collectives
of the others wait for it in C++, where Python ends nothing: so a process that does not end by
itself is ended.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

EVERY_S = 1.0
SILENT_S = 15.0
"""How long a process may give no sign of life."""
_STALE_S = 4 * EVERY_S  # of one that is gone, where a collective already failed
GRACE_S = 4.0
"""How long a process has to end by itself."""

_runs = 0


class Heartbeats:
    """This process's, and those that it sees.

    Args:
        end: ends what this process has started, and then itself.
        steps: how many it has begun.
    """

    def __init__(self, end: Callable[[], None], steps: Callable[[], int]) -> None:
        global _runs
        _runs += 1  # the same in every process: each run of one is a run of all
        self._rank, self._count = dist.get_rank(), dist.get_world_size()
        self._end, self._steps = end, steps
        own: Any = _get_default_store()  # another connection: one that waits holds up the others
        store: Any = PrefixStore(f"fulgurite/{_runs}", own.clone())
        store.set_timeout(timedelta(seconds=SILENT_S))
        self._store, self._beats = store, 0
        now = time.monotonic()
        self._seen: dict[int, tuple[bytes, float]] = {
            rank: (b"", now) for rank in range(self._count) if rank != self._rank
        }
        self._told: str | None = None  # why another process ended
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeats", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """This process has done its part, or has told that it ends."""
        has_told = self._over.is_set()
        self._over.set()
        self._thread.join(GRACE_S)
        if not has_told:
            self._tell(f"done/{self._rank}", str(self._steps()).encode())

    def tell_end(self, error: BaseException) -> str | None:
        """This process ends by an error: tell the others why; or get why one of them did first."""
        first = self._why_others_ended(_STALE_S + 2 * EVERY_S) if _is_of_others(error) else None
        if first is None:
            text = str(error).strip().partition("\n")[0]
            what = f"{type(error).__name__}: {text}".removesuffix(": ")
            self._tell("end", f"rank {self._rank} ended: {what}".encode())
            time.sleep(2 * EVERY_S)  # for the others to hear it: with rank 0 the store goes
        self._over.set()
        return None if first is None else f"{first}. So this process, rank {self._rank}, ends too."

    # -- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._over.wait(EVERY_S):
            try:
                self._beat()
                why = self._why(SILENT_S)
            except RuntimeError as error:  # of the store
                text = str(error).partition("\n")[0]
                why = f"the store of the processes does not answer, so rank 0 is gone ({text})"
            if why is not None:
                self._leave(why)
                return

    def _beat(self) -> None:
        self._beats += 1
        self._store.set(f"beat/{self._rank}", str(self._beats))
        now = time.monotonic()
        for rank, (known, _) in self._seen.items():
            beat = self._get(f"beat/{rank}")
            if beat is not None and beat != known:
                self._seen[rank] = beat, now

    def _why(self, silent_s: float) -> str | None:
        """Why the run is over, as far as is known of the others."""
        told = self._told is None and self._get("end")
        if told:
            self._told = told.decode()
        if self._told is not None:
            return self._told
        for rank, (_, at) in self._seen.items():
            silent, done = time.monotonic() - at, self._get(f"done/{rank}")
            if done is not None and int(done) < self._steps():
                return (
                    f"rank {rank} has ended its run after {int(done)} steps, and this one goes on:"
                    " whatever ends a run (data, should_stop) has to end it on all ranks"
                )
            if silent > silent_s and done is None:
                broke = silent_s < SILENT_S
                since = "since its connection broke" if broke else f"for {silent:.0f} s"
                return (
                    f"rank {rank} gave no sign of life {since}: it was killed or stopped, or it is"
                    " cut off"
                )
        return None

    def _why_others_ended(self, wait_s: float) -> str | None:
        until = time.monotonic() + wait_s
        while time.monotonic() < until:
            if self._told is not None:
                return self._told
            try:
                why = self._why(_STALE_S)
            except RuntimeError:
                return "rank 0 is gone, which keeps the store of the processes"
            if why is not None:
                return why
            time.sleep(0.1)
        return None

    def _get(self, key: str) -> bytes | None:
        return self._store.get(key) if self._store.check([key]) else None

    def _tell(self, key: str, value: bytes) -> None:
        try:
            if not self._store.check([key]):
                self._store.set(key, value.decode())
        except RuntimeError:  # who keeps the store is gone: nobody is left to be told
            return

    def _leave(self, why: str) -> None:
        """End this process, if it does not end by itself within a time of grace."""
        if self._over.wait(GRACE_S):
            return
        self._tell("end", why.encode())
        print(f"CSX: rank {self._rank} ends, since {why}.", file=sys.stderr, flush=True)
        self._end()
        sys.stdout.flush()
        os._exit(1)


def _is_of_others(error: BaseException) -> bool:
    """Whether an error is what a collective raises when another process is gone."""
    text = str(error).lower()
    signs = ("gloo", "connection", "peer", "socket", "nccl", "store")
    return isinstance(error, RuntimeError) and any(sign in text for sign in signs)
