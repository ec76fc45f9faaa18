"""What is another one in each epoch is found where an epoch begins, though there is no time."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from harness import assert_close, make_trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from models import CLASSES, Classifier, loader, mlp
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics import MeanMetric

from fulgurite.backends.csx.program import audit
from fulgurite.errors import GraphChanged

STEPS = 6  # of an epoch
LATE = ContextVar("LATE", default=False)

pytestmark = pytest.mark.fits


@pytest.fixture(autouse=True)
def there_is_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "SHARE", 0.0)


class Asks(Classifier):
    """Asks the trainer for something in each step; it has no hooks."""

    def __init__(self, asked: Callable[[Any], float]) -> None:
        super().__init__(mlp(), torch.optim.SGD)
        self.asked = asked

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1]) * (1 + self.asked(self))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


def score(module: Any) -> float:
    return 0.0 if module.trainer.checkpoint_callback.best_model_score is None else 1.0


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (lambda m: m.trainer.early_stopping_callback.wait_count, "EarlyStopping.wait_count"),
        (lambda m: m.trainer.fit_loop.epoch_progress.current.completed, r"\.completed"),
        (lambda m: m.lr_schedulers().last_epoch, "ExponentialLR.last_epoch"),
        (score, "ModelCheckpoint.best_model_score"),
    ],
    ids=["a callback", "a loop", "a scheduler", "a score"],
)
def test_what_the_step_asks_the_trainer_for(
    asked: Callable[[Any], float], told: str, tmp_path: Any
) -> None:
    trainer = make_trainer(
        True,
        max_epochs=4,
        callbacks=[
            EarlyStopping("val_loss", patience=99, min_delta=1.0),
            ModelCheckpoint(tmp_path, monitor="val_loss"),
        ],
        enable_checkpointing=True,
        backend={"audit": True},
    )
    with pytest.raises(GraphChanged, match=told):
        trainer.fit(Asks(asked), loader(16 * STEPS), loader(32))
    assert STEPS <= trainer.global_step <= 2 * STEPS


class Weighs(pl.LightningModule):
    """Weighs a gradient in its second epoch, by a hook that it registers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(8, CLASSES)
        self.handle: Any = None

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.handle = self.net.weight.register_hook(lambda gradient: gradient * 0.1)
        elif self.handle is not None:
            self.handle.remove()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Filled(Weighs):
    """The same as the error advises."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("k", torch.ones(()))

    def configure_model(self) -> None:
        self.net.weight.register_hook(lambda gradient: gradient * self.k)

    def on_train_epoch_start(self) -> None:
        self.k.fill_(0.1 if self.current_epoch == 1 else 1.0)


def test_a_hook_of_a_gradient_that_comes_or_goes() -> None:
    trainer = make_trainer(True, max_epochs=3, backend={"audit": True})
    with pytest.raises(GraphChanged, match=r"on the host: self\.net hooks") as caught:
        trainer.fit(Weighs(), loader(16 * STEPS))
    assert trainer.global_step == STEPS
    assert "Remedy: register hooks in configure_model(), and leave them" in str(caught.value)


@pytest.mark.numbers
def test_what_is_advised_for_hooks_trains_as_stock() -> None:
    weights = []
    for make, static in ((Weighs, False), (Filled, True)):
        torch.manual_seed(0)
        module = make()
        make_trainer(static, max_epochs=3).fit(module, loader(16 * STEPS))
        weights.append(module.net.weight.detach())
    assert_close(*weights)


class Takes(Weighs):
    """Takes another branch in its second epoch, by what is no attribute of its own."""

    asked: Callable[[Any], bool]

    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()

    def on_train_epoch_start(self) -> None:
        LATE.set(self.current_epoch > 0)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.mean(loss.detach())
        return loss * 2 if self.asked() else loss


class AsksAContext(Takes):
    def asked(self) -> bool:
        return LATE.get()


class AsksAMetric(Takes):
    def asked(self) -> bool:
        return self.mean.update_count > STEPS


@pytest.mark.parametrize("make", [AsksAContext, AsksAMetric])
def test_a_variable_of_the_context_and_a_metrics_count(make: type[Takes]) -> None:
    trainer = make_trainer(True, max_epochs=3, backend={"audit": True})
    with pytest.raises(GraphChanged, match=r"on the host: .*(LATE|self\.mean\.update_count)"):
        trainer.fit(make(), loader(16 * STEPS))
    assert trainer.global_step in (STEPS - 1, STEPS)


class GetsALayer(pl.LightningModule):
    """Data gives it a layer where there was None."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.more = nn.Linear(8, CLASSES), None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out = self.net(batch[0])
        return nn.functional.cross_entropy(out if self.more is None else self.more(out), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_layer_where_there_was_none_is_in_the_next_program() -> None:
    module = GetsALayer()
    data = loader(16 * STEPS)
    rows, count = data.dataset, itertools.count()

    class Giving(Dataset[Any]):
        def __len__(self) -> int:
            return len(rows)  # type: ignore[arg-type]

        def __getitem__(self, index: int) -> Any:
            if next(count) == 40:
                module.more = nn.Tanh()
            return rows[index]

    trainer = make_trainer(True, max_epochs=2)
    trainer.fit(module, DataLoader(Giving(), 16))
    reasons = [one.reason for one in trainer.strategy.programs]  # type: ignore[attr-defined]
    assert "Tanh" in reasons[-1]


def test_modules_may_be_others_between_two_runs() -> None:
    """Lightning takes those of ``sync_batchnorm`` out when a fit ends."""
    trainer, module = make_trainer(True, max_epochs=1), Asks(lambda module: 0.0)
    trainer.fit(module, loader(32), loader(32))
    module.net[0] = nn.Linear(8, 16)
    [found] = trainer.validate(module, loader(32), verbose=False)
    [stock] = make_trainer(False).validate(module, loader(32), verbose=False)
    assert found == pytest.approx(stock, rel=1e-6)


class Everywhere(Weighs):
    """A hook of all modules, in the second epoch."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            register = nn.modules.module.register_module_forward_hook
            self.handle = register(lambda module, x, out: out * 2)


class AfterTheStep(Weighs):
    """What a hook of the optimizer reads changes in the second epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.target, self.decay = nn.Linear(8, CLASSES).requires_grad_(False), {"m": 0.9}

    def on_train_epoch_start(self) -> None:
        self.decay["m"] = 0.9 - 0.4 * self.current_epoch

    @torch.no_grad()
    def average(self, *_: Any) -> None:
        for p, q in zip(self.net.parameters(), self.target.parameters(), strict=True):
            q.lerp_(p, self.decay["m"])

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        optimizer.register_step_post_hook(self.average)
        return optimizer


@pytest.mark.parametrize(
    ("make", "told"),
    [(Everywhere, r"torch\.nn\.Module hooks"), (AfterTheStep, r"self\.decay\['m'\]")],
)
def test_hooks_of_all_modules_and_of_optimizers(make: type[Weighs], told: str) -> None:
    trainer, module = make_trainer(True, max_epochs=3, backend={"audit": True}), make()
    with pytest.raises(GraphChanged, match=f"on the host: {told}"):
        trainer.fit(module, loader(16 * STEPS))
    assert trainer.global_step == STEPS
    if module.handle is not None:
        module.handle.remove()
