"""Gradients that the user takes, changes or defines."""

from __future__ import annotations

from typing import Any

import torch
from idioms.base import Example, F, Manual
from models import CLASSES
from torch import Tensor, nn
from torch.autograd import Function, forward_ad
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint, checkpoint_sequential


class GradientOfInput(Example):
    """Gradient penalty: `autograd.grad(loss, x, create_graph=True)`, its norm in the loss."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        loss = super().loss(x, y)
        [gradient] = torch.autograd.grad(loss, x, create_graph=True)
        return loss + gradient.norm(dim=1).sub(1).square().mean()


class BatchRequiresGrad(Example):
    """`x.requires_grad_()` on the batch itself"""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        x.requires_grad_()
        loss = super().loss(x, y)
        [gradient] = torch.autograd.grad(loss, x, create_graph=True)
        return loss + gradient.square().sum()


class WassersteinCritic(Manual):
    """WGAN-GP under manual optimization: penalty between real and fake, two optimizers"""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic = nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 8), nn.ELU())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        first, second = self.optimizers()
        real = batch[0]
        noise = torch.randn(len(real), 4)
        with torch.no_grad():
            fake = self.generator(noise)
        mix = torch.rand(len(real), 1)
        between = (mix * real + (1 - mix) * fake).requires_grad_()
        out = self.critic(between)
        [slope] = torch.autograd.grad(
            out, between, torch.ones_like(out), create_graph=True, retain_graph=True
        )
        penalty = (slope.norm(2, dim=1) - 1).square().mean()
        told = self.critic(fake).mean() - self.critic(real).mean() + 10 * penalty
        second.zero_grad()
        self.manual_backward(told)
        second.step()
        self.toggle_optimizer(first)
        fooled = -self.critic(self.generator(noise)).mean()
        first.zero_grad()
        self.manual_backward(fooled)
        first.step()
        self.untoggle_optimizer(first)
        return {"loss": told.detach()}

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.Adam(part.parameters(), lr=1e-2, betas=(0.5, 0.9))
            for part in (self.generator, self.critic)
        ]


class GradientOfWeights(Example):
    """Second order: the gradient of the loss by the weights is part of the loss"""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        loss = super().loss(x, y)
        gradients = torch.autograd.grad(loss, list(self.parameters()), create_graph=True)
        return loss + 0.1 * sum(g.square().sum() for g in gradients)


class InnerStep(Example):
    """MAML: an inner step of gradient descent on the weights, differentiated through"""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        weights = dict(self.net.named_parameters())
        inner = F.cross_entropy(self.net(x[:8]), y[:8])
        gradients = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
        moved = {
            name: p - 0.1 * g
            for (name, p), g in zip(weights.items(), gradients, strict=True)
        }
        return F.cross_entropy(torch.func.functional_call(self.net, moved, (x[8:],)), y[8:])


class HessianVectorProduct(Example):
    """Hessian times vector by two `autograd.grad`, and `autograd.functional.hvp`"""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        loss = super().loss(x, y)
        weight = self.net[0].weight
        [first] = torch.autograd.grad(loss, weight, create_graph=True)
        [second] = torch.autograd.grad((first * weight.detach()).sum(), weight, create_graph=True)
        _, product = torch.autograd.functional.hvp(
            lambda z: self.net(z).logsumexp(1).sum(), x, torch.ones_like(x), create_graph=True
        )
        return loss + 0.1 * second.square().sum() + 0.1 * product.square().mean()


class ForcesOfEnergy(Example):
    """Forces as the gradient of a predicted energy (`grad_outputs`), both in the loss"""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        positions = x.detach().requires_grad_(True)
        energy = self.net(positions).sum(1, keepdim=True)
        [slope] = torch.autograd.grad(
            energy, positions, torch.ones_like(energy), create_graph=True, retain_graph=True
        )
        return F.mse_loss(-slope, x) + F.mse_loss(energy[:, 0], y.float())


class UnusedInput(Example):
    """`autograd.grad(allow_unused=True)` where an input has no part in the loss"""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        x, other = x.clone().requires_grad_(), x.clone().requires_grad_()
        loss = super().loss(x, y)
        used, unused = torch.autograd.grad(loss, (x, other), create_graph=True, allow_unused=True)
        assert unused is None
        return loss + used.square().sum()


class BackwardInStep(Manual):
    """`loss.backward()` instead of `manual_backward`"""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(*batch)
        self.zero_grad()
        loss.backward()
        self.optimizers().step()
        return loss.detach()


class SeveralBackwards(Manual):
    """Several backwards before one step, a part of the loss each"""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return self.update(self.loss(x[:8], y[:8]), self.loss(x[8:], y[8:]))


class RetainedGraph(Manual):
    """`retain_graph=True`, and a second backward through the same graph"""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        logits = self.net(batch[0])
        loss, decay = F.cross_entropy(logits, batch[1]), logits.square().mean()
        optimizer.zero_grad()
        self.manual_backward(loss, retain_graph=True)
        self.manual_backward(loss, retain_graph=True)
        self.manual_backward(decay)
        optimizer.step()
        return loss.detach()


class BackwardOfSome(Manual):
    """`loss.backward(inputs=[...])`: only some parameters get a gradient"""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(*batch)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss.backward(inputs=[self.net[2].weight])
        optimizer.step()
        return loss.detach()


class AssignedGradient(Manual):
    """`p.grad = ...` and `p.grad.mul_()` between backward and step"""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(*batch)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        gradients = torch.autograd.grad(loss, list(self.parameters()))
        for p, gradient in zip(self.parameters(), gradients, strict=True):
            p.grad = gradient.sign() * 1e-2
        self.net[0].weight.grad.mul_(0.5)
        self.net[0].bias.grad = None
        optimizer.step()
        return loss.detach()


class ConflictingGradients(Manual):
    """PCGrad: gradients of two losses projected on each other, chosen with `torch.where`"""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.net(batch[0])
        losses = F.cross_entropy(logits, batch[1]), logits.square().mean()
        weights = list(self.parameters())
        first, second = (torch.autograd.grad(l, weights, retain_graph=True) for l in losses)
        for p, a, b in zip(weights, first, second, strict=True):
            dot = (a * b).sum()
            p.grad = a + torch.where(dot < 0, b - dot / a.square().sum() * a, b)
        self.optimizers().step()
        return losses[0].detach()


class HookOfParameter(Example):
    """`param.register_hook` that changes the gradient, set before fit"""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].weight.register_hook(lambda g: g.clamp(-1e-3, 1e-3))
        self.net[2].bias.register_hook(lambda g: 2 * g)


class HookOfActivation(Example):
    """`tensor.register_hook` on an activation, set in the step"""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.net[1](self.net[0](x))
        hidden.register_hook(lambda g: g * 0.5 + 1e-3)
        return F.cross_entropy(self.net[2](hidden), y)


class HookAfterAccumulation(Example):
    """`register_post_accumulate_grad_hook` that changes `p.grad`"""

    def __init__(self) -> None:
        super().__init__()
        self.net[2].weight.register_post_accumulate_grad_hook(self.shrink)

    @staticmethod
    def shrink(p: Tensor) -> None:
        p.grad.mul_(0.3)


class HooksOfModules(Example):
    """Forward, forward-pre, full-backward and backward-pre hooks of modules that change values"""

    def __init__(self) -> None:
        super().__init__()
        first, _, last = self.net
        first.register_forward_pre_hook(lambda m, args: (args[0] * 1.5,))
        first.register_forward_hook(lambda m, args, out: out + 0.1)
        last.register_full_backward_hook(lambda m, gi, go: (gi[0] * 0.5,))
        last.register_full_backward_pre_hook(lambda m, go: (go[0] * 0.9,))


class GradientOfActivation(Example):
    """`retain_grad()` on an activation, read after backward in `on_after_backward`"""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        self.hidden = self.net[1](self.net[0](x))
        self.hidden.retain_grad()
        return F.cross_entropy(self.net[2](self.hidden), y)

    def on_after_backward(self) -> None:
        self.net[0].bias.grad.add_(self.hidden.grad.mean(0))
        self.log("slope", self.hidden.grad.abs().mean())


class GradientNoise(Example):
    """Gradients changed in `on_after_backward` and `on_before_optimizer_step`"""

    def on_after_backward(self) -> None:
        for p in self.parameters():
            p.grad.add_(1e-3 * torch.randn_like(p))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        nn.utils.clip_grad_norm_(self.parameters(), 0.1)


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
        return (values * torch.arange(CLASSES)).mean() + F.cross_entropy(values, y) + 0 * places.sum()


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
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (t + 0, 1), lambda packed: packed[0]):
            return super().loss(x, y)
