"""Loss scaling inside the program equals torch's scaler under stock Lightning, step by step.

The reference is Lightning's plugin with ``torch.amp.GradScaler("cpu")``, for Lightning's connector
makes "bf16-mixed" of "16-mixed" on a CPU. A float16 has 11 significant bits: rounding one moves it
by up to EPS / 2. As under bfloat16, what may differ is the rounding inside torch's own kernels;
largest differences measured over 50 steps are beside each tolerance.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from harness import QUIET, Run, assert_close, assert_same_run, csx, fit, make_trainer
from lightning.pytorch.plugins.precision import MixedPrecision
from models import (
    CONV_NOISE,
    GAN,
    Classifier,
    PerParameter,
    convnet,
    loader,
    mlp,
    pictures,
)
from optimizers import AdaBelief
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.utils.data import DataLoader

import fulgurite
from fulgurite.backends import reset_backend
from fulgurite.backends.csx.diagnostics.trace_errors import NoLoss
from fulgurite.backends.csx.plugins.loss_scale import LossScale

pytestmark = pytest.mark.numbers

EPS = 2**-10  # between 1 and the next float16
KERNELS = {"losses": EPS, "weights": 4 * EPS}  # measured 1.3e-4, 1e-4
TOO_HIGH = 2.0**22
TWENTY_STEPS = {"limit_train_batches": 20}


def scaled(initial: float = TOO_HIGH, interval: int = 5) -> MixedPrecision:
    """Lightning's plugin; its scale is too high at first, and grows often."""
    scaler = GradScaler("cpu", init_scale=initial, growth_interval=interval)
    return MixedPrecision("16-mixed", "cpu", scaler)


class Scales(pl.Callback):
    """The scaler's state after every step."""

    def __init__(self) -> None:
        self.states: list[dict[str, Any]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *rest: Any) -> None:
        state = trainer.precision_plugin.state_dict()
        state.pop("skipped_steps", None)
        self.states.append(state)


def both_scaled(
    make: Callable[[], pl.LightningModule], loaders: Callable[[], tuple[Any, ...]], **options: Any
) -> tuple[Run, Run]:
    """(CSX, stock), whose scalers were equal after every step, and some steps skipped."""
    found = []
    for static in (True, False):
        scales = Scales()
        policy = {"policy": options["policy"]} if static and "policy" in options else {}
        rest = {k: v for k, v in options.items() if k != "policy"}
        plugin = rest.pop("plugin", scaled)()
        run = fit(
            make, loaders, static=static, callbacks=(scales,), plugins=[plugin], **rest, **policy
        )
        found.append((run, scales.states))
    (ours, mine), (stock, theirs) = found
    assert mine == theirs
    assert ours.trainer.precision_plugin.scaler.skipped_steps > 2
    return ours, stock


def classifier(*optimizer: Any, **options: Any) -> Callable[[], Classifier]:
    """An MLP."""
    return lambda: Classifier(mlp(), *optimizer, **options)


def one_loader() -> tuple[DataLoader[Any]]:
    """50 batches."""
    return (loader(),)


def surprises() -> tuple[DataLoader[Any]]:
    """50 batches, of which some are so large that gradients overflow, and the losses do not."""
    batches = [(x * (1000 if i in (11, 12, 30) else 1), y) for i, (x, y) in enumerate(loader())]
    return (DataLoader(batches, batch_size=None),)


@pytest.mark.parametrize(
    "optimizer",
    [
        {},
        {"fused": True},  # which unscales by itself
        pytest.param(  # its first update
            {"optimizer": torch.optim.SGD, "momentum": 0.9, "dampening": 0.1},
            marks=pytest.mark.core,
        ),
    ],
)
def test_overflows_at_first_skip_the_steps_that_stock_skips(optimizer: dict[str, Any]) -> None:
    ours, stock = both_scaled(classifier(**optimizer), one_loader)
    assert len(ours.losses) == 50
    assert_same_run(ours, stock)


def test_a_batch_that_overflows_leaves_no_mark() -> None:
    ours, stock = both_scaled(
        classifier(), surprises, plugin=lambda: scaled(2.0**14, 10), gradient_clip_val=0.5
    )
    assert_same_run(ours, stock)
    assert all(torch.isfinite(p).all() for p in ours.module.parameters())


def test_accumulation_with_a_partial_last_window_equals_stock() -> None:
    """The scale is that of the window; gradients are divided once, at its end."""
    options: dict[str, Any] = {"accumulate_grad_batches": 4, "max_epochs": 2}
    ours, stock = both_scaled(classifier(), lambda: (loader(16 * 25),), **options)
    assert ours.trainer.global_step == 14
    assert_same_run(ours, stock)


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_clipping_comes_after_unscaling(algorithm: str) -> None:
    clip = {"gradient_clip_val": 0.05, "gradient_clip_algorithm": algorithm}
    assert_same_run(*both_scaled(classifier(), one_loader, **clip))


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # stock, when it skips
def test_two_optimizers_under_manual_optimization_equal_stock() -> None:
    """Each step of either skips or counts, and changes the scale, by itself."""
    assert_same_run(*both_scaled(GAN, one_loader))


class WithClosure(Classifier):
    """Manual optimization in which the optimizer's step is given a closure."""

    def __init__(self) -> None:
        super().__init__(mlp())
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()

        def closure() -> None:
            optimizer.zero_grad()
            self.manual_backward(nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

        optimizer.step(closure=closure)


def test_closures_equal_stock() -> None:
    assert_same_run(*both_scaled(WithClosure, one_loader, **TWENTY_STEPS))


def test_convnet_with_batchnorm_equals_stock() -> None:
    ours, stock = both_scaled(lambda: Classifier(convnet()), lambda: (pictures(),), **TWENTY_STEPS)
    assert_same_run(ours, stock, CONV_NOISE, **KERNELS)


@pytest.mark.compiler
def test_a_compiled_program_equals_stock() -> None:
    ours, stock = both_scaled(
        classifier(), one_loader, policy="default", gradient_clip_val=0.5, **TWENTY_STEPS
    )
    assert_same_run(ours, stock, **KERNELS)


class Momentum(PerParameter):
    """Writes through ``p.data``, and puts another tensor into its state each time."""

    def update(self, p: Tensor, state: dict[str, Any], lr: float) -> None:
        state["kept"] = state.get("kept", torch.zeros_like(p)) * 0.9 + p.grad
        p.data.add_(state["kept"] * -lr)


class Hooked(Classifier):
    """Its optimizer's steps are counted in a buffer, and change another, by hooks."""

    def __init__(self) -> None:
        super().__init__(mlp(), Momentum)
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("average", torch.zeros(16, 8))

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()

        def count(*args: Any) -> None:
            self.steps = self.steps + 1
            self.average.data.lerp_(self.net[0].weight.detach(), 0.1)

        optimizer.register_step_post_hook(count)
        return optimizer


def test_whatever_a_step_writes_is_taken_back() -> None:
    ours, stock = both_scaled(Hooked, one_loader, **TWENTY_STEPS)
    assert_same_run(ours, stock)
    assert ours.module.steps == 20 - ours.trainer.scaler.skipped_steps


class Counting(Classifier):
    """Its forward pass replaces a buffer, and a hook on the optimizer's step changes that."""

    def __init__(self) -> None:
        super().__init__(mlp())
        self.register_buffer("seen", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen = self.seen + 1
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        optimizer.register_step_post_hook(lambda *args: self.seen.add_(100))
        return optimizer


def test_what_the_forward_pass_replaced_stays_where_a_step_is_skipped() -> None:
    ours, stock = both_scaled(Counting, one_loader, **TWENTY_STEPS)
    assert ours.module.seen == stock.module.seen
    assert_same_run(ours, stock)


class OldSpectralNorm(Classifier):
    """Its weight shares memory with a parameter, until the first step replaces it."""

    def __init__(self) -> None:
        super().__init__(mlp())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # deprecated, and in use
            nn.utils.spectral_norm(self.net[0])


def test_tensors_that_the_step_only_replaces_may_share_memory() -> None:
    assert_same_run(*both_scaled(OldSpectralNorm, one_loader, **TWENTY_STEPS), **KERNELS)


@pytest.mark.fits
@pytest.mark.long
def test_retracing_every_iteration_gives_the_same_run() -> None:
    options: dict[str, Any] = {"plugins": [scaled()], "limit_train_batches": 8}
    once = fit(classifier(), one_loader, static=True, **options)
    again = fit(
        classifier(), one_loader, static=True, backend={"retrace_every_iteration": True}, **options
    )
    assert_close(again.losses, once.losses, 0.0)
    assert_close(again.module.state_dict(), once.module.state_dict(), 0.0)


class Unscaled(WithClosure):
    """Differentiates by itself, so that nothing scales its loss."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        nn.functional.cross_entropy(self.net(batch[0]), batch[1]).backward()
        self.optimizers().step()


def test_gradients_of_a_loss_that_was_not_scaled_are_refused_as_in_torch() -> None:
    with pytest.raises(AssertionError, match=r"did not use scaler\.scale"):
        fit(Unscaled, one_loader, static=False, plugins=[scaled()])
    with pytest.raises(NoLoss, match="before any loss was scaled") as caught:
        fit(Unscaled, one_loader, static=True, plugins=[scaled()])
    assert "self.optimizers().step()" in str(caught.value)
    assert "self.manual_backward(loss)" in str(caught.value)


class Fails(Classifier):
    """An error of the user's, once, between unscaling and the step."""

    def __init__(self) -> None:
        super().__init__(mlp())
        self.fails = [True]

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.fails:
            raise KeyError("mine")


@pytest.mark.fits
def test_a_failed_trace_leaves_the_scale_as_it_was() -> None:
    module, trainer = Fails(), make_trainer(True, max_steps=3, plugins=[scaled()])
    before = trainer.precision_plugin.state_dict()
    with pytest.raises(KeyError, match="mine"):
        trainer.fit(module, loader())
    assert trainer.precision_plugin.state_dict() == before
    module.fails.clear()
    trainer.fit(module, loader())
    assert trainer.global_step == 3


@pytest.mark.fits
def test_a_run_that_only_checks_leaves_the_scale_as_it_was() -> None:
    trainer = make_trainer(True, max_steps=3, plugins=[scaled()], backend={"validate_only": True})
    before = trainer.precision_plugin.state_dict()
    trainer.fit(classifier()(), loader())
    assert trainer.precision_plugin.state_dict() == before


def half_weights() -> Classifier:
    """A module of which a part is float16, as nobody should train it."""
    module = Classifier(mlp())
    module.net[3].half()
    return module


def test_float16_gradients_are_refused_as_in_torch() -> None:
    for static in (True, False):
        with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
            fit(half_weights, one_loader, static=static, plugins=[scaled()])


# -- the numbers ------------------------------------------------------------------------------


class Counts(pl.LightningModule):
    """Its weight is the number of steps that were not skipped."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def training_step(self, batch: Tensor) -> Tensor:
        return -(self.weight * batch).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


class History(pl.Callback):
    """(scale, steps not skipped) after every step."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, float]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *rest: Any) -> None:
        self.seen.append((trainer.precision_plugin.scaler.get_scale(), module.weight.item()))


def history(device: str, **options: Any) -> list[tuple[float, float]]:
    """Of eleven steps, of which these overflow: 2, 3, 8."""
    reset_backend()
    where: dict[str, Any] = {"backend": csx()} if device == "CSX" else {"device": device}
    kept = History()
    trainer = fulgurite.Trainer(
        precision=fulgurite.MixedPrecision(**options),
        max_epochs=1,
        callbacks=[kept],
        **QUIET,
        **where,
    )
    batches = [torch.tensor([1e30 if i in (2, 3, 8) else 1.0]) for i in range(11)]
    trainer.fit(Counts(), DataLoader(batches, batch_size=None))
    return kept.seen


@pytest.mark.fits
def test_a_dynamic_scale_grows_shrinks_and_stays_within_its_bounds() -> None:
    options: dict[str, Any] = {
        "loss_scaling_factor": "dynamic",
        "initial_loss_scale": 2.0**30,
        "min_loss_scale": 2.0**29,
        "max_loss_scale": 2.0**31,
        "steps_per_increase": 2,
    }
    ours = history("CSX", **options)
    exponents = [30, 31, 30, 29, 29, 30, 30, 31, 30, 30, 31]
    assert [scale for scale, _ in ours] == [2.0**n for n in exponents]
    assert [weight for _, weight in ours] == [1, 2, 2, 2, 3, 4, 5, 6, 6, 7, 8]
    assert ours == history("CPU", **options)


@pytest.mark.fits
def test_a_static_scale_stays_and_skips() -> None:
    ours = history("CSX", loss_scaling_factor=2.0**30)
    assert {scale for scale, _ in ours} == {2.0**30}
    assert ours[-1][1] == 8
    assert ours == history("CPU", loss_scaling_factor=2.0**30)


def test_a_scale_grows_only_while_it_is_finite() -> None:
    plugin = scaled(2.0**127, 1)
    both_runs = []
    for static in (True, False):
        scales = Scales()
        batches = [torch.tensor([2.0**-30]) for _ in range(3)]
        trainer = make_trainer(static, max_epochs=1, plugins=[plugin], callbacks=[scales])
        trainer.fit(Counts(), DataLoader(batches, batch_size=None))
        both_runs.append(scales.states)
    assert both_runs[0] == both_runs[1]
    assert both_runs[0][-1]["scale"] == 2.0**127


# -- checkpoints ------------------------------------------------------------------------------


def trained(static: bool, steps: int, resume: Path | None = None) -> tuple[Classifier, pl.Trainer]:
    """Module and trainer after ``steps`` steps, from the start or from a checkpoint."""
    torch.manual_seed(0)
    module = Classifier(mlp())
    trainer = make_trainer(static, max_steps=steps, plugins=[scaled()])
    same = DataLoader([next(iter(loader()))] * 50, batch_size=None)  # stock begins the epoch anew
    trainer.fit(module, same, ckpt_path=resume, weights_only=False)
    return module, trainer


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before")  # stock
def test_resume_is_exact_and_checkpoints_interchange(tmp_path: Path) -> None:
    path, theirs = tmp_path / "ours.ckpt", tmp_path / "theirs.ckpt"
    trained(True, 13)[1].save_checkpoint(path)
    module, trainer = trained(True, 30)
    wanted = trainer.precision_plugin.state_dict()
    resumed, again = trained(True, 30, path)
    assert_close(resumed.state_dict(), module.state_dict(), 0.0)
    assert again.precision_plugin.state_dict() == wanted

    saved = torch.load(path, weights_only=False)["MixedPrecision"]
    assert saved.pop("skipped_steps") > 2
    _, stock = trained(False, 13)
    assert saved == stock.precision_plugin.state_dict()
    stock.save_checkpoint(theirs)
    for static, start in ((False, path), (True, theirs)):
        crossed, trainer = trained(static, 30, start)
        now = trainer.precision_plugin.state_dict()
        assert (now["scale"], now["_growth_tracker"]) == (
            wanted["scale"],
            wanted["_growth_tracker"],
        )
        assert_close(crossed.state_dict(), module.state_dict(), 2e-5)


def test_a_static_scale_is_not_replaced_by_that_of_a_checkpoint() -> None:
    state = LossScale(2.0**20).state_dict() | {"skipped_steps": 3}
    static = LossScale(64.0, dynamic=False)
    static.load_state_dict(state)
    assert (static.get_scale(), static.skipped_steps) == (64.0, 3)


def test_skipped_steps_do_not_count_in_groups() -> None:
    ours, stock = both_scaled(classifier(AdaBelief), one_loader, **TWENTY_STEPS)
    assert_same_run(ours, stock, **KERNELS)
    counts = [run.trainer.optimizers[0].param_groups[0]["step"] for run in (ours, stock)]
    assert counts[0] == counts[1] < 20
