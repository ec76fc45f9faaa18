"""Lamb: AdamW whose update has the length of the weights, layer by layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fulgurite.optim.adam import AdamBase
from fulgurite.optim.optimizer import ParamsT


class Lamb(AdamBase):
    """Lamb (You et al. 2020, https://arxiv.org/abs/1904.00962, algorithm 2), for large batches.

    The paper's scaling function of the weights' norm is the identity, as in its experiments.

    Args:
        params: parameters, or dicts of a param group each.
        lr: learning rate.
        betas: of the two running averages: how much of it each step keeps.
        eps: keeps a denominator from zero.
        weight_decay: decoupled, times the learning rate; it counts in the update's norm.
        adam: leave the norms out, which is AdamW; for comparison.
        correct_bias: False is the algorithm of the paper's first versions and of programs that
            follow them.

    Raises:
        ValueError: an option is out of its range.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        adam: bool = False,
        *,
        correct_bias: bool = True,
    ) -> None:
        own = {"adam": adam}
        super().__init__(params, lr, betas, eps, weight_decay, correct_bias=correct_bias, own=own)

    def update(self, p: Tensor, first: Tensor, second: Tensor, group: dict[str, Any]) -> Tensor:
        """AdamW's, times the trust ratio: the weights' norm by the update's."""
        update: Tensor = first / (second.sqrt() + group["eps"]) + group["weight_decay"] * p
        if group["adam"]:
            return update
        weights, change = (torch.linalg.vector_norm(x, dtype=update.dtype) for x in (p, update))
        ratio: Tensor = torch.where((weights > 0) & (change > 0), weights / change, 1.0)
        return update * ratio
