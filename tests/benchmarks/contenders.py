"""The contenders built on torch: eager loops, torch.compile, accelerate, Lightning, Fulgurite."""

from __future__ import annotations

import functools
import logging
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import lightning.pytorch as pl
import torch
from models import LEARNING_RATE, NOTHING, Classifier, Model, Schedule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from turns import Contender, FitInTurns, timed

import fulgurite
from fulgurite.backends.csx.config import CSXBackend

FLOAT32 = "32-true"
QUIET: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
PROGRAM_ALONE = {
    option: False for option in ("audit", "background") if option in CSXBackend.__dataclass_fields__
}
"""Commits that are compared may be older than audits."""


def quiet() -> None:
    """Nothing on the screen but figures and errors."""
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "torch._dynamo", "torch._logging"):
        logging.getLogger(name).setLevel(logging.ERROR)


def preloaded(model: Model) -> DataLoader[Any]:
    """Batches that lie ready."""
    return DataLoader(model.batches, batch_size=None)


def shuffling(model: Model) -> DataLoader[Any]:
    """The loader of most scripts: draws rows and collates them."""
    x, y = (torch.cat(parts) for parts in zip(*model.batches, strict=True))
    return DataLoader(TensorDataset(x, y), batch_size=len(model.batches[0][0]), shuffle=True)


def cross_entropy(net: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The loss of every hand-written loop."""
    return nn.functional.cross_entropy(net(batch[0]), batch[1])


def eager(model: Model, fused: bool = False) -> Contender:
    """A hand-written eager loop over preloaded batches."""
    return _loop(model, lambda net: functools.partial(cross_entropy, net), fused)


def compiled(model: Model) -> Contender:
    """torch.compile of net and loss, fused AdamW."""
    return _loop(model, lambda net: torch.compile(functools.partial(cross_entropy, net)), True)


def _loop(
    model: Model, make: Callable[[nn.Module], Callable[[Any], Tensor]], fused: bool
) -> Contender:
    net, batches = model.module().net, model.batches
    optimizer = torch.optim.AdamW(net.parameters(), lr=LEARNING_RATE, fused=fused)
    loss_of = make(net)

    def step(i: int) -> None:
        loss = loss_of(batches[i % len(batches)])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return timed(step)


def eager_shuffling(model: Model) -> Contender:
    """A hand-written eager loop over the shuffling loader, epoch after epoch."""
    net = model.module().net
    optimizer = torch.optim.AdamW(net.parameters(), lr=LEARNING_RATE)
    batches = _endless(shuffling(model))

    def step(i: int) -> None:
        loss = cross_entropy(net, next(batches))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return timed(step)


def _endless(loader: Iterable[Any]) -> Iterator[Any]:
    while True:
        yield from loader


def accelerated(model: Model) -> Contender:
    """The loop of accelerate's documentation."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    net = model.module().net
    optimizer = torch.optim.AdamW(net.parameters(), lr=LEARNING_RATE)
    net, optimizer, loader = accelerator.prepare(net, optimizer, preloaded(model))
    batches = _endless(loader)

    def step(i: int) -> None:
        loss = cross_entropy(net, next(batches))
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()

    return timed(step)


def fit(
    model: Model,
    *,
    ours: bool,
    logs: str = NOTHING,
    feed: Callable[[Model], DataLoader[Any]] = preloaded,
    schedule: Schedule | None = None,
    precision: str = FLOAT32,
) -> Contender:
    """``Trainer.fit``: Fulgurite's if ``ours``, else stock Lightning's."""

    def run(callback: pl.Callback) -> None:
        trainer = make_trainer(ours, max_epochs=-1, callbacks=[callback], precision=precision)
        trainer.fit(model.module(logs, schedule), feed(model))
        if ours:
            check_compiled(trainer)

    return FitInTurns(run)


def make_trainer(ours: bool, **options: Any) -> pl.Trainer:
    """A Trainer that only trains.

    Ours without audits: they may use 2 % of a run, which here is mostly waiting for a turn.
    ``audits.py`` measures them.
    """
    if ours:
        return fulgurite.Trainer(
            backend=fulgurite.backend("CSX", **PROGRAM_ALONE), **QUIET, **options
        )
    return pl.Trainer(accelerator="cpu", **QUIET, **options)


def bare(model: Model, schedule: Schedule | None = None, precision: str = FLOAT32) -> Contender:
    """The program of a fit, called directly on the trained module, checks of inputs included."""
    trainer = make_trainer(True, max_steps=1, precision=precision)
    trainer.fit(model.module(schedule=schedule), preloaded(model))
    check_compiled(trainer)
    step = trainer.strategy.step_functions["training"]
    batches = [list(batch) for batch in model.batches]  # as the loader gives them
    return timed(lambda i: step(batches[i % len(batches)], dict))


class Span(pl.Callback):
    """Microseconds a batch, from the end of the first to the end of the last."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_validation_batch_end(self, *args: object) -> None:
        self.ends.append(time.perf_counter())


def validation(model: Model, *, ours: bool, logs: str) -> Contender:
    """The validation loop, from the end of its first batch to the end of its last."""
    module: Classifier = model.module(logs)
    span = Span()
    trainer = make_trainer(ours, callbacks=[span])

    def run(steps: int) -> float:
        batches = [model.batches[i % len(model.batches)] for i in range(steps + 1)]
        span.ends.clear()
        trainer.validate(module, DataLoader(batches, batch_size=None), verbose=False)
        if ours:
            check_compiled(trainer)
        return (span.ends[-1] - span.ends[0]) / steps * 1e6

    return run


def check_compiled(trainer: pl.Trainer) -> None:
    """Fail where a program ran operation by operation: its time would mean nothing."""
    for step in trainer.strategy.step_functions.values():
        if not all(executable.loaded.compiled for executable in step.executables()):
            sys.exit("a program was not compiled: the figures would mean nothing")
