"""In every precision CSX equals eager Lightning on the CPU of the same one.

A bfloat16 has 8 significant bits: rounding one moves it by up to EPS / 2. What runs in which type,
and where results are rounded, is eager's, so that optimizers under "bf16-true" are equal bit for
bit. What differs is the rounding inside torch's own kernels, which decomposed operations do not
have: losses, attention, LSTM. Largest differences measured over 50 steps are beside each tolerance.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from harness import Run, assert_close, assert_same_run, both, fit, make_trainer
from models import (
    CONV_NOISE,
    GAN,
    KEY_NOISE,
    Classifier,
    Measured,
    Transformer,
    convnet,
    loader,
    mlp,
    pictures,
    tokens,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader

pytestmark = pytest.mark.numbers

EPS = 2**-7  # between 1 and the next bfloat16
MIXED: dict[str, float] = {}  # float32's: 1e-5; measured 2.5e-7
MIXED_KERNELS = {"losses": EPS / 4, "weights": EPS}  # measured 1.2e-3, 3.6e-3
DOUBLE = {"losses": 1e-13, "weights": 1e-11}  # measured 3e-16, 8e-12
TRUE = {"losses": 2 * EPS, "weights": 4 * EPS}  # measured 1.4e-2, 2.4e-2
PRECISIONS = ("bf16-mixed", "bf16-true", "64-true")
DTYPES = {"bf16-mixed": torch.float32, "bf16-true": torch.bfloat16, "64-true": torch.float64}
TWENTY_STEPS = {"limit_train_batches": 20}


def tolerance(precision: str, kernels: bool = False) -> dict[str, float]:
    """Of a run; ``kernels``: with one that rounds inside, such as attention."""
    if precision == "64-true":
        return DOUBLE
    return TRUE if precision == "bf16-true" else MIXED_KERNELS if kernels else MIXED


def classifier(dropout: float = 0.0) -> Callable[[], Classifier]:
    """An MLP."""
    return lambda: Classifier(mlp(dropout))


def assert_state_is(run: Run, dtype: torch.dtype) -> None:
    """All weights and optimizer state that have dimensions are of one type."""
    [optimizer] = run.trainer.optimizers
    states = [x for state in optimizer.state.values() for x in state.values()]
    assert states
    tensors = [*run.module.parameters(), *states]
    assert {t.dtype for t in tensors if t.ndim} == {dtype}


@pytest.mark.parametrize("precision", PRECISIONS)
def test_mlp_with_dropout_equals_stock(precision: str) -> None:
    ours, stock = both(
        classifier(dropout=0.2), lambda: (loader(shuffle=True),), precision=precision
    )
    assert len(ours.losses) == 50
    assert_same_run(ours, stock, **tolerance(precision))
    assert_state_is(ours, DTYPES[precision])
    assert ours.outputs[0]["loss"].dtype is stock.outputs[0]["loss"].dtype


@pytest.mark.parametrize("precision", PRECISIONS)
def test_convnet_with_batchnorm_equals_stock(precision: str) -> None:
    """Not more steps: then the noise of the bias before the norm reaches the losses."""
    ours, stock = both(
        lambda: Classifier(convnet()), lambda: (pictures(),), precision=precision, **TWENTY_STEPS
    )
    assert_same_run(ours, stock, CONV_NOISE, **tolerance(precision))


@pytest.mark.parametrize("norm", [nn.LayerNorm(16), nn.GroupNorm(4, 16)])
def test_statistics_of_norms_are_not_rounded(norm: nn.Module) -> None:
    """The gradient of what comes before a norm reads them."""

    def module() -> Classifier:
        net = mlp()
        net[1] = nn.Sequential(copy.deepcopy(norm), nn.ReLU())
        return Classifier(net, torch.optim.SGD)

    ours, stock = both(module, lambda: (loader(),), precision="bf16-mixed", max_steps=1)
    assert_close(ours.module.net[0].weight, stock.module.net[0].weight, 1e-7)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_transformer_with_tied_weights_equals_stock(precision: str) -> None:
    ours, stock = both(Transformer, lambda: (tokens(),), precision=precision)
    assert_same_run(ours, stock, KEY_NOISE, **tolerance(precision, kernels=True))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_gan_under_manual_optimization_equals_stock(precision: str) -> None:
    ours, stock = both(GAN, lambda: (loader(),), precision=precision)
    assert_same_run(ours, stock, **tolerance(precision))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_accumulation_with_a_partial_last_window_equals_stock(precision: str) -> None:
    options: dict[str, Any] = {"accumulate_grad_batches": 4, "max_epochs": 2}
    ours, stock = both(classifier(), lambda: (loader(16 * 25),), precision=precision, **options)
    assert ours.trainer.global_step == 14
    assert_same_run(ours, stock, **tolerance(precision))


@pytest.mark.parametrize("algorithm", ["norm", "value"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_clipping_equals_stock(precision: str, algorithm: str) -> None:
    clip = {"gradient_clip_val": 0.05, "gradient_clip_algorithm": algorithm}
    ours, stock = both(classifier(), lambda: (loader(),), precision=precision, **clip)
    assert_same_run(ours, stock, **tolerance(precision))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_validation_with_torchmetrics_equals_stock(precision: str) -> None:
    options: dict[str, Any] = {"max_epochs": 2, "val_check_interval": 0.5, **TWENTY_STEPS}
    ours, stock = both(
        Measured, lambda: (loader(), loader(160, seed=5)), precision=precision, **options
    )
    assert {"val_accuracy", "val_f1", "val_binary", "train_accuracy_epoch"} <= set(ours.final)
    if precision == "bf16-true":  # there one sample of a batch of 16 may fall on the other side
        steps = [[m["train_accuracy_step"] for m in run.metrics] for run in (ours, stock)]
        assert all(abs(a - b) <= 1 / 16 for a, b in zip(*steps, strict=True))
        ours.metrics, stock.metrics = [], []
    assert_same_run(ours, stock, **tolerance(precision))


class Heads(Classifier):
    """With a test and a predict step that show what they computed."""

    def __init__(self) -> None:
        super().__init__(mlp())

    def test_step(self, batch: Any) -> None:
        self.log("test_loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    def predict_step(self, batch: Any) -> Tensor:
        return self.net(batch[0])


@pytest.mark.parametrize("precision", PRECISIONS)
def test_test_and_predict_equal_stock(precision: Any) -> None:
    found = []
    for static in (True, False):
        torch.manual_seed(0)
        module = Heads()
        trainer = make_trainer(static, precision=precision)
        [tested] = trainer.test(module, loader(64), verbose=False)
        found.append((tested["test_loss"], trainer.predict(module, loader(64))))
    logits_dtype = torch.float64 if precision == "64-true" else torch.bfloat16
    (loss, logits), (stock_loss, stock_logits) = found
    assert logits[0].dtype is stock_logits[0].dtype is logits_dtype
    assert_close(loss, stock_loss, EPS)
    assert_close(logits, stock_logits, 0.0)


class Exact(pl.LightningModule):
    """Its gradients are the batch, without a rounding: what is tested is the optimizer."""

    def __init__(self, optimizer: type[Any], **options: Any) -> None:
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.randn(512)), nn.Parameter(torch.tensor(0.7))
        self.optimizer, self.options = optimizer, {"lr": 3e-3, **options}

    def training_step(self, batch: Tensor) -> Tensor:
        return (self.weight * batch).sum() + self.scale * batch[0]

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer(self.parameters(), **self.options)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def vectors() -> tuple[DataLoader[Any]]:
    """Thirty batches [512]."""
    data = torch.randn(30, 512, generator=torch.Generator().manual_seed(3))
    return (DataLoader(list(data), batch_size=None),)


def assert_equal_to_the_bit(ours: Run, stock: Run) -> None:
    """Weights and the whole state of the optimizer."""
    assert_close(ours.module.state_dict(), stock.module.state_dict(), 0.0)
    mine, theirs = (run.trainer.optimizers[0].state_dict()["state"] for run in (ours, stock))
    assert_close(mine, theirs, 0.0)


OPTIMIZERS = [
    (torch.optim.SGD, {}),
    (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.01}),
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    (torch.optim.Adam, {"amsgrad": True}),
    (torch.optim.Adam, {"fused": True, "weight_decay": 0.01}),
    (torch.optim.AdamW, {}),
    (torch.optim.AdamW, {"foreach": True}),
    (torch.optim.AdamW, {"fused": True}),
    (torch.optim.RMSprop, {}),
    (torch.optim.Adagrad, {}),
    (torch.optim.Adamax, {}),
    (torch.optim.Adadelta, {}),
]


@pytest.mark.parametrize(("optimizer", "options"), OPTIMIZERS)
def test_optimizers_in_bfloat16_equal_stock_to_the_bit(
    optimizer: type[Any], options: dict[str, Any]
) -> None:
    """A learning rate multiplied out in bfloat16 would leave a tenth of the weights unequal."""
    ours, stock = both(lambda: Exact(optimizer, **options), vectors, precision="bf16-true")
    assert_equal_to_the_bit(ours, stock)


@pytest.mark.compiler
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_compiled_optimizers_in_bfloat16_equal_stock_to_the_bit(optimizer: type[Any]) -> None:
    """A fused loop that keeps its intermediate results in float32 would not."""
    options = {"momentum": 0.9, "weight_decay": 0.1} if optimizer is torch.optim.SGD else {}
    ours, stock = both(
        lambda: Exact(optimizer, **options), vectors, precision="bf16-true", policy="default"
    )
    assert_equal_to_the_bit(ours, stock)


@pytest.mark.compiler
@pytest.mark.parametrize("precision", PRECISIONS)
def test_compiled_programs_equal_stock(precision: str) -> None:
    ours, stock = both(
        classifier(dropout=0.1), lambda: (loader(),), precision=precision, policy="default"
    )
    assert_same_run(ours, stock, **tolerance(precision))


class Defaults(Classifier):
    """Makes tensors without naming their type."""

    def __init__(self) -> None:
        super().__init__(mlp())
        self.dtypes: list[torch.dtype] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        made = [
            *(torch.rand(8), torch.zeros(8), torch.full((8,), 0.5), torch.linspace(0, 1, 8)),
            *(torch.arange(8), torch.arange(8) / 7, torch.tensor(0.25)),
            *((y * 0.5).mean(), (y > 1) * 1.5, torch.where(y > 1, 1.0, 0.0), y.sqrt()),
            *(y // 2, y + 1, y.float() / 2, torch.randn(8)),
        ]
        self.dtypes = [t.dtype for t in made]
        noise = sum(t.mean(dtype=x.dtype) for t in made)
        return nn.functional.cross_entropy(self.net(x + noise), y)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_operations_without_a_type_take_that_of_the_step(precision: str) -> None:
    ours, stock = both(Defaults, lambda: (loader(),), precision=precision, **TWENTY_STEPS)
    assert ours.module.dtypes == stock.module.dtypes
    assert_same_run(ours, stock, **tolerance(precision))


class PartlyFull(Classifier):
    """Keeps its last part out of the autocast of the run."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = self.net[:-1](batch[0])
        with torch.autocast("cpu", enabled=False):
            logits = self.net[-1](hidden.float())
        assert (hidden.dtype, logits.dtype) == (torch.bfloat16, torch.float32)
        return nn.functional.cross_entropy(logits, batch[1])


def test_a_part_without_autocast_equals_stock() -> None:
    ours, stock = both(
        lambda: PartlyFull(mlp()), lambda: (loader(),), precision="bf16-mixed", **TWENTY_STEPS
    )
    assert_same_run(ours, stock, **MIXED)


class OwnAutocast(Classifier):
    """Casts its weights itself, twice, with torch's cache of cast weights on."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=True):
            logits = self.net(batch[0]) + self.net(2 * batch[0])
        return nn.functional.cross_entropy(logits.float(), batch[1])


def test_an_autocast_of_the_users_equals_stock() -> None:
    """But for the gradients of a weight used twice, which eager adds in bfloat16."""
    ours, stock = both(lambda: OwnAutocast(mlp()), lambda: (loader(),), **TWENTY_STEPS)
    assert_same_run(ours, stock, losses=EPS, weights=4 * EPS)


def test_a_fit_inside_an_autocast_sees_its_own_updates() -> None:
    """Stock does not: there the cache of the outer autocast holds the first weights."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = fit(classifier(), lambda: (loader(),), static=True)
    mixed = fit(classifier(), lambda: (loader(),), static=False, precision="bf16-mixed")
    assert_close(inside.losses, mixed.losses, 1e-5)


def test_init_module_makes_modules_in_the_type_of_the_run() -> None:
    trainer = make_trainer(True, precision="bf16-true")
    with trainer.init_module():
        module = nn.Linear(2, 2)
    assert module.weight.dtype is torch.bfloat16
    assert torch.get_default_dtype() is torch.float32


def checkpointed(static: bool, precision: Any, steps: int, resume: Path | None = None) -> Any:
    """Module and trainer after ``steps`` steps, from the start or from a checkpoint."""
    torch.manual_seed(0)
    module = Classifier(mlp(0.2))
    trainer = make_trainer(static, max_steps=steps, precision=precision)
    torch.manual_seed(7)
    trainer.fit(module, loader(shuffle=True), ckpt_path=resume, weights_only=False)
    return module, trainer


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before")  # stock
@pytest.mark.parametrize("precision", PRECISIONS)
def test_resume_is_exact_and_checkpoints_interchange(precision: str, tmp_path: Path) -> None:
    path = tmp_path / "half.ckpt"
    checkpointed(True, precision, 15)[1].save_checkpoint(path)
    whole, trainer = checkpointed(True, precision, 30)
    resumed, again = checkpointed(True, precision, 30, path)
    assert_close(resumed.state_dict(), whole.state_dict(), 0.0)
    assert_close(
        again.optimizers[0].state_dict()["state"], trainer.optimizers[0].state_dict()["state"], 0.0
    )
    stock, theirs = checkpointed(False, precision, 16, path)
    assert theirs.global_step == 16
    assert_close([p.dtype for p in stock.parameters()], [p.dtype for p in whole.parameters()])
    theirs.save_checkpoint(path)
    back, ours = checkpointed(True, precision, 16, path)
    assert ours.global_step == 16
    assert_close(back.state_dict(), stock.state_dict(), 0.0)
