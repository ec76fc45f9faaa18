"""Lion: the sign of an average of gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fulgurite.optim.optimizer import (
    Optimizer,
    ParamsT,
    check_betas,
    check_not_negative,
    wide_dtype,
)


class Lion(Optimizer):
    """Lion (Chen et al. 2023, https://arxiv.org/abs/2302.06675, algorithm 2).

    Every weight moves by the learning rate, up or down, so it should be 3 to 10 times smaller than
    AdamW's, and the weight decay as many times larger (section 5 of the paper).

    Args:
        params: parameters, or dicts of a param group each.
        lr: learning rate.
        betas: how much of the average counts in the update, and how much of it each step keeps.
        weight_decay: decoupled, times the learning rate.

    Raises:
        ValueError: an option is out of its range.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def new_state(self, p: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """An average of zeros."""
        return {"exp_avg": torch.zeros_like(p)}

    def update_parameter(self, p: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """Move ``p`` by the sign, then update the average."""
        assert p.grad is not None
        beta1, beta2 = group["betas"]
        gradient = p.grad.to(wide_dtype(p))
        average = state["exp_avg"].to(gradient.dtype)
        direction = (average * beta1 + gradient * (1 - beta1)).sign()
        p.sub_((direction + group["weight_decay"] * p) * group["lr"])
        state["exp_avg"].copy_(average * beta2 + gradient * (1 - beta2))

    def check_group(self, group: dict[str, Any]) -> None:
        """Raise ``ValueError`` where an option of a new group is out of its range."""
        check_not_negative(group, "lr", "weight_decay")
        check_betas(group)
