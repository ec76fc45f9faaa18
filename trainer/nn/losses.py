"""torch.nn's losses with ``use_autogen``: arguments, values and gradients are torch's.

Constructors name their arguments, for editors, type checkers, and checks of parameter files that
read source; ``use_autogen`` is what ``autogen_loss`` takes and stores. Checked against torch 2.13.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

from torch import Tensor, nn

from fulgurite.nn.autogen import autogen_loss
from fulgurite.nn.multi_margin import multi_margin_loss


@autogen_loss
class BCELoss(nn.BCELoss):
    """``torch.nn.BCELoss`` with ``use_autogen``."""

    def __init__(
        self,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        reduce: bool | None = None,
        reduction: str = "mean",
        *,
        use_autogen: bool = False,
    ) -> None:
        super().__init__(weight, size_average, reduce, reduction)


@autogen_loss
class BCEWithLogitsLoss(nn.BCEWithLogitsLoss):
    """``torch.nn.BCEWithLogitsLoss`` with ``use_autogen``."""

    def __init__(
        self,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        reduce: bool | None = None,
        reduction: str = "mean",
        pos_weight: Tensor | None = None,
        *,
        use_autogen: bool = False,
    ) -> None:
        super().__init__(weight, size_average, reduce, reduction, pos_weight)


@autogen_loss
class CrossEntropyLoss(nn.CrossEntropyLoss):
    """``torch.nn.CrossEntropyLoss`` with ``use_autogen``."""

    def __init__(
        self,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        *,
        use_autogen: bool = False,
    ) -> None:
        super().__init__(weight, size_average, ignore_index, reduce, reduction, label_smoothing)


@autogen_loss
class GaussianNLLLoss(nn.GaussianNLLLoss):
    """``torch.nn.GaussianNLLLoss`` with ``use_autogen``."""

    def __init__(
        self,
        *,
        full: bool = False,
        eps: float = 1e-6,
        reduction: str = "mean",
        use_autogen: bool = False,
    ) -> None:
        super().__init__(full=full, eps=eps, reduction=reduction)


@autogen_loss
class HingeEmbeddingLoss(nn.HingeEmbeddingLoss):
    """``torch.nn.HingeEmbeddingLoss`` with ``use_autogen``."""

    def __init__(
        self,
        margin: float = 1.0,
        size_average: bool | None = None,
        reduce: bool | None = None,
        reduction: str = "mean",
        *,
        use_autogen: bool = False,
    ) -> None:
        super().__init__(margin, size_average, reduce, reduction)


@autogen_loss
class HuberLoss(nn.HuberLoss):
    """``torch.nn.HuberLoss`` with ``use_autogen``."""

    def __init__(
        self,
        reduction: str = "mean",
        delta: float = 1.0,
        *,
        use_autogen: bool = False,
    ) -> None:
        super().__init__(reduction, delta)


@autogen_loss
class KLDivLoss(nn.KLDivLoss):
    """``torch.nn.KLDivLoss`` with ``use_autogen``."""

    def __init__(
        self,
        size_average: bool | None = None,
        reduce: bool | None = None,
        reduction: str = "mean",
        log_target: bool = False,
        *,
        use_autogen: bool = False,
    ) -> None:
        super().__init__(size_average, reduce, reduction, log_target)


@autogen_loss
class L1Loss(nn.L1Loss):
    """``torch.nn.L1Loss`` with ``use_autogen``."""

    def __init__(
        self,
        size_average: bool | None = None,
        reduce: bool | None = None,
        reduction: str = "mean",
        *,
        use_autogen: bool = False,
    ) -> None:
        super().__init__(size_average, reduce, reduction)


@autogen_loss
class MarginRankingLoss(nn.MarginRankingLoss):
    """``torch.nn.MarginRankingLoss`` with ``use_autogen``."""

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


@autogen_loss
class MSELoss(nn.MSELoss):
    """``torch.nn.MSELoss`` with ``use_autogen``."""

    def __init__(
        self,
        size_average: bool | None = None,
        reduce: bool | None = None,
        reduction: str = "mean",
        *,
        use_autogen: bool = False,
    ) -> None:
        super().__init__(size_average, reduce, reduction)


@autogen_loss
class MultiLabelSoftMarginLoss(nn.MultiLabelSoftMarginLoss):
    """``torch.nn.MultiLabelSoftMarginLoss`` with ``use_autogen``."""

    def __init__(
        self,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        reduce: bool | None = None,
        reduction: str = "mean",
        *,
        use_autogen: bool = False,
    ) -> None:
        super().__init__(weight, size_average, reduce, reduction)


@autogen_loss
class MultiMarginLoss(nn.MultiMarginLoss):
    """``torch.nn.MultiMarginLoss`` with ``use_autogen``."""

    def __init__(
        self,
        p: int = 1,
        margin: float = 1.0,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        reduce: bool | None = None,
        reduction: str = "mean",
        *,
        use_autogen: bool = False,
    ) -> None:
        super().__init__(p, margin, weight, size_average, reduce, reduction)

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """Of scores [N, C] or [C] and classes [N] or []; fused it is of operations of its own."""
        if not self.use_autogen:
            return super().forward(input, target)
        return multi_margin_loss(
            input, target, self.p, self.margin, self.weight, reduction=self.reduction
        )


@autogen_loss
class NLLLoss(nn.NLLLoss):
    """``torch.nn.NLLLoss`` with ``use_autogen``."""

    def __init__(
        self,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        *,
        use_autogen: bool = False,
    ) -> None:
        super().__init__(weight, size_average, ignore_index, reduce, reduction)


@autogen_loss
class PoissonNLLLoss(nn.PoissonNLLLoss):
    """``torch.nn.PoissonNLLLoss`` with ``use_autogen``."""

    def __init__(
        self,
        log_input: bool = True,
        full: bool = False,
        size_average: bool | None = None,
        eps: float = 1e-8,
        reduce: bool | None = None,
        reduction: str = "mean",
        *,
        use_autogen: bool = False,
    ) -> None:
        super().__init__(log_input, full, size_average, eps, reduce, reduction)


@autogen_loss
class SmoothL1Loss(nn.SmoothL1Loss):
    """``torch.nn.SmoothL1Loss`` with ``use_autogen``."""

    def __init__(
        self,
        size_average: bool | None = None,
        reduce: bool | None = None,
        reduction: str = "mean",
        beta: float = 1.0,
        *,
        use_autogen: bool = False,
    ) -> None:
        super().__init__(size_average, reduce, reduction, beta)


@autogen_loss
class TripletMarginLoss(nn.TripletMarginLoss):
    """``torch.nn.TripletMarginLoss`` with ``use_autogen``."""

    def __init__(
        self,
        margin: float = 1.0,
        p: float = 2.0,
        eps: float = 1e-6,
        swap: bool = False,
        size_average: bool | None = None,
        reduce: bool | None = None,
        reduction: str = "mean",
        *,
        use_autogen: bool = False,
    ) -> None:
        super().__init__(margin, p, eps, swap, size_average, reduce, reduction)


@autogen_loss
class TripletMarginWithDistanceLoss(nn.TripletMarginWithDistanceLoss):
    """``torch.nn.TripletMarginWithDistanceLoss`` with ``use_autogen``."""

    def __init__(
        self,
        *,
        distance_function: Callable[[Tensor, Tensor], Tensor] | None = None,
        margin: float = 1.0,
        swap: bool = False,
        reduction: str = "mean",
        use_autogen: bool = False,
    ) -> None:
        super().__init__(
            distance_function=distance_function, margin=margin, swap=swap, reduction=reduction
        )


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
