"""Adafactor: the second moment of a matrix as one row and one column."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fulgurite.optim.optimizer import Optimizer, ParamsT, check_not_negative, wide_dtype


class Adafactor(Optimizer):
    """Adafactor (Shazeer and Stern 2018, https://arxiv.org/abs/1804.04235, algorithms 4 and 5).

    Numbers, arguments and state of ``torch.optim.Adafactor``, with every count and norm a tensor;
    nothing is read on the host.

    Args:
        params: parameters, or dicts of a param group each.
        lr: upper bound of the relative step size, which is ``1 / sqrt(step)``.
        beta2_decay: the second moment keeps ``1 - step ** beta2_decay`` of itself.
        eps: the smallest root of a second moment (None: the rounding of the parameter's dtype), and
            the smallest root mean square of the weights that scales the step size.
        d: largest root mean square of an update, before the step size.
        weight_decay: decoupled, times ``lr``.
        maximize: go up the gradient.

    Raises:
        ValueError: an option is out of its range.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-2,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        defaults = {"lr": lr, "beta2_decay": beta2_decay, "eps": eps, "d": d}
        super().__init__(params, {**defaults, "weight_decay": weight_decay, "maximize": maximize})

    def new_state(self, p: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """A count of zero, and zeros: [..., n, 1] and [..., 1, m], or like a vector."""
        state = {"step": torch.zeros((), dtype=torch.float32, device=p.device)}
        if p.dim() < 2:
            return {**state, "variance": torch.zeros_like(p)}
        rows, columns = p[..., :1], p[..., :1, :]
        return {
            **state,
            "row_var": rows.new_zeros(rows.shape),
            "col_var": p.new_zeros(columns.shape),
        }

    def update_parameter(self, p: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """Update the second moment, and ``p`` by it."""
        assert p.grad is not None
        lr, step = group["lr"], state["step"].add_(1)
        smallest, smallest_scale = group["eps"]
        smallest = torch.finfo(p.dtype).eps if smallest is None else smallest
        gradient = (-p.grad if group["maximize"] else p.grad).to(wide_dtype(p))
        scale = root_mean_square(p, gradient.dtype).clamp(min=smallest_scale)
        step_size = scale * step.rsqrt().clamp(max=lr)

        self._accumulate(state, gradient, step ** group["beta2_decay"])
        update = gradient * self._second_moment(state, smallest).clamp(min=smallest**2).rsqrt()
        update /= (root_mean_square(update, update.dtype) / group["d"]).clamp(min=1.0)
        p.sub_(group["weight_decay"] * lr * p + step_size * update)

    def _accumulate(self, state: dict[str, Any], gradient: Tensor, weight: Tensor) -> None:
        square = gradient.square()
        means = {"variance": square}
        if "row_var" in state:
            means = {"row_var": square.mean(-1, True), "col_var": square.mean(-2, True)}
        for name, mean in means.items():
            state[name].copy_(torch.lerp(state[name].to(mean.dtype), mean, weight))

    def _second_moment(self, state: dict[str, Any], smallest: float) -> Tensor:
        if "variance" in state:
            variance: Tensor = state["variance"]
            return variance.to(wide_dtype(variance))
        rows, columns = (state[name].to(wide_dtype(state[name])) for name in ("row_var", "col_var"))
        product: Tensor = rows * columns / rows.mean(-2, True).clamp(min=smallest)
        return product

    def check_group(self, group: dict[str, Any]) -> None:
        """Raise ``ValueError`` where an option of a new group is out of its range."""
        check_not_negative(group, "lr", "weight_decay")
        smallest, smallest_scale = group["eps"]
        if not (smallest is None or smallest >= 0) or not smallest_scale >= 0:
            raise ValueError(f"eps is {group['eps']!r}; each must be at least 0")
        if not group["d"] >= 1:
            raise ValueError(f"d is {group['d']!r}; it must be at least 1")
        if not group["beta2_decay"] <= 0:
            raise ValueError(f"beta2_decay is {group['beta2_decay']!r}; it must be at most 0")


def root_mean_square(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """``sqrt(mean(x * x))``."""
    norm: Tensor = torch.linalg.vector_norm(tensor, dtype=dtype)
    return norm / math.sqrt(tensor.numel())
