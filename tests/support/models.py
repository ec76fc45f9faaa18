"""Small modules and loaders that the tests share."""

from __future__ import annotations

from collections import Counter
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import BinaryAccuracy, MulticlassAccuracy, MulticlassF1Score

from fulgurite.backends.csx.contract.frozen_reads import is_replaying

CLASSES = 4


def rows(count: int, size: int = 8, seed: int = 1) -> TensorDataset:
    """``count`` samples (x [size], y) of CLASSES classes."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, size, generator=generator)
    return TensorDataset(x, x[:, :CLASSES].argmax(1))


def loader(count: int = 800, batch_size: int = 16, **options: Any) -> DataLoader[Any]:
    """A loader over ``rows``; 50 batches by default."""
    return DataLoader(rows(count, seed=options.pop("seed", 1)), batch_size=batch_size, **options)


def pictures(count: int = 400) -> DataLoader[Any]:
    """50 batches of 8 pictures [1, 8, 8]."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(count, 1, 8, 8, generator=generator)
    return DataLoader(TensorDataset(x, (x.mean((1, 2, 3)) > 0).long()), batch_size=8)


def tokens(count: int = 400, length: int = 6) -> DataLoader[Any]:
    """50 batches of 8 token sequences [length]."""
    generator = torch.Generator().manual_seed(3)
    data = torch.randint(0, 12, (count, length + 1), generator=generator)
    return DataLoader(TensorDataset(data), batch_size=8)


class Calls(Counter[str]):
    """How often something ran while a program was made of it; audits do not count."""

    def __setitem__(self, key: str, value: int) -> None:
        """Count."""
        if not is_replaying():
            super().__setitem__(key, value)


class Classifier(pl.LightningModule):
    """Any net as a classifier; logs loss and accuracy.

    Args:
        net: x -> logits.
        optimizer: class of the optimizer.
        options: its arguments.
    """

    def __init__(
        self, net: nn.Module, optimizer: type[Any] = torch.optim.AdamW, **options: Any
    ) -> None:
        super().__init__()
        self.net = net
        self.optimizer, self.options = optimizer, {"lr": 1e-2, **options}
        self.calls = Calls()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.calls["training_step"] += 1
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters(), **self.options)


def mlp(dropout: float = 0.0) -> nn.Module:
    """8-16-CLASSES."""
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, CLASSES))


def convnet() -> nn.Module:
    """A ConvNet with BatchNorm, for ``pictures``."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(36, 2),
    )


CONV_NOISE = ("net.0.bias", "net.1.running_mean")
"""Of ``convnet``: its gradient is rounding noise before BatchNorm, whose mean follows it."""


class Measured(Classifier):
    """With torchmetrics in training and validation, and another metric state for each."""

    def __init__(self) -> None:
        super().__init__(mlp())
        self.train_accuracy = MulticlassAccuracy(CLASSES, average="micro")
        self.val_accuracy = MulticlassAccuracy(CLASSES)
        self.val_f1 = MulticlassF1Score(CLASSES, average="macro")
        self.val_binary = BinaryAccuracy()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.net(batch[0])
        self.train_accuracy(logits, batch[1])
        self.log("train_accuracy", self.train_accuracy, on_step=True, on_epoch=True)
        return nn.functional.cross_entropy(logits, batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        logits = self.net(batch[0])
        self.val_accuracy.update(logits, batch[1])
        self.val_f1.update(logits.argmax(1), batch[1])
        self.val_binary.update(logits[:, 0], (batch[1] == 0).long())
        self.log_dict(
            {"val_loss": nn.functional.cross_entropy(logits, batch[1]), "batch": 1.0},
            prog_bar=True,
        )
        self.log("val_accuracy", self.val_accuracy)
        self.log("val_f1", self.val_f1)
        self.log("val_binary", self.val_binary)


class Transformer(pl.LightningModule):
    """A small causal language model on torch's own encoder, dropout 0."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 12, bias=False)
        self.head.weight = nn.Parameter(self.embed.weight[:, :16].detach().clone())
        self.embed.weight = self.head.weight  # tied

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, targets = batch[0][:, :-1], batch[0][:, 1:]
        mask = nn.Transformer.generate_square_subsequent_mask(inputs.shape[1])
        hidden = self.encoder(self.embed(inputs), mask=mask)
        loss = nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), targets.flatten())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=3e-3)


KEY_NOISE = tuple(f"encoder.layers.{i}.self_attn.in_proj_bias" for i in range(2))
"""The same of ``Transformer``: a key's bias cancels in the softmax."""


class GAN(pl.LightningModule):
    """Two optimizers under manual optimization, with toggling, clipping and a scheduler."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.critic = nn.Linear(4, 8), nn.Linear(8, 1)

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        first, second = self.optimizers()
        real = batch[0]
        noise = torch.randn(real.shape[0], 4)
        self.toggle_optimizer(first)
        fooled = nn.functional.softplus(-self.critic(self.generator(noise))).mean()
        first.zero_grad()
        self.manual_backward(fooled)
        first.step()
        self.untoggle_optimizer(first)
        self.toggle_optimizer(second)
        told = nn.functional.softplus(-self.critic(real))
        told = (told + nn.functional.softplus(self.critic(self.generator(noise).detach()))).mean()
        second.zero_grad()
        self.manual_backward(told)
        self.clip_gradients(second, 1.0, "norm")
        second.step()
        self.untoggle_optimizer(second)
        self.lr_schedulers().step()
        self.log_dict({"fooled": fooled, "told": told})
        return {"loss": told.detach(), "fooled": fooled.detach()}

    def configure_optimizers(self) -> Any:
        first = torch.optim.Adam(self.generator.parameters(), lr=1e-2)
        second = torch.optim.SGD(self.critic.parameters(), lr=1e-2, momentum=0.9)
        return [first, second], [torch.optim.lr_scheduler.StepLR(second, 10, 0.5)]


class PerParameter(torch.optim.Optimizer):
    """An optimizer in tensor operations: ``update`` changes one parameter and its state."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    def update(self, p: Tensor, state: dict[str, Any], lr: float) -> None:
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            for p in group["params"]:
                self.update(p, self.state[p], group["lr"])
        return loss


class SiluDropout(pl.LightningModule):
    """Its mask was once read before it was drawn: docs/backends.md, "Bugs in the compiler"."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(12, 32), nn.BatchNorm1d(32), nn.SiLU(), nn.Dropout(0.1), nn.Linear(32, 1)
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.huber_loss(self.net(x), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 1e-3)


class WithTotals(pl.LightningModule):
    """Any net as a classifier that logs a metric, the loss of steps and epochs, and ``val_loss``.

    Args:
        net: x -> logits [batch, CLASSES].
    """

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.accuracy = MulticlassAccuracy(CLASSES, average="micro")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.net(batch[0])
        loss = nn.functional.cross_entropy(logits, batch[1])
        self.accuracy(logits, batch[1])
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))
