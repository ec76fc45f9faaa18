"""One attempt as the process that watches sees it: what it tells, whether it hangs, its end."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from fulgurite.config.run.attempt import EXITED
from fulgurite.config.run.summary import AttemptRecord, now

PRINTS_WITHIN_S = 2.0  # a hung process its stacks
STOPS = (signal.SIGINT, signal.SIGTERM)
_KILLED = " (the system does that when memory runs out)"
_PAST_PYTHON = "ended with status {} before the run was done, by os._exit() or a C library's exit()"


@dataclass
class Watch:
    """One attempt as the watching process sees it."""

    process: BaseProcess
    reports: Connection
    record: AttemptRecord
    told: dict[str, Any] = field(default_factory=dict)
    results: dict[int, Any] = field(default_factory=dict)
    passed_on: int = 0  # signals
    hung: bool = False
    _open: bool = True
    _moved_at: float = 0.0

    def take(self, wait_s: float) -> None:
        """Take what was reported; wait so long for it."""
        try:
            while self._open and self.reports.poll(wait_s):
                self._merge(self.reports.recv())
                wait_s = 0.0
        except (EOFError, OSError):  # also in the middle of a report
            self._open = False
        if not self._open:
            time.sleep(wait_s)

    def _merge(self, told: dict[str, Any]) -> None:
        if "beat" in told and (not told["beat"][0] or told["beat"] != self.told.get("beat")):
            self._moved_at = time.monotonic()
        if "result" in told:
            index, sent = told.pop("result")
            self.results[index] = sent
        self.told |= told
        names = ["ckpt_path", "from_step", "last_step"]
        if told.get("earlier") is not None:  # a trainer began, where else one is done
            names.append("trainer")
        for name in names:
            if name in told:
                setattr(self.record, name, told[name])

    def stands_still(self, timeout_s: float | None) -> bool:
        """Whether batches should come, and none did for so long."""
        watched = self.told.get("beat", (False,))[0]
        return watched and timeout_s is not None and time.monotonic() > self._moved_at + timeout_s

    def pass_on(self, received: list[signal.Signals]) -> None:
        """Send the signals to stop that came; a process that has not begun is ended at once."""
        for one in received[self.passed_on :]:
            self._send(one if "trainer" in self.told else signal.SIGKILL)
        self.passed_on = len(received)

    def kill(self) -> None:
        """Print where a hung process is, and kill it."""
        self.hung = True
        self._send(signal.SIGQUIT)
        time.sleep(PRINTS_WITHIN_S)
        self._send(signal.SIGKILL)

    def _send(self, one: signal.Signals) -> None:
        assert self.process.pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, one)

    def has_ended(self) -> bool:
        """Whether the process is over; it is not reaped yet, so that its number stays its own."""
        assert self.process.pid is not None
        how = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, self.process.pid, how) is not None

    def reap(self) -> int:
        """Return its exit status; what a process that failed has left running is killed."""
        if not self.has_ended():
            self._send(signal.SIGKILL)
        pid = self.process.pid or 0
        found = os.waitid(os.P_PID, pid, os.WNOWAIT | os.WEXITED)
        if found is not None and found.si_status:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
        self.take(0.0)
        self.process.join()
        status = self.process.exitcode
        assert status is not None
        self.reports.close()
        return status

    def ended(self, status: int, hang_timeout: float | None) -> None:
        """Write into the record how the process ended.

        Args:
            status: its exit status; a signal that ended it is negative.
            hang_timeout: in seconds.
        """
        record = self.record
        record.ended = now()
        record.exit_status = status if status >= 0 else None
        record.signal = None if status >= 0 else signal.Signals(-status).name
        if self.hung:
            record.ended_by = f"hung: no batch for {hang_timeout:g} s"
        elif status < 0:
            record.ended_by = f"killed by {record.signal}{_KILLED if status == -9 else ''}"
        elif status - 128 in STOPS:
            record.ended_by = f"stopped by {signal.Signals(status - 128).name}"
        elif self.exited:
            record.ended_by = f"the code ended it with status {status} (SystemExit)"
        elif "ended" not in self.told:
            record.ended_by = f"the process {_PAST_PYTHON.format(status)}"
        elif status == 0:
            record.ended_by = "done"
        else:
            record.ended_by = self.told.get("error", f"exit status {status}")

    @property
    def exited(self) -> bool:
        """Whether the code ended it, by ``sys.exit()``."""
        return self.told.get("ended") == EXITED

    def crashed(self, status: int) -> bool:
        """Whether it shall be tried again: not what somebody stopped, nor an error of the code."""
        if self.hung or (status < 0 and -status not in STOPS) or "ended" not in self.told:
            return True
        return status == 1 and bool(self.told.get("crash"))
