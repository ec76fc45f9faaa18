"""A step under each ``autogen_policy``: the same numbers, at which speed.

    taskset -c 0 python tests/benchmarks/policies.py [--steps 2000] [--rounds 20]

For the three models, with one thread: the fits take turns, round by round. Printed are the least
and the median of the rounds, in microseconds a step of ``Trainer.fit``, with stock Lightning's
beside them, and how far the losses of the first steps are from stock's. Nothing is logged.
"""

from __future__ import annotations

import argparse
import os
from statistics import median

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, which reads it once
import contenders
import lightning.pytorch as pl
import models
import torch
from turns import FitInTurns, one_arena, rounds

import fulgurite
from fulgurite.backends import reset_backend

POLICIES = ("disabled", "medium", "aggressive")
COMPARED = 20  # steps


def trainer(policy: str, **options: object) -> pl.Trainer:
    """A Trainer of a policy; stock Lightning's where it is ``stock``."""
    quiet = {**contenders.QUIET, **options}
    if policy == "stock":
        return pl.Trainer(accelerator="cpu", **quiet)
    reset_backend()
    backend = fulgurite.backend("CSX", autogen_policy=policy, background=False, audit=False)
    return fulgurite.Trainer(backend=backend, **quiet)


class Losses(pl.Callback):
    """The losses of a fit."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(
        self, trainer: object, module: object, outputs: object, *_: object
    ) -> None:
        """Note one."""
        self.seen.append(float(outputs["loss"]))  # type: ignore[index]


def losses(model: models.Model, policy: str) -> torch.Tensor:
    """Those of the first steps."""
    noted = Losses()
    fit = trainer(policy, max_steps=COMPARED, callbacks=[noted])
    fit.fit(model.module(), contenders.preloaded(model))
    return torch.tensor(noted.seen)


def contender(model: models.Model, policy: str) -> FitInTurns:
    """A fit that takes turns."""

    def fit(pause: pl.Callback) -> None:
        torch.set_num_threads(1)
        made = trainer(policy, max_epochs=-1, callbacks=[pause])
        made.fit(model.module(), contenders.preloaded(model))

    class Pausing(FitInTurns, pl.Callback):
        """A callback to Lightning."""

    return Pausing(fit)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    torch.set_num_threads(1)
    contenders.quiet()
    one_arena()
    print("| step | policy | least | median | by medium's | losses apart |")
    print("| --- | --- | --- | --- | --- | --- |")
    for model in (models.mlp(), models.convnet(), models.gpt()):
        names = ("stock", *POLICIES)
        wanted = losses(model, "stock")
        apart = {one: ((losses(model, one) - wanted) / wanted).abs().max().item() for one in names}
        fits = {one: contender(model, one) for one in names}
        times = rounds(
            fits, max(10, options.steps // options.rounds // model.slower), options.rounds
        )
        for one in names:
            least = min(times[one])
            print(
                f"| {model.name} | {one} | {least:,.0f} µs | {median(times[one]):,.0f} µs |"
                f" {least / min(times['medium']):.2f} | {apart[one]:.0e} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
