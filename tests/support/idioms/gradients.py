"""Gradients that the user takes and changes."""

from __future__ import annotations

from typing import Any

import torch
from idioms.base import Example, F, Manual
from models import CLASSES
from torch import Tensor, nn


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
        moved = {name: p - 0.1 * g for (name, p), g in zip(weights.items(), gradients, strict=True)}
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
        first, second = (torch.autograd.grad(loss, weights, retain_graph=True) for loss in losses)
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


class PenaltyThroughLayers(Example):
    """Gradient penalty through convolution, BatchNorm, GroupNorm, LeakyReLU and pooling"""

    noise = ("net.1.bias", "net.2.running_mean")

    def __init__(self) -> None:
        super().__init__()
        layers = nn.BatchNorm1d(3), nn.LeakyReLU(0.2), nn.MaxPool1d(2), nn.GroupNorm(1, 3)
        self.net = nn.Sequential(
            nn.Unflatten(1, (1, 8)),
            nn.Conv1d(1, 3, 3),
            *layers,
            nn.Flatten(),
            nn.Linear(9, CLASSES),
        )

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        loss = super().loss(x, y)
        [gradient] = torch.autograd.grad(loss, x, create_graph=True)
        return loss + 10 * gradient.square().sum()


class PenaltyThroughTime(Example):
    """Gradient penalty through an LSTM and an embedding with LayerNorm"""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(6, 2), nn.LayerNorm(2)
        self.lstm, self.head = nn.LSTM(2, 4, batch_first=True), nn.Linear(4, CLASSES)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        words = self.table((x * 2).long().clamp(-3, 2) + 3)
        loss = F.cross_entropy(self.head(self.lstm(self.norm(words))[0][:, -1]), y)
        [gradient] = torch.autograd.grad(loss, words, create_graph=True)
        return loss + 10 * gradient.square().sum()


class HooksOfNodes(Example):
    """`grad_fn.register_hook`, `register_prehook`, `register_multi_grad_hook`"""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        first = self.net[0](x)
        hidden = self.net[1](first)
        hidden.grad_fn.register_hook(lambda gi, go: (gi[0] * 0.5,))
        hidden.grad_fn.register_prehook(lambda go: (go[0] + 1e-3,))
        torch.autograd.graph.register_multi_grad_hook([first, hidden], self.log_norm)
        return F.cross_entropy(self.net[2](hidden), y)

    def log_norm(self, gradients: Any) -> None:
        self.log("norm", sum(g.norm() for g in gradients))


class SavedOnCpu(Example):
    """`torch.autograd.graph.save_on_cpu`"""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return super().loss(x, y)


class FeaturesOfHooks(Example):
    """Forward hooks that hand features on: set and removed in the step, a list, a dict emptied"""

    def __init__(self) -> None:
        super().__init__()
        self.listed: list[Tensor] = []
        self.named: dict[str, Tensor] = {}
        self.net[0].register_forward_hook(lambda m, args, out: self.listed.append(out))
        self.net[1].register_forward_hook(lambda m, args, out: self.named.update(hidden=out))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        outputs: list[Tensor] = []
        handle = self.net[2].register_forward_hook(lambda m, args, out: outputs.append(out))
        loss = super().loss(x, y)
        handle.remove()
        self.log("spread", outputs[0].std())
        extra = self.listed[-1].square().mean() + self.named.pop("hidden").abs().mean()
        self.listed.clear()
        return loss + 0.1 * extra


class FeaturesByName(Example):
    """A forward hook that leaves features in a dict of the module, which the host reads"""

    def __init__(self) -> None:
        super().__init__()
        self.features: dict[str, Tensor] = {}
        self.net[0].register_forward_hook(lambda m, args, out: self.features.update(hidden=out))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return super().loss(x, y) + self.features["hidden"].square().mean()

    def on_train_batch_end(self, *args: Any) -> None:
        self.log("seen", self.features["hidden"].detach().mean())


class BackwardOfTensors(Manual):
    """`torch.autograd.backward(tensors, grad_tensors)`"""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        out = self.net(batch[0])
        weights = [torch.ones_like(out) * 1e-2, None]
        torch.autograd.backward([out, out.square().mean()], weights)
        optimizer.step()
        return out.mean().detach()


class OwnBackward(Example):
    """`backward` overridden: twice through one graph"""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward(retain_graph=True)
        (0.1 * loss).backward()
