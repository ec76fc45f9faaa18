"""Adam, AdamW, Lamb, and the base of optimizers like them.

Words: the *first moment* of a gradient is its running average, the *second* that of its square.
Both start at zero and are therefore too small at first; *corrected*, they are divided by the sum of
the weights that they have received, ``1 - beta ** step``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
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


class AdamBase(Optimizer):
    """An optimizer with the state of ``torch.optim.Adam``; a subclass writes ``update``.

    The learning rate times what ``update`` returns is subtracted from the parameter:

    >>> class AdamOfWeights(AdamBase):
    ...     def update(self, p, first, second, group):
    ...         return p.abs() * first / (second.sqrt() + group["eps"])
    >>> weight = torch.nn.Parameter(torch.tensor([1.0, 4.0]))
    >>> weight.grad = torch.tensor([0.1, 0.1])
    >>> AdamOfWeights([weight], lr=0.5).step()
    >>> weight.data
    tensor([0.5000, 2.0000])

    ``gradient`` and ``accumulate`` may be overridden too, and ``new_state``, for more state. State
    and options have torch's names, so checkpoints of ``torch.optim.Adam`` and AdamW load.

    Args:
        params: parameters, or dicts of a param group each.
        lr: learning rate.
        betas: of the two running averages: how much of it each step keeps.
        eps: keeps a denominator from zero.
        weight_decay: as the subclass uses it.
        amsgrad: use the largest second moment so far (Reddi et al. 2018,
            https://openreview.net/forum?id=ryQu7f-RZ).
        correct_bias: divide the moments by the weights that they have received.
        own: options of the subclass, by name.

    Raises:
        ValueError: an option is out of its range.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        correct_bias: bool = True,
        own: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        numbers = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        flags = {"amsgrad": amsgrad, "correct_bias": correct_bias}
        super().__init__(params, {**numbers, **flags, **own})

    def update(self, p: Tensor, first: Tensor, second: Tensor, group: dict[str, Any]) -> Tensor:
        """The update of one parameter, before the learning rate.

        Args:
            p: the parameter; ``p.grad`` is its gradient.
            first: its first moment, corrected: a copy, in float32 where ``p`` is narrower.
            second: its second moment, the same way.
            group: its param group.

        Returns:
            A tensor of the shape of ``p``.
        """
        raise self._undefined("update(self, p, first, second, group)")

    def gradient(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        """What the moments are averages of; here the gradient itself."""
        assert p.grad is not None
        return p.grad

    def accumulate(self, state: dict[str, Any], gradient: Tensor, group: dict[str, Any]) -> None:
        """Update the moments in place."""
        beta1, beta2 = group["betas"]
        state["exp_avg"].lerp_(gradient, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)

    def new_state(self, p: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """A count of zero, and moments of zeros like ``p``."""
        moments = ["exp_avg", "exp_avg_sq"] + ["max_exp_avg_sq"] * group["amsgrad"]
        step = torch.zeros((), dtype=torch.float32, device=p.device)
        return {"step": step, **{name: torch.zeros_like(p) for name in moments}}

    def update_parameter(self, p: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """Update the moments, and ``p`` by them."""
        state["step"].add_(1)
        self.accumulate(state, self.gradient(p, group), group)
        square = "exp_avg_sq"
        if group["amsgrad"]:
            square = "max_exp_avg_sq"
            # of the moment before its correction, as torch has it
            state[square].copy_(torch.maximum(state[square], state["exp_avg_sq"]))
        # copies, also where the dtype is the same: a subclass may change them in place
        first, second = (state[key].to(wide_dtype(p), copy=True) for key in ("exp_avg", square))
        if group["correct_bias"]:
            for moment, beta in zip((first, second), group["betas"], strict=True):
                moment.mul_(correction(beta, state["step"]))
        update = self.update(p, first, second, group)
        if not isinstance(update, Tensor) or update.shape != p.shape:
            given = update.shape if isinstance(update, Tensor) else update
            raise ValueError(
                f"{type(self).__name__}.update() returns a tensor of the parameter's shape,"
                f" {list(p.shape)}; got {given}."
            )
        p.sub_(update * group["lr"])

    def check_group(self, group: dict[str, Any]) -> None:
        """Raise ``ValueError`` where an option of a new group is out of its range."""
        check_not_negative(group, "lr", "eps", "weight_decay")
        check_betas(group)


def correction(beta: float, step: Tensor) -> Tensor:
    """``1 / (1 - beta ** step)``, to float32's last digits: from the power, four would be lost.

    A factor, because dividing every weight by the other form takes 4 % of an MLP's step (measured).
    """
    return -torch.expm1(step * math.log(beta)).reciprocal() if beta else torch.ones_like(step)


class Adam(AdamBase):
    """Adam (Kingma and Ba 2015, https://arxiv.org/abs/1412.6980), weight decay as an L2 penalty.

    The numbers of ``torch.optim.Adam``; the arguments are ``AdamBase``'s.
    """

    def gradient(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        """The gradient of the loss and the penalty."""
        assert p.grad is not None
        return p.grad.add(p, alpha=group["weight_decay"])

    def update(self, p: Tensor, first: Tensor, second: Tensor, group: dict[str, Any]) -> Tensor:
        """The first moment by the root of the second."""
        update: Tensor = first / (second.sqrt() + group["eps"])
        return update


class AdamW(AdamBase):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019, arXiv:1711.05101).

    The numbers of ``torch.optim.AdamW``, whose default of ``weight_decay`` is 0.01 too; the other
    arguments are ``AdamBase``'s.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        correct_bias: bool = True,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, correct_bias=correct_bias)

    def update(self, p: Tensor, first: Tensor, second: Tensor, group: dict[str, Any]) -> Tensor:
        """Adam's, and the decay."""
        update: Tensor = first / (second.sqrt() + group["eps"]) + group["weight_decay"] * p
        return update


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
        # weights that begin at zero, as biases do, would never move: a ratio of zero
        ratio: Tensor = torch.where((weights > 0) & (change > 0), weights / change, 1.0)
        return update * ratio
