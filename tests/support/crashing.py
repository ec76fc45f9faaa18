"""What processes do in tests of runs that crash: by import path, as they are spawned."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from tqdm import tqdm

from fulgurite.config.run.attempt import Attempt


class Trouble(pl.Callback):
    """Comes before a step, in the first so many attempts.

    Args:
        what: "kill", "raise" or "slow", which sleeps before each step.
        step: before which it comes.
        marker: a file that counts the times.
        times: that it comes.
    """

    def __init__(self, what: str, step: int, marker: str, times: int = 1) -> None:
        self.what, self.step, self.marker, self.times = what, step, Path(marker), times

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        if self.what == "slow":
            time.sleep(0.1)
            return
        if trainer.global_step != self.step or _count(self.marker) >= self.times:
            return
        _count(self.marker, 1)
        if self.what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("an error of the user's code")


def _count(marker: Path, more: int = 0) -> int:
    count = int(marker.read_text()) if marker.exists() else 0
    if more:
        marker.write_text(str(count + more))
    return count + more


def dies(attempt: Attempt) -> None:
    """Is killed, each time."""
    attempt.report(trainer=0, earlier=[], last_step=attempt.number)
    os.kill(os.getpid(), signal.SIGSEGV)


def leaves(attempt: Attempt, folder: str, seen: str) -> None:
    """Writes a checkpoint before it is killed; later attempts note what they go on from."""
    with open(seen, "a", encoding="utf-8") as file:
        file.write(f"{attempt.resume and Path(attempt.resume).name}\n")
    if attempt.number < 4:
        there = [str(path) for path in sorted(Path(folder).glob("*.ckpt"))]
        with attempt.running(0, there):
            torch.save({"global_step": 3}, Path(folder, f"checkpoint_{2 + attempt.number}.ckpt"))
            if attempt.number == 2:
                Path(folder, "checkpoint_4.ckpt").write_bytes(b"PK half of one")
            os.kill(os.getpid(), signal.SIGKILL)


def hangs(attempt: Attempt) -> None:
    """Takes its time in building; then hangs, once, in the middle of batches."""
    attempt.begin()
    attempt.report(trainer=0, earlier=[], beat=(False, 0))
    if attempt.number == 1:
        time.sleep(2.0)
        attempt.report(beat=(True, 1))
        time.sleep(600)
    attempt.report(beat=(False, attempt.number))


def stops(attempt: Attempt, number: int) -> None:
    """Is stopped by a signal that somebody sent to it alone."""
    signal.signal(number, signal.SIG_DFL)
    attempt.report(trainer=0, earlier=[])
    os.kill(os.getpid(), number)
    time.sleep(600)


def crashes_at_the_end(attempt: Attempt) -> None:
    """Is done with everything, and crashes then."""
    attempt.done(0, None)
    os.kill(os.getpid(), signal.SIGSEGV)


def ends_early(attempt: Attempt, folder: str, status: int, past_python: bool) -> None:
    """Leaves a checkpoint of step 3, and ends before it is done; the second attempt is done."""
    attempt.begin()
    assert tqdm.get_lock() is not None
    if attempt.number == 1:
        with attempt.running(0, ()):
            attempt.report(last_step=1)
            torch.save({"global_step": 3}, Path(folder, "checkpoint_3.ckpt"))
            if past_python:
                os._exit(status)
            raise SystemExit(status)
    attempt.done(0, None)


def loses_a_worker(attempt: Attempt) -> int:
    """Fails by an error of the machine, and then by one of the code."""
    error = OSError(28, "No space left on device") if attempt.number == 1 else KeyError("mine")
    try:
        with attempt.running(0, ()):
            raise error
    except (OSError, KeyError):
        return 1
    return 0
