"""``autorestart``: a process watches a run in another one, and starts it again after a crash.

    attempt 1: killed         no status of its own: killed by a signal that nobody sent to stop it
    wait 1 s                  doubled each time, 5 minutes at most
    attempt 2: hung           no batch for hang_timeout: its stacks are printed, then it is killed
    wait 2 s                  1 s again, where it left a new checkpoint
    attempt 3: done           or an error of the code or the file: that is not tried again

Each attempt goes on from the newest whole checkpoint that this run has written. ``summary.json``
is the history.

torchrun's elastic agent, which restarts too, does not give what is written out here: it tries an
error of the code again like a crash, counts restarts without asking for progress, does not see a
hang, and knows no checkpoints; and it is the process of a command line, not of ``run_config``.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import pickle
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from datetime import datetime
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_info

from fulgurite.backends.checkpoints.damage import CheckpointError
from fulgurite.backends.checkpoints.files import part
from fulgurite.backends.checkpoints.folders import check_checkpoint
from fulgurite.config.document.variables import Variables
from fulgurite.config.run.attempt import Attempt, Identity, Target, identities, run_attempt
from fulgurite.config.run.loading import model_dir
from fulgurite.config.run.own_checkpoints import all_of, steps_of
from fulgurite.config.run.refusing import only_builds
from fulgurite.config.schema.checking import Phase, Plan
from fulgurite.config.schema.sections import AutoRestart

SUMMARY = "summary.json"
LOOKS_EVERY_S = 0.2
PRINTS_WITHIN_S = 2.0  # a hung process its stacks
START_METHOD = "spawn"  # no state of this process, no locks of its threads
FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 300.0
STOPS = (signal.SIGINT, signal.SIGTERM)


class RestartsUsedUp(RuntimeError):
    """A run crashed more often than ``autorestart.max_num_restarts`` allows."""


def now() -> str:
    """The time, as the history has it."""
    return datetime.now().astimezone().isoformat(timespec="seconds")


@dataclass(kw_only=True)
class AttemptRecord:
    """What the history says of one attempt; docs/reliability.md tells what each field is."""

    number: int
    pid: int | None = None
    began: str = field(default_factory=now)
    ended: str | None = None
    trainer: int = 0  # of the file, from 0, that ran last
    ckpt_path: str | None = None
    from_step: int | None = None
    last_step: int | None = None  # reported twice a second, or that a checkpoint of it has
    exit_status: int | None = None
    signal: str | None = None
    ended_by: str | None = None
    waited_s: float | None = None  # before the next one


@dataclass(kw_only=True)
class RunRecord:
    """What the history says of one run: "running", and then "done", "failed", "stopped" (by a
    signal, or the code's own ``sys.exit()``) or "given up" as its outcome.
    """

    file: str
    mode: str
    began: str = field(default_factory=now)
    ended: str | None = None
    outcome: str = "running"
    attempts: list[AttemptRecord] = field(default_factory=list)


class Summary:
    """The file of the history, and in it the run that goes on now, after those that were there.

    Args:
        folder: where it lies.
        run: the record, which the caller changes before ``write``.
        variables: of the parameter file; their values are written as ``${NAME}``.

    Raises:
        ValueError: there is a file of that name, and it is no such history.
    """

    def __init__(self, folder: str, run: RunRecord, variables: Variables) -> None:
        self.path, self.run, self._variables = Path(folder, SUMMARY), run, variables
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            found = {"runs": []}
        except ValueError:
            found = None
        self._before: Any = found.get("runs") if isinstance(found, dict) else None
        if not isinstance(self._before, list):
            raise ValueError(
                f"{self.path} is not the history of runs that autorestart keeps there. Move it, or"
                " give another model_dir."
            )

    def write(self) -> None:
        """Replace the file in one step. A disk that is full does not end the run."""
        runs = [*self._before, self._variables.hidden_in(asdict(self.run))]
        try:
            with part(self.path.parent) as file:
                file.write((json.dumps({"runs": runs}, indent=1) + "\n").encode())
                os.fsync(file.fileno())
                os.replace(str(file.name), self.path)
        except OSError as error:
            rank_zero_info(f"{self.path} could not be written: {error.strerror}. The run goes on.")


@dataclass(kw_only=True)
class Outcome:
    """How a run ended: what the last attempt came to, and what the trainers before it found."""

    status: int  # of the last attempt's process; 128 and its number for a signal to stop
    reason: str  # its end, in words
    raised: bytes | None  # its error, pickled, where it can be
    results: dict[int, Any]  # what the stages found, by trainer
    stopped: signal.Signals | None
    exited: bool  # by sys.exit() in the code


def _settings(phase: Phase) -> AutoRestart:
    return phase.init.autorestart or AutoRestart()


def wants_restarts(plan: Plan) -> bool:
    """Whether a trainer of a file is to be started again after a crash; none that only builds."""
    restarts = any(_settings(phase).max_num_restarts for phase in plan.phases)
    return restarts and not any(map(only_builds, plan.phases))


def supervise(
    plan: Plan, mode: str, target: Target, arguments: tuple[Any, ...], wants_results: bool = False
) -> Outcome:
    """Run a file in another process, again after each crash.

    Args:
        plan: the file, checked.
        mode: what is run.
        target: what the process calls: with an ``Attempt``, and these arguments.
        arguments: for it.
        wants_results: whether what the stages find comes back.

    Raises:
        RestartsUsedUp: it crashed too often without a new checkpoint.
        ValueError: the run has several processes; or ``summary.json`` is something else.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError(
            f"autorestart watches one process, and this is one of {os.environ['WORLD_SIZE']}"
            " (WORLD_SIZE). Leave autorestart out: torchrun --max-restarts restarts all of them."
        )
    run = RunRecord(file=plan.document.source, mode=mode)
    summary = Summary(model_dir(plan.phases[0].init), run, plan.document.variables)
    with _signals() as received:
        one = _Supervision(plan, target, arguments, wants_results, summary, received)
        try:
            outcome = one.run()
            failed = "failed" if outcome.status else "done"
            run.outcome = "stopped" if outcome.stopped or outcome.exited else failed
        except RestartsUsedUp:
            run.outcome = "given up"
            raise
        finally:
            run.ended = now()
            summary.write()
    return outcome


def run_watched(plan: Plan, mode: str, target: Target, arguments: tuple[Any, ...]) -> list[Any]:
    """The same for a caller in Python, who gets the results of each trainer, and errors raised.

    Raises:
        ValueError: the arguments cannot be sent to another process; and as ``supervise``.
        KeyboardInterrupt: Ctrl-C ended it.
        SystemExit: SIGTERM did, or the code itself.
        Exception: what the last attempt raised.
    """
    try:
        pickle.dumps(arguments)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise ValueError(
            "autorestart runs a file in another process, and this dict holds something that cannot"
            f" be sent there ({error}). Write it as text, classes by their import path."
        ) from None
    found = supervise(plan, mode, target, arguments, wants_results=True)
    if found.stopped == signal.SIGINT:
        raise KeyboardInterrupt
    if found.stopped is not None or found.exited:
        raise SystemExit(found.status)
    if found.status:
        raise RuntimeError(found.reason) if found.raised is None else pickle.loads(found.raised)
    return [pickle.loads(found.results[i]) for i in range(len(plan.phases))]


@contextlib.contextmanager
def _signals() -> Iterator[list[signal.Signals]]:
    """Collect Ctrl-C and SIGTERM; only the main thread gets them."""
    received: list[signal.Signals] = []
    here = threading.current_thread() is threading.main_thread()
    before = {
        one: signal.signal(one, lambda number, _: received.append(signal.Signals(number)))
        for one in (STOPS if here else ())
    }
    try:
        yield received
    finally:
        for one, handler in before.items():
            signal.signal(one, signal.SIG_DFL if handler is None else handler)


@dataclass
class _Supervision:
    """The attempts of one run, and where the next one goes on."""

    plan: Plan
    target: Target
    arguments: tuple[Any, ...]
    wants_results: bool
    summary: Summary
    received: list[signal.Signals]  # to stop
    trainer: int = 0
    earlier: list[Identity] | None = None
    resume: str | None = None
    in_a_row: int = 0
    results: dict[int, Any] = field(default_factory=dict)

    def run(self) -> Outcome:
        """Try until it is done, or not to be tried again."""
        while True:
            watch = self._attempt()
            before = self.trainer, self.resume
            self._look_where(watch)
            status, report, stopped = watch.status, watch.report, self._stopped_by(watch.status)
            crashed = stopped is None and watch.crashed()
            if crashed and self.trainer == len(self.plan.phases):
                status = 0  # it crashed when all was done
            elif crashed:
                # only attempts that came no further count: a run that crashes once a day goes on
                # for ever
                self.in_a_row = 1 if before != (self.trainer, self.resume) else self.in_a_row + 1
                self._wait(watch.record)
                if not self.received:
                    continue
                stopped = self.received[0]
            elif stopped is None and report.get("exited"):
                rank_zero_info(f"{self._ended(watch.record)}. It is not tried again.")
            return Outcome(
                status=status if stopped is None else 128 + stopped,
                reason=watch.record.ended_by or "",
                raised=report.get("raised"),
                results=self.results,
                stopped=stopped,
                exited=bool(report.get("exited")),
            )

    def _stopped_by(self, status: int) -> signal.Signals | None:
        """The signal to stop that ended the run: sent to this process, or to the other alone."""
        if status == 0:
            return None
        if self.received:
            return self.received[0]
        # a signal that nobody handles ends a process by itself; our commands handle it, and end
        # with 128 more
        number = -status if status < 0 else status - 128
        return signal.Signals(number) if number in STOPS else None

    def _attempt(self) -> _Watch:
        """Start the process, and watch it to its end."""
        record = AttemptRecord(number=len(self.summary.run.attempts) + 1)
        context: Any = multiprocessing.get_context(START_METHOD)
        reports, sending = context.Pipe(duplex=False)
        attempt = Attempt(
            number=record.number,
            reports=sending,
            trainer=self.trainer,
            earlier=self.earlier,
            resume=self.resume,
            wants_results=self.wants_results,
        )
        process = context.Process(target=run_attempt, args=(self.target, attempt, *self.arguments))
        process.start()
        sending.close()  # or the pipe would not end with the process
        watch = _Watch(process, process.pid, reports, record, self.results)
        record.pid = process.pid
        self.summary.run.attempts.append(record)
        self.summary.write()
        try:
            while not watch.has_ended():
                watch.take(LOOKS_EVERY_S)
                watch.pass_on(self.received)
                watch.kill_if_it_hangs(self._hang_timeout(watch))
        finally:
            watch.reap()
        return watch

    def _hang_timeout(self, watch: _Watch) -> float | None:
        """That of the trainer that runs."""
        running = min(watch.report.get("trainer", self.trainer), len(self.plan.phases) - 1)
        return _settings(self.plan.phases[running]).hang_timeout

    def _look_where(self, watch: _Watch) -> None:
        """Find where the next attempt goes on."""
        self.trainer = watch.report.get("trainer", self.trainer)
        self.earlier = watch.report.get("earlier", self.earlier)
        before, self.resume = self.resume, None
        fits = self.summary.run.mode == "fit" and self.trainer < len(self.plan.phases)
        if fits and self.earlier is not None:
            # also where the file says what to begin from: those of another run are told apart by
            # what lay there before this one began, which a new file of the same name is not
            there = identities(all_of(self.plan.phases[self.trainer]))
            own = [path for path, *rest in there if (path, *rest) not in self.earlier]
            self.resume = next(filter(_is_whole, reversed(own)), None)
        if self.resume not in (None, before):  # it trained so far, whatever it could still report
            watch.record.last_step = max(watch.record.last_step or 0, steps_of(self.resume))

    def _ended(self, record: AttemptRecord) -> str:
        """The end of an attempt, in words."""
        reason = self.plan.document.variables.hidden(record.ended_by or "").rstrip(". ")
        at = "" if record.last_step is None else f" after step {record.last_step}"
        return f"autorestart: attempt {record.number} ended{at}: {reason}"

    def _wait(self, record: AttemptRecord) -> None:
        """Wait before the next attempt, or until a signal comes.

        Raises:
            RestartsUsedUp: there shall be no other.
        """
        allowed = _settings(self.plan.phases[self.trainer]).max_num_restarts or 0
        ended = self._ended(record)
        if self.in_a_row > allowed:
            raise RestartsUsedUp(
                f"{ended}. It is not tried again: max_num_restarts is {allowed}, and"
                f" {self.in_a_row} attempts in a row ended so without a new checkpoint. The history"
                f" is in {self.summary.path}."
            )
        wait_s = min(FIRST_WAIT_S * 2 ** (self.in_a_row - 1), LONGEST_WAIT_S)
        goes_on = "from the same beginning" if self.resume is None else f"from {self.resume}"
        rank_zero_info(
            f"{ended}. Again in {wait_s:g} s, {goes_on} (restart {self.in_a_row} of {allowed})."
        )
        record.waited_s = wait_s
        self.summary.write()
        until = time.monotonic() + wait_s
        while time.monotonic() < until and not self.received:
            time.sleep(LOOKS_EVERY_S)


def _is_whole(path: str) -> bool:
    try:
        check_checkpoint(path)
    except CheckpointError as error:
        rank_zero_info(f"{error.path} {error.what}. An older one is taken.")
        return False
    return True


@dataclass
class _Watch:
    """One attempt as the watching process sees it: what it tells, whether it hangs, its end."""

    process: BaseProcess
    pid: int
    reports: Connection
    record: AttemptRecord
    results: dict[int, Any]
    report: dict[str, Any] = field(default_factory=dict)
    status: int = 0  # once it has ended: of the process, negative for a signal
    _hung: str = ""
    _passed_on: int = 0  # signals
    _moved_at: float = 0.0

    def take(self, wait_s: float) -> None:
        """Take what was reported; wait so long for it."""
        try:
            while self.reports.poll(wait_s):
                self._merge(self.reports.recv())
                wait_s = 0.0
        except (EOFError, OSError):  # also in the middle of a report
            time.sleep(wait_s)

    def _merge(self, sent: dict[str, Any]) -> None:
        # a beat that is not watched moves the clock too: it begins when batches are due
        if "beat" in sent and (not sent["beat"][0] or sent["beat"] != self.report.get("beat")):
            self._moved_at = time.monotonic()
        self.results |= sent.pop("results", {})
        self.report |= sent
        if sent.get("earlier") is not None:  # a trainer began, where else one is done
            self.record.trainer = sent["trainer"]

    def kill_if_it_hangs(self, timeout_s: float | None) -> None:
        """Print where the process is, and kill it, where no batch that should came for so long."""
        watched = self.report.get("beat", (False,))[0]
        # by this process's clock, from the last beat that was another one: no clock is compared
        # across processes
        if watched and timeout_s is not None and time.monotonic() > self._moved_at + timeout_s:
            self._hung = f"hung: no batch for {timeout_s:g} s"
            self._send(signal.SIGQUIT)
            time.sleep(PRINTS_WITHIN_S)
            self._send(signal.SIGKILL)

    def pass_on(self, received: list[signal.Signals]) -> None:
        """Send the signals to stop that came; a process that has not begun is ended at once."""
        for one in received[self._passed_on :]:
            # before that its handlers are not set: it has nothing to save, and may be importing for
            # a while
            self._send(one if "trainer" in self.report else signal.SIGKILL)
            self._passed_on += 1

    def _send(self, one: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, one)

    def has_ended(self) -> bool:
        """Whether the process is over; it is not reaped yet, so that its number stays its own."""
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def reap(self) -> None:
        """Write down how the process ended; what one that failed has left running is killed."""
        if not self.has_ended():  # an error of the process that watches
            self._send(signal.SIGKILL)
        # its number is another process's once it is reaped, so its group is killed before that
        found = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        if found is not None and found.si_status:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
        self.take(0.0)
        self.reports.close()
        self.process.join()
        assert self.process.exitcode is not None
        self.status, record = self.process.exitcode, self.record
        for name in ("ckpt_path", "from_step", "last_step"):
            setattr(record, name, self.report.get(name))
        if self.status < 0:
            record.signal = signal.Signals(-self.status).name
        else:
            record.exit_status = self.status
        record.ended, record.ended_by = now(), self._hung or self._ended_by(self.status)

    def _ended_by(self, status: int) -> str:
        if status < 0:
            why = " (the system does that when memory runs out)" if status == -9 else ""
            return f"killed by {self.record.signal}{why}"
        if status - 128 in STOPS:
            return f"stopped by {signal.Signals(status - 128).name}"
        if "exited" not in self.report:
            return (
                f"the process ended with status {status} before the run was done, by os._exit() or"
                " a C library's exit()"
            )
        if self.report["exited"]:
            return f"the code ended it with status {status} (SystemExit)"
        return "done" if status == 0 else str(self.report.get("error", f"exit status {status}"))

    def crashed(self) -> bool:
        """Whether it shall be tried again: not what somebody stopped, nor an error of the code."""
        killed = self.status < 0 and -self.status not in STOPS
        # what ended without a word, as os._exit() does, was not Python's decision
        if self._hung or killed or "exited" not in self.report:
            return True
        return self.status == 1 and bool(self.report.get("crash"))
