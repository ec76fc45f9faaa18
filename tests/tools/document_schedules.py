"""Draw docs/schedules.png: the learning rate of every class over 1,000 steps.

python tests/tools/document_schedules.py
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import torch
from torch.optim import Optimizer

from fulgurite.optim import lr_scheduler as ours
from fulgurite.optim.scheduler import Scheduler

PICTURE = Path(__file__).parents[2] / "docs" / "schedules.png"
STEPS = 1000

Make = Callable[[Optimizer], Scheduler]


def warm_up(optimizer: Optimizer, steps: int = 100) -> Scheduler:
    """From nothing to the whole learning rate."""
    return ours.LinearLR(optimizer, 0.0, end_learning_rate=1.0, total_iters=steps)


def wave(count: torch.Tensor) -> torch.Tensor:
    """A wave that dies away."""
    return torch.exp(-count / 400) * (1 + 0.3 * torch.sin(2 * math.pi * count / 150)) / 1.15


PANELS: dict[str, dict[str, Make]] = {
    "ConstantLR": {"": lambda o: ours.ConstantLR(o, 0.6)},
    "LinearLR": {
        "": lambda o: ours.LinearLR(o, end_learning_rate=0.1, total_iters=700),
        "cycle": lambda o: ours.LinearLR(o, end_learning_rate=0.1, total_iters=250, cycle=True),
    },
    "PolynomialLR": {
        "power 0.5": lambda o: ours.PolynomialLR(
            o, end_learning_rate=0.1, total_iters=700, power=0.5
        ),
        "power 3": lambda o: ours.PolynomialLR(
            o, end_learning_rate=0.1, total_iters=700, power=3.0
        ),
    },
    "ExponentialLR": {
        "": lambda o: ours.ExponentialLR(o, total_iters=200, decay_rate=0.5),
        "staircase": lambda o: ours.ExponentialLR(
            o, total_iters=200, decay_rate=0.5, staircase=True
        ),
    },
    "InverseExponentialTimeDecayLR": {
        "exponent 1": lambda o: ours.InverseExponentialTimeDecayLR(
            o, step_exponent=1, total_iters=200, decay_rate=1.0
        ),
        "2, staircase": lambda o: ours.InverseExponentialTimeDecayLR(
            o, step_exponent=2, total_iters=60_000, decay_rate=1.0, staircase=True
        ),
    },
    "InverseSquareRootDecayLR": {
        "": lambda o: ours.InverseSquareRootDecayLR(o, scale=10.0, warmup_steps=100)
    },
    "CosineDecayLR": {"": lambda o: ours.CosineDecayLR(o, end_learning_rate=0.1, total_iters=700)},
    "CosineAnnealingLR": {"": lambda o: ours.CosineAnnealingLR(o, T_max=400, eta_min=0.1)},
    "CosineAnnealingWarmRestarts": {
        "T_mult=2": lambda o: ours.CosineAnnealingWarmRestarts(o, T_0=143, T_mult=2, eta_min=0.1)
    },
    "StepLR": {"": lambda o: ours.StepLR(o, step_size=200, gamma=0.6)},
    "MultiStepLR": {"": lambda o: ours.MultiStepLR(o, gamma=0.5, milestones=[150, 600, 800])},
    "PiecewiseConstantLR": {"": lambda o: ours.PiecewiseConstantLR(o, [0.3, 1.0, 0.1], [200, 700])},
    "CyclicLR": {
        mode: lambda o, mode=mode: ours.CyclicLR(
            o, 0.1, 1.0, step_size_up=100, step_size_down=150, mode=mode, gamma=0.998
        )
        for mode in ("triangular2", "exp_range")
    },
    "OneCycleLR": {
        "cos": lambda o: ours.OneCycleLR(o, 0.1, 1.0),
        "three_phase": lambda o: ours.OneCycleLR(
            o, 0.1, 1.0, three_phase=True, anneal_strategy="linear"
        ),
    },
    "LambdaLR": {"": lambda o: ours.LambdaLR(o, lr_lambda=wave)},
    "MultiplicativeLR": {
        "coefficient": lambda o: ours.MultiplicativeLR(o, coefficient=0.995),
        "lr_lambda": lambda o: ours.MultiplicativeLR(o, lr_lambda=lambda t: 1 - 1 / (t + 99)),
    },
    "SequentialLR": {
        "warm-up, cosine": lambda o: ours.SequentialLR(
            o, [warm_up(o), ours.CosineDecayLR(o, end_learning_rate=0.1, total_iters=900)]
        )
    },
    "ChainedScheduler": {
        "warm-up * steps": lambda o: ours.ChainedScheduler(
            [warm_up(o), ours.StepLR(o, step_size=300, gamma=0.6)]
        )
    },
    "ScalePerParamLR": {
        f"factor {factor}": lambda o, factor=factor: ours.ScalePerParamLR(
            scaled(o, factor), ours.CosineDecayLR(o, end_learning_rate=0.1, total_iters=900)
        )
        for factor in (1.0, 0.5)
    },
}


def scaled(optimizer: Optimizer, factor: float) -> Optimizer:
    """The optimizer, its group with a factor."""
    optimizer.param_groups[0]["adjust_learning_rate"] = factor
    return optimizer


def numbers(make: Make) -> list[float]:
    """The learning rate of each step."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    scheduler, found = make(optimizer), []
    for _ in range(STEPS):
        found.append(float(optimizer.param_groups[0]["lr"]))
        scheduler.step()
    return found


def draw(axes: Any, title: str, lines: dict[str, Make]) -> None:
    """One panel."""
    for (label, make), style in zip(lines.items(), ("-", "--"), strict=False):
        axes.plot(numbers(make), style, linewidth=1.4, label=label)
    axes.set_title(title, fontsize=8)
    axes.set_ylim(0, 1.08)
    axes.tick_params(labelsize=6)
    axes.grid(linewidth=0.3)
    if any(lines):
        axes.legend(fontsize=6, frameon=False, loc="best")


def main() -> None:
    """Write the picture; the same classes give the same bytes."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, grid = pyplot.subplots(4, 5, figsize=(11, 7.2), sharex=True, sharey=True)
    for axes, (title, lines) in zip(grid.flat, PANELS.items(), strict=False):
        draw(axes, title, lines)
    for axes in list(grid.flat)[len(PANELS) :]:
        axes.set_axis_off()
    figure.supxlabel("optimizer steps", fontsize=8)
    figure.supylabel("learning rate; the group's own is 1", fontsize=8)
    figure.tight_layout()
    figure.savefig(PICTURE, dpi=100, metadata={"Software": None})


if __name__ == "__main__":
    main()
