"""The estimate of stock Lightning beside what it takes: the zoo, the README's script, the digits.

    python tests/benchmarks/stock.py [readme digits mlp lstm ...] [--rounds 3] [--seconds 1.5]

Each model has a process of its own, in which stock Lightning and programs that run operation by
operation take turns. Prints a Markdown table:

    measured     milliseconds a batch of stock Lightning, the median of the rounds
    here         the same of ours, operation by operation; in brackets by measured
    estimated    the same as a fit's end says it; in brackets by measured
    units        of Python that stock adds to the kernels: measured (see ``costs/stock.py``)
    operations, logged    what these are estimated from

and at last the units of a batch, an operation and a logged value that would fit best.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import statistics
import subprocess
import sys
import warnings
from pathlib import Path
from time import perf_counter
from typing import Any

import lightning.pytorch as pl
import torch
from models import ACCURACY, LOSS, Model, convnet, gpt, mlp
from torch.utils.data import DataLoader, TensorDataset

import fulgurite
from fulgurite.backends.csx.costs.stock import unit_s

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "examples/zoo"))
sys.path.append(str(ROOT / "examples"))
compare, digits = map(importlib.import_module, ("compare", "digits"))  # examples/ is no package

BENCHMARKS = {"mlp": mlp, "convnet": convnet, "gpt": gpt}
NAMES = ("readme", "digits", *BENCHMARKS, *compare.ZOO)
FIRST = 40  # batches that are not timed: programs are traced, threads chosen


class Watch(pl.Callback):
    """Seconds a batch, of those after the first ones."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self.ends = seconds, list[float]()

    def on_train_batch_end(self, trainer: pl.Trainer, *args: object) -> None:
        self.ends.append(perf_counter())
        timed = self.ends[FIRST:]
        trainer.should_stop = len(timed) > 5 and timed[-1] - timed[0] > self._seconds

    @property
    def batch_s(self) -> float:
        timed = self.ends[FIRST:]
        return (timed[-1] - timed[0]) / (len(timed) - 1)


def made(name: str) -> tuple[pl.LightningModule, list[Any]]:
    """A module and its loaders."""
    if name == "digits":
        return digits.Digits(), [digits.loaders(shifted=True)[0]]
    if name == "readme":
        x, y = torch.randn(3200, 64), torch.randint(0, 10, (3200,))
        return mlp().module(LOSS), [DataLoader(TensorDataset(x, y), batch_size=32)]
    if name in BENCHMARKS:
        model: Model = BENCHMARKS[name]()
        return model.module(ACCURACY), [DataLoader(model.batches, batch_size=None)]  # type: ignore[arg-type]
    file = importlib.import_module(name)
    loaders = [file.loader()] if hasattr(file, "loader") else []
    return getattr(file, compare.ZOO[name])(), loaders


def timed(name: str, ours: bool, seconds: float) -> tuple[float, pl.Trainer]:
    """Seconds a batch of one fit, and its Trainer."""
    pl.seed_everything(0, verbose=False)
    module, loaders = made(name)
    watch = Watch(seconds)
    quiet = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    options: dict[str, Any] = {**quiet, "max_epochs": 10_000, "callbacks": [watch]}
    if ours:
        backend = fulgurite.backend("CSX", autogen_policy="disabled", audit=False)
        trainer: pl.Trainer = fulgurite.Trainer(backend=backend, **options)
    else:
        trainer = pl.Trainer(accelerator="cpu", **options)
    trainer.fit(module, *loaders)
    return watch.batch_s, trainer


def child(name: str, rounds: int, seconds: float) -> None:
    """Print what was measured of a model, as JSON."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    stock, ours, units, estimates = [], list[float](), [], []
    for _ in range(rounds):
        units.append(unit_s())
        stock.append(timed(name, False, seconds)[0])
        batch_s, trainer = timed(name, True, seconds)
        ours.append(batch_s)
        strategy: Any = trainer.strategy
        estimates.append(strategy.fit_summary.lightning_batch_s)
        step = strategy.step_functions["training"]
        [*_, counts] = [one.counts(step.speed) for one in step.executables()]
    known = [one for one in estimates if one is not None]
    kernels_s, unit = counts.kernels_s, statistics.median(units)
    print(
        json.dumps(
            {
                "stock_ms": statistics.median(stock) * 1e3,
                "ours_ms": statistics.median(ours) * 1e3,
                "estimate_ms": statistics.median(known) * 1e3 if known else None,
                "unit_us": unit * 1e6,
                "units": (statistics.median(stock) - kernels_s) / unit,
                "kernels": kernels_s / unit,
                "counts": [counts.operations, counts.logged],
            }
        )
    )


def main() -> None:
    """Print the table, or what one model gave."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help=", ".join(NAMES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.5, help="of each fit")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        return child(options.names[0], options.rounds, options.seconds)
    heads = ("model", "measured, ms", "here", "estimated", "units", "operations", "logged")
    print(f"| {' | '.join(heads)} |\n|{' --- |' * len(heads)}")
    rows, wanted = [], []
    for name in options.names or NAMES:
        arguments = [f"--rounds={options.rounds}", f"--seconds={options.seconds}", "--child"]
        command = [sys.executable, __file__, name, *arguments]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        one = json.loads(done.stdout.splitlines()[-1])
        estimate = one["estimate_ms"]
        told = "none" if estimate is None else f"{estimate:.2f} ({estimate / one['stock_ms']:.2f})"
        here = f"{one['ours_ms']:.2f} ({one['ours_ms'] / one['stock_ms']:.2f})"
        cells = (name, f"{one['stock_ms']:.2f}", here, told, f"{one['units']:.1f}")
        print(f"| {' | '.join((*cells, *map(str, one['counts'])))} |", flush=True)
        total = one["units"] + one["kernels"]
        rows.append([1 / total, *(count / total for count in one["counts"])])
        wanted.append(one["units"] / total)
    # relative to what stock takes in all, so that the Python of a large model counts as little
    best = torch.linalg.lstsq(torch.tensor(rows), torch.tensor(wanted).unsqueeze(1)).solution
    print("best:", [round(float(one), 3) for one in best])


if __name__ == "__main__":
    main()
