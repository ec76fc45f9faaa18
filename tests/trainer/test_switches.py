"""``detect_anomaly``, ``deterministic``, ``benchmark`` and ``inference_mode`` do what they say."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from harness import assert_close, make_trainer
from models import Classifier, loader, mlp, rows
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fulgurite.callbacks import CheckLoss
from fulgurite.callbacks.check_loss import NonFiniteLoss

COMPILED = pytest.param("default", marks=pytest.mark.compiler)
POLICIES = pytest.mark.parametrize("policy", ["disabled", COMPILED])


@pytest.fixture(autouse=True)
def switches_of_before() -> Iterator[None]:
    """Lightning leaves them as a Trainer set them."""
    benchmark = torch.backends.cudnn.benchmark
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.benchmark = benchmark


class RootOfZero(Classifier):
    """The loss is finite, and in the fourth batch, of factors 0, the gradient is NaN."""

    def __init__(self) -> None:
        super().__init__(mlp())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, _, factor = batch
        y = self.net(x)
        return y.square().mean() + (y.square() * factor).sqrt().mean()


def factors() -> DataLoader[Any]:
    x, y = rows(160).tensors
    factor = torch.ones(160, 1)
    factor[48:64] = 0
    return DataLoader(TensorDataset(x, y, factor), batch_size=16)


@pytest.mark.numbers
@pytest.mark.parametrize(
    "policy", ["disabled", pytest.param("default", marks=pytest.mark.compiler)]
)
def test_detect_anomaly_names_the_forward_line_of_a_gradient_that_became_nan(policy: str) -> None:
    ours, stock = RootOfZero(), RootOfZero()
    stock.load_state_dict(ours.state_dict())
    trainer = make_trainer(True, policy, max_epochs=1, detect_anomaly=True)
    with pytest.raises(NonFiniteLoss) as error:
        trainer.fit(ours, factors())
    assert "A gradient became NaN or infinite in training batch 4 of this run" in str(error.value)
    assert "The first result that is NaN is that of mul in the backward pass" in str(error.value)
    assert "return y.square().mean() + (y.square() * factor).sqrt().mean()" in str(error.value)
    with pytest.raises(RuntimeError, match="'MulBackward0' returned nan values"):
        make_trainer(False, max_epochs=1, detect_anomaly=True).fit(stock, factors())
    assert_close(ours.state_dict(), stock.state_dict(), 2e-5)  # that step changed nothing


@pytest.mark.fits
def test_detect_anomaly_adds_one_check_and_changes_no_number() -> None:
    found = []
    own = CheckLoss(max_consecutive_skips=2)
    for options in ({}, {"detect_anomaly": True}, {"detect_anomaly": True, "callbacks": [own]}):
        torch.manual_seed(0)
        trainer = make_trainer(True, max_epochs=1, **options)
        trainer.fit(module := Classifier(mlp()), loader(160))
        if options:
            trainer.fit(Classifier(mlp()), loader(160))
        checks = [one for one in trainer.callbacks if isinstance(one, CheckLoss)]
        assert len(checks) == bool(options)
        assert own in checks or "callbacks" not in options
        found.append(module.state_dict())
    assert_close(found[1], found[0], 0)
    assert_close(found[2], found[0], 0)


class Unpools(Classifier):
    """Uses an operation that PyTorch has no deterministic code for."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        places = torch.tensor([0, 2, 4, 6]).expand(1, 16, 4)
        spread = nn.functional.max_unpool1d(batch[0][None, :, :4], places, 2)
        return loss + spread.mean()


@pytest.mark.numbers
@pytest.mark.failing_compiler  # it is refused there, and then where it runs
@POLICIES
def test_deterministic_refuses_what_is_not(policy: str) -> None:
    for static in (True, False):
        make_trainer(static, policy, max_steps=2).fit(Unpools(mlp()), loader(160))
        trainer = make_trainer(static, policy, max_steps=2, deterministic=True)
        with pytest.raises(RuntimeError, match=r"unpool.* does not have a deterministic implement"):
            trainer.fit(Unpools(mlp()), loader(160))
        torch.use_deterministic_algorithms(False)


@pytest.mark.numbers
@pytest.mark.parametrize("asked", [None, True, False])
@pytest.mark.parametrize("deterministic", [None, True])
def test_benchmark_sets_the_flag_that_stock_sets(
    asked: bool | None, deterministic: bool | None
) -> None:
    class Flag(pl.Callback):
        def on_train_start(self, *args: Any) -> None:
            flags.append(torch.backends.cudnn.benchmark)

    flags: list[bool] = []
    warnings.filterwarnings("ignore", message="You passed `deterministic=True` and `benchmark")
    for static in (True, False):
        torch.backends.cudnn.benchmark = asked is False
        options = {"benchmark": asked, "deterministic": deterministic}
        trainer = make_trainer(static, max_steps=1, callbacks=[Flag()], **options)
        trainer.fit(Classifier(mlp()), loader(160))
    assert flags[0] == flags[1] == bool(asked)


class Slopes(Classifier):
    """Validates with the gradient of its inputs."""

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.enable_grad():
            x = batch[0].clone().requires_grad_()
            loss = nn.functional.cross_entropy(self.net(x), batch[1])
            [slope] = torch.autograd.grad(loss, x)
        self.log("slope", slope.norm())
        return slope


class Plain(Classifier):
    """Validates without gradients."""

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("val", loss)
        return loss


class Modes(pl.Callback):
    """The mode that hooks of evaluation run in, and whether outputs are inference tensors."""

    def __init__(self) -> None:
        self.found: set[tuple[bool, ...]] = set()

    def on_validation_batch_end(self, trainer: Any, module: Any, out: Tensor, *args: Any) -> None:
        modes = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
        self.found.add((*modes, out.is_inference(), out.requires_grad))


@pytest.mark.parametrize("inference", [True, False])
def test_inference_mode_is_that_of_stock(inference: bool) -> None:
    found = []
    for static in (True, False):
        torch.manual_seed(0)
        modes = Modes()
        trainer = make_trainer(static, inference_mode=inference, callbacks=[modes])
        found.append((trainer.validate(Plain(mlp()), loader(64), verbose=False), modes.found))
    (values, ours), (wanted, stock) = found
    assert_close(values, wanted)
    assert ours == stock == {(inference, False, inference, False)}


def test_without_inference_mode_validation_differentiates() -> None:
    found = []
    for static in (True, False):
        torch.manual_seed(0)
        trainer = make_trainer(static, inference_mode=False)
        found.append(trainer.validate(Slopes(mlp()), loader(64), verbose=False))
    assert_close(*found)
    assert found[0][0]["slope"] > 0
