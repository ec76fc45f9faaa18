"""A small training, by Lightning and as a compiled program: the same numbers, in which time."""

from __future__ import annotations

import copy
import logging
import signal
import statistics
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import fulgurite

MODEL = "an MLP 64-128-10, batch 32, AdamW"
LIMIT_S = 60.0
TOLERANCE = (
    1e-4  # of a loss: float32 sums in another order, grown over the compared steps (assumed)
)
_COMPARED, _STEPS = 20, 220
_QUIET: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "max_steps": _STEPS,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How long steps took, how the program ran, and how far its losses were from Lightning's.

    Times are those that a tenth of the steps keep within: what else runs here lengthens the others.

    ``how`` says it in words, ``prepared_s`` is how long capturing and compiling took.
    """

    lightning_us: float
    program_us: float
    compiled: bool
    how: str
    prepared_s: float
    apart: float


class OutOfTime(BaseException):
    """The self-test takes too long. An Exception would be taken for a failed compile."""


class _Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class _Steps(pl.Callback):
    """The first steps' losses, and when each later step ended."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.ends: list[float] = []

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if len(self.losses) < _COMPARED:
            self.losses.append(float(outputs["loss"]))
        else:
            self.ends.append(time.perf_counter())

    def step_us(self) -> float:
        """What a tenth of the steps keep within."""
        pairs = zip(self.ends, self.ends[1:], strict=False)
        return statistics.quantiles((b - a for a, b in pairs), n=10)[0] * 1e6


def self_test(folder: Path) -> Outcome:
    """Train by Lightning, then as a program that is compiled into a folder.

    Raises:
        OutOfTime: it takes longer than ``LIMIT_S``.
    """
    with _in_time(), _quiet(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = _Net()
        batches: Any = [(torch.randn(32, 64), torch.randint(0, 10, (32,))) for _ in range(_STEPS)]
        loader: DataLoader[Any] = DataLoader(batches, batch_size=None)
        stock, ours = _Steps(), _Steps()
        pl.Trainer(accelerator="cpu", callbacks=[stock], **_QUIET).fit(copy.deepcopy(net), loader)
        backend = fulgurite.backend("CSX", compile_dir=folder, background=False, audit=False)
        trainer = fulgurite.Trainer(backend=backend, callbacks=[ours], **_QUIET)
        trainer.fit(net, loader)
    step = trainer.strategy.step_functions["training"]  # type: ignore[attr-defined]
    [executable], [program] = step.executables(), step.programs
    apart = [abs(a - b) / abs(a) for a, b in zip(stock.losses, ours.losses, strict=True)]
    return Outcome(
        lightning_us=stock.step_us(),
        program_us=ours.step_us(),
        compiled=executable.loaded.compiled,
        how=executable.loaded.how,
        prepared_s=program.cost.waited_s,
        apart=max(apart),
    )


@contextmanager
def _in_time() -> Iterator[None]:
    """Raise OutOfTime in the block when its time is over."""

    def end(number: int, frame: object) -> None:
        raise OutOfTime

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def _quiet() -> Iterator[None]:
    """Nothing on the screen but what the caller prints: the outcome holds what there is to say."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)
