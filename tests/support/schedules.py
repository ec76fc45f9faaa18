"""Schedules under test: each class, its arguments, and what must give the same numbers.

Arguments are written once, in the words of weight decay; ``made`` turns them into those of either.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim import lr_scheduler as theirs

from fulgurite.optim import lr_scheduler, weight_decay_scheduler
from fulgurite.optim.scheduler import Scheduler

STEPS = 1000
OWN = 0.1
"""The learning rate and the weight decay that optimizers here begin with."""

Spec = tuple[str, dict[str, Any]]
"""A class without LR or WD at its end, and its arguments; inner schedulers are such pairs again."""

_LR_NAMES = {
    "CosineAnnealingWarmRestarts": "CosineAnnealingWarmRestarts",
    "Chained": "ChainedScheduler",
}
_LR_ARGUMENTS = {
    "initial_val": "initial_learning_rate",
    "end_val": "end_learning_rate",
    "val": "learning_rate",
    "vals": "learning_rates",
    "base_val": "base_lr",
    "max_val": "max_lr",
    "val_lambda": "lr_lambda",
}


def sgd(*groups: dict[str, Any], **options: Any) -> Optimizer:
    """An optimizer of one weight per group."""
    each = [{"params": [torch.nn.Parameter(torch.ones(1))], **group} for group in groups or ({},)]
    optimizer = torch.optim.SGD(each, **{"lr": OWN, "weight_decay": OWN, **options})
    optimizer.step()  # torch's schedulers warn where they step first
    return optimizer


def made(key: str, optimizer: Optimizer, spec: Spec) -> Scheduler:
    """The scheduler of "lr" or "weight_decay" that a spec describes."""
    name, arguments = spec
    given = dict(arguments)
    if "schedulers" in given:
        given["schedulers"] = [made(key, optimizer, inner) for inner in given["schedulers"]]
    if "scheduler" in given:
        given["scheduler"] = made(key, optimizer, given["scheduler"])
    first = () if name == "Chained" else (optimizer,)
    kind: type[Scheduler]
    if key == "weight_decay":
        kind = getattr(weight_decay_scheduler, f"{name}WD")
        return kind(*first, **given)
    kind = getattr(lr_scheduler, _LR_NAMES.get(name, f"{name}LR"))
    return kind(*first, **{_LR_ARGUMENTS.get(word, word): given[word] for word in given})


@dataclass(frozen=True)
class Case:
    """A schedule, and either torch's or a formula of the count."""

    spec: Spec
    torch: Callable[[Optimizer], Any] | None = None
    formula: Callable[[int], float] | None = None

    def expected(self) -> list[float]:
        """The numbers of each step."""
        if self.formula is not None:
            return [self.formula(step) for step in range(STEPS)]
        optimizer = sgd()
        assert self.torch is not None
        scheduler, numbers = self.torch(optimizer), []
        optimizer.step()
        for _ in range(STEPS):
            numbers.append(optimizer.param_groups[0]["lr"])
            scheduler.step()
        return numbers


def squares(step: Tensor | int) -> Any:
    """A factor in tensor code; torch's get it with Python's numbers."""
    return 1 / (1 + step / 100) ** 2


def shrink(step: Tensor | int) -> Any:
    return 1 - 1 / (step + 50)


def cycled(step: int) -> float:
    """Keras' PolynomialDecay with cycle=True, end 0.01, 300 steps, power 1.5."""
    length = 300 * max(1, math.ceil(step / 300))
    return (OWN - 0.01) * (1 - step / length) ** 1.5 + 0.01


def inverse_time(step: int) -> float:
    return OWN / (1 + 0.5 * step / 70)


def inverse_time_stairs(step: int) -> float:
    return OWN / (1 + 0.25 * math.floor(step**2 / 500))


def cosine_decay(step: int) -> float:
    return 0.01 + (OWN - 0.01) * 0.5 * (1 + math.cos(math.pi * min(step, 600) / 600))


def product(first: int, last: int) -> float:
    return math.prod(shrink(step) for step in range(first, last + 1))


WARM_UP: Spec = ("Linear", {"initial_val": OWN / 10, "end_val": OWN, "total_iters": 100})

CASES: dict[str, Case] = {
    "constant": Case(("Constant", {"val": OWN}), lambda o: theirs.ConstantLR(o, factor=1.0)),
    "a factor for some steps": Case(
        ("PiecewiseConstant", {"vals": [OWN / 4, OWN], "milestones": [50]}),
        lambda o: theirs.ConstantLR(o, factor=0.25, total_iters=50),
    ),
    "piecewise": Case(
        ("PiecewiseConstant", {"vals": [0.3, 0.2, 0.0, 0.1], "milestones": [1, 400, 999]}),
        formula=lambda t: 0.3 if t < 1 else 0.2 if t < 400 else 0.0 if t < 999 else 0.1,
    ),
    "linear": Case(
        ("Linear", {"initial_val": OWN / 3, "end_val": OWN, "total_iters": 5}),
        lambda o: theirs.LinearLR(o, start_factor=1 / 3, total_iters=5),
    ),
    "linear down": Case(
        ("Linear", {"end_val": OWN / 5, "total_iters": 700}),
        lambda o: theirs.LinearLR(o, start_factor=1.0, end_factor=0.2, total_iters=700),
    ),
    "linear cycle": Case(
        ("Linear", {"end_val": 0.0, "total_iters": 300, "cycle": True}),
        formula=lambda t: OWN * (1 - t / (300 * max(1, math.ceil(t / 300)))),
    ),
    "polynomial": Case(
        ("Polynomial", {"end_val": 0.0, "total_iters": 900, "power": 2.5}),
        lambda o: theirs.PolynomialLR(o, total_iters=900, power=2.5),
    ),
    "polynomial to an end": Case(
        ("Polynomial", {"initial_val": 1.0, "end_val": 0.2, "total_iters": 900, "power": 0.5}),
        formula=lambda t: (1 - 0.2) * (1 - min(t, 900) / 900) ** 0.5 + 0.2,
    ),
    "polynomial cycle": Case(
        ("Polynomial", {"end_val": 0.01, "total_iters": 300, "power": 1.5, "cycle": True}),
        formula=cycled,
    ),
    "exponential": Case(
        ("Exponential", {"total_iters": 1, "decay_rate": 0.99}),
        lambda o: theirs.ExponentialLR(o, gamma=0.99),
    ),
    "exponential in 200 steps": Case(
        ("Exponential", {"initial_val": 0.5, "total_iters": 200, "decay_rate": 0.3}),
        formula=lambda t: 0.5 * 0.3 ** (t / 200),
    ),
    "exponential stairs": Case(
        ("Exponential", {"total_iters": 150, "decay_rate": 0.5, "staircase": True}),
        lambda o: theirs.StepLR(o, step_size=150, gamma=0.5),
    ),
    "inverse time": Case(
        (
            "InverseExponentialTimeDecay",
            {"step_exponent": 1, "total_iters": 70, "decay_rate": 0.5},
        ),
        formula=inverse_time,
    ),
    "inverse time stairs": Case(
        (
            "InverseExponentialTimeDecay",
            {"step_exponent": 2, "total_iters": 500, "decay_rate": 0.25, "staircase": True},
        ),
        formula=inverse_time_stairs,
    ),
    "inverse square root": Case(
        ("InverseSquareRootDecay", {"initial_val": 0.3, "scale": 2.0, "warmup_steps": 64}),
        formula=lambda t: 0.3 * 2.0 / math.sqrt(max(t, 64)),
    ),
    "inverse square root by default": Case(
        ("InverseSquareRootDecay", {}), formula=lambda t: 1 / math.sqrt(max(t, 1))
    ),
    "cosine decay": Case(
        ("CosineDecay", {"end_val": 0.01, "total_iters": 600}), formula=cosine_decay
    ),
    "cosine annealing": Case(
        ("CosineAnnealing", {"T_max": 300, "eta_min": 1e-3}),
        lambda o: theirs.CosineAnnealingLR(o, T_max=300, eta_min=1e-3),
    ),
    "cosine annealing to zero": Case(
        ("CosineAnnealing", {"T_max": 999}), lambda o: theirs.CosineAnnealingLR(o, T_max=999)
    ),
    **{
        f"warm restarts, T_0={first}, T_mult={times}": Case(
            ("CosineAnnealingWarmRestarts", {"T_0": first, "T_mult": times, "eta_min": 1e-3}),
            lambda o, first=first, times=times: theirs.CosineAnnealingWarmRestarts(
                o, first, times, eta_min=1e-3
            ),
        )
        for first, times in ((7, 1), (1, 1), (10, 2), (1, 2), (1, 3), (3, 10), (49, 3))
    },
    "step": Case(
        ("Step", {"step_size": 30, "gamma": 0.7}), lambda o: theirs.StepLR(o, 30, gamma=0.7)
    ),
    "multi-step": Case(
        ("MultiStep", {"milestones": [3, 80, 800], "gamma": 0.2}),
        lambda o: theirs.MultiStepLR(o, [3, 80, 800], gamma=0.2),
    ),
    "cyclic": Case(
        ("Cyclic", {"base_val": 0.01, "max_val": 0.2, "step_size_up": 70, "step_size_down": 30}),
        lambda o: theirs.CyclicLR(o, 0.01, 0.2, 70, 30, cycle_momentum=False),
    ),
    "cyclic, halved": Case(
        (
            "Cyclic",
            {"base_val": 0.01, "max_val": 0.2, "step_size_up": 45, "mode": "triangular2"},
        ),
        lambda o: theirs.CyclicLR(o, 0.01, 0.2, 45, mode="triangular2", cycle_momentum=False),
    ),
    "cyclic, shrinking": Case(
        (
            "Cyclic",
            {"base_val": 0.01, "max_val": 0.2, "step_size_up": 45, "mode": "exp_range"}
            | {"gamma": 0.995},
        ),
        lambda o: theirs.CyclicLR(
            o, 0.01, 0.2, 45, mode="exp_range", gamma=0.995, cycle_momentum=False
        ),
    ),
    **{
        f"cyclic by a function of {mode}": Case(
            (
                "Cyclic",
                {"base_val": 0.01, "max_val": 0.2, "step_size_up": 60}
                | {"scale_fn": squares, "scale_mode": mode},
            ),
            lambda o, mode=mode: theirs.CyclicLR(
                o, 0.01, 0.2, 60, scale_fn=squares, scale_mode=mode, cycle_momentum=False
            ),
        )
        for mode in ("cycle", "iterations")
    },
    **{
        f"one cycle, {strategy}, three_phase={three}": Case(
            (
                "OneCycle",
                {"initial_val": 0.4 / 25, "max_val": 0.4, "total_steps": STEPS, "pct_start": 0.25}
                | {"anneal_strategy": strategy, "three_phase": three},
            ),
            lambda o, strategy=strategy, three=three: theirs.OneCycleLR(
                o,
                0.4,
                STEPS,
                pct_start=0.25,
                anneal_strategy=strategy,
                three_phase=three,
                cycle_momentum=False,
            ),
        )
        for strategy in ("cos", "linear")
        for three in (False, True)
    },
    "one cycle by default": Case(
        ("OneCycle", {"initial_val": 0.4 / 25, "max_val": 0.4}),
        lambda o: theirs.OneCycleLR(o, 0.4, 1000, cycle_momentum=False),
    ),
    "function": Case(
        ("Lambda", {"val_lambda": squares}), lambda o: theirs.LambdaLR(o, lr_lambda=squares)
    ),
    "list of functions": Case(
        ("Lambda", {"val_lambda": [squares]}), lambda o: theirs.LambdaLR(o, lr_lambda=[squares])
    ),
    "coefficient": Case(
        ("Multiplicative", {"coefficient": 0.99}),
        lambda o: theirs.MultiplicativeLR(o, lr_lambda=lambda _: 0.99),
    ),
    "product of a function": Case(
        ("Multiplicative", {"val_lambda": shrink}),
        lambda o: theirs.MultiplicativeLR(o, lr_lambda=shrink),
    ),
    "warm-up, then cosine": Case(
        (
            "Sequential",
            {"schedulers": [WARM_UP, ("CosineAnnealing", {"T_max": 900})], "milestones": [100]},
        ),
        lambda o: theirs.SequentialLR(
            o,
            [
                theirs.LinearLR(o, start_factor=0.1, total_iters=100),
                theirs.CosineAnnealingLR(o, T_max=900),
            ],
            [100],
        ),
    ),
    "three in a row, without milestones": Case(
        (
            "Sequential",
            {
                "schedulers": [
                    WARM_UP,
                    ("Constant", {"val": OWN, "total_iters": 250}),
                    ("Step", {"step_size": 60, "gamma": 0.5}),
                ]
            },
        ),
        lambda o: theirs.SequentialLR(
            o,
            [
                theirs.LinearLR(o, start_factor=0.1, total_iters=100),
                theirs.ConstantLR(o, factor=1.0),
                theirs.StepLR(o, 60, gamma=0.5),
            ],
            [100, 350],
        ),
    ),
    "warm-up, then a product": Case(
        ("Sequential", {"schedulers": [WARM_UP, ("Multiplicative", {"val_lambda": shrink})]}),
        formula=lambda t: OWN * (0.1 + 0.9 * t / 100 if t < 100 else product(1, t - 100)),
    ),
    "a row in a row": Case(
        (
            "Sequential",
            {
                "schedulers": [
                    ("Constant", {"val": 0.5, "total_iters": 20}),
                    (
                        "Sequential",
                        {"schedulers": [WARM_UP, ("Multiplicative", {"val_lambda": shrink})]},
                    ),
                ]
            },
        ),
        formula=lambda t: (
            0.5
            if t < 20
            else OWN * (0.1 + 0.9 * (t - 20) / 100 if t < 120 else product(1, t - 120))
        ),
    ),
    "chain": Case(
        (
            "Chained",
            {
                "schedulers": [
                    WARM_UP,
                    ("Exponential", {"total_iters": 1, "decay_rate": 0.995}),
                    ("MultiStep", {"milestones": [300, 600], "gamma": 0.5}),
                ]
            },
        ),
        lambda o: theirs.ChainedScheduler(
            [
                theirs.LinearLR(o, start_factor=0.1, total_iters=100),
                theirs.ExponentialLR(o, gamma=0.995),
                theirs.MultiStepLR(o, [300, 600], gamma=0.5),
            ]
        ),
    ),
    "chain of products": Case(
        (
            "Chained",
            {
                "schedulers": [
                    ("Multiplicative", {"val_lambda": shrink}),
                    ("Multiplicative", {"val_lambda": shrink, "initial_val": 3.0}),
                ]
            },
        ),
        lambda o: theirs.ChainedScheduler(
            [theirs.MultiplicativeLR(o, shrink), theirs.MultiplicativeLR(o, shrink)]
        ),
    ),
    "scaled per group": Case(
        ("ScalePerParam", {"scheduler": ("Step", {"step_size": 100, "gamma": 0.5})}),
        lambda o: theirs.StepLR(o, 100, gamma=0.5),
    ),
}
"""By name. Sources of the formulas: for cycle, the cosine decay and the inverse time, Keras'
documentation of optimizers.schedules; for the others, Cerebras' documentation of cstorch.optim.
"""


def numbers(scheduler: Scheduler) -> list[float]:
    """The numbers of each step, on the host."""
    group, found = scheduler.optimizer.param_groups[0], []
    for _ in range(STEPS):
        found.append(float(group[scheduler.key]))
        scheduler.step()
    return found
