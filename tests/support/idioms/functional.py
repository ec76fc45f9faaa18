"""torch.func: transforms of functions in the step."""

from __future__ import annotations

from typing import Any

import torch
from idioms.base import Example, F, Manual
from models import CLASSES
from torch import Tensor, nn
from torch.func import (
    functional_call,
    grad,
    grad_and_value,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    linearize,
    stack_module_state,
    vjp,
    vmap,
)


class FuncGrad(Example):
    """`torch.func.grad` of the input, part of the loss"""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        slope = grad(lambda z: F.cross_entropy(self.net(z), y))(x)
        return super().loss(x, y) + slope.square().sum()


class FunctionalWeights(Manual):
    """`grad_and_value` with `functional_call` makes the gradients of a manual step"""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch

        def loss_of(weights: dict[str, Tensor]) -> Tensor:
            return F.cross_entropy(functional_call(self.net, weights, (x,)), y)

        weights = {name: p.detach() for name, p in self.net.named_parameters()}
        gradients, loss = grad_and_value(loss_of)(weights)
        for name, p in self.net.named_parameters():
            p.grad = gradients[name]
        self.optimizers().step()
        return loss


class PerSampleGradients(Manual):
    """Per-sample gradients, `vmap(grad(...), in_dims=(None, 0, 0))`, clipped as in DP-SGD"""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        def loss_of(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(functional_call(self.net, weights, (x[None],)), y[None])

        weights = {name: p.detach() for name, p in self.net.named_parameters()}
        gradients = vmap(grad(loss_of), in_dims=(None, 0, 0))(weights, *batch)
        norms = sum(g.flatten(1).square().sum(1) for g in gradients.values()).sqrt()
        scale = (0.1 / norms).clamp(max=1)
        for name, p in self.net.named_parameters():
            noise = 1e-3 * torch.randn_like(p)
            p.grad = torch.einsum("n,n...->...", scale, gradients[name]) / len(scale) + noise
        self.optimizers().step()
        return self.loss(*batch).detach()


class Ensemble(Example):
    """An ensemble by `stack_module_state` and `vmap(functional_call)`; its weights are trained"""

    def __init__(self) -> None:
        super().__init__()
        members = [nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, CLASSES)) for _ in "abc"]
        weights, _ = stack_module_state(members)
        self.names = list(weights)
        self.net = nn.ParameterList(weights.values())
        self.__dict__["skeleton"] = members[0].to("meta")

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        weights = dict(zip(self.names, self.net, strict=True))
        logits = vmap(lambda w: functional_call(self.skeleton, w, (x,)))(weights)
        return sum(F.cross_entropy(one, y) for one in logits) / 3


class Jvp(Example):
    """`jvp` in the loss"""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        logits, slope = jvp(self.net, (x,), (torch.ones_like(x),))
        return F.cross_entropy(logits, y) + slope.square().mean()


class Vjp(Example):
    """`vjp` in the loss"""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        logits, back = vjp(self.net, x)
        [slope] = back(torch.ones_like(logits))
        return F.cross_entropy(logits, y) + slope.square().mean()


class Jacobians(Example):
    """`jacrev` and `jacfwd` under `vmap`"""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        reverse, forward = vmap(jacrev(self.net))(x), vmap(jacfwd(self.net))(x)
        return super().loss(x, y) + (reverse * forward).mean()


class Hessians(Example):
    """`hessian` under `vmap`: a physics-informed residual"""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        curvature = vmap(hessian(lambda z: self.net(z).sum()))(x)
        laplacian = curvature.diagonal(dim1=1, dim2=2).sum(1)
        return super().loss(x, y) + laplacian.square().mean()


class Linearized(Example):
    """`linearize`"""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        logits, tangent = linearize(self.net, x)
        return F.cross_entropy(logits, y) + tangent(torch.ones_like(x)).square().mean()


class Vmapped(Example):
    """`vmap` with `in_dims`, `out_dims`, `randomness="different"` and dropout inside"""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        def one(row: Tensor) -> Tensor:
            return F.dropout(self.net(row), 0.2)

        logits = vmap(one, in_dims=1, out_dims=1, randomness="different")(x.T)
        return F.cross_entropy(logits.T, y)


class VmappedNorm(Example):
    """`vmap` over layer_norm, softmax and a custom `autograd.Function` with `vmap` support"""

    class Square(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return x * x

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            (x,) = ctx.saved_tensors
            return 2 * x * gradient

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        def one(row: Tensor) -> Tensor:
            return self.Square.apply(F.layer_norm(self.net(row), (CLASSES,))).softmax(0)

        return F.cross_entropy(vmap(one)(x), y)
