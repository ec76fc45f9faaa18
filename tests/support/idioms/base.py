"""What an idiom is: a small LightningModule that does one thing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import lightning.pytorch as pl
import torch
from models import CLASSES, loader
from torch import Tensor, nn

F = nn.functional


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    """Of examples that do not make their own."""
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


class Example(pl.LightningModule):
    """Logits [16, CLASSES] of x [16, 8]; a subclass changes the part that its idiom is about.

    The first line of a subclass's docstring is what the list in the docs says.
    """

    tolerance = 1e-5  # relative, of losses; of weights twice that
    why = ""  # where it is wider than float32's
    noise: tuple[str, ...] = ()  # parameters whose gradient is rounding noise
    alone = False  # whether it changes what others in the same training see
    batches = staticmethod(lambda: loader(64))

    def __init__(self) -> None:
        super().__init__()
        self.net: Any = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, CLASSES))

    def forward(self, x: Tensor) -> Any:
        return self.net(x)

    def loss(self, x: Any, y: Tensor) -> Tensor:
        return F.cross_entropy(self(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch[0], batch[1])

    def configure_optimizers(self) -> Any:
        return optimizer(self.parameters())


class Manual(Example):
    """The same under manual optimization; a subclass has a training step of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def update(self, *losses: Tensor) -> Tensor:
        """One step of the optimizer on the sum of the losses' gradients; returns the first."""
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        for loss in losses:
            self.manual_backward(loss)
        optimizer.step()
        return losses[0].detach()


class OneLayer(Example):
    """``prepare`` -> one layer -> mean over all but the batch -> logits"""

    def __init__(self, layer: nn.Module, prepare: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.net, self.prepare = layer, prepare
        self.head = nn.Linear(1, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        given = self.prepare(x)
        out = self.net(*given) if isinstance(given, tuple) else self.net(given)
        return self.head(out.reshape(len(x), -1).square().mean(1, keepdim=True))  # type: ignore[no-any-return]


class OneOperation(Example):
    """hidden [16, 16] -> ``operation`` -> a number beside the loss"""

    def __init__(self, operation: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.operation = operation

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.net[1](self.net[0](x))
        out = self.operation(hidden)
        out = torch.view_as_real(out) if out.is_complex() else out
        return F.cross_entropy(self.net[2](hidden), y) + 0.1 * out.square().mean().log1p()


@dataclass(frozen=True, slots=True, kw_only=True)
class Idiom:
    """One thing that works as it does in stock Lightning.

    Args:
        name: for the test.
        text: for the docs, a line.
        make: makes the module.
        batches: makes its loader.
        tolerance: relative, of losses and logged values; weights have twice that.
        why: the reason of a tolerance wider than 1e-5.
        noise: parameters whose gradient is rounding noise; they are not compared.
    """

    name: str
    text: str
    make: Callable[[], pl.LightningModule]
    batches: Callable[[], Any]
    tolerance: float = 1e-5
    why: str = ""
    noise: tuple[str, ...] = ()


def examples_in(module: ModuleType) -> Iterator[Idiom]:
    """The examples that a file defines, in its order."""
    for kind in vars(module).values():
        own = isinstance(kind, type) and kind.__module__ == module.__name__
        if own and issubclass(kind, Example):
            yield Idiom(
                name=kind.__name__,
                text=str(kind.__doc__).partition("\n")[0].rstrip("."),
                make=kind,
                batches=kind.batches,
                tolerance=kind.tolerance,
                why=kind.why,
                noise=kind.noise,
            )
