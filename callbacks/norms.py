"""Norms of weights and gradients."""

from __future__ import annotations

import re
from collections.abc import Iterable

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.optim import Optimizer

from fulgurite.callbacks.sparse import logs_in_step

_LAYER = re.compile(r".*\blayers\.(\d+)\.")


class ComputeNorm(pl.Callback):
    """Logs the 2-norms of parameters and gradients, computed inside the step.

    Logged: ``model_wise_params_norm`` (parameters that require grad, before the update),
    ``model_wise_grad_norm`` (gradients before they are clipped, whole windows of accumulation,
    unscaled), and ``per_layer_grad_norm/layer_<n>`` of all parameters with ``layers.<n>.`` in their
    names. With several optimizers, each has its own, of its parameters: ``/optimizer_<i>`` follows
    the name. Norms are float32 whatever the parameters are. Off CSX only log steps compute them.
    """

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Compute and log."""
        if not logs_in_step(trainer):
            return
        optimizers = trainer.optimizers
        parameters = dict(pl_module.named_parameters())
        suffix = ""
        if len(optimizers) > 1:
            mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
            parameters = {name: p for name, p in parameters.items() if id(p) in mine}
            index = next(i for i, one in enumerate(optimizers) if _is(one, optimizer))
            suffix = f"/optimizer_{index}"
        for name, norm in norms(parameters).items():
            pl_module.log(f"{name}{suffix}", norm)


def _is(one: Optimizer, other: Optimizer) -> bool:
    """Whether two objects are one optimizer; manual optimization sees Lightning's wrappers."""
    return getattr(one, "optimizer", one) is getattr(other, "optimizer", other)


@torch.no_grad()
def norms(parameters: dict[str, torch.nn.Parameter]) -> dict[str, Tensor]:
    """Every norm that is logged, by name, [] each."""
    gradients = {name: p.grad for name, p in parameters.items() if p.grad is not None}
    layers: dict[str, list[Tensor]] = {}
    for name, gradient in gradients.items():
        match = _LAYER.match(name)
        if match:
            layers.setdefault(match.group(1), []).append(gradient)
    trained = [p for p in parameters.values() if p.requires_grad]
    found = {
        "model_wise_params_norm": total_norm(trained),
        "model_wise_grad_norm": total_norm(gradients.values()),
    }
    for layer, of_layer in layers.items():
        found[f"per_layer_grad_norm/layer_{layer}"] = total_norm(of_layer)
    return found


def total_norm(tensors: Iterable[Tensor]) -> Tensor:
    """The 2-norm of all elements together, float32 []."""
    each = [torch.linalg.vector_norm(t, dtype=torch.float32) for t in tensors]
    return torch.linalg.vector_norm(torch.stack(each)) if each else torch.zeros(())
