"""Device and backend: every rule of the contract, a behaviour a test."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import fulgurite
from fulgurite import CSConfig, Trainer, placement
from fulgurite.backends import Backend, CPUBackend, CSXBackend, GPUBackend
from fulgurite.backends.csx.config import process_config
from fulgurite.backends.csx.plugins.accelerator import CSXAccelerator
from fulgurite.backends.csx.plugins.strategy import CSXStrategy

BOTH = (
    "backend and device are mutually exclusive arguments of Trainer."
    " Please only provide one or the other"
)
SECOND_TYPE = (
    "Cannot instantiate multiple backends. A backend with type {} has already been instantiated."
)
THREE = ("CSX", "CPU", "GPU")
OPTIONS = {
    "artifact_dir": None,
    "compile_dir": None,
    "compile_only": False,
    "validate_only": False,
    "retrace_every_iteration": False,
    "background": True,
    "audit": True,
    "autogen_policy": "default",
    "flush_denormals": True,
    "fabric": "auto",
    "max_programs": "auto",
    "execution": "pipeline",
    "max_resident_bytes": None,
    "cluster_config": None,
}
"""Every argument of CSX, with its default."""

NOT_BUILT = {
    "fabric": "gpu",
}
"""Known values without an effect so far; a row goes when its effect comes."""

GPU_HERE = torch.cuda.is_available() or torch.backends.mps.is_available()
without_gpu = pytest.mark.skipif(GPU_HERE, reason="this machine has a GPU")

MAKE: dict[str, Callable[[str], object]] = {
    "Trainer(device=)": lambda kind: Trainer(device=kind),
    "Trainer(backend={})": lambda kind: Trainer(backend={"backend_type": kind}),
    "Trainer(backend=object)": lambda kind: Trainer(backend=fulgurite.backend(kind)),
    "fulgurite.backend()": lambda kind: fulgurite.backend(kind),
    "class": lambda kind: {"CSX": CSXBackend, "CPU": CPUBackend, "GPU": GPUBackend}[kind](),
}
ways = pytest.mark.parametrize("make", MAKE.values(), ids=MAKE.keys())


class Line(pl.LightningModule):
    """y = ax + b; ``error`` is raised in its step."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__()
        self.error, self.net = error, nn.Linear(4, 1)

    def training_step(self, batch: list[Tensor]) -> Tensor:
        if self.error is not None:
            raise self.error
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(trainer: pl.Trainer, module: Line | None = None) -> Line:
    """Train; returns the trained module."""
    module = module or Line()
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    trainer.fit(module, DataLoader(TensorDataset(x), batch_size=4))
    return module


def short(**arguments: Any) -> dict[str, Any]:
    """Arguments of a Trainer of two steps that writes nothing."""
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    return dict.fromkeys(off, False) | {"max_steps": 2, **arguments}


@contextmanager
def refused(kind: type[Exception], *parts: str, text: str = "") -> Iterator[None]:
    """The block raises exactly ``kind``, bare, with these parts or exactly this text in it."""
    with pytest.raises(kind) as caught:
        yield
    error = caught.value
    assert type(error) is kind
    assert error.__cause__ is None
    assert error.__context__ is None
    assert not text or str(error) == text
    assert [part for part in parts if part not in str(error)] == [], str(error)


def script(code: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a script of a user's, in a process of its own."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PL_TRAINER_")}
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd,
        env=environment | variables,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("PL_TRAINER_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("backend", ["object", "dict"])
def test_device_and_backend_exclude_each_other(backend: str) -> None:
    value = CSXBackend() if backend == "object" else {"backend_type": "CSX"}
    with refused(ValueError, text=BOTH):
        Trainer(device="CSX", backend=value)


def test_neither_device_nor_backend_names_both_and_the_three_devices() -> None:
    with refused(ValueError, "device", "backend", *THREE):
        Trainer()


@pytest.mark.parametrize("device", ["CSX", "csx", "Csx", "CPU", "cpu"])
def test_device_in_any_case_makes_the_default_backend(device: str) -> None:
    trainer = Trainer(device=device)
    assert trainer.backend == {"CSX": CSXBackend, "CPU": CPUBackend}[device.upper()]()
    assert isinstance(trainer.strategy, CSXStrategy) == (device.upper() == "CSX")


def test_device_makes_the_default_backend_also_where_another_one_lives() -> None:
    fulgurite.backend("CSX", autogen_policy="disabled")
    assert Trainer(device="CSX").backend == CSXBackend()


@pytest.mark.parametrize("device", ["TPU", "cuda", "", "CSX2", 1, torch.device("cpu")])
def test_an_unknown_device_is_an_error_with_the_three(device: Any) -> None:
    with refused(ValueError, repr(device), *THREE):
        Trainer(device=device)


@without_gpu
@ways
def test_gpu_without_gpu_is_an_error_at_construction_that_claims_nothing(
    make: Callable[[str], object],
) -> None:
    with refused(MisconfigurationException, "no usable GPU"):
        make("GPU")
    assert type(Trainer(device="CPU").backend) is CPUBackend


@pytest.mark.parametrize("kind", ["CSX", "csx", "cpu"])
def test_backend_may_be_an_object_or_a_dict_in_any_case(kind: str) -> None:
    ready = fulgurite.backend(kind)
    assert Trainer(backend=ready).backend is ready
    assert Trainer(backend={"backend_type": kind}).backend == ready


def test_the_other_keys_of_a_dict_are_the_backends_arguments() -> None:
    given = {"backend_type": "CSX", "autogen_policy": "disabled", "max_programs": 3}
    trainer = Trainer(backend=given)
    assert trainer.backend == CSXBackend(autogen_policy="disabled", max_programs=3)
    assert list(given) == ["backend_type", "autogen_policy", "max_programs"]


def test_a_dict_without_backend_type_names_the_key() -> None:
    with refused(ValueError, "backend_type", *THREE):
        Trainer(backend={"autogen_policy": "disabled"})


def test_a_dict_of_an_unknown_backend_type_is_an_error_with_the_three() -> None:
    with refused(ValueError, "'TPU'", *THREE):
        Trainer(backend={"backend_type": "TPU"})


@pytest.mark.parametrize("value", ["CSX", 1, CSXBackend])
def test_a_backend_that_is_neither_object_nor_dict_is_refused(value: Any) -> None:
    with refused(TypeError, "backend object", "dict"):
        Trainer(backend=value)


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("autogen", "autogen_policy"),
        ("artefact_dir", "artifact_dir"),
        ("max_program", "max_programs"),
    ],
)
def test_an_unknown_key_is_an_error_with_the_nearest(key: str, near: str) -> None:
    with refused(ValueError, repr(key), f"Did you mean {near!r}?"):
        Trainer(backend={"backend_type": "CSX", key: 1})
    with refused(ValueError, repr(key), f"Did you mean {near!r}?"):
        fulgurite.backend("CSX", **{key: 1})


def test_a_key_of_another_type_is_an_error_too() -> None:
    with refused(ValueError, "backend CPU", "'autogen_policy'"):
        Trainer(backend={"backend_type": "CPU", "autogen_policy": "disabled"})


@ways
@pytest.mark.parametrize(
    ("live", "second"), [("CSX", "CPU"), ("CSX", "GPU"), ("CPU", "CSX"), ("CPU", "GPU")]
)
def test_a_second_type_is_refused_through_every_way(
    live: str, second: str, make: Callable[[str], object]
) -> None:
    Trainer(device=live)
    with refused(RuntimeError, text=SECOND_TYPE.format(live)):
        make(second)


@ways
def test_every_way_of_making_a_backend_claims_its_type(make: Callable[[str], object]) -> None:
    make("CSX")
    with refused(RuntimeError, text=SECOND_TYPE.format("CSX")):
        Trainer(device="CPU")


def test_a_refused_second_type_leaves_the_live_backend() -> None:
    live = fulgurite.backend("CSX", autogen_policy="disabled")
    with refused(RuntimeError, text=SECOND_TYPE.format("CSX")):
        Trainer(device="CPU")
    assert fulgurite.backend() is live


def test_lightnings_own_trainer_is_held_to_one_type_too() -> None:
    fulgurite.backend("CPU")
    with refused(RuntimeError, text=SECOND_TYPE.format("CPU")):
        pl.Trainer(strategy="csx")


@pytest.mark.fits
def test_the_same_type_again_keeps_its_own_options_per_trainer(tmp_path: Path) -> None:
    first, second = (
        fulgurite.backend("CSX", autogen_policy="disabled", artifact_dir=tmp_path / name)
        for name in ("first", "second")
    )
    trainers = [Trainer(**short(backend=backend)) for backend in (first, second)]
    for trainer, name in zip(trainers, ("first", "second"), strict=True):
        fit(trainer)
        assert list((tmp_path / name).iterdir())
    assert [trainer.backend for trainer in trainers] == [first, second]


def test_backend_without_arguments_returns_the_live_one() -> None:
    trainer = Trainer(device="CSX")
    assert fulgurite.backend() is trainer.backend
    later = fulgurite.backend("CSX", max_programs=2)
    assert fulgurite.backend() is later
    Trainer(backend=trainer.backend)
    assert fulgurite.backend() is trainer.backend


def test_backend_without_arguments_and_without_a_live_one_says_how_to_make_one() -> None:
    with refused(RuntimeError, "no backend", "fulgurite.backend('CSX')"):
        fulgurite.backend()


def test_backend_with_options_but_without_type_is_an_error() -> None:
    with refused(ValueError, "autogen_policy", "backend_type"):
        fulgurite.backend(autogen_policy="disabled")


@pytest.mark.parametrize(
    ("device", "name", "value", "shown"),
    [
        ("CSX", "accelerator", "gpu", "'gpu'"),
        ("CSX", "accelerator", "cpu", "'cpu'"),
        ("CSX", "accelerator", CPUAccelerator(), "CPUAccelerator"),
        ("CSX", "strategy", "ddp", "'ddp'"),
        ("CSX", "strategy", SingleDeviceStrategy(torch.device("cpu")), "SingleDeviceStrategy"),
        ("CSX", "devices", 0, "0"),
        ("CSX", "num_nodes", 0, "0"),
        ("CSX", "devices", [0, 1], "[0, 1]"),
        ("CPU", "accelerator", "gpu", "'gpu'"),
        ("CPU", "accelerator", "cuda", "'cuda'"),
        ("CPU", "accelerator", "csx", "'csx'"),
        ("CPU", "accelerator", CSXAccelerator(), "CSXAccelerator"),
        ("CPU", "strategy", "csx", "'csx'"),
        ("CPU", "strategy", "CSX", "'CSX'"),  # Lightning takes strategies in any case
        ("GPU", "accelerator", "cpu", "'cpu'"),
        ("GPU", "strategy", "csx", "'csx'"),
    ],
)
@pytest.mark.parametrize("through", ["device", "backend"])
def test_lightnings_placement_that_contradicts_is_an_error_that_names_both(
    device: str, name: str, value: object, shown: str, through: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # for the rows of "GPU"
    ours: dict[str, Any] = {"device": device}
    if through == "backend":
        ours = {"backend": {"backend_type": device}}
    named = f"device={device!r}" if through == "device" else f"backend {device}"
    with refused(MisconfigurationException, named, f"{name}=", shown):
        Trainer(**ours, **{name: value})


@pytest.mark.parametrize(
    "arguments",
    [
        {"device": "CSX", "accelerator": "csx", "strategy": "csx", "devices": 1},
        {"device": "CSX", "strategy": "CSX"},  # Lightning takes strategies in any case
        {"device": "CSX", "accelerator": "auto", "strategy": "auto", "devices": "auto"},
        {"device": "CPU", "accelerator": "cpu", "devices": 1},
        {"device": "CPU", "accelerator": CPUAccelerator()},
    ],
)
def test_lightnings_placement_that_agrees_is_accepted(arguments: dict[str, Any]) -> None:
    assert Trainer(**arguments).backend.backend_type == arguments["device"]


@pytest.mark.fits
def test_lightnings_own_trainer_trains_with_strategy_csx() -> None:
    live = fulgurite.backend("CSX", autogen_policy="disabled")
    trainer = pl.Trainer(**short(strategy="csx"))
    trained = fit(trainer)
    assert isinstance(trainer.strategy, CSXStrategy)
    assert trainer.strategy.backend is live
    assert [program.stage for program in trainer.strategy.programs] == ["training"]
    torch.manual_seed(0)
    fresh = Line()
    assert not torch.equal(trained.net.weight, fresh.net.weight)


@pytest.mark.fits
def test_accelerator_csx_alone_is_refused_with_the_remedy() -> None:
    with refused(MisconfigurationException, "accelerator='csx'", "strategy='csx'"):
        fit(pl.Trainer(**short(accelerator="csx")))


def test_all_names_of_csx_arguments_are_known() -> None:
    assert sorted(field.name for field in fields(CSXBackend)) == sorted(OPTIONS)


def test_an_artifact_dir_that_cannot_be_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for name in ("file", "file/below"):
        with refused(ValueError, "artifact_dir=", "is a file"):
            fulgurite.backend("CSX", artifact_dir=tmp_path / name)
    with refused(TypeError, "artifact_dir must be", "int 3"):
        fulgurite.backend("CSX", artifact_dir=3)
    assert fulgurite.backend("CSX", artifact_dir=tmp_path / "new" / "below").artifact_dir


def test_mild_is_read_as_medium() -> None:
    with pytest.warns(UserWarning, match="mild.*medium"):
        made = fulgurite.backend("CSX", autogen_policy="mild")
    assert (made.autogen_policy, made.policy) == ("medium", "medium")


@pytest.mark.parametrize("key", NOT_BUILT)
def test_an_option_that_is_not_built_is_refused_by_name_and_claims_nothing(key: str) -> None:
    with refused(NotImplementedError, f"{key}={NOT_BUILT[key]!r}", "not built yet"):
        Trainer(backend={"backend_type": "CSX", key: NOT_BUILT[key]})
    assert type(fulgurite.backend("CPU")) is CPUBackend


@pytest.mark.parametrize(("key", "default"), OPTIONS.items())
def test_the_default_of_every_option_is_accepted(key: str, default: object) -> None:
    assert fulgurite.backend("CSX", **{key: default}) == CSXBackend()


@pytest.mark.parametrize(
    ("key", "value"),
    [("autogen_policy", "fast"), ("fabric", "tpu"), ("execution", "eager"), ("max_programs", 0)],
)
def test_an_option_outside_its_range_is_an_error_that_names_it(key: str, value: object) -> None:
    with refused(ValueError, key, repr(value)):
        fulgurite.backend("CSX", **{key: value})


def test_the_first_explicit_cluster_config_holds_for_the_process() -> None:
    fulgurite.backend("CSX")
    fulgurite.backend("CSX", cluster_config={"num_csx": 1})
    fulgurite.backend("CSX")
    Trainer(backend={"backend_type": "CSX", "cluster_config": CSConfig()})
    assert process_config() == CSConfig()


@pytest.mark.parametrize("key", ["num_csx", "num_workers_per_csx"])
def test_another_explicit_cluster_config_is_an_error_that_names_both(key: str) -> None:
    first, second = CSConfig(), CSConfig(**{key: 2})
    fulgurite.backend("CSX", cluster_config=first)
    with refused(ValueError, repr(first), repr(second)):
        fulgurite.backend("CSX", cluster_config={key: 2})


@pytest.mark.parametrize("key", ["max_act_per_csx", "max_wgt_servers"])
def test_a_cluster_config_that_is_not_built_is_refused_by_name(key: str) -> None:
    with refused(NotImplementedError, f"{key}=2", "not built yet"):
        fulgurite.backend("CSX", cluster_config={key: 2})
    assert process_config() == CSConfig()


TORCHRUN = {"TORCHELASTIC_RUN_ID": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
SLURM = {"SLURM_PROCID": "0", "SLURM_NTASKS": "6", "SLURM_NNODES": "3"}


@pytest.mark.parametrize(
    ("environment", "num_csx", "devices", "num_nodes", "systems"),
    [
        ({}, None, "auto", 1, (1, 1)),
        ({}, None, -1, 1, (1, 1)),
        ({}, 2, "auto", 1, (2, 1)),
        ({}, 4, "auto", 2, (2, 2)),
        ({}, None, "2", 1, (2, 1)),
        ({}, None, 2, 2, (2, 2)),
        ({}, 4, 2, 2, (2, 2)),
        (TORCHRUN, None, "auto", 1, (2, 2)),
        (TORCHRUN, 4, "auto", 1, (2, 2)),
        (SLURM, None, "auto", 1, (2, 3)),
        (SLURM, None, 2, 3, (2, 3)),
    ],
)
def test_systems_are_as_many_as_somebody_says(
    environment: dict[str, str],
    num_csx: int | None,
    devices: Any,
    num_nodes: int,
    systems: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert placement.systems(num_csx, devices, num_nodes) == (*systems, None)


@pytest.mark.parametrize(
    ("environment", "given", "names"),
    [
        ({}, {"devices": 2}, ("devices=2 (2 in all)", "num_csx=3")),
        ({}, {"devices": 2, "num_nodes": 2}, ("num_nodes=2 (4 in all)", "num_csx=3")),
        (TORCHRUN, {}, ("num_csx=3", "WORLD_SIZE=4 of torchrun")),
        (SLURM, {}, ("num_csx=3", "SLURM_NTASKS=6 of SLURM")),
    ],
)
def test_two_who_say_another_number_of_systems_are_an_error_that_names_both(
    environment: dict[str, str],
    given: dict[str, int],
    names: tuple[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    backend = {"backend_type": "CSX", "cluster_config": {"num_csx": 3}}
    with refused(MisconfigurationException, *names):
        Trainer(backend=backend, **given)


def test_an_unknown_key_of_cluster_config_is_an_error_with_the_nearest() -> None:
    with refused(ValueError, "cluster_config", "'num_cs'", "Did you mean 'num_csx'?"):
        fulgurite.backend("CSX", cluster_config={"num_cs": 1})


def test_environment_gives_lightnings_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_TRAINER_MAX_EPOCHS", "7")
    assert Trainer(device="CSX").max_epochs == 7
    assert Trainer(device="CSX", max_epochs=3).max_epochs == 3


def test_environment_gives_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_TRAINER_DEVICE", "csx")
    assert Trainer().backend == CSXBackend()


def test_environment_gives_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_TRAINER_BACKEND", "{'backend_type': 'CSX', 'max_programs': 2}")
    assert Trainer().backend == CSXBackend(max_programs=2)


def test_environment_is_held_to_one_type_too(monkeypatch: pytest.MonkeyPatch) -> None:
    fulgurite.backend("CSX")
    monkeypatch.setenv("PL_TRAINER_DEVICE", "CPU")
    with refused(RuntimeError, text=SECOND_TYPE.format("CSX")):
        Trainer()


@pytest.mark.parametrize("given", [{"backend": {"backend_type": "CSX"}}, {"device": "CSX"}])
@pytest.mark.parametrize(
    ("variable", "value"), [("DEVICE", "CPU"), ("BACKEND", "{'backend_type': 'CPU'}")]
)
def test_an_explicit_device_or_backend_overrides_the_environment(
    given: dict[str, Any], variable: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"PL_TRAINER_{variable}", value)
    assert Trainer(**given).backend == CSXBackend()


@pytest.mark.fits
def test_model_dir_is_the_root_of_logs_and_checkpoints(tmp_path: Path) -> None:
    backend = fulgurite.backend("CSX", autogen_policy="disabled")
    off = short(logger=None, enable_checkpointing=None)
    trainer = Trainer(**off, backend=backend, model_dir=tmp_path / "run", log_every_n_steps=1)
    fit(trainer)
    assert trainer.default_root_dir == str(tmp_path / "run")
    assert list((tmp_path / "run").rglob("*.ckpt"))
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_model_dir_and_default_root_dir_may_agree() -> None:
    trainer = Trainer(device="CSX", model_dir="run", default_root_dir=Path("run"))
    assert trainer.default_root_dir == "run"


def test_model_dir_and_default_root_dir_that_differ_are_an_error_that_names_both() -> None:
    with refused(ValueError, "model_dir='a'", "default_root_dir='b'"):
        Trainer(device="CSX", model_dir="a", default_root_dir="b")


def test_an_explicit_model_dir_overrides_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_TRAINER_DEFAULT_ROOT_DIR", "elsewhere")
    assert Trainer(device="CSX", model_dir="run").default_root_dir == "run"


def test_precision_32_is_accepted_on_csx() -> None:
    for precision in (None, 32, "32", "32-true"):
        assert Trainer(device="CSX", precision=precision).precision == "32-true"


@pytest.mark.parametrize(
    ("precision", "plugin"),
    [("bf16-mixed", MixedPrecision), ("bf16-true", HalfPrecision), ("64-true", DoublePrecision)],
)
def test_precision_is_accepted_on_csx_by_name_and_by_plugin(
    precision: Any, plugin: type[Any]
) -> None:
    names = {MixedPrecision: (precision, "cpu"), HalfPrecision: (precision,), DoublePrecision: ()}
    given = plugin(*names[plugin])
    for trainer in (
        Trainer(device="CSX", precision=precision),
        Trainer(device="CSX", plugins=given),
        Trainer(device="CSX", plugins=[given]),
        pl.Trainer(strategy="csx", precision=precision),
        pl.Trainer(strategy=CSXStrategy(precision_plugin=given)),
    ):
        assert trainer.precision == trainer.precision_plugin.precision == precision
        assert isinstance(trainer.precision_plugin, plugin)


def test_bf16_alone_is_mixed_as_in_lightning() -> None:
    with pytest.warns(UserWarning, match="historical reasons"):
        assert Trainer(device="CSX", precision="bf16").precision == "bf16-mixed"


ALLOWED = ("32-true", "64-true", "bf16-mixed", "bf16-true", "16-mixed", "cb16-mixed")


@pytest.mark.parametrize("precision", ["16-true"])
def test_another_precision_is_refused_on_csx(precision: Any) -> None:
    with refused(MisconfigurationException, str(precision), *ALLOWED):
        Trainer(device="CSX", precision=precision)


class OwnPrecision(MixedPrecision):
    """A plugin of the user's."""


@pytest.mark.parametrize("plugin", [HalfPrecision("16-true"), OwnPrecision("bf16-mixed", "cpu")])
def test_another_plugin_is_refused_on_csx(plugin: Any) -> None:
    name = type(plugin).__name__
    with refused(MisconfigurationException, name, *ALLOWED):
        Trainer(device="CSX", plugins=plugin)


@pytest.mark.parametrize(
    ("device", "precision"), [("CPU", "bf16-mixed"), ("CPU", "bf16-true"), ("CPU", "64-true")]
)
def test_other_devices_have_lightnings_own_precision(device: str, precision: Any) -> None:
    plugin = Trainer(device=device, precision=precision).precision_plugin
    assert type(plugin).__module__.startswith("lightning.")


@pytest.mark.parametrize("device", ["CSX", "CPU"])
def test_the_trainer_is_a_lightning_trainer(device: str) -> None:
    assert isinstance(Trainer(device=device), pl.Trainer)


def test_the_trainer_takes_every_argument_of_lightnings_with_its_default() -> None:
    ours = inspect.signature(Trainer.__init__).parameters
    theirs = inspect.signature(pl.Trainer.__init__).parameters
    assert set(ours) - set(theirs) == {"device", "backend", "model_dir"}
    assert {name: ours[name].default for name in theirs} == {
        name: parameter.default for name, parameter in theirs.items()
    }
    assert {name: ours[name].kind for name in theirs} == {
        name: parameter.kind for name, parameter in theirs.items()
    }


@pytest.mark.numbers
def test_device_cpu_is_lightnings_own_training() -> None:
    torch.manual_seed(0)
    eager = fit(Trainer(**short(device="CPU")))
    torch.manual_seed(0)
    stock = fit(pl.Trainer(**short(accelerator="cpu")))
    assert torch.equal(eager.net.weight, stock.net.weight)


@pytest.mark.fits
@pytest.mark.parametrize("kind", ["CSX", "CPU"])
def test_an_error_of_the_users_comes_out_as_it_is(kind: str) -> None:
    options = {"autogen_policy": "disabled"} if kind == "CSX" else {}
    backend: Backend = fulgurite.backend(kind, **options)
    mine = KeyError("mine")
    with pytest.raises(KeyError) as caught:
        fit(Trainer(**short(backend=backend)), Line(mine))
    assert caught.value is mine
    assert mine.args == ("mine",)
    assert mine.__cause__ is None


CLASS = f"{MisconfigurationException.__module__}.MisconfigurationException"


@pytest.mark.long
@pytest.mark.process
@pytest.mark.parametrize(
    ("code", "last_line"),
    [
        ("Trainer(device='CSX', backend={'backend_type': 'CSX'})", f"ValueError: {BOTH}"),
        ("Trainer(device='CSX'); Trainer(device='CPU')", f"RuntimeError: {SECOND_TYPE}"),
        (
            "backend('CSX'); Trainer(backend={'backend_type': 'CPU'})",
            f"RuntimeError: {SECOND_TYPE}",
        ),
        ("Trainer(device='CSX', accelerator='gpu')", f"{CLASS}: device='CSX' contradicts"),
    ],
    ids=["both", "second type by device", "second type by dict", "contradiction"],
)
def test_a_user_meets_the_text_below_two_frames_and_a_remedy_below_it(
    code: str, last_line: str, tmp_path: Path
) -> None:
    done = script(f"from fulgurite import Trainer, backend\n{code}", tmp_path)
    assert done.returncode == 1
    told = done.stderr.splitlines()
    frames = [line for line in told if line.startswith("  File ")]
    assert len(frames) == 2  # the user's own, and where the Trainer begins
    last = told[-2 if last_line.startswith("RuntimeError") else -1]
    assert last.startswith(last_line.format("CSX"))
    assert "contradicts" in last_line or last == last_line.format("CSX")
    assert "During handling" not in done.stderr
    assert "direct cause" not in done.stderr


def test_a_refused_device_has_its_remedy_and_no_frames_between() -> None:
    fulgurite.backend("CSX")
    for device, note in ("CPU", "or run what needs CPU in a process of its own"), ("TPU", ""):
        with pytest.raises((RuntimeError, ValueError)) as caught:
            Trainer(device=device)
        assert [entry.name for entry in caught.traceback[1:]] == ["with_defaults"]
        assert note in "".join(getattr(caught.value, "__notes__", []))


@pytest.mark.long
@pytest.mark.process
def test_importing_the_backends_is_enough_for_lightnings_own_trainer(tmp_path: Path) -> None:
    code = """import sys, fulgurite.backends, lightning
trainer = lightning.Trainer(strategy="csx", logger=False)
print(type(trainer.strategy).__name__, "fulgurite.trainer" in sys.modules)"""
    done = script(code, tmp_path)
    assert done.stdout.splitlines()[-1:] == ["CSXStrategy False"], done.stderr


@pytest.mark.long
@pytest.mark.process
def test_the_environment_gives_a_script_its_device(tmp_path: Path) -> None:
    code = "from fulgurite import Trainer; print(Trainer(logger=False).backend.backend_type)"
    done = script(code, tmp_path, PL_TRAINER_DEVICE="csx")
    assert done.stdout.splitlines()[-1:] == ["CSX"], done.stderr
