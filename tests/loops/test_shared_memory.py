"""What a step leaves that is memory of the state or of the batch: that memory, as under stock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from harness import assert_same_run, both
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric


class Net(pl.LightningModule):
    """A net whose step leaves what a row says, and whose hook does with that what it says."""

    def __init__(self, leave: Callable[..., Any], change: Callable[..., Any]) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))
        self.register_buffer("ema", torch.zeros(3))
        self.old, self.metric = torch.ones(3), MeanMetric()
        self.leave, self.change = leave, change
        self.kept: list[Tensor] = []
        self.held: dict[str, Tensor] = {}
        self.register_buffer("seen", torch.zeros(3))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = (self.net(batch[0]) - batch[0].sum(1, keepdim=True)).square().mean()
        more = self.leave(self, batch[0], loss.detach())
        return loss if more is None else {"loss": loss, "left": more}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.change(self, outputs.get("left"), batch[0])
        kept = [one.sum() for one in self.kept]
        self.seen += torch.stack([batch[0].sum(), self.ema.sum(), sum(kept, torch.zeros(()))])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        w = getattr(self, "w", None)  # what the step left is read in another program
        self.log("v", self.net(batch[0]).mean() + (0.0 if w is None else w.sum()))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.05)


def weight(net: Net, x: Tensor, loss: Tensor) -> None:
    net.w = net.net[0].weight.detach()


def part(net: Net, x: Tensor, loss: Tensor) -> None:
    net.w = net.net[0].weight[1:, ::2].detach()


def halves(net: Net, x: Tensor, loss: Tensor) -> Any:
    a, b = net.ema.chunk(2)
    net.ema += loss
    return [a, b]


def running(net: Net, x: Tensor, loss: Tensor) -> None:
    net.ema.mul_(0.9).add_(loss)
    net.kept.append(net.ema)


def in_dict(net: Net, x: Tensor, loss: Tensor) -> None:
    net.old.mul_(0.9).add_(loss)
    net.held["old"] = net.old


def replaced(net: Net, x: Tensor, loss: Tensor) -> Tensor:
    old, net.old = net.old, net.old * 0.9 + loss
    return old


def data(net: Net, x: Tensor, loss: Tensor) -> Tensor:
    old = net.net[0].weight.data
    net.net[0].weight.data = old * 0.99
    return old


def metric(net: Net, x: Tensor, loss: Tensor) -> Any:
    net.metric.update(loss)
    return net.metric.mean_value


def rows(net: Net, x: Tensor, loss: Tensor) -> Tensor:
    return x[:, 1:]


def scale(net: Net, left: Any, x: Tensor) -> None:
    found = [*net.held.values(), *([net.w] if hasattr(net, "w") else [])]
    for one in found + (left if isinstance(left, list) else [] if left is None else [left]):
        one.mul_(0.95)


def keep(net: Net, left: Any, x: Tensor) -> None:
    net.kept += left if isinstance(left, list) else [] if left is None else [left]


def loaders() -> tuple[Any, ...]:
    x = torch.randn(32, 4, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x), 8), DataLoader(TensorDataset(x[:8]), 8)


LEAVE = {
    one.__name__: one
    for one in (weight, part, halves, running, in_dict, replaced, data, metric, rows)
}


@pytest.mark.numbers
@pytest.mark.parametrize("change", [scale, keep], ids=["scaled", "kept"])
@pytest.mark.parametrize("leave", LEAVE.values(), ids=LEAVE)
def test_what_a_step_leaves_is_the_memory_that_it_was(
    leave: Callable[..., Any], change: Callable[..., Any]
) -> None:
    assert_same_run(*both(lambda: Net(leave, change), loaders, max_epochs=2))


@pytest.mark.numbers
@pytest.mark.process
def test_so_it_is_where_code_is_compiled() -> None:
    ours, stock = both(lambda: Net(part, scale), loaders, policy="default", max_epochs=2)
    assert_same_run(ours, stock)


class Same(Net):
    """Notes which of what its steps leave are the very objects that they were given."""

    def __init__(self) -> None:
        super().__init__(weight, keep)
        self.found: list[list[bool]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.ema.mul_(0.9)
        self.last = batch[0]
        loss = self.net(batch[0]).square().mean()
        views = {"detached": self.old.detach(), "part": batch[0][:2]}
        return {"loss": loss, "x": batch[0], "ema": self.ema, "w": self.net[0].weight, **views}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        now = {"x": batch[0], "ema": self.ema, "w": self.net[0].weight, "detached": self.old}
        same = [outputs[name] is one for name, one in (*now.items(), ("part", outputs["part"]))]
        self.found.append([*same, self.last is batch[0], outputs["w"].requires_grad])


@pytest.mark.numbers
def test_what_a_step_was_given_is_the_same_object_when_it_leaves() -> None:
    ours, stock = both(Same, loaders, max_epochs=2)
    assert ours.module.found == stock.module.found
    assert stock.module.found[0] == [True, True, True, False, True, True, True]
