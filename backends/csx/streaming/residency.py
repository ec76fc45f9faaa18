"""Which state that is in files is in memory: within a budget, read ahead of its use by a thread.

A program's run is a row of calls; at each the program says so (``at``) before it begins. The thread
goes ahead of it: for each call it brings in what that works on, and where there is no room it drops
what is needed last (Belady's rule), after the call that it brings in for: then nothing is dropped
that is needed sooner. After a run's last call comes its first: the next step is the same most of
the time. What a call works on and the thread has not brought in yet, it waits for, so that the
budget holds.
"""

from __future__ import annotations

import contextlib
import os
import threading
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor

from fulgurite.backends.csx.graph.graph import like
from fulgurite.backends.csx.streaming.mapped import Files, Mapped, over, warn_of_memory

LEAST_BYTES = 1 << 16  # of a tensor that is worth a file: assumed
_AHEAD = 1 / 8  # of the room, for what is read ahead in the place of something else


@dataclass(frozen=True, slots=True, eq=False)
class Uses:
    """What each call of a program works on.

    Args:
        calls: for each the positions of inputs.
        written: the positions of inputs that the program writes.
    """

    calls: tuple[tuple[int, ...], ...]
    written: frozenset[int]


@dataclass(slots=True)
class Traffic:
    """What streaming took since ``Residency.open``.

    Args:
        limit_bytes: the budget.
        read_bytes: that were brought into memory.
        waited_s: in which calls waited for what they work on.
        files_bytes: of state that is in files.
    """

    limit_bytes: int = 0
    read_bytes: int = 0
    waited_s: float = 0.0
    files_bytes: int = 0


@dataclass(slots=True, eq=False)
class _Run:
    """A program that runs on certain tensors.

    Args:
        program: what its calls work on.
        found: its inputs that are in files, None for others.

    Attributes:
        needs: what each call works on.
        written: what the program writes.
        uses: the calls that work on each, in order.
    """

    program: Uses
    found: Sequence[Mapped | None]
    needs: list[list[Mapped]] = field(init=False)
    written: set[Mapped] = field(init=False)
    uses: dict[Mapped, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        found = self.found
        self.needs = [
            [one for i in call if (one := found[i]) is not None] for call in self.program.calls
        ]
        self.written = {one for i in self.program.written if (one := found[i]) is not None}
        for call, needed in enumerate(self.needs):
            for one in needed:
                self.uses.setdefault(one, []).append(call)

    def next_use(self, one: Mapped, now: int) -> float:
        """The first call from ``now`` on that works on something; of the next run, if need be."""
        if (calls := self.uses.get(one)) is None:
            return inf
        i = bisect_left(calls, now)
        return calls[i] if i < len(calls) else calls[0] + len(self.needs)

    def ahead_bytes(self, now: int, ahead: int) -> int:
        """Of what the calls after ``now`` work on, up to another."""
        calls = range(now + 1, ahead + 1)
        needed = {one for call in calls for one in self.needs[call % len(self.needs)]}
        return sum(one.nbytes for one in needed)

    def spare(
        self, residents: Sequence[Mapped], missing: int, now: int, ahead: int, room_bytes: int
    ) -> list[Mapped] | None:
        """What is dropped to bring something in for call ``ahead``; None: it has to wait.

        Args:
            residents: what is in memory.
            missing: bytes of room that it takes; 0 or less where there is enough.
            now: the call that runs.
            ahead: the call that it is for.
            room_bytes: all room.
        """
        if missing <= 0:
            return []
        # what is there already for calls to come takes room from what is used again soon: on a
        # cycle of 6 with room for 4, each run reads 4 without a limit, 3 with this (measured)
        if ahead > now + 1 and self.ahead_bytes(now, ahead) > room_bytes * _AHEAD:
            return None
        last = [(self.next_use(one, now), one) for one in residents]
        chosen = []
        for call, one in sorted(last, key=lambda pair: pair[0], reverse=True):
            if missing > 0 and call > ahead:
                chosen.append(one)
                missing -= one.nbytes
        return chosen if missing <= 0 else None


def _drop(some: Sequence[Mapped]) -> None:
    for one in some:
        one.is_resident = False
        one.drop()


class _Room:
    """Tensors in files, and what a budget leaves to them.

    Attributes:
        limit_bytes: the budget, of all state; None where there is none.
        traffic: what it took.
        moves: how often state went into files: who knows addresses of it asks anew.
    """

    def __init__(self) -> None:
        self.limit_bytes: int | None = None
        self.traffic, self.moves = Traffic(), 0
        self._files = Files()
        self._beside_bytes = 0  # of state that is in no file

    @property
    def is_open(self) -> bool:
        """Whether there is a budget."""
        return self.limit_bytes is not None

    def count(self, files_bytes: int, beside_bytes: int, moved: bool) -> None:
        """Take note of how much state is in files and how much is not, and whether some moved."""
        # a program that does not train works on weights alone; other state is there all the same
        self.traffic.files_bytes = max(self.traffic.files_bytes, files_bytes)
        self._beside_bytes = max(self._beside_bytes, beside_bytes)
        self.moves += moved  # it has other addresses than before

    @property
    def room_bytes(self) -> int:
        """What the budget leaves to state in files."""
        return (self.limit_bytes or 0) - self._beside_bytes

    def storage(self, nbytes: int) -> torch.UntypedStorage:
        """New memory that is a file.

        Raises:
            OSError: the disk has no room for it, or the file system cannot map files.
        """
        return self._files.storage(nbytes)

    def is_in_file(self, tensor: Tensor) -> bool:
        """Whether a tensor's memory is a file."""
        return self._files.find(tensor) is not None

    def like(self, tensor: Tensor) -> Tensor:
        """Memory for a tensor of the same layout; for one in a file, in another file."""
        if self.limit_bytes is None or not self.is_in_file(tensor):
            return like(tensor)
        return over(self.storage(tensor.untyped_storage().nbytes()), tensor)


class Residency(_Room):
    """What is in memory of the state that is in files."""

    def __init__(self) -> None:
        super().__init__()
        self._changed = threading.Condition(threading.RLock())
        self._run: _Run | None = None
        self._runs: dict[tuple[int, ...], _Run] = {}
        # the call that runs, counted in calls of this run; and the first that the thread has
        # not brought everything in for
        self._now = self._ahead = 0
        self._busy = False
        self._thread: threading.Thread | None = None

    # -- a fit ---------------------------------------------------------------------------------

    def open(self, limit_bytes: int, folder: Path) -> None:
        """Begin to keep state within a budget, with the rest in files of a folder."""
        warn_of_memory(folder)
        self._files.folder = folder
        self.limit_bytes, self._beside_bytes = limit_bytes, 0
        self.traffic = Traffic(limit_bytes)

    def close(self) -> None:
        """Stop keeping a budget: tensors in files stay in them, used as any other memory."""
        with self._idle():
            thread, self._thread, self.limit_bytes = self._thread, None, None
            self._runs.clear()
            for one in self._files:
                one.is_resident = False  # it is, but nobody counts it any more
            self._changed.notify_all()
        if thread is not None:
            thread.join()

    def copy_of(self, tensor: Tensor) -> Tensor:
        """A copy; of a tensor in a file another one in a file."""
        made = self.like(tensor)
        self.use(tensor, made)
        return made.copy_(tensor)

    def use(self, *tensors: Tensor) -> None:
        """Make room for tensors that are about to be used, not by a program."""
        if self.limit_bytes is None or not self._files:
            return
        with self._idle():
            wanted = [one for one in map(self._files.find, tensors) if one is not None]
            for one in wanted:
                one.is_resident = True
            spare = [one for one in self._files.residents() if one not in wanted]
            over_bytes = sum(one.nbytes for one in self._files.residents()) - self.room_bytes
            for one in spare:
                if over_bytes > 0:
                    over_bytes -= one.nbytes
                    _drop([one])

    def drop_used(self) -> None:
        """Drop what came into memory by itself: somebody read it who said nothing before."""
        with self._changed:
            _drop([one for one in self._files if not one.is_resident])

    # -- runs ----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def running(self, uses: Uses, inputs: Sequence[Tensor]) -> Iterator[None]:
        """A program runs in the block."""
        if self._files and self.limit_bytes is not None:
            stated = {i for call in uses.calls for i in call}
            found = (self._files.find(one) if i in stated else None for i, one in enumerate(inputs))
            self._begin(uses, [*found])
        try:
            yield
        finally:
            if self._run is not None:
                with self._changed:
                    self._now = len(self._run.needs)
                    self._changed.notify_all()

    def at(self, call: int) -> None:
        """The program's next call begins, when all that it works on is there."""
        run = self._run
        if run is None:
            return
        with self._changed:
            self._now = call
            if self._ahead <= call:
                began = perf_counter()
                while self._ahead <= call and self._bring_here():
                    pass
                self.traffic.waited_s += perf_counter() - began
            self._changed.notify_all()

    def _bring_here(self) -> bool:
        """Bring in what the next call works on; False: there is no room for all of it at once."""
        if self._busy:
            return self._changed.wait()
        ahead, found = self._ahead, self._next()
        if found is None:
            return self._ahead > ahead
        found.bring(found in self._written())
        self.traffic.read_bytes += found.nbytes
        return True

    def _written(self) -> set[Mapped]:
        return set() if self._run is None else self._run.written

    def _begin(self, program: Uses, found: Sequence[Mapped | None]) -> None:
        key = (id(program), *(0 if one is None else id(one) for one in found))
        with self._changed:
            run = self._runs.get(key)
            if run is None:
                runs = self._runs.items()
                gone = (k for k, run in runs if any(one.is_gone for one in run.uses))
                for k in [*gone]:
                    del self._runs[k]
                run = self._runs[key] = _Run(program, found)
            # the thread may have begun with this one already
            same = run is self._run
            self._ahead = max(0, self._ahead - len(run.needs)) if same else 0
            self._run, self._now = (run if run.uses else None), 0
            self.drop_used()
            if self._run is not None and self._thread is None:
                self._thread = threading.Thread(
                    target=self._work, name="fulgurite-streaming", daemon=True
                )
                self._thread.start()
            self._changed.notify_all()

    @contextlib.contextmanager
    def _idle(self) -> Iterator[None]:
        """No program runs in the block, and the thread does nothing."""
        with self._changed:
            self._run = None
            while self._busy:
                self._changed.wait()
            yield

    # -- the thread ----------------------------------------------------------------------------

    def _work(self) -> None:
        """Bring in what is needed next, as long as there is room; the thread's function."""
        me = threading.current_thread()
        with self._changed:
            while self._thread is me:
                found = None if self._busy else self._next()
                if found is None:
                    self._changed.wait()
                    continue
                is_written, self._busy = found in self._written(), True
                self._changed.release()
                try:
                    found.bring(is_written)
                finally:
                    self._changed.acquire()
                    self._busy = False
                self.traffic.read_bytes += found.nbytes
                self._changed.notify_all()

    def _next(self) -> Mapped | None:
        """What to bring in now; room is made for it. None where there is nothing, or no room."""
        run = self._run
        while run is not None and self._ahead < self._now + len(run.needs):
            for one in run.needs[self._ahead % len(run.needs)]:
                if not one.is_resident and not one.is_gone:
                    residents = self._files.residents()
                    missing = (
                        sum(there.nbytes for there in residents) + one.nbytes - self.room_bytes
                    )
                    spare = run.spare(residents, missing, self._now, self._ahead, self.room_bytes)
                    if spare is None:
                        return None
                    _drop(spare)
                    one.is_resident = True
                    return one
            self._ahead += 1
            self._changed.notify_all()
        return None


residency = Residency()
"""That of this process."""


def _begin_in_child() -> None:
    """In a process that was forked the state is memory as any other, and there is no thread."""
    for one in residency._files:
        one.keep_own()
    residency.__init__()  # type: ignore[misc]


os.register_at_fork(after_in_child=_begin_in_child)


def begin_call(call: int) -> None:
    """What programs call before each of their calls that works on state; ``call`` counts them."""
    residency.at(call)
