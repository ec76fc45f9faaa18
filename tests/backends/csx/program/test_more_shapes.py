"""More shapes of batches than are compiled: they run operation by operation, and it is said."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from harness import both, make_trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging
from torch import Tensor, nn
from torch.testing import assert_close
from torchmetrics import MeanMetric

from fulgurite.backends.csx.diagnostics.trace_errors import InputChanged
from fulgurite.backends.csx.objects import varying_dimensions
from fulgurite.backends.csx.program import announcements


class Texts(pl.LightningModule):
    """Rows of any length."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(20, 8), nn.Linear(8, 2)
        self.norm = nn.BatchNorm1d(8)

    def training_step(self, batch: list[Tensor]) -> Tensor:
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.norm(self.embed(tokens).mean(1)))  # type: ignore[no-any-return]

    def validation_step(self, batch: list[Tensor]) -> None:
        self.log("val", nn.functional.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def batches(lengths: list[int]) -> list[list[Tensor]]:
    drawn = torch.Generator().manual_seed(0)
    return [
        [torch.randint(0, 20, (4, n), generator=drawn), torch.tensor([0, 1, n % 2, 1])]
        for n in lengths
    ]


class Batches:
    """A loader of them."""

    def __init__(self, lengths: list[int]) -> None:
        self.batches = batches(lengths)

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[Tensor]]:
        return iter(self.batches)


LENGTHS = [5, 7, 5, 9, 11, 13, 15, 17, 13, 5, 15, 19]


@pytest.mark.numbers
@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2}])
def test_all_lengths_train_as_in_lightning(options: dict[str, Any]) -> None:
    ours, stock = both(
        Texts, lambda: (Batches(LENGTHS), Batches(LENGTHS[::-1])), max_epochs=3, **options
    )
    assert len(ours.losses) == 36
    assert ours.losses == pytest.approx(stock.losses, rel=1e-5)
    for one, other in zip(ours.metrics, stock.metrics, strict=True):
        assert one == pytest.approx(other, rel=1e-5)


class Counted(Texts):
    """A step by hand, which draws, counts, keeps a mean, and leaves a gradient now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.calls, self.mean = 0, MeanMetric()
        self.register_buffer("seen", torch.zeros(()))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        optimizer: Any = self.optimizers()
        self.calls += 1
        loss = nn.functional.cross_entropy(nn.functional.dropout(self(batch[0])), batch[1])
        self.seen += loss.detach()
        self.mean(loss)
        self.log("mean", self.mean)
        self.manual_backward(loss)
        if batch_idx % 2 == 1:
            optimizer.step()
            optimizer.zero_grad()
        return loss


class Rebound(Texts):
    """Binds attributes to new tensors, which were none when the fit began."""

    def __init__(self) -> None:
        super().__init__()
        self.base: Any = None
        self.pair: Any = None
        self.last: Any = (0.0, 0.0)
        self.total: Any = 0.0
        self.register_buffer("mean", None)

    def training_step(self, batch: list[Tensor]) -> Tensor:
        now = super().training_step(batch)
        if self.base is None:
            self.base, self.mean, self.pair = (now.detach(),) * 2, now.detach(), (now.detach(),) * 2
        self.base = self.base[1], 0.9 * self.base[0] + 0.1 * now.detach()
        self.mean = 0.5 * self.mean + 0.5 * now.detach()
        self.total += now.detach()
        self.pair = self.pair[1], now.detach()
        now, self.last = now + self.last[0], (self.last[1], 0.5 * now.detach())
        terms = torch.stack([*self.base, self.mean, self.total, *self.pair])
        return now + (now - terms).square().mean()


@pytest.mark.numbers
def test_what_a_step_binds_anew_goes_on_in_both_ways() -> None:
    ours, stock = both(Rebound, lambda: (Batches(LENGTHS),), max_epochs=3, fresh=True)
    assert ours.losses == pytest.approx(stock.losses, rel=1e-5)
    for name in ("mean", "total", "base", "pair"):
        assert_close(getattr(ours.module, name), getattr(stock.module, name))


@pytest.mark.numbers
@pytest.mark.filterwarnings("ignore:.*calls")
def test_a_step_by_hand_has_state_in_both_ways() -> None:
    ours, stock = both(Counted, lambda: (Batches(LENGTHS),), max_epochs=3, fresh=True)
    assert ours.losses == pytest.approx(stock.losses, rel=1e-5)
    assert ours.module.seen == pytest.approx(float(stock.module.seen), rel=1e-5)
    for one, other in zip(ours.metrics, stock.metrics, strict=True):
        assert one == pytest.approx(other, rel=1e-5)


@pytest.mark.fits
def test_one_line_and_a_row_of_the_table_tell_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(announcements, "rank_zero_info", said.append)
    make_trainer(True, max_epochs=2).fit(Texts(), Batches(LENGTHS))
    told = [line for line in said if "more than 4 shapes" in line]
    assert len(told) == 1
    assert "batch[0], dimension 1: 5, 7, 9, 11 and 13 seen" in told[0]
    assert "fulgurite.utils.data.PadToBuckets(collate_fn, sizes=(8, 16)) as collate_fn" in told[0]
    table = " ".join(said[-1].split())
    assert "shapes 4 more than are compiled: 12 batches ran without a program" in table
    assert sum("training program" in line for line in said) == 4


@pytest.mark.fits
def test_a_limit_that_was_given_holds() -> None:
    trainer = make_trainer(True, max_epochs=1, backend={"max_programs": 3})
    with pytest.raises(InputChanged, match=r"5, 7, 9 and 11 seen. Each .* and 3 may be built"):
        trainer.fit(Texts(), Batches(LENGTHS))


class Averaged(Texts):
    """Its rates and betas are scheduled: averaging takes another scheduler, which keeps both."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=200)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


@pytest.mark.long
@pytest.mark.fits
@pytest.mark.filterwarnings("ignore:SWA is currently only supported every epoch")
def test_shapes_are_counted_in_each_phase_anew() -> None:
    averaging = StochasticWeightAveraging(1e-3, swa_epoch_start=2)
    trainer = make_trainer(True, callbacks=[averaging], max_epochs=4)
    trainer.fit(Averaged(), Batches([5, 7, 9] * 3))
    assert trainer.strategy.fit_summary.other_shapes == 0
    assert 6 <= len(trainer.strategy.training.programs) <= 9


def test_the_sizes_of_one_bucket_are_a_tuple() -> None:
    [found] = varying_dimensions([{"x": torch.Size([4, 5])}, {"x": torch.Size([4, 7])}])
    assert "sizes=(8,)" in found.buckets()
