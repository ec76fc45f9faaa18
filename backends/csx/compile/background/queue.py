"""Compile beside the training, in one process of its own.

The *worker* is forked: it has the graphs, the compiler's settings and the user's environment as
they are, and imports nothing anew. It compiles what waits into the compile cache, from which this
process loads it. It runs with lower priority, and ends with this process, however that ends.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from fcntl import LOCK_EX, flock
from pathlib import Path
from typing import NoReturn

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn

from fulgurite.backends.csx.compile.background.worker_pulse import (
    GRACE_S,
    Pulse,
    end_session,
    end_with,
    let_go,
    nice_session,
    sweep,
)
from fulgurite.backends.csx.compile.fabric import NOW, Wanted
from fulgurite.backends.csx.compile.programs.compiler_log import PREFIX, keep
from fulgurite.backends.csx.compile.programs.progress import CODE, Course, listening, tell
from fulgurite.backends.patches import fx_lock, trace_lock
from fulgurite.backends.torch_compiler import compiler_module

AVAILABLE = sys.platform == "linux"  # elsewhere a forked process may not use the system's libraries
# where there is one core, about half as much of it as the training, beside all processes of whose
# session it runs; where there are more, the one that is free, and next to nothing where none is
_ONE_CORE = (3, 6)
_MORE_CORES = (10, 12)
_LOG = "log.txt"
_TOLD = 4  # values of a line that tells how far a job is, without its number
_STOPPED = 128 + signal.SIGTERM  # the exit status of a worker that somebody stopped


@dataclass(slots=True, eq=False, kw_only=True)
class Job:
    """Something to be compiled.

    Args:
        name: the same for the same thing: it is compiled once.
        run: compiles it, in the worker; returns why it cannot, or None.
        wanted: when it is to begin.
        fixed: the share of what it compiles that stays as it is (see ``Wanted.worth``); None until
            that is known: it is not begun before.

    Attributes:
        ended: whether it is known what came of it.
        failure: why it was not compiled, in words.
        full: whether that was because the folder takes no files.
        log: what the worker printed, where it failed.
        seconds: how long it took.
        cpu_s: how long processors worked on it.
        again: whether a worker was lost with it, and another one has it.
        course: how far it is, once it has begun.
    """

    name: tuple[str, ...]
    run: Callable[[], str | None]
    wanted: Wanted = NOW
    fixed: float | None = 0.0
    ended: bool = False
    failure: str | None = None
    full: bool = False
    log: Path | None = None
    seconds: float = 0.0
    cpu_s: float = 0.0
    again: bool = False
    course: Course | None = None

    def is_worth(self) -> bool:
        """Whether compiling it may begin."""
        return self.fixed is not None and self.wanted.worth(self.fixed)


class Queue:
    """What waits to be compiled, and the worker."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Begin anew: in a forked process, where the worker is the parent's."""
        self._lock = threading.Lock()
        self._waiting: list[Job] = []
        self._hurries = False
        self._worker: _Worker | None = None

    @property
    def compiles(self) -> bool:
        """Whether the worker is at work, as far as ``poll`` has seen."""
        return self._worker is not None

    def add(self, job: Job) -> Job:
        """Let a job wait; returns the one of that name that is under way, if there is."""
        with self._lock:
            under_way = self._waiting + (self._worker.jobs if self._worker else [])
            for other in under_way:
                if other.name == job.name and not other.ended:
                    other.wanted = job.wanted  # by this run, which goes on
                    return other
            self._waiting.append(job)
            self._waiting.sort(key=lambda one: not one.wanted.urgent)
        return job

    def hurry(self) -> None:
        """Everything that waits may be compiled: what is needed most has come.

        Its order stays: what is urgent comes first, also where it comes later.
        """
        with self._lock:
            self._hurries = bool(self._waiting)

    def poll(self) -> None:
        """Note what has ended, and start the worker where something urgent waits (4 µs)."""
        if self._lock.acquire(blocking=False):  # else another thread does it
            try:
                if self._worker is not None and self._worker.has_ended():
                    self._worker = None
                elif self._worker is not None and (why := self._worker.pulse.lost()):
                    self._replace(self._worker, why)
                if self._worker is None and self._waiting:
                    self._start()
            finally:
                self._lock.release()

    def progress(self, job: Job) -> str:
        """How far a job is, in words; empty: it has not begun, or has ended."""
        if self._worker is None or job.course is None or job.ended:
            return ""
        return f"{job.course}{', the machine is busy' * self._worker.pulse.starves}"

    def _replace(self, worker: _Worker, why: str) -> None:
        """End a worker that does nothing any more; what it was at is tried once more."""
        worker.kill()
        self._worker, left = None, [job for job in worker.jobs if not job.ended]
        # jobs go in order: the first one that has not ended is what it was at
        for job in left[:1]:
            if job.again:
                job.failure, job.ended = why, True
            job.again = True
        self._waiting[:0] = [job for job in left if not job.ended]
        self._hurries = bool(self._waiting)
        instead = "Another one takes its place" if self._waiting else "It is not replaced again"
        rank_zero_warn(f"CSX: {why}. {instead}.")

    def _start(self) -> None:
        """Start the worker, where something that waits may begin."""
        # what is not urgent waits until the training is compiled: that is needed first
        may = self._hurries or self._waiting[0].wanted.urgent
        jobs = [job for job in self._waiting if may and job.is_worth()]
        if not jobs:
            return
        with contextlib.ExitStack() as held:
            for lock in (fx_lock, trace_lock):  # what they guard is whole in the worker then
                if not lock.acquire(blocking=False):
                    return
                held.callback(lock.release)
            self._waiting = [job for job in self._waiting if job not in jobs]
            self._hurries = bool(self._waiting)  # by what is not worth it yet
            try:
                self._worker = _Worker(jobs)
            except OSError as error:  # no memory, no process, no place for temporary files
                for job in jobs:
                    job.failure, job.ended = f"no process to compile in: {error}", True

    def end(self) -> None:
        """End the worker; what it has not compiled is not compiled."""
        with self._lock:
            if self._worker is not None:
                self._worker.end()
            self._worker, self._waiting = None, []


class _Worker:
    """A process that compiles jobs one after the other."""

    def __init__(self, jobs: list[Job]) -> None:
        self.jobs, self._read = jobs, b""
        sweep(Path(tempfile.gettempdir()), PREFIX, _LOG)
        self._folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        log = os.open(self._folder / _LOG, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        flock(log, LOCK_EX)  # as long as the worker lives
        self._results, write = os.pipe()
        # it is read between two steps, which must not wait
        os.set_blocking(self._results, False)
        parent = os.getpid()
        with warnings.catch_warnings():  # Python 3.12 warns of threads; locks are in docs/backends
            warnings.simplefilter("ignore", DeprecationWarning)
            self._pid = os.fork()
        if self._pid == 0:
            _work(jobs, write, log, self._folder, parent)
        # else this process would hold the pipe open itself, and never read its end
        os.close(write)
        # the lock is the open file's, which the worker has too
        os.close(log)
        self.pulse = Pulse(self._pid)

    def has_ended(self) -> bool:
        """Whether all jobs ended; those that ended since are noted."""
        try:
            while read := os.read(self._results, 1 << 16):
                self._read += read
        except BlockingIOError:
            self._note()
            return False
        self._note()
        self._close()
        return True

    def end(self) -> None:
        """End it, and what it started."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGTERM)  # it ends its compilers and removes its files
        until = time.monotonic() + GRACE_S
        while not self._is_gone() and time.monotonic() < until:
            time.sleep(0.01)
        self.kill()

    def kill(self) -> None:
        """End it, and what it started, at once."""
        end_session(self._pid)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._pid, 0)
        os.close(self._results)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _note(self) -> None:
        *lines, self._read = self._read.split(b"\n")
        for line in lines:
            number, *told = json.loads(line)
            job = self.jobs[number]
            if len(told) == _TOLD:
                job.course = job.course or Course()
                job.course.note(*told[1:])
                continue
            failure, full, (seconds, cpu_s) = told
            job.failure, job.full, job.seconds, job.cpu_s = failure, full, seconds, cpu_s
            job.ended = failure is None  # a failure is told with the log, when it is written

    def _close(self) -> None:
        """Note what the process left undone; of its files only the log of a failure stays."""
        os.close(self._results)
        how, failed = self._waited(), [job for job in self.jobs if not job.ended]
        kept = self._keep_log() if failed else None
        for job in failed:
            job.failure, job.log, job.ended = job.failure or how, kept, True
        shutil.rmtree(self._folder, ignore_errors=True)

    def _keep_log(self) -> Path | None:
        try:
            return keep((self._folder / _LOG).read_text(errors="replace"))
        except OSError:  # the process ended before it had one
            return None

    def _is_gone(self) -> bool:
        """Whether it has ended; its number stays its own until it is waited for."""
        try:
            return os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:  # somebody else waited for it
            return True

    def _waited(self) -> str:
        """How the process ended, in words; what it started ends with it."""
        try:
            # looked at, and not waited for: until then no other process gets its number, by which
            # all that it started is found
            os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOWAIT)
            end_session(self._pid)
            _, status = os.waitpid(self._pid, 0)
        except ChildProcessError:
            return "the compiling process ended"
        code = os.waitstatus_to_exitcode(status)
        if code == _STOPPED:
            return "the compiling process was stopped by SIGTERM"
        if code >= 0:
            return f"the compiling process ended with status {code}"
        name = signal.Signals(-code).name
        memory = "; the system does that when memory runs out" if name == "SIGKILL" else ""
        return f"the compiling process was ended by {name}{memory}"


def _work(jobs: list[Job], results: int, log_file: int, folder: Path, parent: int) -> NoReturn:
    """Be the worker. Nothing of what this process would do at its end is done here."""
    status = 1
    try:
        with open(log_file, "w", buffering=1) as log:
            sys.stdout = sys.stderr = log
            _settle_down(log_file, {log_file, results}, folder, parent)
            try:
                for number, job in enumerate(jobs):
                    print(f"{time.strftime('%X')} compiling {' '.join(job.name)}")
                    with listening(functools.partial(_write, results, number, "told")):
                        _write(results, number, *_outcome(job))
                status = 0
            except SystemExit:
                status = _STOPPED
                traceback.print_exc()  # where it was, into the log
    finally:
        if os.getppid() != parent:  # which would have removed it
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(status)


def _write(results: int, number: int, *told: object) -> None:
    """Write a line: of one job how far it is, or what came of it."""
    os.write(results, (json.dumps([number, *told]) + "\n").encode())


def _outcome(job: Job) -> tuple[str | None, bool, tuple[float, float]]:
    """Compile; returns why that failed, whether for want of space, and the seconds: those that
    passed, and those of processors.
    """
    began, cpu_s = time.perf_counter(), _cpu_s()
    full = False
    tell(CODE, 0, 1)
    try:
        failure = job.run()
    except Exception as error:  # whatever it is, the parent tells it
        traceback.print_exc()
        first = [*str(error).strip().splitlines(), ""][0]
        failure, full = f"{type(error).__name__}: {first}", isinstance(error, OSError)
    return failure, full, (time.perf_counter() - began, _cpu_s() - cpu_s)


def _cpu_s() -> float:
    """Processor seconds of this process, and of compilers that it has waited for."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in used)


def _settle_down(log: int, kept: set[int], folder: Path, parent: int) -> None:
    """Let go of what is the parent's: its terminal, files, signals, priority, threads, memory."""
    # a session of its own: Ctrl-C at the terminal is not for it, and by it is found what it starts
    os.setsid()
    own, of_session = _ONE_CORE if len(os.sched_getaffinity(0)) == 1 else _MORE_CORES
    os.nice(own)
    nice_session(os.getpid(), of_session)
    let_go(kept)
    os.dup2(log, 1)
    os.dup2(log, 2)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for one in (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD):
        signal.signal(one, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, _leave)
    sys.settrace(None)
    gc.freeze()  # or a collection would write to all the memory that is shared with the parent
    # what its compilers write goes with the folder, however they end
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
    compiler = compiler_module()
    if compiler is not None:
        compiler.AsyncCompile.pool.cache_clear()  # its threads were not forked
    torch.set_num_threads(1)  # torch's threads were not forked either
    threading.Thread(target=end_with, args=(parent,), daemon=True).start()


def _leave(number: int, frame: object) -> NoReturn:
    raise SystemExit  # ends the C++ compilers on its way, and removes what is half written


queue = Queue()
"""This process's."""


atexit.register(queue.end)
if AVAILABLE:
    os.register_at_fork(after_in_child=queue.begin)
