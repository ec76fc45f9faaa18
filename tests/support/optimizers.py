"""What tests of optimizers share: those we know, numbers that move, the comparison with stock."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from harness import assert_same_run, both
from models import Classifier, PerParameter, loader, mlp
from torch import Tensor, nn
from torch.optim import Optimizer

from fulgurite import optim

TORCH: list[tuple[type[Optimizer], dict[str, Any]]] = [
    (torch.optim.SGD, {}),
    (torch.optim.SGD, {"lr": 1}),
    (torch.optim.SGD, {"lr": torch.tensor(0.1), "momentum": 0.9}),
    (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.01, "maximize": True, "lr": 1e-3}),
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "foreach": True}),
    (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.5, "weight_decay": 0.01}),
    (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.1, "fused": True}),
    (torch.optim.Adam, {"amsgrad": True, "weight_decay": 0.01}),
    (torch.optim.Adam, {"foreach": True}),
    (torch.optim.Adam, {"lr": torch.tensor(0.01)}),
    (torch.optim.Adam, {"betas": (0.495, 0.9)}),
    (torch.optim.AdamW, {"fused": True, "amsgrad": True}),
    (torch.optim.AdamW, {"maximize": True, "lr": 1e-4}),
    (torch.optim.RMSprop, {}),
    (torch.optim.RMSprop, {"momentum": 0.9, "centered": True, "weight_decay": 0.01}),
    (torch.optim.Adadelta, {"lr": 1.0}),
    (torch.optim.Adadelta, {"lr": 1.0, "weight_decay": 0.01, "foreach": True}),
    (torch.optim.Adagrad, {"lr_decay": 0.1, "initial_accumulator_value": 0.1}),
    (torch.optim.Adagrad, {"maximize": True, "weight_decay": 0.01, "lr": 1e-3}),
    (torch.optim.Adamax, {}),
    (torch.optim.Adamax, {"weight_decay": 0.01, "foreach": True}),
    (torch.optim.NAdam, {}),
    (torch.optim.NAdam, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    (torch.optim.RAdam, {}),
    (torch.optim.RAdam, {"weight_decay": 0.1, "decoupled_weight_decay": True, "foreach": True}),
    (torch.optim.ASGD, {}),
    (torch.optim.ASGD, {"t0": 3.0, "lambd": 0.01, "alpha": 0.6, "weight_decay": 0.01}),
    (torch.optim.Rprop, {}),
    (torch.optim.Rprop, {"etas": (0.6, 1.3), "step_sizes": (1e-5, 1.0), "maximize": True}),
    (torch.optim.Adafactor, {}),
    (torch.optim.Adafactor, {"lr": torch.tensor(0.02), "eps": (1e-8, 1e-2), "d": 1.5}),
]

OURS: list[tuple[type[Optimizer], dict[str, Any]]] = [
    (optim.Adam, {}),
    (optim.Adam, {"betas": (0.0, 0.9)}),
    (optim.Adam, {"weight_decay": 0.1, "amsgrad": True}),
    (optim.AdamW, {"lr": torch.tensor(0.01)}),
    (optim.AdamW, {"correct_bias": False}),
    (optim.AdamW, {"amsgrad": True}),
    (optim.Lamb, {"adam": True}),
    (optim.Lamb, {"weight_decay": 0.1}),
    (optim.Lion, {"lr": 1e-3, "weight_decay": 0.1}),
    (optim.Adafactor, {"lr": torch.tensor(0.02), "eps": (1e-8, 1e-2), "d": 1.5}),
    (optim.Adafactor, {"weight_decay": 0.1, "maximize": True, "lr": 1e-3}),
]


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


class AdaBelief(Optimizer):
    """As published: the count is born in the group on the first step, and read as a number."""

    def __init__(self, params: Any, lr: float = 1e-2, **options: Any) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.999), **options})

    def count(self, group: dict[str, Any]) -> Any:
        if "step" in group:
            group["step"] += 1
        else:
            group["step"] = 1
        return group["step"]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = torch.enable_grad()(closure)() if closure is not None else None
        for group in self.param_groups:
            first, second = group["betas"]
            step = self.count(group)
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if len(state) == 0:
                    state["mean"], state["var"] = torch.zeros_like(p), torch.zeros_like(p)
                state["mean"].mul_(first).add_(p.grad, alpha=1 - first)
                apart = p.grad - state["mean"]
                state["var"].mul_(second).addcmul_(apart, apart, value=1 - second)
                size = (state["var"].sqrt() / math.sqrt(1 - second**step)).add_(1e-8)
                p.addcdiv_(state["mean"], size, value=-group["lr"] / (1 - first**step))
        return loss


class CountingGroup(PerParameter):
    """Counts them in a group."""

    def step(self, closure: Any = None) -> Any:
        self.param_groups[0]["steps"] = self.param_groups[0].get("steps", 0) + 1
        return super().step(closure)

    def update(self, p: Tensor, state: dict[str, Any], lr: float) -> None:
        p.sub_(p.grad * lr)
