"""The multi-class margin loss in operations that compilers generate loops for.

torch's has no decomposition of its backward pass, and the compiler calls torch's kernel for it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def multi_margin_loss(
    scores: Tensor,
    target: Tensor,
    p: int = 1,
    margin: float = 1.0,
    weight: Tensor | None = None,
    *,
    reduction: str = "mean",
) -> Tensor:
    """As ``torch.nn.functional.multi_margin_loss``, whose kernel this follows.

    Args:
        scores: [N, C] or [C].
        target: the right class of each row, [N]; of one row it may be [].
        p: 1 or 2.
        weight: [C], of each class.

    Raises:
        RuntimeError: shapes or types do not fit, ``weight`` asks for a gradient.
        ValueError: ``reduction`` is none.
    """
    _check(scores, target, weight, reduction)
    single = target.ndim == 0
    if torch.is_autocast_enabled(scores.device.type) and scores.dtype != torch.float64:
        scores = scores.float()  # as autocast has torch's
        weight = None if weight is None else weight.float()
    if weight is not None and weight.dtype != scores.dtype:
        raise RuntimeError(f"multi_margin_loss: weight is {weight.dtype}, input {scores.dtype}")
    x_NC, target_N1 = _rows(scores), target.reshape(-1, 1)
    right_N1: Tensor = _AtTarget.apply(x_NC, target_N1)  # type: ignore[no-untyped-call]
    over_NC = margin - right_N1 + x_NC
    counts_NC = (over_NC > 0) & ~_is_target(x_NC, target_N1)  # not of NaN
    over_NC = torch.where(counts_NC, over_NC, 0.0)
    loss_NC = over_NC if p == 1 else over_NC * over_NC
    if weight is not None:
        loss_NC = loss_NC * weight[target_N1]
    loss_N = loss_NC.sum(1) / x_NC.shape[1]
    if reduction == "none":
        return loss_N[0] if single else loss_N
    return loss_N.mean() if reduction == "mean" else loss_N.sum()


def _rows(scores: Tensor) -> Tensor:
    return scores if scores.ndim == 2 else scores.reshape(1, -1)


def _check(scores: Tensor, target: Tensor, weight: Tensor | None, reduction: str) -> None:
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"{reduction} is not a valid value for reduction")
    if scores.ndim > 2 or scores.shape[-1:] == (0,):
        raise RuntimeError(
            "Expected non-empty vector or matrix with optional 0-dim batch size, but got:"
            f" {list(scores.shape)}"
        )
    rows, classes = _rows(scores).shape
    if target.ndim > 1 or target.numel() != rows:
        raise RuntimeError(
            "multi_margin_loss: target tensor should be 1-D with size equal to the number of input"
            f" samples (batch size). Expected target size [{rows}], but got {list(target.shape)}."
            f" Input has shape {list(scores.shape)}."
        )
    if target.dtype != torch.int64:
        raise RuntimeError(f"multi_margin_loss: expected an int64 target but got {target.dtype}")
    if weight is not None and weight.shape != (classes,):
        raise RuntimeError(
            f"inconsistent weight size, expected {classes} but got {list(weight.shape)}"
        )
    if weight is not None and weight.requires_grad:
        raise RuntimeError("multi_margin_loss has no gradient with respect to its weight")


def _is_target(x_NC: Tensor, target_N1: Tensor) -> Tensor:
    return torch.arange(x_NC.shape[1], device=x_NC.device) == target_N1


class _AtTarget(torch.autograd.Function):
    """``x.gather(1, target)``, whose gradient is chosen, not added up in memory."""

    @staticmethod
    def forward(x_NC: Tensor, target_N1: Tensor) -> Tensor:
        return x_NC.gather(1, target_N1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(inputs[1])
        ctx.classes = inputs[0].shape[1]

    @staticmethod
    def backward(ctx: Any, grad_N1: Tensor) -> tuple[Tensor, None]:
        (target_N1,) = ctx.saved_tensors
        classes = torch.arange(ctx.classes, device=grad_N1.device)
        return torch.where(classes == target_N1, grad_N1, 0.0), None
