"""Heartbeats of processes that train together: who is gone ends the run of all, with a line.

Each process counts up in the store where they met, from a thread of its own, so that a long hook of
the host is no loss of it; and looks whether the others still do. Where one is gone the collectives
of the others wait for it in C++, where Python ends nothing: so a process that does not end by
itself is ended. So are processes that wait for each other: each says what it waits for.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

EVERY_S = 1.0
SILENT_S = 15.0
"""How long a process may give no sign of life."""
_STALE_S = 4 * EVERY_S  # of one that is gone, where a collective already failed
TOGETHER_S = 20.0
"""How long processes may wait for different things: longer, and they wait for each other."""
GRACE_S = 4.0
"""How long a process has to end by itself."""
_SIGNS = ("gloo", "connection", "peer", "socket", "nccl", "store")
"""Words in what a collective raises when another process is gone."""

_runs = 0
_waits_for = ""  # what this process does, for which the others have to do the same


def begin_wait(what: str) -> None:
    """This process begins what it can only end together with the others; "": it has ended."""
    global _waits_for
    _waits_for = what


@contextlib.contextmanager
def waiting_for(what: str) -> Iterator[None]:
    """The block is such a thing, or a part of one that has begun."""
    before = _waits_for
    begin_wait(before or what)
    try:
        yield
    finally:
        begin_wait(before)


class Heartbeats:
    """This process's, and those that it sees.

    Args:
        end: ends what this process has started, and then itself.
        steps: how many it has begun.
    """

    def __init__(self, end: Callable[[], None], steps: Callable[[], int]) -> None:
        global _runs
        _runs += 1  # the same in every process: each run of one is a run of all
        self._rank, self._end, self._steps = dist.get_rank(), end, steps
        # a connection of its own: the strategy's is held up while torch waits on it
        own: Any = _get_default_store()
        self._store: Any = PrefixStore(f"fulgurite/{_runs}", own.clone())
        self._store.set_timeout(timedelta(seconds=SILENT_S))
        others = {*range(dist.get_world_size())} - {self._rank}
        self._beats, self._seen = 0, dict.fromkeys(sorted(others), (b"", time.monotonic()))
        self._waits: dict[int, tuple[str, float]] = {}  # for what each does, and since when
        self._reason: str | None = None  # why another process ended
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeats", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """This process has done its part, or has said that it ends."""
        has_said = self._over.is_set()
        self._over.set()
        self._thread.join(GRACE_S)
        if not has_said:
            self._publish(f"done/{self._rank}", str(self._steps()))

    def tell(self, key: str, value: str) -> None:
        """Leave a value for the others, in the place of one before."""
        self._store.set(f"{key}/{self._rank}", value)

    def told(self, key: str) -> dict[int, str]:
        """What the others have left under a key, by their ranks."""
        found = {rank: self._get(f"{key}/{rank}") for rank in self._seen}
        return {rank: value.decode() for rank, value in found.items() if value is not None}

    def publish_end(self, error: BaseException) -> str | None:
        """This process ends by an error: tell the others why; or get why one of them did first.

        A collective fails some seconds before the heartbeats of who is gone are overdue, and says
        nothing of the cause: so what it raises waits for them.
        """
        first = self._why_others_ended(_STALE_S + 2 * EVERY_S) if is_of_others(error) else None
        if first is None:
            text = f"{type(error).__name__}: {_first_line(error)}".removesuffix(": ")
            self._publish("end", f"rank {self._rank} ended: {text}")
            time.sleep(2 * EVERY_S)  # for the others to hear it: with rank 0 the store goes
        self._over.set()
        return None if first is None else f"{first}. So this process, rank {self._rank}, ends too."

    def _run(self) -> None:
        """The thread."""
        while not self._over.wait(EVERY_S):
            try:
                self._beat()
                why = self._why(SILENT_S)
            except RuntimeError as error:  # of the store
                why = (
                    "the store of the processes does not answer, so rank 0 is gone"
                    f" ({_first_line(error)})"
                )
            if why is not None:
                return self._leave(why)

    def _beat(self) -> None:
        self._beats += 1
        self._store.set(f"beat/{self._rank}", f"{self._beats} {_waits_for}")
        self._note_wait(self._rank, _waits_for)
        # by this machine's clock alone: those of several are not the same
        for rank, (known, _) in self._seen.items():
            beat = self._get(f"beat/{rank}")
            if beat is not None and beat != known:
                self._seen[rank] = beat, time.monotonic()
                self._note_wait(rank, beat.decode().partition(" ")[2])

    def _note_wait(self, rank: int, what: str) -> None:
        if self._waits.get(rank, ("", 0.0))[0] != what:
            self._waits[rank] = what, time.monotonic()

    def _why_for_ever(self) -> str | None:
        """Which processes wait for each other."""
        long = time.monotonic() - TOGETHER_S
        waits = {rank: what for rank, (what, since) in self._waits.items() if what and since < long}
        own = waits.get(self._rank, "")
        for rank, what in sorted(waits.items()):
            if own and what != own:
                return (
                    f"rank {rank} waits for all in {what}, and rank {self._rank} in {own}: whatever"
                    " ends an epoch or a run (data, should_stop) has to end it on all ranks, and"
                    " each has to log, save and validate what the others do"
                )
        return None

    def _why(self, silent_s: float) -> str | None:
        """Why the run is over, as far as is known of the others."""
        if self._reason is None and (found := self._get("end")):
            self._reason = found.decode()
        if self._reason is not None:
            return self._reason
        for rank, (_, at) in self._seen.items():
            silent, done = time.monotonic() - at, self._get(f"done/{rank}")
            # a process that has ended well is silent too: it is missed only where this one goes on
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
        return self._why_for_ever()

    def _why_others_ended(self, wait_s: float) -> str | None:
        until = time.monotonic() + wait_s
        while time.monotonic() < until:
            try:
                why = self._reason or self._why(_STALE_S)
            except RuntimeError:
                return "rank 0 is gone, which keeps the store of the processes"
            if why is not None:
                return why
            time.sleep(0.1)
        return None

    def _get(self, key: str) -> bytes | None:
        return self._store.get(key) if self._store.check([key]) else None  # get alone would wait

    def _publish(self, key: str, value: str) -> None:
        """Leave a value for the others, unless one of them was first."""
        try:
            if not self._store.check([key]):
                self._store.set(key, value)
        except RuntimeError:  # who keeps the store is gone: nobody is left to read it
            return

    def _leave(self, why: str) -> None:
        """End this process, if it does not end by itself within a time of grace."""
        if self._over.wait(GRACE_S):
            return
        self._publish("end", why)
        print(f"CSX: rank {self._rank} ends, since {why}.", file=sys.stderr, flush=True)
        self._end()
        sys.stdout.flush()
        os._exit(1)  # sys.exit would end this thread alone: the main one waits in C++


def is_of_others(error: BaseException) -> bool:
    """Whether a collective raised it, as when another process is gone."""
    return isinstance(error, RuntimeError) and any(one in str(error).lower() for one in _SIGNS)


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
