"""What tests of optimizers share: numbers that move, and the comparison with stock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from harness import assert_same_run, both
from models import Classifier, loader, mlp
from torch import Tensor, nn
from torch.optim import Optimizer


class Moving(pl.Callback):
    """Changes the numbers of all param groups before every step."""

    KEYS = ("momentum", "dampening", "weight_decay", "alpha", "rho", "lambd", "lr_decay", "eps")
    MORE = ("momentum_decay", "beta2_decay", "d", "t0")

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        for optimizer in trainer.optimizers:
            for group in optimizer.param_groups:
                group["lr"] *= 0.8 if batch_idx % 3 else 1.4
                for key in (*self.KEYS, *self.MORE):
                    if isinstance(group.get(key), float) and group[key]:
                        group[key] *= 0.98 if batch_idx % 2 else 1.01
                for key in ("betas", "etas"):
                    if key in group:
                        first, second = group[key]
                        group[key] = (first * 0.99, second * (0.9995 if batch_idx % 2 else 1.0002))


def assert_equals_stock(
    optimizer: Any,
    options: dict[str, Any] | None = None,
    moving: tuple[pl.Callback, ...] = (Moving(),),
    **fit_options: Any,
) -> Any:
    """Ten steps on CSX and in stock; returns the run on CSX."""

    def make() -> Classifier:
        copies = {k: v.clone() if isinstance(v, Tensor) else v for k, v in (options or {}).items()}
        return Classifier(mlp(), optimizer, **copies)

    fit_options = {"limit_train_batches": 10, "callbacks": moving, **fit_options}
    ours, stock = both(make, lambda: (loader(160),), **fit_options)
    assert_same_run(ours, stock)
    return ours


class Alternating(pl.LightningModule):
    """Every optimizer in turn, under manual optimization.

    Args:
        optimizers: makes them for ``mlp``.
    """

    def __init__(self, optimizers: Callable[[nn.Module], list[Optimizer]]) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.net, self.make = mlp(), optimizers

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def configure_optimizers(self) -> list[Optimizer]:
        return self.make(self.net)


class FirstGradient(Optimizer):
    """Heavy ball as users write it: the buffer begins as the first gradient."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "momentum": 0.9, "weight_decay": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                d = p.grad.add_(p, alpha=group["weight_decay"])
                if "buf" not in state:
                    state["buf"] = d.clone().sub_(d.mean())
                    state["count"] = torch.zeros(())
                    state["size"] = {"norm": d.norm()}
                else:
                    state["buf"] = group["momentum"] * state["buf"] + 0.3 * d
                    state["size"]["norm"].mul_(0.5).add_(d.norm())
                state["count"] += 1
                p.add_(state["buf"], alpha=-group["lr"] / 1.1)
        return loss
