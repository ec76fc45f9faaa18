"""Batches that a step has no loss for: it returns None where a counter or a hook says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from harness import assert_same_run, both
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

pytestmark = pytest.mark.filterwarnings("ignore:.*returned `None`")


class Net(pl.LightningModule):
    """Trains on the batches that a row chooses, by an attribute that a hook sets, too."""

    def __init__(self, leaves_out: Callable[[Net, int], bool], adam: bool) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))
        self.leaves_out, self.adam, self.is_bad = leaves_out, adam, False
        self.seen: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        loss = (self.net(batch[0]) - batch[0].sum(1, keepdim=True)).square().mean()
        if self.leaves_out(self, batch_idx):
            return None
        self.log("loss", loss)
        return loss

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.is_bad = batch_idx in (1, 4, 7)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        given = float(outputs["loss"]) if outputs else -1.0
        self.seen += [given, self.trainer.global_step, float(self.net[0].weight.detach().sum())]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("v", self.net(batch[0]).square().mean())

    def configure_optimizers(self) -> Any:
        kinds: Any = torch.optim
        chosen = kinds.AdamW if self.adam else kinds.SGD
        more = {} if self.adam else {"momentum": 0.9}
        optimizer = chosen(self.parameters(), lr=0.05, **more)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


ROWS = {
    "some batches": lambda net, i: i in (2, 3, 5),
    "the first": lambda net, i: i == 0,
    "a hook's": lambda net, i: net.is_bad,
    "an epoch": lambda net, i: net.current_epoch == 1,
    "all": lambda net, i: True,
}


def loaders() -> tuple[Any, ...]:
    x = torch.randn(72, 4, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x), 8), DataLoader(TensorDataset(x[:16]), 8)


@pytest.mark.numbers
@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("adam", [False, True], ids=["SGD", "AdamW"])
@pytest.mark.parametrize("leaves_out", ROWS.values(), ids=ROWS)
def test_a_step_without_a_loss_trains_as_under_stock(
    leaves_out: Callable[[Net, int], bool], adam: bool, window: int
) -> None:
    ours, stock = both(
        lambda: Net(leaves_out, adam),
        loaders,
        max_epochs=3,
        accumulate_grad_batches=window,
        val_check_interval=5,
    )
    assert ours.module.seen == pytest.approx(stock.module.seen, rel=1e-4, abs=1e-5)
    assert_same_run(ours, stock)


class Turns(pl.LightningModule):
    """Two optimizers by hand, of which a hook says whose turn it is; ``.grad`` is named nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.a, self.b, self.phase = nn.Linear(4, 4), nn.Linear(4, 1), 0
        self.seen: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()[self.phase]  # type: ignore[index]
        optimizer.zero_grad()
        self.manual_backward(self.b(self.a(batch[0])).square().mean())
        optimizer.step()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.phase = (batch_idx // 3) % 2

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen += [float(self.a.weight.detach().sum()), float(self.b.weight.detach().sum())]

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(one.parameters(), lr=0.1) for one in (self.a, self.b)]


@pytest.mark.numbers
def test_optimizers_take_turns_that_a_hook_decides() -> None:
    ours, stock = both(Turns, lambda: loaders()[:1], max_epochs=2)
    assert ours.module.seen == pytest.approx(stock.module.seen, rel=1e-5, abs=1e-6)
