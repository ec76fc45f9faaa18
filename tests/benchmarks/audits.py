"""What audits take of a run: seconds in them by the seconds of the whole fit, compile included.

    python tests/benchmarks/audits.py [--mlp 10] [--gpt 60]

An MLP for ten seconds and a GPT for a minute, with a host callback, so that host code which may
have changed something runs in every epoch; then both again with validation, which is a program
more.
"""

from __future__ import annotations

import argparse
import itertools
import os
import time
from datetime import timedelta
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, which reads it once
import contenders as torch_
import lightning.pytorch as pl
import models
import torch

import fulgurite
from fulgurite.backends.csx.program.audit import Audits


class Counted(pl.Callback):
    """Host code at every epoch's ends."""

    def __init__(self) -> None:
        self.epochs = 0

    def on_train_epoch_end(self, *args: object) -> None:
        self.epochs += 1


class Clock:
    """The seconds and the calls of the methods that it is put around."""

    def __init__(self) -> None:
        self.seconds, self.calls = 0.0, 0

    def around(self, function: Any) -> Any:
        """The function, timed."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - began
                self.calls += 1

        return timed


def measure(
    model: models.Model, seconds: float, validates: bool, looks: Clock, wakes: Clock
) -> str:
    """A fit of so many seconds: a line of the table."""
    looks.__init__(), wakes.__init__()  # type: ignore[misc]
    loader = torch_.preloaded(model)
    counted = Counted()
    trainer = fulgurite.Trainer(
        backend=fulgurite.backend("CSX", background=False),
        max_time=timedelta(seconds=seconds),
        limit_val_batches=2 * validates,
        callbacks=[counted],
        **torch_.QUIET,
    )
    began = time.perf_counter()
    trainer.fit(model.module(models.LOSS), loader, loader)
    took = time.perf_counter() - began
    spent = looks.seconds + wakes.seconds
    name = f"{model.name}{', validated' * validates}"
    return (
        f"{name:14} {took:5.1f} s {trainer.global_step:7d} steps {counted.epochs:5d} epochs"
        f" {looks.calls:2d} audits {spent:6.3f} s {100 * spent / took:5.2f} %"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--mlp", type=float, default=10, help="seconds")
    parser.add_argument("--gpt", type=float, default=60, help="seconds")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch_.quiet()
    looks, wakes = Clock(), Clock()
    for name, clock in (("audit", looks), ("wake", wakes)):
        setattr(Audits, name, clock.around(getattr(Audits, name)))
    runs = ((models.mlp(), options.mlp), (models.gpt(), options.gpt))
    for validates, (model, seconds) in itertools.product((False, True), runs):
        print(measure(model, seconds, validates, looks, wakes), flush=True)


if __name__ == "__main__":
    main()
