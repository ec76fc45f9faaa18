"""Functions with a gradient of their own, what is kept for backward, and where none is computed."""

from __future__ import annotations

from typing import Any

import torch
from idioms.base import Example, F
from models import CLASSES
from torch import Tensor, nn
from torch.autograd import Function, forward_ad
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint, checkpoint_sequential


class ReversedGradient(Example):
    """Gradient reversal (domain adaptation): a custom function with a number in `ctx`"""

    class Reverse(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
            ctx.scale = scale
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            return -ctx.scale * gradient, None

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.net[1](self.net[0](x))
        reversed_ = self.Reverse.apply(hidden, 0.3)
        return F.cross_entropy(self.net[2](hidden), y) + reversed_.square().mean()


class SavedTensors(Example):
    """A custom function that saves tensors, with a gradient of its own gradient"""

    class Cube(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            (x,) = ctx.saved_tensors
            return 3 * x**2 * gradient

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        loss = F.cross_entropy(self.Cube.apply(self.net(x)), y)
        [gradient] = torch.autograd.grad(loss, x, create_graph=True)
        return loss + gradient.square().mean()


class OnceDifferentiable(Example):
    """A custom function under `once_differentiable`, with `needs_input_grad`"""

    class Scale(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
            ctx.save_for_backward(x, scale)
            return x * scale

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, gradient: Tensor) -> Any:
            x, scale = ctx.saved_tensors
            of_scale = (gradient * x).sum() if ctx.needs_input_grad[1] else None
            return gradient * scale, of_scale

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.Scale.apply(self.net(x), self.scale), y)


class MarkedDirty(Example):
    """A custom function in place, with `mark_dirty`"""

    class Double(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.mark_dirty(x)
            return x.mul_(2)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            return 2 * gradient

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.Double.apply(self.net(x)), y)


class SetupContext(Example):
    """A custom function in the `setup_context` form, several outputs, one not differentiable"""

    class Sorted(Function):
        @staticmethod
        def forward(x: Tensor) -> Any:
            return x.sort(1)

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.mark_non_differentiable(output[1])
            ctx.save_for_backward(output[1])

        @staticmethod
        def backward(ctx: Any, gradient: Tensor, _: Any) -> Any:
            (places,) = ctx.saved_tensors
            return torch.zeros_like(gradient).scatter(1, places, gradient)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        values, places = self.Sorted.apply(self.net(x))
        return (
            (values * torch.arange(CLASSES)).mean() + F.cross_entropy(values, y) + 0 * places.sum()
        )


class StraightThrough(Example):
    """Straight-through estimator: `x + (q - x).detach()`"""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.net[0](x)
        hidden = hidden + (hidden.round() - hidden).detach()
        return F.cross_entropy(self.net[2](hidden), y)


class VectorQuantization(Example):
    """VQ-VAE: nearest codes by `argmin`, codebook and commitment loss, the code straight through"""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Embedding(6, 16)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.net[0](x)
        nearest = torch.cdist(hidden, self.codes.weight).argmin(1)
        code = self.codes(nearest)
        aside = F.mse_loss(code, hidden.detach()) + 0.25 * F.mse_loss(hidden, code.detach())
        return F.cross_entropy(self.net[2](hidden + (code - hidden).detach()), y) + aside


class GumbelSoftmax(Example):
    """`gumbel_softmax`, soft and hard"""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        logits = self.net(x)
        soft, hard = F.gumbel_softmax(logits, tau=0.7), F.gumbel_softmax(logits, hard=True)
        return F.nll_loss((soft + 0.1).log(), y) + (hard * logits).mean()


class ForwardMode(Example):
    """Forward-mode derivatives: `torch.autograd.forward_ad` in the step"""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        with forward_ad.dual_level():
            out = self.net(forward_ad.make_dual(x, torch.ones_like(x)))
            logits, slope = forward_ad.unpack_dual(out)
        return F.cross_entropy(logits, y) + slope.square().mean()


class NoGrad(Example):
    """`no_grad`, `enable_grad`, `set_grad_enabled` and `detach` in the step"""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.net(x).softmax(1)
            with torch.enable_grad():
                live = self.net(0.5 * x)
        with torch.set_grad_enabled(False):
            weight = self.net[2].weight.square().sum()
        return F.cross_entropy(self.net(x), y) + (live - target).square().mean() * weight


class InferenceMode(Example):
    """`inference_mode` for a part of the step"""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.inference_mode():
            target = self.net(x).softmax(1)
        return F.cross_entropy(self.net(x), y) + F.mse_loss(self.net(x), target.clone())


def dropped(net: Any, x: Tensor) -> Tensor:
    """Through two layers, with dropout between."""
    return net[2](F.dropout(net[1](net[0](x)), 0.3))  # type: ignore[no-any-return]


class Checkpointed(Example):
    """`torch.utils.checkpoint` with dropout, `use_reentrant=False`"""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(checkpoint(dropped, self.net, x, use_reentrant=False), y)


class CheckpointedReentrant(Example):
    """`torch.utils.checkpoint` with dropout, `use_reentrant=True`"""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        return F.cross_entropy(checkpoint(dropped, self.net, x, use_reentrant=True), y)


class CheckpointedSequential(Example):
    """`checkpoint_sequential`"""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(checkpoint_sequential(self.net, 2, x, use_reentrant=False), y)


class SavedTensorHooks(Example):
    """`torch.autograd.graph.saved_tensors_hooks` that pack and unpack"""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: (t + 0, 1), lambda packed: packed[0]
        ):
            return super().loss(x, y)
