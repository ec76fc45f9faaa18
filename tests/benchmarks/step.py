"""Microseconds a training step: the same MLP in several trainers, side by side in one run.

    taskset -c 0 python tests/benchmarks/step.py [--steps 400] [--rounds 7]

MLP 64-128-128-10, batch 32, AdamW, float32, on one core and one thread, over preloaded batches. The
contenders take turns, so that a noisy machine is noisy for all of them; the table shows each one's
median and fastest round, and the median of its paired ratios to stock Lightning with the same
logging. The run fails if a program of ours was not compiled. JSON is written beside this file.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader

import fulgurite
from fulgurite.backends.csx.fabric import cpu_name
from fulgurite.backends.csx.step import STEP

BATCHES = 64


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Preloaded batches: x [32, 64], y [32]."""
    generator = torch.Generator().manual_seed(0)
    return [
        (
            torch.randn(32, 64, generator=generator),
            torch.randint(0, 10, (32,), generator=generator),
        )
        for _ in range(BATCHES)
    ]


class MLP(pl.LightningModule):
    """64-128-128-10 with AdamW; ``logs`` turns one ``self.log`` a step on."""

    def __init__(self, logs: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.logs = logs
        self.net = nn.Sequential(
            nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)
        )

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        if self.logs:
            self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Clock(pl.Callback):
    """Microseconds a step between two steps of one fit."""

    def __init__(self, first: int, last: int) -> None:
        self.first, self.last, self.us = first, last, 0.0

    def on_train_batch_end(self, trainer: pl.Trainer, *args: object) -> None:
        if trainer.global_step == self.first:
            self.began = time.perf_counter()
        elif trainer.global_step == self.last:
            self.us = (time.perf_counter() - self.began) / (self.last - self.first) * 1e6


def plain(fused: bool) -> Callable[[int], float]:
    """A hand-written eager loop."""
    module, data = MLP(), batches()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, fused=fused)

    def run(steps: int) -> float:
        began = time.perf_counter()
        for i in range(steps):
            loss = nn.functional.cross_entropy(
                module.net(data[i % BATCHES][0]), data[i % BATCHES][1]
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return (time.perf_counter() - began) / steps * 1e6

    return run


def fit(trainer_class: type[pl.Trainer], logs: bool, **options: object) -> Callable[[int], float]:
    """``Trainer.fit``, from step 50 on."""

    def run(steps: int) -> float:
        clock = Clock(50, 50 + steps)
        trainer = trainer_class(
            max_steps=50 + steps,
            max_epochs=-1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[clock],
            **options,
        )
        trainer.fit(MLP(logs), DataLoader(batches(), batch_size=None))
        if trainer_class is fulgurite.Trainer:
            check_compiled(trainer)
        return clock.us

    return run


def check_compiled(trainer: pl.Trainer) -> None:
    """Fail where a program ran operation by operation: its time would mean nothing."""
    for built in trainer.strategy.step_functions["training"]._built:
        if not all(ready._loaded.compiled for ready in built.ready.values()):
            sys.exit("a program was not compiled: the figures would mean nothing")


def bare() -> Callable[[int], float]:
    """The program of a fit, called directly on the trained module, checks of inputs included."""
    trainer = fulgurite.Trainer(
        device="CSX",
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = batches()
    trainer.fit(MLP(), DataLoader(data, batch_size=None))
    check_compiled(trainer)
    step = trainer.strategy.step_functions["training"]
    data = [list(batch) for batch in data]  # as the loader gives them

    def run(steps: int) -> float:
        began = time.perf_counter()
        for i in range(steps):
            step(data[i % BATCHES], dict, STEP)
        return (time.perf_counter() - began) / steps * 1e6

    return run


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    stock = {"accelerator": "cpu"}
    ours = {"device": "CSX"}
    contenders = {
        "plain eager loop": plain(fused=False),
        "plain eager loop, fused AdamW": plain(fused=True),
        "Lightning fit, nothing logged": fit(pl.Trainer, False, **stock),
        "Lightning fit, one self.log a step": fit(pl.Trainer, True, **stock),
        "Fulgurite fit, nothing logged": fit(fulgurite.Trainer, False, **ours),
        "Fulgurite fit, one self.log a step": fit(fulgurite.Trainer, True, **ours),
        "Fulgurite bare program": bare(),
    }
    for run in contenders.values():
        run(50)
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(arguments.rounds):
        for name, run in contenders.items():
            times[name].append(run(arguments.steps))
    report(times)


def report(times: dict[str, list[float]]) -> None:
    """Print the table and write the JSON."""
    print(f"{cpu_name()}, {len(os.sched_getaffinity(0))} core(s), torch {torch.__version__}")
    print(f"{'µs a step':38s} {'median':>8s} {'fastest':>8s} {'Lightning is':>13s}")
    rows = []
    for name, values in times.items():
        logs = "one self.log" if "one self.log" in name else "nothing logged"
        against = times[next(n for n in times if n.startswith("Lightning fit") and logs in n)]
        ratio = statistics.median(a / b for a, b in zip(against, values, strict=True))
        rows.append(
            {
                "name": name,
                "median_us": statistics.median(values),
                "fastest_us": min(values),
                "lightning_ratio": ratio,
            }
        )
        print(f"{name:38s} {statistics.median(values):8.0f} {min(values):8.0f} {ratio:11.2f} x")
    path = Path(__file__).with_suffix(".json")
    path.write_text(json.dumps({"cpu": cpu_name(), "torch": torch.__version__, "rows": rows}))
    print(f"written: {path}")


if __name__ == "__main__":
    main()
