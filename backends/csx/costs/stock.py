"""What stock Lightning would have taken for a fit: an estimate.

Its step calls the kernels that a program calls operation by operation, in the least time that was
seen (so it is rather too low: stock's several threads often take longer), and around them runs
Python: modules, autograd, the optimizer, ``self.log``, hooks, loops, the progress bar. How fast a
machine runs that is timed when a fit begins and when it ends, in *units*: a unit is a step of a
tiny net in eager torch, and the faster ones count. How many units a batch has is counted; what each
thing counts was measured on the zoo, the README's script and the digits
(``tests/benchmarks/stock.py``, docs/what_pays.md). Where other processes took the cores away there
is no estimate: a step of two threads then takes any time.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import lightning.pytorch as pl
import rich
import torch
from lightning.pytorch.callbacks import ProgressBar, RichProgressBar
from torch import nn

from fulgurite.backends.csx.compile.store.measured import measured_before, note_measured

# units, of a batch that is trained on and of one that is not: loops and hooks; of each operation
# and logged value; and of a bar that is shown, on a terminal where it is Rich's
_BATCH, _EVALUATED, _OPERATION, _LOGGED, _BAR, _RICH = 2.3, 1.4, 0.009, 0.5, 0.3, 2.0
_BUSY = 0.1
"""Seconds that a thread waits for a core, by those that it has one: 0.01 to 0.07 on two idle cores,
0.6 to 0.9 beside two busy processes (measured)."""
_ROUNDS = 12


class Used:
    """What the thread that made this object has had of a core since, and waited for one."""

    def __init__(self) -> None:
        self._before = _scheduled_ns()

    @property
    def is_busy(self) -> bool:
        """Whether other processes took cores away."""
        had_ns, waited_ns = (
            now - was for now, was in zip(_scheduled_ns(), self._before, strict=True)
        )
        return waited_ns > _BUSY * had_ns


@dataclass(frozen=True, slots=True)
class Stock:
    """What stock Lightning would have taken, an estimate.

    Args:
        total_s: for the fit.
        batch_s: for a training batch, without its data.
    """

    total_s: float
    batch_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """What is known of an entry point of a program.

    Args:
        key: the same in another process that finds it compiled; empty: there is none.
        compiled: whether it is compiled.
        batches: how many of its steps were like each other.
        kernels_s: seconds of a run operation by operation, where they were measured.
        operations: how many it has.
        logged: how many values it logs.
    """

    key: str
    compiled: bool
    batches: int
    kernels_s: float | None
    operations: int
    logged: int


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage of a fit: the entry points of its programs, its batches, and what they took."""

    entries: list[Counts]
    batches: int
    in_steps_s: float


def estimate(
    trainer: pl.Trainer, stages: Mapping[str, Stage], total_s: float, unit: float = math.inf
) -> Stock | None:
    """An estimate, of a fit that has ended.

    Args:
        trainer: its Trainer.
        stages: by name, "training" among them.
        total_s: what it took here.
        unit: what ``unit_s`` was when it began: a moment with others beside it makes one too long.

    Returns:
        The estimate; None where nothing ran operation by operation, now or before.
    """
    unit, found = min(unit, unit_s()), dict[str, float]()
    bar_s = _bar_units(trainer) * unit
    for name, stage in stages.items():
        loops = _BATCH if name == "training" else _EVALUATED
        each = [(_batch_s(one, unit, loops), one.batches) for one in stage.entries]
        known = [(seconds, batches) for seconds, batches in each if seconds is not None]
        if stage.batches and not known:
            return None
        found[name] = _mean(known) + bar_s if known else 0.0
    rest_s = total_s - sum(stage.in_steps_s for stage in stages.values())
    in_steps_s = sum(found[name] * stage.batches for name, stage in stages.items())
    return Stock(rest_s + in_steps_s, found["training"])


def unit_s() -> float:
    """Seconds of a step of a tiny net in eager torch: the median of some, 5 ms for all."""
    with torch.inference_mode(False), torch.enable_grad(), torch.random.fork_rng(devices=()):
        net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
        optimizer, x = torch.optim.SGD(net.parameters(), lr=1e-3), torch.ones(4, 4)
        seconds = []
        for _ in range(_ROUNDS):
            began = time.perf_counter()
            loss = net(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def _batch_s(entry: Counts, unit: float, loops: float) -> float | None:
    """What a batch takes in stock Lightning, noted for processes that find it compiled."""
    name = f"stock {entry.key}"
    if entry.kernels_s is None:
        before = measured_before(name)
        return statistics.median(before) * unit if before else None
    python = loops + _OPERATION * entry.operations + _LOGGED * entry.logged
    if entry.key:
        note_measured(name, entry.kernels_s / unit + python)
    return entry.kernels_s + python * unit


def _mean(known: Sequence[tuple[float, int]]) -> float:
    """Each as often as it was; where none was more than traced, all alike."""
    weights = [batches for _, batches in known]
    return statistics.fmean([one for one, _ in known], weights if any(weights) else None)


def _bar_units(trainer: pl.Trainer) -> float:
    bar: ProgressBar | None = trainer.progress_bar_callback
    if bar is None or not getattr(bar, "is_enabled", False):
        return 0.0
    on_terminal = isinstance(bar, RichProgressBar) and rich.get_console().is_terminal
    return _RICH if on_terminal else _BAR


def _scheduled_ns() -> tuple[int, int]:
    """How long this thread has had a core, and waited for one; nothing where nobody counts that."""
    try:
        had_ns, waited_ns, _ = Path("/proc/thread-self/schedstat").read_text().split()
    except (OSError, ValueError):  # not Linux, or a kernel without it
        return 0, 0
    return int(had_ns), int(waited_ns)
