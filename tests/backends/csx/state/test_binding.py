"""Host code that unties tensors which shared memory, or ties others, is an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from harness import assert_same_run, both, fit
from models import loader, mlp
from torch import Tensor, nn

from fulgurite.backends.csx.diagnostics.trace_errors import StateChanged

Change = Callable[["Sharing"], None]


class Sharing(pl.LightningModule):
    """Two buffers, one a view of the other or not, and a row of a weight that no step reads."""

    def __init__(self, change: Change, views: bool) -> None:
        super().__init__()
        self.change, self.net = change, mlp()
        self.register_buffer("all", torch.ones(8))
        self.register_buffer("most", self.all[1:] if views else torch.ones(7))
        if views:
            self.row = self.net[0].weight.data[0]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Changes one buffer, and reads the other."""
        self.most.mul_(1.1)
        return self.net(batch[0] * self.all).square().mean()

    def on_train_epoch_start(self) -> None:
        """The host changes something before the second epoch."""
        if self.current_epoch == 1:
            self.change(self)

    def configure_optimizers(self) -> Any:
        """Any."""
        return torch.optim.SGD(self.parameters(), lr=0.1)


def another_buffer(module: Sharing) -> None:
    """The view stays over the old one."""
    module.all = torch.full((8,), 0.3)


def other_data(module: Sharing) -> None:
    """The parameter stays, its memory does not."""
    weight: nn.Parameter = module.net[0].weight
    weight.data = weight.data * 0.5


def overlapping(module: Sharing) -> None:
    """Two views of one new tensor, which begin in different places."""
    both = torch.ones(9)
    module.all, module.most = both[:8], both[2:]


@pytest.mark.fits
@pytest.mark.parametrize(
    ("change", "views", "message"),
    [
        (another_buffer, True, r"self\.all and self\.most shared memory .* no longer do"),
        (other_data, True, r"self\.row and self\.net\.0\.weight shared memory .* no longer do"),
        (overlapping, False, r"self\.all and self\.most share memory, which they did not"),
    ],
)
def test_memory_that_is_shared_otherwise_is_an_error(
    change: Change, views: bool, message: str
) -> None:
    with pytest.raises(StateChanged, match=message):
        fit(lambda: Sharing(change, views), lambda: (loader(32),), static=True, max_epochs=2)


@pytest.mark.numbers
def test_data_of_a_parameter_that_shares_nothing_may_be_replaced() -> None:
    runs = [
        fit(lambda: Sharing(other_data, False), lambda: (loader(32),), static=ours, max_epochs=2)
        for ours in (True, False)
    ]
    assert runs[0].losses == pytest.approx(runs[1].losses, rel=1e-5)


class SwapsAverages(pl.LightningModule):
    """Averaged weights for validation, put in and taken out by the data of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.seen = mlp(), list[float]()
        self.averages = {name: p.detach().clone() for name, p in self.named_parameters()}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.training_step(batch, batch_idx))

    def on_train_batch_end(self, *args: Any) -> None:
        for name, p in self.named_parameters():
            self.averages[name].mul_(0.9).add_(p.detach(), alpha=0.1)

    def on_validation_epoch_start(self) -> None:
        self.own = {name: p.data for name, p in self.named_parameters()}
        for name, p in self.named_parameters():
            p.data = self.averages[name]

    def on_validation_epoch_end(self) -> None:
        for name, p in self.named_parameters():
            p.data = self.own[name]
        self.seen.append(float(self.trainer.callback_metrics["val"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.numbers
@pytest.mark.parametrize("sanity", [0, 2])
def test_averages_in_the_place_of_weights_while_validation_runs(sanity: int) -> None:
    loaders = lambda: (loader(), loader())  # noqa: E731
    options: dict[str, Any] = {"max_epochs": 3, "num_sanity_val_steps": sanity, "fresh": True}
    ours, stock = both(SwapsAverages, loaders, **options)
    assert_same_run(ours, stock)
    assert len(stock.module.seen) == 3 + bool(sanity)
    assert ours.module.seen == pytest.approx(stock.module.seen, rel=1e-5)
