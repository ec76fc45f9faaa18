"""Runs in cbfloat16: they train as runs in float32 do, whatever the step has in it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from harness import Run, assert_close, fit, make_trainer
from models import (
    GAN,
    Classifier,
    Measured,
    Transformer,
    convnet,
    loader,
    mlp,
    pictures,
    tokens,
)

from fulgurite.backends.csx.plugins.precision_plugins import CSXMixedPrecision

pytestmark = pytest.mark.fits

EPS = 2**-9  # between 1 and the next number


def run(
    make: Callable[[], pl.LightningModule], loaders: Callable[[], tuple[Any, ...]], **options: Any
) -> Run:
    """Fit in cbfloat16."""
    return fit(make, loaders, static=True, plugins=[CSXMixedPrecision("cbfloat16")], **options)


Losses = Callable[[], pl.LightningModule]


def assert_near_float32(
    make: Losses, loaders: Callable[[], tuple[Any, ...]], tolerance: float, **options: Any
) -> Run:
    """Train in cbfloat16 and in float32: losses, and what was logged, differ by ``tolerance``."""
    options = {"limit_train_batches": 15, **options}
    ours = run(make, loaders, **options)
    full = fit(make, loaders, static=True, **options)
    differences = [
        abs(a - b) / max(abs(b), 0.1) for a, b in zip(ours.losses, full.losses, strict=True)
    ]
    assert max(differences, default=0.0) <= tolerance
    assert ours.losses != full.losses or not full.losses
    assert list(ours.final) == list(full.final)
    for name, value in full.final.items():
        if "loss" in name:
            assert ours.final[name] == pytest.approx(value, rel=tolerance)
    assert {w.dtype for w in ours.module.parameters()} == {torch.float32}
    return ours


def classifier(dropout: float = 0.0, **options: Any) -> Losses:
    """An MLP."""
    return lambda: Classifier(mlp(dropout), **options)


def test_dropout() -> None:
    assert_near_float32(classifier(0.2), lambda: (loader(shuffle=True),), 4 * EPS)


def test_a_convnet_with_batchnorm() -> None:
    assert_near_float32(lambda: Classifier(convnet()), lambda: (pictures(),), 4 * EPS)


@pytest.mark.long
def test_attention_and_tied_weights() -> None:
    ours = assert_near_float32(Transformer, lambda: (tokens(),), 4 * EPS)
    assert ours.module.head.weight is ours.module.embed.weight


def test_a_gan_under_manual_optimization() -> None:
    assert_near_float32(GAN, lambda: (loader(),), 4 * EPS)


@pytest.mark.long
def test_accumulation_with_a_partial_last_window() -> None:
    ours = assert_near_float32(
        classifier(),
        lambda: (loader(),),
        4 * EPS,
        accumulate_grad_batches=4,
        max_epochs=2,
    )
    assert ours.trainer.global_step == 2 * 4


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_clipping(algorithm: str) -> None:
    clip = {"gradient_clip_val": 0.05, "gradient_clip_algorithm": algorithm}
    assert_near_float32(classifier(), lambda: (loader(),), 4 * EPS, **clip)


@pytest.mark.long
def test_validation_with_torchmetrics() -> None:
    ours = assert_near_float32(
        Measured,
        lambda: (loader(), loader(160, seed=5)),
        4 * EPS,
        val_check_interval=0.5,
    )
    assert {"val_accuracy", "val_f1", "val_binary", "train_accuracy_epoch"} <= set(ours.final)


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {"amsgrad": True}])
def test_forms_of_adamw(options: dict[str, Any]) -> None:
    ours = assert_near_float32(classifier(**options), lambda: (loader(),), 4 * EPS)
    [optimizer] = ours.trainer.optimizers
    states = [x for state in optimizer.state.values() for x in state.values()]
    assert {x.dtype for x in states} == {torch.float32}


@pytest.mark.long
@pytest.mark.compiler
def test_compiled_programs_train_as_interpreted_ones() -> None:
    """Sums come in another order, and then a result may fall on the next number."""
    limit = {"limit_train_batches": 15}
    compiled = run(classifier(0.1), lambda: (loader(),), policy="default", **limit)
    interpreted = run(classifier(0.1), lambda: (loader(),), **limit)
    assert_close(compiled.losses, interpreted.losses, EPS)


@pytest.mark.numbers
@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before")  # stock
def test_resume_is_exact_and_checkpoints_hold_float32(tmp_path: Path) -> None:
    path = tmp_path / "half.ckpt"

    def trained(steps: int, resume: Path | None = None, static: bool = True) -> Any:
        torch.manual_seed(0)
        module = Classifier(mlp(0.2))
        plugins = {"plugins": [CSXMixedPrecision("cbfloat16")]} if static else {}
        trainer = make_trainer(static, max_steps=steps, **plugins)
        torch.manual_seed(7)
        trainer.fit(module, loader(shuffle=True), ckpt_path=resume, weights_only=False)
        return module, trainer

    trained(15)[1].save_checkpoint(path)
    saved = torch.load(path, weights_only=False)
    assert {w.dtype for w in saved["state_dict"].values()} == {torch.float32}
    whole, _ = trained(30)
    resumed, _ = trained(30, path)
    assert_close(resumed.state_dict(), whole.state_dict(), 0.0)
    _, stock = trained(16, path, static=False)
    assert stock.global_step == 16
