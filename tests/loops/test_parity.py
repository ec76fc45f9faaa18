"""Fifty steps on CSX equal fifty steps of stock Lightning, from one seed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import assert_close, assert_same_run, both, fit
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
from torch import nn

pytestmark = pytest.mark.numbers


def test_mlp_equals_stock() -> None:
    ours, stock = both(lambda: Classifier(mlp()), lambda: (loader(),))
    assert len(ours.losses) == 50
    assert_same_run(ours, stock)


@pytest.mark.compiler
@pytest.mark.parametrize(
    ("make", "data", "noise"),
    [
        (lambda: Classifier(mlp(0.1)), loader, ()),
        (lambda: Classifier(convnet()), pictures, CONV_NOISE),
        (Transformer, tokens, KEY_NOISE),
        (GAN, loader, ()),
    ],
    ids=["mlp", "convnet", "transformer", "gan"],
)
def test_compiled_programs_equal_stock(make: Any, data: Any, noise: Any) -> None:
    ours, stock = both(make, lambda: (data(),), policy="default")
    assert_same_run(ours, stock, noise)


def test_dropout_masks_equal_stock() -> None:
    ours, stock = both(lambda: Classifier(mlp(0.2)), lambda: (loader(shuffle=True),))
    assert_same_run(ours, stock)


def test_convnet_with_batchnorm_equals_stock() -> None:
    ours, stock = both(lambda: Classifier(convnet()), lambda: (pictures(),))
    assert_same_run(ours, stock, CONV_NOISE)


def test_transformer_with_tied_weights_equals_stock() -> None:
    ours, stock = both(Transformer, lambda: (tokens(),))
    assert ours.module.head.weight is ours.module.embed.weight
    assert_same_run(ours, stock, KEY_NOISE)


def test_gan_under_manual_optimization_equals_stock() -> None:
    ours, stock = both(GAN, lambda: (loader(),))
    assert_same_run(ours, stock)
    assert_close([o["fooled"] for o in ours.outputs], [o["fooled"] for o in stock.outputs])
    rate = ours.trainer.optimizers[1].param_groups[0]["lr"]
    assert rate == stock.trainer.optimizers[1].param_groups[0]["lr"] < 1e-2


def test_accumulation_with_a_partial_last_window_equals_stock() -> None:
    options: dict[str, Any] = {"accumulate_grad_batches": 4, "max_epochs": 2}
    ours, stock = both(lambda: Classifier(mlp()), lambda: (loader(16 * 25),), **options)
    assert ours.trainer.global_step == 14
    assert_same_run(ours, stock)
    program = ours.trainer.strategy.programs[0]
    assert [entry.name for entry in program.entries] == ["accumulate", "step"]


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_clipping_equals_stock(algorithm: str) -> None:
    clip = {"gradient_clip_val": 0.05, "gradient_clip_algorithm": algorithm}
    ours, stock = both(lambda: Classifier(mlp()), lambda: (loader(),), **clip)
    assert_same_run(ours, stock)


@pytest.mark.long
def test_validation_with_torchmetrics_equals_stock() -> None:
    options: dict[str, Any] = {"max_epochs": 2, "val_check_interval": 0.5}
    ours, stock = both(Measured, lambda: (loader(), loader(160, seed=5)), **options)
    assert {"val_accuracy", "val_f1", "val_binary", "train_accuracy_epoch"} <= set(ours.final)
    assert_same_run(ours, stock)


@pytest.mark.fits
def test_python_runs_once_and_the_program_every_step() -> None:
    ours = fit(lambda: Classifier(mlp()), lambda: (loader(),), static=True, max_epochs=2)
    assert ours.module.calls["training_step"] == 1
    assert ours.trainer.strategy.step_functions["training"].runs == 100


class Watching(Classifier):
    """Writes down every hook of the module, and logs in those of the step."""

    HOOKS = (
        *("on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_batch_start"),
        *("on_before_zero_grad", "on_before_backward", "on_after_backward"),
        *("on_before_optimizer_step", "on_train_batch_end", "on_validation_start"),
        *("on_validation_epoch_start", "on_validation_batch_start", "on_validation_batch_end"),
        *("on_validation_epoch_end", "on_validation_end", "on_train_epoch_end", "on_train_end"),
        "on_fit_end",
    )

    def __init__(self) -> None:
        super().__init__(mlp())
        self.seen: list[str] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append("training_step")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.seen.append("validation_step")
        self.log("val_loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self.seen.append("optimizer_step")
        super().optimizer_step(*args, **kwargs)

    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        self.seen.append("configure_gradient_clipping")
        norms = [p.grad.norm() for p in self.parameters() if p.grad is not None]
        self.log("gradient_norm", torch.stack(norms).norm())


def _watch(name: str) -> Any:
    def hook(self: Watching, *args: Any, **kwargs: Any) -> None:
        self.seen.append(name)

    return hook


for _name in Watching.HOOKS:
    setattr(Watching, _name, _watch(_name))

IN_STEP = {
    "training_step",
    "optimizer_step",
    "configure_gradient_clipping",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "validation_step",
}


@pytest.mark.filterwarnings("ignore:self.seen was changed")  # audits tell of such lists
def test_hooks_come_in_the_order_of_stock() -> None:
    """In the first step all of them; in later steps those outside the program."""
    ours, stock = both(
        Watching, lambda: (loader(16 * 3), loader(16 * 2)), num_sanity_val_steps=0, max_epochs=2
    )
    assert_same_run(ours, stock)
    reference = stock.module.seen
    first = reference.index("on_train_batch_end") + 1
    assert ours.module.seen[:first] == reference[:first]
    outside = [hook for hook in reference[first:] if hook not in IN_STEP]
    assert [hook for hook in ours.module.seen[first:] if hook not in IN_STEP] == outside
    assert ours.module.seen.count("training_step") == 1
    assert ours.module.seen.count("validation_step") == 1


def test_several_validation_loaders_equal_stock() -> None:
    class Two(Classifier):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
            self.log("val_loss", loss * (dataloader_idx + 1))

    ours, stock = both(
        lambda: Two(mlp()), lambda: (loader(), [loader(32), loader(64)]), max_epochs=2
    )
    assert "val_loss/dataloader_idx_1" in ours.final
    assert_same_run(ours, stock)
