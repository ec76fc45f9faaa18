"""``precision=`` of the Trainer on each device, and ``fulgurite.MixedPrecision``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from harness import QUIET, Recorder, Run, assert_close, assert_same_run, csx, fit
from lightning.pytorch.plugins import MixedPrecision as LightningMixedPrecision
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from models import GAN, Classifier, loader, mlp
from torch.amp import GradScaler

import fulgurite
from fulgurite import MixedPrecision, Trainer
from fulgurite.backends import reset_backend
from fulgurite.backends.csx.plugins.loss_scale import LossScale
from fulgurite.backends.csx.plugins.strategy import CSXStrategy
from fulgurite.backends.mixed import BoundedGradScaler


def plugin_of(device: str, precision: Any, **options: Any) -> Any:
    """The precision plugin of a Trainer."""
    reset_backend()
    return Trainer(device=device, precision=precision, **QUIET, **options).precision_plugin


# -- names ------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["16-mixed", MixedPrecision(fp16_type="float16")])
def test_sixteen_mixed_is_float16_on_csx_without_a_warning(precision: Any) -> None:
    """Lightning would make bfloat16 of it, with a warning, which is an error here."""
    plugin = plugin_of("CSX", precision)
    assert (plugin.precision, plugin.fp16_type) == ("16-mixed", "float16")
    with plugin.forward_context():
        assert torch.get_autocast_dtype("cpu") is torch.float16


@pytest.mark.parametrize("precision", [16, "16"])
def test_sixteen_alone_is_mixed_as_in_lightning(precision: Any) -> None:
    with pytest.warns(UserWarning, match="historical reasons"):
        assert plugin_of("CSX", precision).precision == "16-mixed"


def test_sixteen_mixed_begins_as_lightnings() -> None:
    state = plugin_of("CSX", "16-mixed").state_dict()
    assert state.pop("skipped_steps") == 0
    scaler = GradScaler("cpu")
    assert state == scaler.state_dict()


def test_cb16_mixed_is_cbfloat16_with_a_dynamic_scale() -> None:
    plugin = plugin_of("CSX", "cb16-mixed")
    assert (plugin.precision, plugin.fp16_type) == ("cb16-mixed", "cbfloat16")
    assert plugin.scaler.get_scale() == 2.0**31
    with plugin.forward_context():
        assert torch.get_autocast_dtype("cpu") is torch.bfloat16  # its stand-in while tracing


@pytest.mark.parametrize(
    "precision",
    ["cb16-mixed", MixedPrecision(fp16_type="cbfloat16", loss_scaling_factor="dynamic")],
)
def test_cbfloat16_needs_csx(precision: Any) -> None:
    with pytest.raises(MisconfigurationException, match=r"cbfloat16.*CSX; CPU does not have it"):
        plugin_of("CPU", precision)


@pytest.mark.parametrize("precision", ["cb16", {"fp16_type": "float16"}])
def test_an_unknown_name_is_lightnings_error_with_our_names(precision: Any) -> None:
    with pytest.raises(ValueError, match="is invalid") as raised:
        fulgurite.Trainer(device="CSX", precision=precision)
    assert "'cb16-mixed'" in raised.value.__notes__[0]


def test_a_refused_precision_claims_no_backend() -> None:
    with pytest.raises(MisconfigurationException):
        plugin_of("CPU", "cb16-mixed")
    assert fulgurite.current_backend() is None


@pytest.mark.parametrize("device", ["CSX", "CPU"])
@pytest.mark.parametrize("precision", [MixedPrecision(), "16-mixed", "bf16-mixed"])
def test_a_precision_and_a_plugin_of_one_are_lightnings_error(device: str, precision: Any) -> None:
    mine = LightningMixedPrecision("bf16-mixed", "cpu")
    with pytest.raises(ValueError, match=r"Received both `precision=.*` and `plugins=.*Choose"):
        plugin_of(device, precision, plugins=[mine])


@pytest.mark.parametrize("plugins", [TorchCheckpointIO(), [TorchCheckpointIO()]])
def test_plugins_of_other_kinds_stay(plugins: Any) -> None:
    reset_backend()
    trainer = Trainer(device="CSX", precision="16-mixed", plugins=plugins, **QUIET)
    assert trainer.precision == "16-mixed"
    assert isinstance(trainer.strategy.checkpoint_io, TorchCheckpointIO)


# -- lightning.Trainer ------------------------------------------------------------------------


def test_lightnings_own_trainer_is_not_silently_bfloat16() -> None:
    with pytest.raises(MisconfigurationException, match=r"would compute in bfloat16.*plugins="):
        pl.Trainer(strategy="csx", precision="16-mixed", **QUIET)


def test_lightnings_own_trainer_takes_float16_as_a_plugin() -> None:
    scaler = GradScaler("cpu", init_scale=8.0, growth_factor=3.0, growth_interval=7)
    plugin = LightningMixedPrecision("16-mixed", "cpu", scaler)
    found = pl.Trainer(strategy="csx", plugins=plugin, **QUIET).precision_plugin
    state = found.state_dict()
    assert found.precision == "16-mixed"
    assert state == scaler.state_dict() | {"skipped_steps": 0}


@pytest.mark.filterwarnings("ignore:.*GradScaler is enabled, but CUDA is not available")
def test_a_strategy_object_takes_sixteen_mixed() -> None:
    """Its accelerator is no CPU to the connector, which then makes a scaler for CUDA."""
    trainer = pl.Trainer(strategy=CSXStrategy(), precision="16-mixed", **QUIET)
    assert trainer.precision == "16-mixed"
    assert trainer.scaler.get_scale() == 2.0**16


def test_a_scaler_that_is_switched_off_scales_nothing() -> None:
    plugin = LightningMixedPrecision("16-mixed", "cpu", GradScaler("cpu", enabled=False))
    assert pl.Trainer(strategy="csx", plugins=plugin, **QUIET).scaler is None


# -- MixedPrecision ---------------------------------------------------------------------------


def test_it_is_plain_data_with_the_keys_of_parameter_files() -> None:
    mixed = MixedPrecision(fp16_type="float16")
    assert mixed == MixedPrecision(fp16_type="float16")
    with pytest.raises(FrozenInstanceError):
        mixed.fp16_type = "bfloat16"  # type: ignore[misc]
    assert set(vars(mixed)) == {
        *("enabled", "fp16_type", "precision_opt_level", "loss_scaling_factor", "log_loss_scale"),
        *("initial_loss_scale", "steps_per_increase", "min_loss_scale", "max_loss_scale"),
        *("max_gradient_norm", "max_gradient_value"),
    }


DYNAMIC = {"loss_scaling_factor": "dynamic"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"fp16_type": "fp8"}, ["fp16_type", "'fp8'", "float16", "bfloat16", "cbfloat16"]),
        ({"enabled": "yes"}, ["enabled", "'yes'"]),
        ({"precision_opt_level": 3}, ["precision_opt_level", "3", "0, 1, 2"]),
        ({"loss_scaling_factor": "static"}, ["loss_scaling_factor", "'static'", "'dynamic'"]),
        ({"loss_scaling_factor": 0.0}, ["loss_scaling_factor", "0.0", "2**-126"]),
        ({"loss_scaling_factor": 1e-40}, ["loss_scaling_factor", "1e-40", "2**-126"]),
        ({"loss_scaling_factor": 1e39}, ["loss_scaling_factor", "1e+39", "2**126"]),
        ({"loss_scaling_factor": True}, ["loss_scaling_factor", "True"]),
        ({"steps_per_increase": 0}, ["steps_per_increase", "0", "positive integer"]),
        ({"min_loss_scale": -1.0, **DYNAMIC}, ["min_loss_scale", "-1.0", "2**-126"]),
        ({"max_loss_scale": 1e40, **DYNAMIC}, ["max_loss_scale", "1e+40", "2**126"]),
        ({"max_gradient_norm": 0}, ["max_gradient_norm", "0", "positive"]),
        ({"max_gradient_value": float("inf")}, ["max_gradient_value", "inf", "positive"]),
        ({"log_loss_scale": 2}, ["log_loss_scale", "2"]),
        (
            {"max_gradient_norm": 1.0, "max_gradient_value": 2.0},
            ["max_gradient_norm=1.0", "max_gradient_value=2.0", "exclude"],
        ),
        (
            {"initial_loss_scale": 4.0, "max_loss_scale": 2.0, **DYNAMIC},
            ["initial_loss_scale=4.0", "max_loss_scale=2.0", "<="],
        ),
        (
            {"initial_loss_scale": 4.0, "min_loss_scale": 8.0, **DYNAMIC},
            ["initial_loss_scale=4.0", "min_loss_scale=8.0", "<="],
        ),
        (
            {"initial_loss_scale": 4.0, "loss_scaling_factor": 2.0},
            ["initial_loss_scale=4.0", "loss_scaling_factor=2.0", "'dynamic'"],
        ),
        ({"fp16_type": "cbfloat16"}, ["cbfloat16", "loss_scaling_factor=1.0", "'dynamic'"]),
    ],
)
def test_a_wrong_value_is_an_error_that_names_it(options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError, match=r"must be|exclude|<=|static|needs") as caught:
        MixedPrecision(**options)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    ("fp16_type", "largest"), [("float16", 2.0**15), ("bfloat16", 2.0**15), ("cbfloat16", 2.0**31)]
)
def test_a_dynamic_scale_begins_at_the_largest_of_its_type(fp16_type: str, largest: float) -> None:
    mixed = MixedPrecision(fp16_type=fp16_type, loss_scaling_factor="dynamic")
    assert (mixed.least_scale, mixed.first_scale, mixed.largest_scale) == (2**-14, largest, largest)


@pytest.mark.parametrize("device", ["CSX", "CPU"])
def test_disabled_is_float32(device: str) -> None:
    reset_backend()
    mixed = MixedPrecision(enabled=False, fp16_type="cbfloat16", max_gradient_norm=1.0)
    trainer = Trainer(device=device, precision=mixed, **QUIET)
    assert (trainer.precision, trainer.scaler) == ("32-true", None)
    assert trainer.gradient_clip_val == 1.0


@pytest.mark.parametrize("device", ["CSX", "CPU"])
@pytest.mark.parametrize("fp16_type", ["float16", "bfloat16"])
def test_a_factor_of_one_scales_nothing(device: str, fp16_type: str) -> None:
    plugin = plugin_of(device, MixedPrecision(fp16_type=fp16_type))
    assert isinstance(plugin, LightningMixedPrecision)
    assert plugin.scaler is None


@pytest.mark.parametrize(("device", "kind"), [("CSX", LossScale), ("CPU", BoundedGradScaler)])
@pytest.mark.parametrize("fp16_type", ["float16", "bfloat16"])
def test_every_type_may_be_scaled(device: str, kind: type[Any], fp16_type: str) -> None:
    mixed = MixedPrecision(
        fp16_type=fp16_type, loss_scaling_factor="dynamic", initial_loss_scale=64.0
    )
    plugin = plugin_of(device, mixed)
    assert isinstance(plugin.scaler, kind)
    assert plugin.state_dict()["scale"] == 64.0
    assert type(plugin).__qualname__ == LightningMixedPrecision.__qualname__


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_clipping_becomes_lightnings(algorithm: str) -> None:
    mixed: Any = MixedPrecision(**{f"max_gradient_{algorithm}": 0.5})  # type: ignore[arg-type]
    reset_backend()
    trainer = Trainer(device="CSX", precision=mixed, **QUIET)
    assert trainer.gradient_clip_val == 0.5
    assert trainer.gradient_clip_algorithm == algorithm


@pytest.mark.parametrize("twice", [{"gradient_clip_val": 1.0}, {"gradient_clip_algorithm": "norm"}])
def test_clipping_that_is_given_twice_is_an_error_that_names_both(twice: dict[str, Any]) -> None:
    [name] = twice
    with pytest.raises(ValueError, match=rf"{name}=.*max_gradient_norm=0.5.*twice"):
        plugin_of("CSX", MixedPrecision(max_gradient_norm=0.5), **twice)


def fit_on(
    static: bool,
    precision: Any,
    make: Callable[[], pl.LightningModule] = lambda: Classifier(mlp()),
    *callbacks: pl.Callback,
) -> Run:
    """Ten steps with our Trainer, on CSX or on the CPU."""
    reset_backend()
    torch.manual_seed(0)
    module, recorder = make(), Recorder()
    trainer = Trainer(
        precision=precision,
        callbacks=[recorder, *callbacks],
        max_steps=10,
        **({"backend": csx()} if static else {"device": "CPU"}),
        **QUIET,
    )
    trainer.fit(module, loader())
    return Run(module, trainer, recorder.losses, recorder.outputs, recorder.metrics)


class Logged(pl.Callback):
    """What "loss_scale" was after each step, and whether anything was skipped."""

    def __init__(self) -> None:
        self.scales: list[float] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *rest: Any) -> None:
        self.scales.append(float(trainer.callback_metrics["loss_scale"]))


@pytest.mark.fits
@pytest.mark.parametrize("make", [lambda: Classifier(mlp()), GAN], ids=["automatic", "manual"])
def test_the_scale_of_every_step_is_logged(make: Any) -> None:
    mixed = MixedPrecision(
        fp16_type="float16",
        loss_scaling_factor="dynamic",
        initial_loss_scale=4.0,
        max_loss_scale=16.0,
        steps_per_increase=2,
        log_loss_scale=True,
    )
    ours, eager = Logged(), Logged()
    fit_on(True, mixed, make, ours)
    fit_on(False, mixed, make, eager)
    assert ours.scales == eager.scales
    assert (ours.scales[0], ours.scales[-1]) == (4.0, 16.0)


@pytest.mark.fits
def test_the_same_numbers_on_csx_and_on_the_cpu() -> None:
    """With loss scaling in bfloat16, which stock Lightning does not have."""
    mixed = MixedPrecision(
        loss_scaling_factor="dynamic", steps_per_increase=3, max_gradient_norm=0.1
    )
    assert_same_run(fit_on(True, mixed), fit_on(False, mixed))


@pytest.mark.numbers
def test_float16_without_scaling_equals_scaling_by_one() -> None:
    one = GradScaler("cpu", init_scale=1.0, growth_interval=100)
    stock = fit(
        lambda: Classifier(mlp()),
        lambda: (loader(),),
        static=False,
        plugins=[LightningMixedPrecision("16-mixed", "cpu", one)],
        limit_train_batches=10,
    )
    ours = fit_on(True, MixedPrecision(fp16_type="float16"))
    assert_close(ours.losses, stock.losses)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--trainer.precision=16-mixed"], "16-mixed"),
        (["--trainer.precision=cb16-mixed"], "cb16-mixed"),
        (["--trainer.precision=bf16-mixed"], "bf16-mixed"),
        (
            ["--trainer.precision.fp16_type=float16", "--trainer.precision.max_gradient_norm=2"],
            "16-mixed",
        ),
    ],
)
def test_lightnings_cli_parses_every_form(
    arguments: list[str], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cli = pytest.importorskip("lightning.pytorch.cli")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["train.py"])
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # Lightning's
    made = cli.LightningCLI(
        Parsed,
        trainer_class=Trainer,
        args=["--trainer.device=CSX", *arguments],
        run=False,
        seed_everything_default=1,
    )
    assert made.trainer.precision == expected
    assert made.trainer.gradient_clip_val == (2 if len(arguments) > 1 else None)


class Parsed(Classifier):
    """Without arguments."""

    def __init__(self) -> None:
        super().__init__(mlp())
