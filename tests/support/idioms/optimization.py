"""Steps that the user writes: manual optimization, averages of weights, frozen parts."""

from __future__ import annotations

import copy
from typing import Any

import torch
from idioms.base import Example, F, Manual
from models import CLASSES
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


class ManualOptimization(Manual):
    """Manual optimization: `zero_grad`, `manual_backward`, `step`"""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.update(self.loss(*batch))


class ManualClosure(Manual):
    """`optimizer.step(closure)`"""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = self.loss(*batch)
            self.manual_backward(loss)
            return loss

        return optimizer.step(closure=closure).detach()


class RawOptimizer(Manual):
    """`self.optimizers(use_pl_optimizer=False)`"""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers(use_pl_optimizer=False)
        optimizer.zero_grad(set_to_none=False)
        loss = self.loss(*batch)
        self.manual_backward(loss)
        optimizer.step()
        return loss.detach()


class ClippedByHand(Manual):
    """`clip_grad_norm_`, `clip_grad_value_` and `self.clip_gradients` in a manual step"""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        loss = self.loss(*batch)
        optimizer.zero_grad()
        self.manual_backward(loss)
        norm = nn.utils.clip_grad_norm_(self.parameters(), 0.2)
        self.clip_gradients(optimizer, 0.1, "norm")
        nn.utils.clip_grad_value_(self.net.parameters(), 0.05)
        self.log("norm", norm)
        optimizer.step()
        return loss.detach()


class NormOfGradients(Manual):
    """A norm of all gradients, by `torch.stack` or `parameters_to_vector`, that scales them"""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        loss = self.loss(*batch)
        optimizer.zero_grad()
        self.manual_backward(loss)
        norm = torch.stack([p.grad.norm() for p in self.parameters()]).norm()
        flat = nn.utils.parameters_to_vector(p.grad for p in self.parameters())
        scale = (0.1 / torch.maximum(norm, flat.norm())).clamp(max=1)
        for p in self.parameters():
            p.grad.mul_(scale)
        optimizer.step()
        return loss.detach()


class AccumulatedByHand(Manual):
    """Micro-batches in a loop: the step cuts the batch, and steps once"""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        total = torch.zeros(())
        for x, y in zip(batch[0].chunk(4), batch[1].chunk(4), strict=True):
            loss = self.loss(x, y) / 4
            self.manual_backward(loss)
            total = total + loss.detach()
        optimizer.step()
        return total


class KeptGradients(Manual):
    """A step that never clears gradients, or clears them after: they are state"""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(*batch)
        self.manual_backward(loss)
        for p in self.net[0].parameters():
            p.grad.mul_(0.5)
        self.optimizers().step()
        self.net[2].zero_grad()
        return loss.detach()


class ScaledLoss(Manual):
    """Loss scaling by hand: gradients unscaled, a step skipped with `torch.where`"""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(1024.0))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        loss = self.loss(*batch)
        optimizer.zero_grad()
        self.manual_backward(loss * self.scale)
        gradients = [p.grad for p in self.parameters()]
        torch._foreach_div_(gradients, self.scale)
        finite = torch.stack([g.isfinite().all() for g in gradients]).all()
        for g in gradients:
            g.copy_(torch.where(finite, g, 0))
        self.scale.copy_(torch.where(finite, self.scale * 1.5, self.scale / 2))
        optimizer.step()
        return loss.detach()


class Sharpness(Manual):
    """SAM: climb by the gradient, a second pass there, back, then the step"""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer, weights = self.optimizers(), list(self.parameters())
        loss = self.loss(*batch)
        optimizer.zero_grad()
        self.manual_backward(loss)
        norm = torch.stack([p.grad.norm() for p in weights]).norm()
        climbs = [p.grad * (0.05 / (norm + 1e-12)) for p in weights]
        with torch.no_grad():
            for p, climb in zip(weights, climbs, strict=True):
                p.add_(climb)
        optimizer.zero_grad()
        self.manual_backward(self.loss(*batch))
        with torch.no_grad():
            for p, climb in zip(weights, climbs, strict=True):
                p.sub_(climb)
        optimizer.step()
        return loss.detach()


class SharpnessOptimizer(torch.optim.Optimizer):
    """SAM as it is published: around another optimizer."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.base_optimizer = torch.optim.SGD(self.param_groups, lr=lr, momentum=0.9)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = torch.enable_grad()(closure)()
        every = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in every]).norm()
        for p in every:
            self.state[p]["old"] = p.data.clone()
            p.add_(p.grad * (0.05 / norm))
        self.zero_grad()
        torch.enable_grad()(closure)()
        for p in every:
            p.data = self.state[p]["old"]
        self.base_optimizer.step()
        return loss


class OptimizerInside(Example):
    """An optimizer around another one, as SAM and Lookahead are published"""

    def configure_optimizers(self) -> Any:
        return SharpnessOptimizer(self.parameters(), lr=0.1)


class UpdateByHand(Manual):
    """No optimizer's step: `p.sub_(lr * p.grad)` and `p.data = ...` under `no_grad`"""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(*batch)
        self.zero_grad()
        self.manual_backward(loss)
        with torch.no_grad():
            for p in self.net[0].parameters():
                p.sub_(0.1 * p.grad)
            for p in self.net[2].parameters():
                p.data = p.data - 0.1 * p.grad
        return loss.detach()


class TwoOptimizers(Manual):
    """Two optimizers with `toggle_optimizer`, each with its own loss"""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        for optimizer, decay in zip(self.optimizers(), (0.1, 0.0), strict=True):
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            loss = self.loss(x, y) + decay * self.net[0].weight.square().sum()
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)
        return loss.detach()

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.Adam(self.net[0].parameters(), lr=1e-2),
            torch.optim.RMSprop(self.net[2].parameters(), lr=1e-2),
        ]


class StepsInALoop(Manual):
    """Several optimizer steps in one training step (five critic updates)"""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        for _ in range(5):
            loss = self.update(self.loss(*batch))
        return loss


class RatesByGroup(Example):
    """Param groups with rates and decay of their own, a scheduler for each step"""

    def configure_optimizers(self) -> Any:
        groups = [
            {"params": [p for p in self.parameters() if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in self.parameters() if p.ndim == 1], "lr": 0.1},
        ]
        optimizer = torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.0)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, [1e-2, 1e-1], total_steps=10)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class TargetNetwork(Example):
    """A target network that follows by `lerp_` under `no_grad` in the step"""

    def __init__(self) -> None:
        super().__init__()
        self.target = copy.deepcopy(self.net).requires_grad_(False)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            for p, q in zip(self.target.parameters(), self.net.parameters(), strict=True):
                p.lerp_(q, 0.1)
            wanted = self.target(x).softmax(1)
        return super().loss(x, y) + F.mse_loss(self.net(x).softmax(1), wanted)


class TargetByData(Example):
    """The same by `p.data`, and `load_state_dict` into another module in the step"""

    def __init__(self) -> None:
        super().__init__()
        self.target = copy.deepcopy(self.net).requires_grad_(False)
        self.last = copy.deepcopy(self.net).requires_grad_(False)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        for p, q in zip(self.target.parameters(), self.net.parameters(), strict=True):
            p.data = 0.9 * p.data + 0.1 * q.data
        distance = F.mse_loss(self.net(x), self.last(x)) + F.mse_loss(self.net(x), self.target(x))
        self.last.load_state_dict(self.net.state_dict())
        return super().loss(x, y) + distance


class WeightAverage(Example):
    """`swa_utils.AveragedModel` updated in `on_train_batch_end`, on the host"""

    def __init__(self) -> None:
        super().__init__()
        self.average = AveragedModel(self.net, multi_avg_fn=get_ema_multi_avg_fn(0.5))

    def on_train_batch_end(self, *args: Any) -> None:
        self.average.update_parameters(self.net)


class WeightAverageInStep(Example):
    """`swa_utils.AveragedModel` updated in the step, by each of its formulas"""

    def __init__(self) -> None:
        super().__init__()
        self.plain = AveragedModel(self.net, use_buffers=True)
        self.moving = AveragedModel(self.net, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        self.own = AveragedModel(self.net, avg_fn=lambda a, p, n: a + (p - a) / (n + 2))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        averages = (self.plain, self.moving, self.own)
        for average in averages:
            average.update_parameters(self.net)
        with torch.no_grad():
            taught = [average(x) for average in averages]
        return super().loss(x, y) + sum(F.mse_loss(self.net(x), one) for one in taught)


class Frozen(Example):
    """A frozen part: `requires_grad_(False)` in `__init__`, optimizer over the rest"""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], lr=1e-2)


class FrozenInStep(Example):
    """`requires_grad_(False)` and back around a part of the step"""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        self.net[2].requires_grad_(False)
        first = super().loss(x, y)
        self.net[2].requires_grad_(True)
        return first + self.net(0.5 * x).square().mean()


class Detached(Example):
    """A part that gets no gradient by `detach()`; its optimizer leaves it alone"""

    def __init__(self) -> None:
        super().__init__()
        self.probe = nn.Linear(16, CLASSES)
        self.unused = nn.Linear(2, 2)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.net[1](self.net[0](x))
        return F.cross_entropy(self.probe(hidden.detach()), y)


class MovingStatistics(Example):
    """Running statistics in buffers: `lerp_`, `copy_`, and `self.mean = ...`"""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("scale", torch.ones(8))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        self.mean.lerp_(x.mean(0), 0.1)
        self.scale = 0.9 * self.scale + 0.1 * x.std(0)
        self.seen += len(x)
        return super().loss((x - self.mean) / self.scale, y) + 1e-3 * self.seen


class Queue(Example):
    """MoCo: a queue of past keys in a buffer, written at a pointer that is a tensor"""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", F.normalize(torch.randn(48, CLASSES), dim=1))
        self.register_buffer("place", torch.zeros((), dtype=torch.int64))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        query, key = F.normalize(self.net(x), dim=1), F.normalize(self.net(2 * x), dim=1).detach()
        logits = (
            torch.cat([(query * key).sum(1, keepdim=True), query @ self.queue.clone().T], 1) / 0.2
        )
        rows = (self.place + torch.arange(len(x))) % len(self.queue)
        self.queue.index_copy_(0, rows, key)
        self.place.add_(len(x)).remainder_(len(self.queue))
        return F.cross_entropy(logits, torch.zeros_like(y))


class ClampedWeights(Example):
    """Weights clamped or normalized after `optimizer_step`"""

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        with torch.no_grad():
            self.net[0].weight.clamp_(-0.2, 0.2)
            self.net[2].weight.div_(self.net[2].weight.norm(dim=1, keepdim=True).clamp(min=1))


class AddedNoise(Example):
    """Weights perturbed for the forward pass and put back after backward"""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            self.kept = self.net[0].weight.clone()
            self.net[0].weight.add_(0.1 * torch.randn_like(self.kept))
        return super().loss(x, y)

    def on_after_backward(self) -> None:
        with torch.no_grad():
            self.net[0].weight.copy_(self.kept)


class SwappedData(Manual):
    """Two networks swap weights by `p.data`; `old = p.data` keeps the values it had"""

    def __init__(self) -> None:
        super().__init__()
        self.other = copy.deepcopy(self.net).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.update(self.loss(*batch))
        for p, q in zip(self.net.parameters(), self.other.parameters(), strict=True):
            old = p.data
            p.data = q.data
            q.data = old
        return loss


class DataSetBefore(Example):
    """`p.data = ...` before the forward pass, `p.grad.data = ...` after backward"""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        weight = self.net[0].weight
        self.before = weight.data
        weight.data = weight.data / weight.data.norm(dim=1, keepdim=True)
        weight.data.mul_(1.01)
        return super().loss(x, y) + 0.1 * self.before.mean()

    def on_after_backward(self) -> None:
        for p in self.parameters():
            p.grad.data = p.grad.data.clamp(-0.1, 0.1)


class WeightsAsVector(Manual):
    """`parameters_to_vector`, `vector_to_parameters`"""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.update(self.loss(*batch))
        flat = nn.utils.parameters_to_vector(self.parameters())
        nn.utils.vector_to_parameters(0.99 * flat.detach(), self.parameters())
        return loss


class MixedGradients(Manual):
    """`p.grad += ...`, gradients kept, cleared with `set_to_none=False`, and mixed"""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(*batch)
        self.manual_backward(loss)
        for p in self.parameters():
            p.grad += 1e-2 * p.detach()
        kept = [p.grad.clone() for p in self.parameters()]
        optimizer.zero_grad(set_to_none=False)
        self.manual_backward(self.loss(batch[0].flip(1), batch[1]))
        for p, gradient in zip(self.parameters(), kept, strict=True):
            p.grad = 0.5 * (p.grad + gradient)
        optimizer.step()
        return loss.detach()


class ToggledModel(Manual):
    """`with optimizer.toggle_model():`"""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with self.optimizers().toggle_model():
            return self.update(self.loss(*batch))


class OwnClipping(Example):
    """`configure_gradient_clipping` overridden"""

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.clip_gradients(optimizer, 0.1, "value")
        self.clip_gradients(optimizer, 0.1, "norm")
