"""Numbers of param groups: every function takes them, and what Python sees is remembered."""

from __future__ import annotations

import math
from contextlib import nullcontext
from math import exp as exponential
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from harness import assert_same_run, both
from models import Classifier, loader, mlp
from optimizers import Moving, assert_equals_stock
from torch import Tensor, nn
from torch.optim import Optimizer

from fulgurite.backends.csx.diagnostics.trace_errors import StateChanged

pytestmark = pytest.mark.numbers

FORMS: dict[str, Any] = {
    "add": lambda p, d, lr: torch.add(p, d, alpha=-lr),
    "sub": lambda p, d, lr: torch.sub(p, d, alpha=lr),
    "subtract": lambda p, d, lr: p.subtract(d, alpha=lr),
    "rsub": lambda p, d, lr: torch.rsub(p, d, alpha=lr),
    "addcmul": lambda p, d, lr: torch.addcmul(p, d, d, value=lr),
    "addcdiv": lambda p, d, lr: torch.addcdiv(p, tensor1=d, tensor2=d.abs() + 1, value=-lr),
    "lerp": lambda p, d, lr: torch.lerp(p, d, lr),
    "far lerp": lambda p, d, lr: p.lerp(d, 1 - lr),
    "addmm": lambda p, d, lr: torch.addmm(p, d, d.t() @ p, beta=1 - lr, alpha=lr),
    "addmv": lambda p, d, lr: torch.addmv(p[:, 0], d, d[0], alpha=lr),
    "addr": lambda p, d, lr: torch.addr(p, d[:, 0], d[0], alpha=lr),
    "baddbmm": lambda p, d, lr: torch.baddbmm(p[None], d[None], (d.t() @ p)[None], beta=lr),
    "addbmm": lambda p, d, lr: torch.addbmm(p, d[None], (d.t() @ p)[None], alpha=lr),
    "full": lambda p, d, lr: torch.full((3,), lr),
    "full_like": lambda p, d, lr: torch.full_like(p, lr),
    "new_full": lambda p, d, lr: p.new_full((2,), lr),
    "tensor": lambda p, d, lr: torch.tensor([lr, 1.0, 2]),
    "as_tensor": lambda p, d, lr: torch.as_tensor(lr),
    "new_tensor": lambda p, d, lr: p.new_tensor([lr, 2 * lr]),
    "fill": lambda p, d, lr: torch.empty(3).fill_(lr),
    "masked_fill": lambda p, d, lr: d.masked_fill(d > 0, lr),
    "where": lambda p, d, lr: torch.where(d > 0, lr, 0.0),
    "index": lambda p, d, lr: _written(d.clone(), lr),
    "mul": lambda p, d, lr: p.mul(1 - lr * 0.1),
    "div": lambda p, d, lr: d / lr + lr / (d.abs() + 1),
    "scalar": lambda p, d, lr: d.norm() * lr + 1,
    "int": lambda p, d, lr: torch.arange(3) * lr,
    "clamp": lambda p, d, lr: d.clamp(min=-lr, max=0.5),
    "clip": lambda p, d, lr: torch.clip(d, max=lr),
    "pow": lambda p, d, lr: torch.pow(lr, d.abs()) + d.abs() ** lr,
    "maximum": lambda p, d, lr: torch.maximum(d, torch.tensor(lr)),
    "compare": lambda p, d, lr: (d > lr).float(),
    "softshrink": lambda p, d, lr: nn.functional.softshrink(d, 0.01),
    "sqrt": lambda p, d, lr: d * math.sqrt(lr) + d * math.log(lr, 2) + d * math.pow(lr, 0.3),
    "exp": lambda p, d, lr: d * exponential(-lr),
    "max": lambda p, d, lr: d * max(lr, 1e-9) * min(lr, 1e9),
    "abs": lambda p, d, lr: d * abs(-lr) + d * divmod(lr, 0.001)[0],
    "foreach": lambda p, d, lr: torch._foreach_pow(1 + lr, [d])[0],
    "foreach scalars": lambda p, d, lr: torch._foreach_mul([d, p], [lr, 2.0])[0],
    "quantile": lambda p, d, lr: torch.quantile(d, lr) + d.nanquantile(1 - lr),
    "scatter": lambda p, d, lr: d.scatter(1, d.argmax(1, keepdim=True), value=lr),
    "in place": lambda p, d, lr: d.clone().addcmul_(p, p, value=lr).sub_(p, alpha=lr),
}


def _written(tensor: Tensor, value: float) -> Tensor:
    tensor[tensor > 0] = value
    tensor[0, 0] = value
    return tensor


class EveryForm(Optimizer):
    """Writes down what each function makes of ``lr``, and of p beside."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure is not None else None
        [group] = self.param_groups
        for p in group["params"]:
            for name, form in FORMS.items():
                value = form(p, p.grad, group["lr"])
                assert value.dtype is torch.float32, name
                self.state[p].setdefault(name, torch.zeros_like(value)).copy_(value)
            p.sub_(p.grad, alpha=group["lr"])
        return loss


def test_every_function_takes_a_number_that_changes() -> None:
    class Matrix(Classifier):
        def configure_optimizers(self) -> Any:
            return EveryForm([self.net[0].weight], lr=0.01)

    ours, stock = both(
        lambda: Matrix(mlp()), lambda: (loader(48),), callbacks=(Moving(),), max_steps=3
    )
    assert_same_run(ours, stock)


@pytest.mark.parametrize("interval", ["epoch", "step"])
def test_the_numbers_of_frozen_parameters_may_change(interval: str) -> None:
    class FineTuned(Classifier):
        def configure_optimizers(self) -> Any:
            body, head = self.net[0], self.net[2]
            body.requires_grad_(False)
            groups = [{"params": head.parameters()}, {"params": body.parameters(), "lr": 1e-3}]
            optimizer = torch.optim.AdamW(groups, lr=0.01)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
            return [optimizer], [{"scheduler": schedule, "interval": interval}]

    options: dict[str, Any] = {"max_epochs": 2, "limit_train_batches": 3}
    ours, stock = both(lambda: FineTuned(mlp()), lambda: (loader(48),), **options)
    assert_same_run(ours, stock)
    assert len(ours.trainer.strategy.programs) == 1


def _shrunk(lr: Any) -> Tensor:
    return nn.functional.softshrink(torch.ones(()), lr)


@pytest.mark.parametrize(
    ("look", "message"),
    [
        (lambda lr, k: round(lr, 2), r"round\(.*, 2\) was 0.01 when traced, and now is 0.02"),
        (lambda lr, k: float(lr), r"\['lr'\], read by float\(\), was 0.01 when traced"),
        (lambda lr, k: math.hypot(lr, 1.0), r"\['lr'\], read by math.hypot, was 0.01"),
        (lambda lr, k: float(np.sqrt(lr)), r"\['lr'\], read by numpy.sqrt, was 0.01"),
        (
            lambda lr, k: len(range(k)),
            r"\['k'\], read by range\(\) or \[\], was 3 when traced, and now is 4\.",
        ),
        (lambda lr, k: [0, 0, 0, 1, 1][k] if isinstance(k, int) else 5, r"\['k'\], read by range"),
        (lambda lr, k: _shrunk(lr), r"\['lr'\], read by softshrink\(\), was 0.01"),
        (lambda lr, k: [1.0, 2.0][int(lr < 0.015)], None),  # another program
    ],
)
def test_what_python_sees_of_a_number_may_not_change(look: Any, message: str | None) -> None:
    class Looking(Optimizer):
        def __init__(self, params: Any, lr: float) -> None:
            super().__init__(params, {"lr": lr, "k": 3})

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            loss = closure() if closure is not None else None
            for group in self.param_groups:
                for p in group["params"]:
                    scale = look(group["lr"], group["k"]) * group["lr"] / group["k"]
                    p.add_(p.grad, alpha=-scale)
            return loss

    class Move(pl.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, idx: int) -> None:
            if idx == 2:
                group = trainer.optimizers[0].param_groups[0]
                group["lr"], group["k"] = 0.02, 4

    assert_equals_stock(Looking, moving=(), limit_train_batches=2)
    refused = pytest.raises(StateChanged, match=message) if message else nullcontext()
    with refused:
        assert_equals_stock(Looking, moving=(Move(),))
