"""Whether the worker still works, and the end of all that it started.

The worker leads a session of its own: compilers that it starts are in it, in process groups of
their own, and stay in it when the worker is gone. Linux: what there is of a session is read off
``/proc`` (proc(5)).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from fcntl import LOCK_EX, LOCK_NB, flock
from pathlib import Path

GRACE_S = 3.0  # for the worker to end its C++ compilers and remove its files
LOOK_S = 1.0  # how often it is looked at
STOPPED_S = 2.0  # a batch system that stops and continues all processes is no reason
IDLE_S = 120.0  # assumed: no compilation waits that long for a disk
STARVING_LOOKS = 4  # a compiler may wait for a disk for a moment
_TICKS = os.sysconf("SC_CLK_TCK")  # a second
_PARENT_S = 0.5  # how often the worker looks whether its parent lives
_PROC = Path("/proc")


class Pulse:
    """Looks whether a process still works.

    Args:
        session: its id, and that of the session that it leads.

    Attributes:
        starves: it gets less than half of a processor, for others work too.
    """

    def __init__(self, session: int) -> None:
        self._session = session
        self._looked = self._worked = self._ran = time.monotonic()
        self._ticks, self.starves = -1, False
        self._looks = deque[tuple[float, int]](maxlen=STARVING_LOOKS)

    def lost(self) -> str | None:
        """Why nothing is to be expected of it any more, in words (50 ns where it is too early)."""
        now = time.monotonic()
        if now - self._looked < LOOK_S:
            return None
        self._looked = now
        rows = {pid: row for pid, row in _processes() if int(row[3]) == self._session}
        # T: stopped; t: by a debugger
        if self._session in rows and rows[self._session][0] not in "Tt":
            self._ran = now
        # processor time in user and system mode, and that of children that have ended
        ticks = sum(int(row[i]) for row in rows.values() for i in (11, 12, 13, 14))
        self._looks.append((now, ticks))
        first_at, first = self._looks[0]
        seconds, full = now - first_at, len(self._looks) == STARVING_LOOKS
        self.starves = full and (ticks - first) / _TICKS < seconds / 2 and bool(rows)
        if ticks != self._ticks or _waits_for_a_lock(rows):
            self._ticks, self._worked = ticks, now
        name = f"the compiling process {self._session}"
        if now - self._ran > STOPPED_S:
            return f"{name} was stopped (SIGSTOP)"
        if now - self._worked > IDLE_S:
            return f"{name} has done nothing for {IDLE_S:.0f} s"
        return None


def nice_session(session: int, nice: int) -> None:
    """Give a session a priority, where Linux shares out cores by sessions (autogroups).

    There what ``os.nice`` sets counts within a session alone.
    """
    with contextlib.suppress(OSError):
        Path(f"/proc/{session}/autogroup").write_text(str(nice))


def end_session(session: int) -> None:
    """End all processes of a session at once; its leader must not have been waited for."""
    for _ in range(2):  # what one of them started meanwhile, too
        of = [pid for pid, row in _processes() if int(row[3]) == session]
        for pid in sorted(of, key=lambda pid: pid == session):  # who may be this process
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)


def _processes() -> Iterator[tuple[int, list[str]]]:
    """All processes, with the fields of ``/proc/<pid>/stat`` from the state on."""
    for entry in _PROC.iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):  # it has ended by now
                # a program's name stands in parentheses, and may have spaces and parentheses itself
                yield int(entry.name), (entry / "stat").read_text().rpartition(")")[2].split()


def _waits_for_a_lock(pids: dict[int, list[str]]) -> bool:
    """Whether one of them waits for a lock: another run compiles the same program."""
    try:
        lines = (_PROC / "locks").read_text().splitlines()
    except OSError:
        return True  # nobody knows
    # ``12: -> FLOCK ADVISORY WRITE 4711 ...``: 4711 waits for the lock of the line above
    waiting = (line.split() for line in lines if "->" in line)
    return any(int(words[5]) in pids for words in waiting)


def let_go(kept: set[int]) -> None:
    """Let the null device take the place of each inherited file, but of those that are kept.

    A pipe whose other end waits for its end of file then has it. The numbers stay in use: whatever
    still holds one closes no other file.
    """
    # a callback's Popen, say, waited for an end of file that the worker held back
    null = os.open(os.devnull, os.O_RDWR)
    for number in map(int, os.listdir("/proc/self/fd")):
        if number not in kept and number != null:
            with contextlib.suppress(OSError):
                os.dup2(null, number, inheritable=False)


def sweep(folder: Path, prefix: str, lock: str) -> None:
    """Remove what dead workers left in a folder: a living one has locked a file in its own."""
    for left in folder.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            if left.is_symlink() or left.stat().st_uid != os.geteuid() or not left.is_dir():
                continue
            file = os.open(left / lock, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                flock(file, LOCK_EX | LOCK_NB)
                shutil.rmtree(left, ignore_errors=True)
            finally:
                os.close(file)


def end_with(parent: int) -> None:
    """End this process when its parent is gone."""
    while os.getppid() == parent:
        time.sleep(_PARENT_S)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    shutil.rmtree(tempfile.gettempdir(), ignore_errors=True)
    end_session(os.getpid())
