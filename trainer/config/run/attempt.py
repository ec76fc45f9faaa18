"""One attempt of a run that is started again after a crash: what it tells the process that watches.

The attempt is a process of its own (``restarting`` starts it). It says which trainer of the file
runs, from which checkpoint, and twice a second whether batches come; a thread does that, so nothing
is asked per step. If the watching process dies, the attempt ends as by SIGTERM.

Of a run of several processes the attempt is rank 0. The others, which it starts, find in their
environment where the run goes on; they end with it, and it ends with them.
"""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import json
import os
import pickle
import re
import signal
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Self

import lightning.pytorch as pl
import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from tqdm import tqdm  # a dependency of lightning

from fulgurite.backends.csx.program.announcements import is_building
from fulgurite.callbacks import Checkpoint

BEAT_S = 0.5

_OF_THE_MACHINE = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.ENFILE, errno.EMFILE}
    | {errno.ENOMEM, errno.EAGAIN, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN}
)
_RANK_LOST = re.compile(
    r"(CSX: )?rank \d+ (gave no sign of life|is gone)|Gloo cannot connect|Rank \d+ has waited"
)
_WORKER_LOST = re.compile(r"DataLoader (worker \(pid|timed out)|Worker \d+ of the loader \(pid")
_VARIABLE = "FULGURITE_ATTEMPT"
"""Of the environment: what the other ranks of an attempt have to know of it."""

_sending = threading.Lock()  # beats come from a thread of their own

Target = Callable[..., int | None]
"""What an attempt does; returns the exit status of its process, None for 0."""

Identity = tuple[str, int, int]
"""A file: its path, inode and time, so that another of the same name is another."""


def identities(paths: Collection[str]) -> Iterator[Identity]:
    """Which files lie at some paths; those that are gone meanwhile do not count."""
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            found = os.stat(path)
            yield path, found.st_ino, found.st_mtime_ns


def is_of_the_machine(error: BaseException) -> bool:
    """Whether an error comes from the machine rather than from somebody's code.

    A data worker that died or timed out, a connection, a disk that is full or fails, an
    accelerator that fails (but for an assertion of the code that it ran).
    """
    if isinstance(error, torch.AcceleratorError):
        return "device-side assert" not in str(error)
    if isinstance(error, (ConnectionError, TimeoutError)):
        return True
    if isinstance(error, OSError):
        return error.errno in _OF_THE_MACHINE
    texts = [str(error), *getattr(error, "__notes__", ())]
    if any(map(_RANK_LOST.match, texts)):
        return True
    return isinstance(error, (RuntimeError, EOFError)) and any(map(_WORKER_LOST.match, texts))


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """What a process that is watched gets from the one that watches it.

    Args:
        number: of the attempt, from 1.
        reports: takes dicts; each replaces what was told before under its keys. None: of another
            rank than the first, which nobody watches.
        trainer: index of the first trainer of the file that is not done.
        earlier: the checkpoints that lay there before that trainer first began; None if it did not.
        resume: the checkpoint that it goes on from; None where it begins as the first time.
        wants_results: whether what the stages find is reported too.
        watcher: the process that watches.
    """

    number: int
    reports: Connection | None
    trainer: int = 0
    earlier: Collection[Identity] | None = None
    resume: str | None = None
    wants_results: bool = False
    watcher: int = field(default_factory=os.getpid)

    def begin(self) -> None:
        """Get ready in the new process: signals of the terminal go to the watching process alone,
        and a crash, or SIGQUIT, prints where each thread is.
        """
        # a group of its own: a terminal's Ctrl-C goes to the process that watches, which passes it
        # on; and with the group all that the attempt has started can be killed
        os.setpgid(0, 0)
        faulthandler.enable()
        faulthandler.register(signal.SIGQUIT, all_threads=True)
        # torch makes a progress bar to run a graph, and the bars' own lock is for several
        # processes: where this one is killed, Python would tell of it as a leak
        tqdm.set_lock(threading.RLock())
        of_all_ranks = {"number": self.number, "trainer": self.trainer, "resume": self.resume}
        os.environ[_VARIABLE] = json.dumps(of_all_ranks)

    @classmethod
    def of_this_rank(cls) -> Self | None:
        """What this process is to do, where an attempt has started it as another rank."""
        found = os.environ.get(_VARIABLE)
        if found is None or os.environ.get("LOCAL_RANK", "0") == "0":
            return None
        return cls(**json.loads(found), reports=None)

    def report(self, **values: Any) -> None:
        """Tell the watching process; not an error where that is gone."""
        if self.reports is not None:
            with _sending, contextlib.suppress(BrokenPipeError):
                self.reports.send(values)

    @contextlib.contextmanager
    def running(self, index: int, checkpoints: Sequence[str]) -> Iterator[AttemptReporter]:
        """Report the beginning of a trainer's stage, its beats, and its failure.

        Args:
            index: of the trainer in the file.
            checkpoints: those of its folder.
        """
        first = index != self.trainer or self.earlier is None
        earlier = list(identities(checkpoints)) if first else self.earlier
        self.report(trainer=index, earlier=earlier)
        try:
            with AttemptReporter(self) as watched:
                yield watched
        except Exception as error:
            sent = _sendable(error) if self.wants_results else None
            text, crash = f"{type(error).__name__}: {error}", is_of_the_machine(error)
            self.report(error=text, crash=crash, raised=sent)
            raise

    def resumes(self, index: int) -> str | None:
        """The checkpoint that a trainer goes on from, if it was begun before."""
        return self.resume if index == self.trainer else None

    def done(self, index: int, result: Any) -> None:
        """Report that a trainer's stage is done."""
        sent = {index: pickle.dumps(result)} if self.wants_results else {}
        self.report(trainer=index + 1, earlier=None, results=sent)


def run_attempt(target: Target, attempt: Attempt, *arguments: Any) -> None:
    """Do what an attempt does, and say that Python ended it, and whether by ``sys.exit()``; what
    ends the process otherwise, ``os._exit`` or ``exit()`` of a C library, leaves that out.
    """
    exited = False
    try:
        status = target(attempt, *arguments)
    except SystemExit:
        exited = True
        raise
    finally:
        attempt.report(exited=exited)
    sys.exit(status)


def _sendable(error: Exception) -> bytes | None:
    """An error for another process; None where it cannot be made again there."""
    try:
        sent = pickle.dumps(error)
        # some exceptions pickle, and fail when they are made again from their arguments
        pickle.loads(sent)
    except (pickle.PicklingError, TypeError, AttributeError):
        return None
    return sent


class AttemptReporter(pl.Callback):
    """The callback, and the context, by which an attempt tells whether batches come.

    Twice a second a thread reports a beat: the step, the counts of batches, and whether they are
    to be watched, which is while a loop over batches runs and no program is built.
    """

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt
        self._trainer: pl.Trainer | None = None
        self._in_a_loop = False
        self._ended = threading.Event()
        self._beats = threading.Thread(target=self._report, name="fulgurite-beats", daemon=True)

    def __enter__(self) -> AttemptReporter:
        """Begin to report, where somebody watches."""
        if self._attempt.reports is not None:
            self._beats.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Report a last time, and no more."""
        if self._attempt.reports is not None:
            self._in_a_loop = False
            self._ended.set()
            self._beats.join()
            self._beat()

    def __deepcopy__(self, memo: object) -> AttemptReporter:
        """A copied Trainer is watched by the same thread."""
        return self

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Take the trainer."""
        self._trainer = trainer

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Tell what the fit goes on from; batches must come from here on."""
        path = None if trainer.ckpt_path is None else str(trainer.ckpt_path)
        self._attempt.report(ckpt_path=path, from_step=trainer.global_step)
        saves = trainer.checkpoint_callback
        often = isinstance(saves, Checkpoint) and isinstance(saves.steps, int)
        if self._attempt.number == 1 and not often:
            rank_zero_info(
                "autorestart: no checkpoints are written on the way, so a restart begins where this"
                " attempt did. checkpoint: {steps: 1000} writes one every 1000 steps."
            )
        self._in_a_loop = True

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Batches must come from here on."""
        self._in_a_loop = True

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Go on watching the fit that it belongs to, if it is not the one before the fit."""
        self._in_a_loop = trainer.state.fn == "fit" and not trainer.sanity_checking

    def on_train_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        exception: BaseException | None = None,
    ) -> None:
        """No batches come any more."""
        self._in_a_loop = False

    on_test_start = on_predict_start = on_validation_start
    on_test_end = on_predict_end = on_exception = on_train_end

    def _report(self) -> None:
        """Report beats; end the process, as SIGTERM does, where nobody watches it any more."""
        while not self._ended.wait(BEAT_S):
            self._beat()
            # whoever loses its parent is given another one
            if os.getppid() != self._attempt.watcher:
                os.kill(os.getpid(), signal.SIGTERM)
                return

    def _beat(self) -> None:
        trainer = self._trainer
        if trainer is None:
            return
        fit = trainer.fit_loop.epoch_loop
        loops: tuple[Any, ...] = (fit, fit.val_loop, trainer.validate_loop, trainer.test_loop)
        every = [loop.batch_progress for loop in (*loops, trainer.predict_loop)]
        batches = [(one.total.completed, one.current.ready) for one in every]
        watched = self._in_a_loop and not is_building()
        self._attempt.report(last_step=trainer.global_step, beat=(watched, batches))
