"""A condition on a tensor: the remedy is that of the line and of its branch, and trains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from harness import assert_close, fit, make_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fulgurite.backends.csx.diagnostics.trace_errors import ConditionalOnTensor, HostRead


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def loss(self, batch: Any) -> Tensor:
        return self.layer(batch[0]).square().mean()


class LeavesOut(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        loss = self.loss(batch)
        if loss > 0.2:
            return None
        return loss


class LeavesOutByItem(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        loss = self.loss(batch)
        if loss.item() > 0.2:
            return None
        return loss


class Stops(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        if loss < 0.1:
            self.trainer.should_stop = True
        return loss


class Shows(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        if float(loss) > 0.2:
            print("large")
        return loss


class Chooses(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        return loss if loss.item() > 0.2 else 2 * loss


class Reads(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        return loss * loss.item() if self.training else loss


def data() -> DataLoader[Any]:
    x = torch.randn(32, 4, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x), 4)


REMEDIES = {
    LeavesOut: (ConditionalOnTensor, "loss = torch.where(condition, 0.0, loss)"),
    LeavesOutByItem: (HostRead, "loss = torch.where(condition, 0.0, loss)"),
    Stops: (ConditionalOnTensor, "self.trainer.should_stop = True"),
    Shows: (HostRead, "def show(value)"),
    Chooses: (HostRead, "x = torch.where(condition, a, b)"),
}


@pytest.mark.fits
@pytest.mark.parametrize("kind", REMEDIES)
def test_the_remedy_is_that_of_the_branch(kind: Callable[[], Net]) -> None:
    error, remedy = REMEDIES[kind]
    with pytest.raises(error) as raised:
        make_trainer(True, max_epochs=1).fit(kind(), data())
    assert remedy in str(raised.value).partition("Remedy: ")[2]


@pytest.mark.fits
def test_a_value_that_is_read_in_no_condition_is_left_a_tensor() -> None:
    with pytest.raises(HostRead, match="leave it a tensor"):
        make_trainer(True, max_epochs=1).fit(Reads(), data())


class Where(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        return torch.where(loss > 0.2, 0.0, loss)


class StopsOnTheHost(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if outputs["loss"] < 0.1:
            self.trainer.should_stop = True


@pytest.mark.numbers
@pytest.mark.filterwarnings("ignore:.*returned `None`")
@pytest.mark.parametrize(("without", "taken"), [(LeavesOut, Where), (Stops, StopsOnTheHost)])
def test_taken_literally_it_trains_as_stock_does_without_it(
    without: Callable[[], Net], taken: Callable[[], Net]
) -> None:
    stock, ours = (
        fit(make, lambda: (data(),), static=static, max_epochs=3)
        for make, static in ((without, False), (taken, True))
    )
    assert ours.trainer.should_stop == stock.trainer.should_stop
    assert_close(ours.module.state_dict(), stock.module.state_dict())
