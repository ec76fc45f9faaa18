"""SIGKILL a fit at random moments, go on from its newest checkpoint, and compare every bit.

    python tests/tools/kills.py                     200 kills, both checkpoint callbacks
    python tests/tools/kills.py --kills 20 --seed 3

A fit of a small compiled model (dropout, shuffled data, metrics, validation within the epoch, a
plateau scheduler) runs in a process of its own until it is killed: in a step, in a validation,
while a checkpoint is written, or while the program is compiled (with a compile cache of its own).
Then another process goes on from the newest checkpoint, until one reaches the end; then the next
fit begins. After every kill and at every end:

unreadable      files with a checkpoint's name that do not load; there must be none
lost            checkpoints whose writing had returned, and that are not there; none
different       losses, metrics and learning rates of a step, and weights, optimizer and scheduler
                at the end, that are not those of a run which nobody killed, to the bit; none
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import multiprocessing
import os
import pickle
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[1] / "support"))
from killed_fit import fit, newest

CALLBACKS = ("Checkpoint", "ModelCheckpoint")
PHASES = ("step", "validation", "writing")
COMPILING_S = 10.0  # a kill while compiling comes within this time
SHORT_S = {"step": 0.02, "validation": 0.03, "writing": 0.05}
Processes = multiprocessing.get_context("fork")


@dataclasses.dataclass
class Figures:
    """What came of it."""

    kills: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    continued: int = 0
    finished: int = 0
    lines: int = 0
    unreadable: list[str] = dataclasses.field(default_factory=list)
    lost: list[str] = dataclasses.field(default_factory=list)
    different: list[str] = dataclasses.field(default_factory=list)

    @property
    def failed(self) -> bool:
        """Whether anything was found."""
        return bool(self.unreadable or self.lost or self.different)

    def __str__(self) -> str:
        phases = ", ".join(f"{count} in {phase}" for phase, count in sorted(self.kills.items()))
        text = (
            f"{self.kills.total()} kills ({phases}); {self.continued} runs went on from a"
            f" checkpoint, {self.finished} fits reached their end, {self.lines} lines of results"
            f" compared: {len(self.unreadable)} unreadable files, {len(self.lost)} checkpoints"
            f" lost, {len(self.different)} results different"
        )
        return "\n  ".join([text, *self.unreadable[:5], *self.lost[:5], *self.different[:5]])


class Fits:
    """Fits of one callback, one after another, each killed until it reaches its end."""

    def __init__(self, callback: str, folder: Path, cache: Path, figures: Figures) -> None:
        self._callback, self._folder, self._cache = callback, folder, cache
        self._figures, self._count, self._read = figures, 0, 0
        self._now = self._begin()
        self._run(None, 0, 0.0)
        self.wanted = {" ".join(line.split()[:2]): line for line in self._lines()}
        self.wanted["end"] = self._lines()[-1]
        self._now = self._begin()

    def _begin(self) -> Path:
        folder = self._folder / f"{self._callback}-{self._count}"
        folder.mkdir()
        self._count, self._read = self._count + 1, 0
        self.cache = self._cache
        return folder

    def _run(self, phase: str | None, number: int, wait_s: float) -> bool:
        """Run until the end, or until a time after a phase began; returns if it was killed."""
        here, there = Processes.Pipe(duplex=False)
        process = Processes.Process(target=fit, args=(self._callback, self._now, self.cache, there))
        process.start()
        there.close()
        try:
            while True:
                number -= here.recv() == phase
                if number <= 0 and phase is not None:
                    time.sleep(wait_s)
                    os.kill(process.pid or 0, signal.SIGKILL)
                    break
        except EOFError:
            pass
        process.join()
        here.close()
        if process.exitcode not in (0, -signal.SIGKILL):
            raise RuntimeError(f"a fit ended with status {process.exitcode}: {self._now}")
        return process.exitcode != 0

    def kill(self, phase: str, draw: random.Random) -> None:
        """Kill one process in a phase; where it ends before, look at what it left."""
        wait_s = draw.random() * SHORT_S.get(phase, COMPILING_S)
        if phase == "compiling":
            self.cache = self._now / "cache"
        number = draw.randint(1, 12 if phase == "step" else 3) if phase in PHASES else 1
        self._figures.continued += newest(self._now) is not None
        if self._run(phase, number, wait_s):
            self._figures.kills[phase] += 1
            self._look()
            self.cache = self._cache
        else:
            self._finish()

    def end(self) -> None:
        """Let the fit that was killed last reach its end."""
        self._figures.continued += newest(self._now) is not None
        self._run(None, 0, 0.0)
        self._finish()

    def _lines(self) -> list[str]:
        path = self._now / "lines"
        return path.read_text().splitlines() if path.exists() else []

    def _finish(self) -> None:
        self._look()
        self._figures.finished += 1
        if not self._lines()[-1].startswith("end"):
            self._figures.different.append(f"{self._now}: no end")
        self._now = self._begin()

    def _look(self) -> None:
        figures, there = self._figures, set()
        for path in sorted(self._now.glob("*.ckpt")):
            try:
                there.add(torch.load(path, weights_only=True)["global_step"])
            except (RuntimeError, EOFError, OSError, pickle.UnpicklingError) as error:
                figures.unreadable.append(f"{path}: {error}")
                path.unlink()
        for line in self._lines()[self._read :]:
            self._read += 1
            kind, key = line.split()[:2]
            if kind == "saved":
                if int(key) not in there:
                    figures.lost.append(f"{self._now}: step {key}")
                continue
            figures.lines += 1
            wanted = self.wanted.get(kind if kind == "end" else f"{kind} {key}", "nothing")
            if line != wanted:
                figures.different.append(f"{self._now}: {line} instead of {wanted}")


def run(
    kills: int, seed: int, folder: Path, compiling: float, cache: Path | None = None
) -> Figures:
    """Kill that often.

    Args:
        kills: how often, for both callbacks together.
        seed: of the moments.
        folder: for checkpoints.
        compiling: share of kills while compiling.
        cache: of compiled programs; None begins with an empty one.
    """
    figures, draw = Figures(), random.Random(seed)
    fits = [Fits(name, folder, cache or folder / "cache", figures) for name in CALLBACKS]
    while figures.kills.total() < kills:
        phase = "compiling" if draw.random() < compiling else draw.choice(PHASES)
        fits[figures.kills.total() % len(fits)].kill(phase, draw)
        if figures.kills.total() % 20 == 0 and __name__ == "__main__":
            print(figures, flush=True)
    for one in fits:
        one.end()
    return figures


def main() -> int:
    """Run, and print figures; the exit status says whether anything was found."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compiling", type=float, default=0.1, help="share while compiling")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = run(options.kills, options.seed, Path(folder), options.compiling)
    print(figures)
    return int(figures.failed)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    sys.exit(main())
