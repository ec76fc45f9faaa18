"""``autorestart``: a process watches a run in another one, and starts it again after a crash.

    attempt 1: killed         no status of its own: killed by a signal that nobody sent to stop it
    wait 1 s                  doubled each time, 5 minutes at most
    attempt 2: hung           no batch for hang_timeout: its stacks are printed, then it is killed
    wait 2 s                  1 s again, where it left a new checkpoint
    attempt 3: done           or an error of the code or the file: that is not tried again

Each attempt goes on from the newest whole checkpoint that this run has written.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_info

from fulgurite.backends.checkpoints.damage import CheckpointError, check_file
from fulgurite.config.run.attempt import Attempt, Identity, Target, identities, run_attempt
from fulgurite.config.run.building import model_dir
from fulgurite.config.run.own_checkpoints import steps_of
from fulgurite.config.run.summary import AttemptRecord, RunRecord, Summary, now
from fulgurite.config.run.watching import STOPS, Watch
from fulgurite.config.schema.checking import Phase, Plan
from fulgurite.config.schema.sections import AutoRestart

LOOKS_EVERY_S = 0.2
START_METHOD = "spawn"  # no state of this process, no locks of its threads
FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 300.0


class RestartsUsedUp(RuntimeError):
    """A run crashed more often than ``autorestart.max_num_restarts`` allows."""


@dataclass(kw_only=True)
class Outcome:
    """How a run ended.

    Args:
        status: the exit status of the last attempt; 128 and its number for a signal to stop.
        results: what the stages found, by trainer.
        raised: the error of the last attempt, pickled, where it can be.
        told: that error in words.
        stopped: the signal to stop that came.
        exited: the code ended it by ``sys.exit()``.
    """

    status: int
    results: dict[int, Any]
    raised: bytes | None
    told: str
    stopped: signal.Signals | None
    exited: bool = False


def wants_restarts(plan: Plan) -> bool:
    """Whether a trainer of a file is to be started again after a crash; none that only builds."""
    backends = [phase.init.backend or {} for phase in plan.phases]
    dry = any(one.get("compile_only") or one.get("validate_only") for one in backends)
    return not dry and any(_settings(phase).max_num_restarts for phase in plan.phases)


def _settings(phase: Phase) -> AutoRestart:
    return phase.init.autorestart or AutoRestart()


def supervise(
    plan: Plan,
    mode: str,
    checkpoints: Callable[[Phase], list[str]],
    target: Target,
    arguments: tuple[Any, ...],
    wants_results: bool = False,
) -> Outcome:
    """Run a file in another process, again after each crash.

    Args:
        plan: the file, checked.
        mode: what is run.
        checkpoints: finds those of a trainer's folder, by step.
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
    one = _Supervision(
        plan=plan,
        checkpoints=checkpoints,
        target=target,
        arguments=arguments,
        wants_results=wants_results,
        summary=summary,
    )
    with _signals() as received:
        try:
            outcome = one.run(received)
            failed = "failed" if outcome.status else "done"
            run.outcome = "stopped" if outcome.stopped or outcome.exited else failed
        except RestartsUsedUp:
            run.outcome = "given up"
            raise
        finally:
            run.ended = now()
            summary.write()
    return outcome


def run_watched(
    plan: Plan,
    mode: str,
    checkpoints: Callable[[Phase], list[str]],
    target: Target,
    arguments: tuple[Any, ...],
) -> list[Any]:
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
    found = supervise(plan, mode, checkpoints, target, arguments, wants_results=True)
    if found.stopped == signal.SIGINT:
        raise KeyboardInterrupt
    if found.stopped is not None or found.exited:
        raise SystemExit(found.status)
    if found.status:
        raise RuntimeError(found.told) if found.raised is None else pickle.loads(found.raised)
    return [pickle.loads(found.results[i]) for i in range(len(plan.phases))]


@contextlib.contextmanager
def _signals() -> Iterator[list[signal.Signals]]:
    """Collect Ctrl-C and SIGTERM; only the main thread gets them."""
    received: list[signal.Signals] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    before = {
        one: signal.signal(one, lambda number, _: received.append(signal.Signals(number)))
        for one in STOPS
    }
    try:
        yield received
    finally:
        for one, handler in before.items():
            signal.signal(one, signal.SIG_DFL if handler is None else handler)


@dataclass(kw_only=True)
class _Supervision:
    """The attempts of one run, and where the next one goes on."""

    plan: Plan
    checkpoints: Callable[[Phase], list[str]]
    target: Target
    arguments: tuple[Any, ...]
    wants_results: bool
    summary: Summary
    trainer: int = 0
    earlier: list[Identity] | None = None
    resume: str | None = None
    in_a_row: int = 0
    results: dict[int, Any] = field(default_factory=dict)

    def run(self, received: list[signal.Signals]) -> Outcome:
        """Try until it is done, or not to be tried again; ``received`` are signals to stop."""
        while True:
            watch, status = self._attempt(received)
            self.results |= watch.results
            before = self.trainer, self.resume
            self._look_where(watch)
            outcome = Outcome(
                status=status,
                results=self.results,
                raised=watch.told.get("raised"),
                told=watch.record.ended_by or "",
                stopped=_stopped_by(status, received),
                exited=watch.exited,
            )
            if outcome.stopped is not None:
                outcome.status = 128 + outcome.stopped
                return outcome
            if not watch.crashed(status):
                if outcome.exited:
                    rank_zero_info(f"{self._ended(watch.record)}. It is not tried again.")
                return outcome
            if self.trainer == len(self.plan.phases):  # it crashed when all was done
                outcome.status = 0
                return outcome
            self.in_a_row = 1 if before != (self.trainer, self.resume) else self.in_a_row + 1
            self._wait(watch.record, received)
            if received:
                outcome.stopped, outcome.status = received[0], 128 + received[0]
                return outcome

    def _attempt(self, received: list[signal.Signals]) -> tuple[Watch, int]:
        """Start the process, and watch it to its end; returns its exit status too."""
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
        sending.close()
        watch = Watch(process=process, reports=reports, record=record)
        record.pid = process.pid
        self.summary.run.attempts.append(record)
        self.summary.write()
        try:
            while not watch.has_ended():
                watch.take(LOOKS_EVERY_S)
                watch.pass_on(received)
                if watch.stands_still(self._timeout(watch)):
                    watch.kill()
        finally:
            status = watch.reap()
            watch.ended(status, self._timeout(watch))
        return watch, status

    def _timeout(self, watch: Watch) -> float | None:
        """``hang_timeout`` of the trainer that runs."""
        running = min(watch.told.get("trainer", self.trainer), len(self.plan.phases) - 1)
        return _settings(self.plan.phases[running]).hang_timeout

    def _look_where(self, watch: Watch) -> None:
        """Find where the next attempt goes on."""
        self.trainer = watch.told.get("trainer", self.trainer)
        self.earlier = watch.told.get("earlier", self.earlier)
        before, self.resume = self.resume, None
        fits = self.summary.run.mode == "fit" and self.trainer < len(self.plan.phases)
        if fits and self.earlier is not None:
            there = identities(self.checkpoints(self.plan.phases[self.trainer]))
            own = [path for path, *rest in there if (path, *rest) not in self.earlier]
            self.resume = next(filter(_is_whole, reversed(own)), None)
        if self.resume not in (None, before):  # it trained so far, whatever it could still report
            watch.record.last_step = max(watch.record.last_step or 0, steps_of(self.resume))

    def _ended(self, record: AttemptRecord) -> str:
        """The end of an attempt, in words."""
        told = self.plan.document.variables.hidden(record.ended_by or "").rstrip(". ")
        at = "" if record.last_step is None else f" after step {record.last_step}"
        return f"autorestart: attempt {record.number} ended{at}: {told}"

    def _wait(self, record: AttemptRecord, received: list[signal.Signals]) -> None:
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
        while time.monotonic() < until and not received:
            time.sleep(LOOKS_EVERY_S)


def _stopped_by(status: int, received: list[signal.Signals]) -> signal.Signals | None:
    """The signal to stop that ended a run: sent to this process, or to the other one alone."""
    if status == 0:
        return None
    if received:
        return received[0]
    number = -status if status < 0 else status - 128
    return signal.Signals(number) if number in STOPS else None


def _is_whole(path: str) -> bool:
    try:
        check_file(path)
    except CheckpointError as error:
        rank_zero_info(f"{error.path} {error.what}. An older one is taken.")
        return False
    return True
