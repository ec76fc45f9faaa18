"""Schedules that a program computes train as the same schedules do on the host."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from harness import assert_same_run, both, fit
from models import Classifier, loader, mlp
from torch import Tensor
from torch.optim import AdamW

from fulgurite.errors import ConditionalOnTensor, HostRead, StateChanged, TraceError
from fulgurite.optim import lr_scheduler as lr
from fulgurite.optim import weight_decay_scheduler as wd


def shrink(count: Tensor) -> Tensor:
    return 1 - 1 / (count + 5)


def warm_up(optimizer: Any, **options: Any) -> Any:
    return lr.LinearLR(optimizer, 0.0, end_learning_rate=0.01, total_iters=3, **options)


def product(optimizer: Any) -> Any:
    return lr.MultiplicativeLR(optimizer, lr_lambda=shrink)


def waves(optimizer: Any) -> Any:
    return lr.CyclicLR(optimizer, 1.0, 2.0, step_size_up=2, scale_fn=shrink)


MAKERS: dict[str, Any] = {
    "warm-up, then restarts": lambda o: [
        lr.SequentialLR(
            o, [warm_up(o), lr.CosineAnnealingWarmRestarts(o, T_0=2, T_mult=2, eta_min=1e-4)]
        )
    ],
    "functions that work in place": lambda o: [
        lr.ChainedScheduler(
            [
                lr.LambdaLR(o, lr_lambda=lambda t: t.add_(1).reciprocal_()),
                lr.LambdaLR(o, lr_lambda=lambda t: t.add_(2)),
            ]
        )
    ],
    "products within rows": lambda o: [
        lr.SequentialLR(
            o,
            [
                lr.ConstantLR(o, 0.02, total_iters=2),
                lr.SequentialLR(o, [warm_up(o), product(o)]),
            ],
        )
    ],
    "a chain, and weight decay": lambda o: [
        lr.ChainedScheduler(
            [warm_up(o), product(o), lr.StepLR(o, step_size=4, gamma=0.5), waves(o)]
        ),
        wd.CyclicWD(o, 0.0, 0.3, step_size_up=2, step_size_down=3, mode="triangular2"),
    ],
    "one for each tag": lambda o: [
        lr.ScalePerParamLR(o, lr.OneCycleLR(o, 1e-3, 0.02, 20, three_phase=True)),
        wd.PiecewiseConstantWD(o, [0.3, 0.0, 0.1], [2, 7], param_group_tags=[None]),
        wd.LambdaWD(o, val_lambda=lambda t: torch.cos(t) ** 2, param_group_tags="bias"),
    ],
}


class Net(Classifier):
    """An MLP whose biases are a param group of their own."""

    def __init__(self, make: Any) -> None:
        super().__init__(mlp())
        self.make = make

    def configure_optimizers(self) -> Any:
        named = list(self.named_parameters())
        biases = {"tags": "bias", "weight_decay": 0.2, "adjust_learning_rate": 0.5}
        groups: list[dict[str, Any]] = [
            {"params": [p for name, p in named if "bias" not in name]},
            {"params": [p for name, p in named if "bias" in name], **biases},
        ]
        optimizer = AdamW(groups, lr=1e-2, weight_decay=0.1)
        return [optimizer], [{"scheduler": one, "interval": "step"} for one in self.make(optimizer)]


@pytest.mark.long
@pytest.mark.numbers
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_a_run_equals_stock_with_the_same_schedules_on_the_host(make: Any) -> None:
    ours, stock = both(lambda: Net(make), lambda: (loader(),), max_epochs=1, limit_train_batches=12)
    assert_same_run(ours, stock)
    states = [
        [config.scheduler.state_dict() for config in run.trainer.lr_scheduler_configs]
        for run in (ours, stock)
    ]
    for mine, theirs in zip(*states, strict=True):
        for name in ("_last_lr", "base_lrs"):
            assert mine.pop(name) == pytest.approx(theirs.pop(name), rel=1e-12)
        assert mine == pytest.approx(theirs, rel=1e-12)
        assert mine["last_epoch"] == 12


PYTHON: dict[str, Any] = {
    "a minimum": (lambda t: min(1, t / 100), ConditionalOnTensor),
    "math": (lambda t: math.exp(-t / 10), HostRead),
}


@pytest.mark.fits
@pytest.mark.parametrize(("function", "error"), PYTHON.values(), ids=PYTHON)
def test_a_function_in_python_is_an_error_with_the_tensor_code_instead(
    function: Any, error: type[TraceError]
) -> None:
    with pytest.raises(error, match=r"torch\.clamp\(t / 100, max=1\)") as raised:
        fit(
            lambda: Net(lambda o: [lr.LambdaLR(o, lr_lambda=function)]),
            lambda: (loader(),),
            static=True,
        )
    assert raised.value.line is not None
    assert "lambda t" in raised.value.line.source


@pytest.mark.fits
def test_a_number_that_the_host_sets_before_the_first_step_is_an_error() -> None:
    class Sets(Net):
        def on_train_start(self) -> None:
            self.trainer.optimizers[0].param_groups[0]["lr"] = 0.1

    with pytest.raises(StateChanged, match=r"was set to 0\.1 on the host, but LinearLR computes"):
        fit(lambda: Sets(lambda o: [warm_up(o)]), lambda: (loader(),), static=True)
