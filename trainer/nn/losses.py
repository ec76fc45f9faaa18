"""torch.nn's losses with ``use_autogen``: arguments, values and gradients are torch's.

Their constructors are torch's, and ``autogen_loss`` adds the argument; who reads and does not run
them, as type checkers and ``fulgurite check --no-imports``, finds it in ``_Loss``. The multi-class
margin loss is written here in operations that compilers generate loops for: torch's has no
decomposition of its backward pass, and the compiler calls torch's kernel for it.

Checked against torch 2.13. Of shapes, N are the rows of a batch, and C its classes.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fulgurite.nn.autogen import autogen_loss

if TYPE_CHECKING:

    class _Loss(nn.Module):
        def __init__(self, *args: Any, use_autogen: bool = False, **kwargs: Any) -> None:
            super().__init__(**kwargs)

else:

    class _Loss(nn.Module):
        """Nothing when it runs: torch's constructor is the next one."""


@autogen_loss
class BCELoss(_Loss, nn.BCELoss):
    """``torch.nn.BCELoss`` with ``use_autogen``."""


@autogen_loss
class BCEWithLogitsLoss(_Loss, nn.BCEWithLogitsLoss):
    """``torch.nn.BCEWithLogitsLoss`` with ``use_autogen``."""


@autogen_loss
class CrossEntropyLoss(_Loss, nn.CrossEntropyLoss):
    """``torch.nn.CrossEntropyLoss`` with ``use_autogen``."""


@autogen_loss
class GaussianNLLLoss(_Loss, nn.GaussianNLLLoss):
    """``torch.nn.GaussianNLLLoss`` with ``use_autogen``."""


@autogen_loss
class HingeEmbeddingLoss(_Loss, nn.HingeEmbeddingLoss):
    """``torch.nn.HingeEmbeddingLoss`` with ``use_autogen``."""


@autogen_loss
class HuberLoss(_Loss, nn.HuberLoss):
    """``torch.nn.HuberLoss`` with ``use_autogen``."""


@autogen_loss
class KLDivLoss(_Loss, nn.KLDivLoss):
    """``torch.nn.KLDivLoss`` with ``use_autogen``."""


@autogen_loss
class L1Loss(_Loss, nn.L1Loss):
    """``torch.nn.L1Loss`` with ``use_autogen``."""


@autogen_loss
class MarginRankingLoss(_Loss, nn.MarginRankingLoss):
    """``torch.nn.MarginRankingLoss`` with ``use_autogen``."""


@autogen_loss
class MSELoss(_Loss, nn.MSELoss):
    """``torch.nn.MSELoss`` with ``use_autogen``."""


@autogen_loss
class MultiLabelSoftMarginLoss(_Loss, nn.MultiLabelSoftMarginLoss):
    """``torch.nn.MultiLabelSoftMarginLoss`` with ``use_autogen``."""


@autogen_loss
class MultiMarginLoss(_Loss, nn.MultiMarginLoss):
    """``torch.nn.MultiMarginLoss`` with ``use_autogen``."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """Of scores [N, C] or [C] and classes [N] or []; fused it is of operations of its own."""
        if not self.use_autogen:
            return super().forward(input, target)
        return multi_margin_loss(
            input, target, self.p, self.margin, self.weight, reduction=self.reduction
        )


@autogen_loss
class NLLLoss(_Loss, nn.NLLLoss):
    """``torch.nn.NLLLoss`` with ``use_autogen``."""


@autogen_loss
class PoissonNLLLoss(_Loss, nn.PoissonNLLLoss):
    """``torch.nn.PoissonNLLLoss`` with ``use_autogen``."""


@autogen_loss
class SmoothL1Loss(_Loss, nn.SmoothL1Loss):
    """``torch.nn.SmoothL1Loss`` with ``use_autogen``."""


@autogen_loss
class TripletMarginLoss(_Loss, nn.TripletMarginLoss):
    """``torch.nn.TripletMarginLoss`` with ``use_autogen``."""


@autogen_loss
class TripletMarginWithDistanceLoss(_Loss, nn.TripletMarginWithDistanceLoss):
    """``torch.nn.TripletMarginWithDistanceLoss`` with ``use_autogen``."""


class CosineEmbeddingLoss(nn.CosineEmbeddingLoss):
    """``torch.nn.CosineEmbeddingLoss``. It is not fused: ``use_autogen=True`` gives a warning."""

    def __init__(
        self,
        margin: float = 0.0,
        size_average: bool | None = None,
        reduce: bool | None = None,
        reduction: str = "mean",
        *,
        use_autogen: bool = False,
    ) -> None:
        super().__init__(margin, size_average, reduce, reduction)
        if use_autogen:
            warnings.warn(
                "CosineEmbeddingLoss(use_autogen=True) is not fused: it stays on primitive kernels."
                " Leave use_autogen out.",
                stacklevel=2,
            )


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
