"""compile_only and validate_only: programs are built through the Trainer, and all else stays."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from harness import QUIET, Recorder, csx
from lightning.pytorch.callbacks import ModelCheckpoint, RichProgressBar
from lightning.pytorch.loggers import CSVLogger
from models import GAN, Classifier, Measured, loader, mlp
from torch import Tensor

import fulgurite
from fulgurite.backends.csx.compile.background import compilation, later
from fulgurite.backends.csx.compile.fabric import Loaded
from fulgurite.backends.csx.compile.host.host_fabric import HostFabric
from fulgurite.backends.csx.compile.inductor import toolchain
from fulgurite.backends.csx.diagnostics.trace_errors import (
    ConditionalOnTensor,
    HostRead,
    InputChanged,
)
from fulgurite.backends.csx.graph import rng
from fulgurite.backends.csx.program import announcements
from fulgurite.backends.csx.program.offline import BuiltOnly

pytestmark = pytest.mark.fits

STAGES = ("fit", "validate", "test", "predict")


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was said."""
    said: list[str] = []
    monkeypatch.setattr(announcements, "rank_zero_info", said.append)
    return said


@pytest.fixture
def fake_compiler(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every graph that is loaded: as if it had been compiled in a second."""
    loaded: list[Any] = []

    def load(self: HostFabric, graph: Any, shown: Any, *how: Any) -> Loaded:
        loaded.append(graph)
        call: Any = lambda inputs: pytest.fail("a program was run")  # noqa: E731
        return Loaded(call=call, compiled=True, built=True, seconds=1.0, how="compiled")

    monkeypatch.setattr(HostFabric, "load", load)
    return loaded


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing may be compiled, and no cache opened."""
    asked = {
        toolchain: "toolchain_missing",
        later: "CompileCache",
        compilation: "compile_graph",
    }
    for module, name in asked.items():
        monkeypatch.setattr(module, name, lambda *args, name=name: pytest.fail(f"asked for {name}"))


@pytest.fixture(params=["validate_only", "compile_only"])
def offline(request: pytest.FixtureRequest, fake_compiler: list[Any]) -> Iterator[str]:
    """Both options in turn."""
    return request.param


def make_trainer(offline: str, **options: Any) -> fulgurite.Trainer:
    backend = options.pop("backend", {})
    return fulgurite.Trainer(
        backend=csx("default", **{offline: True}, **backend),
        **{**QUIET, "max_epochs": 3, **options},
    )


class Everything(Measured):
    """Every stage, dropout, metrics, attributes and lists; ``hooks`` lists what was called."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(0.5)
        self.hooks: list[str] = []
        self.outs: list[Tensor] = []
        self.counted: dict[str, int] = {"steps": 0}  # counts without a warning

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.counted["steps"] += 1
        self.last = super().training_step(batch, batch_idx)
        self.outs.append(self.last)
        return self.last

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0])

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.hooks.append(f"on_train_batch_start {batch_idx}")


def _note(name: str) -> Any:
    return lambda self, *args, **kwargs: self.hooks.append(name)


HOOKS = [f"on_{stage}_{what}" for stage in ("train", "validation", "test", "predict")
         for what in ("start", "epoch_start", "batch_end", "epoch_end", "end")]  # fmt: skip
for _name in (*HOOKS, "on_fit_start", "on_fit_end", "setup", "teardown", "on_sanity_check_end"):
    setattr(Everything, _name, _note(_name))


def content(module: pl.LightningModule) -> dict[str, Any]:
    """The module's own attributes and those of its metrics, and its weights."""
    names = {"hooks", "_trainer", "_hparams", "_log_hyperparams"}
    kept = {
        f"{path}.{key}": value
        for path, owner in module.named_modules()
        for key, value in vars(owner).items()
        if key not in names and not isinstance(value, torch.nn.Module) and key != "_modules"
    }
    return copy.deepcopy(kept)


def random_states() -> str:
    return str([(k, v.tolist() if k == "torch" else v) for k, v in rng.collect().items()])


# -- what stays ------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
def test_module_and_random_states_are_exactly_as_before(stage: str, offline: str) -> None:
    module, trainer = Everything(), make_trainer(offline)
    generator = torch.Generator().manual_seed(5)
    batches = loader(64, shuffle=True, generator=generator)
    if stage != "fit":
        batches = loader(64)
    weights = [tensor.clone() for tensor in module.state_dict().values()]
    before, states, drawn = content(module), random_states(), generator.get_state()
    getattr(trainer, stage)(module, batches, *([loader(32)] if stage == "fit" else []))
    assert list(content(module)) == list(before)
    for name, value in content(module).items():
        same = torch.equal if isinstance(value, Tensor) else lambda a, b: str(a) == str(b)
        assert same(value, before[name]), name
    assert all(map(torch.equal, module.state_dict().values(), weights))
    assert random_states() == states
    assert torch.equal(generator.get_state(), drawn)


@pytest.mark.parametrize("make", [lambda: Classifier(mlp()), GAN])
def test_optimizers_and_counters_are_as_before(make: Any, offline: str) -> None:
    trainer = make_trainer(offline)
    counted = str(trainer.fit_loop.state_dict())
    trainer.fit(make(), loader(64))
    for optimizer in trainer.optimizers:
        assert not optimizer.state
    assert str(trainer.fit_loop.state_dict()) == counted
    assert (trainer.global_step, trainer.current_epoch) == (0, 0)
    for config in trainer.lr_scheduler_configs:
        assert config.scheduler.last_epoch == 0


def test_nothing_is_written(tmp_path: Path, offline: str) -> None:
    logger, checkpoint = CSVLogger(tmp_path / "logs"), ModelCheckpoint(save_last=True)
    trainer = make_trainer(
        offline,
        logger=logger,
        callbacks=[checkpoint],
        enable_checkpointing=True,
        log_every_n_steps=1,
        default_root_dir=tmp_path,
    )
    module = Everything()
    module.save_hyperparameters({"width": 16})
    trainer.fit(module, loader(64), loader(32))
    trainer.validate(module, loader(32))
    assert list(tmp_path.iterdir()) == []
    assert trainer.loggers == [logger]
    assert checkpoint.dirpath is None


def test_hooks_before_a_step_run_and_those_after_it_do_not(offline: str) -> None:
    module = Everything()
    make_trainer(offline).fit(module, loader(64), loader(32))
    assert module.hooks == [
        "setup",
        "on_fit_start",
        "on_train_start",
        "on_train_epoch_start",
        "on_train_batch_start 0",
        "on_validation_start",
        "on_validation_epoch_start",
        "teardown",
    ]


@pytest.mark.parametrize("stage", STAGES[1:])
def test_hooks_of_the_other_stages_likewise(stage: str, offline: str) -> None:
    module, hook = Everything(), {"validate": "validation"}.get(stage, stage)
    getattr(make_trainer(offline), stage)(module, loader(64))
    assert module.hooks == ["setup", f"on_{hook}_start", f"on_{hook}_epoch_start", "teardown"]


def test_every_call_returns_as_it_does_where_there_is_nothing_to_say(offline: str) -> None:
    module, trainer = Everything(), make_trainer(offline)
    assert trainer.fit(module, loader(64), loader(32)) is None
    assert trainer.state.finished
    assert trainer.validate(module, loader(32)) == []
    assert trainer.test(module, loader(32)) == []
    assert trainer.predict(module, loader(32)) == []
    assert trainer.predict(module, loader(32), return_predictions=False) is None
    assert trainer.state.finished


def test_the_progress_bar_stays_away_and_comes_back(
    offline: str, capsys: pytest.CaptureFixture[str]
) -> None:
    bar = RichProgressBar()
    trainer = make_trainer(offline, enable_progress_bar=True, callbacks=[bar])
    trainer.fit(Classifier(mlp()), loader(64))
    assert "Epoch" not in capsys.readouterr().out
    assert bar.is_enabled


def test_a_hook_that_skips_the_epoch_leaves_nothing_to_build(
    offline: str, lines: list[str]
) -> None:
    class Skipping(Everything):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int:
            return -1

    module = Skipping()
    make_trainer(offline, limit_val_batches=0).fit(module, loader(64), loader(32))
    assert "on_train_epoch_end" not in module.hooks
    assert lines == [f"{offline}: no batch came to a step, so there was nothing to build."]


def test_a_loader_without_batches_leaves_nothing_to_build(offline: str, lines: list[str]) -> None:
    assert make_trainer(offline, limit_val_batches=0).validate(Measured(), loader(32)) == []
    assert lines == [f"{offline}: no batch came to a step, so there was nothing to build."]


# -- what is built ---------------------------------------------------------------------------------


def stages(trainer: Any) -> list[str]:
    return [program.stage for program in trainer.strategy.programs]


def test_fit_builds_the_program_of_training_and_of_each_validation_loader(offline: str) -> None:
    class Two(Classifier):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log("val", self.net(batch[0]).mean() * (dataloader_idx + 1))

    trainer = make_trainer(offline)
    trainer.fit(Two(mlp()), loader(64), [loader(32), loader(32, batch_size=8)])
    assert stages(trainer) == ["training", "validation 0", "validation 1"]
    shapes = [program.inputs[0].shape for program in trainer.strategy.programs]
    assert shapes == [(16, 8), (16, 8), (8, 8)]


def test_no_validation_program_where_validation_is_switched_off(offline: str) -> None:
    trainer = make_trainer(offline, limit_val_batches=0)
    trainer.fit(Measured(), loader(64), loader(32))
    assert stages(trainer) == ["training"]


def test_accumulation_has_both_entry_points(offline: str) -> None:
    trainer = make_trainer(offline, accumulate_grad_batches=2)
    trainer.fit(Classifier(mlp()), loader(64))
    [program] = trainer.strategy.programs
    assert [entry.name for entry in program.entries] == ["accumulate", "step"]


def test_validate_only_asks_for_no_compiler_and_no_cache(
    no_compiler: None, tmp_path: Path, lines: list[str]
) -> None:
    trainer = make_trainer("validate_only", backend={"compile_dir": tmp_path / "programs"})
    trainer.fit(Everything(), loader(64), loader(32))
    assert list(tmp_path.iterdir()) == []
    assert stages(trainer) == ["training", "validation"]


def test_compile_only_loads_every_graph(fake_compiler: list[Any]) -> None:
    trainer = make_trainer("compile_only", accumulate_grad_batches=2)
    trainer.fit(Everything(), loader(64), loader(32))
    graphs = [e.graph for program in trainer.strategy.programs for e in program.entries]
    assert list(map(id, fake_compiler)) == list(map(id, graphs))
    assert len(graphs) == 3


@pytest.mark.long
@pytest.mark.compiler
def test_the_next_run_loads_what_compile_only_compiled(tmp_path: Path, lines: list[str]) -> None:
    class Plain(Classifier):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val", self.net(batch[0]).mean())

    module = Plain(mlp(), torch.optim.SGD)
    batches = loader(64), loader(32)
    make_trainer("compile_only", backend={"compile_dir": tmp_path}).fit(module, *batches)
    built = [line for line in lines if " program, " in line and "..." not in line]
    assert [", compiled in " in line for line in built] == [True, True]
    assert module.calls.total() == 0
    lines.clear()
    backend = csx("default", compile_dir=tmp_path)
    fulgurite.Trainer(backend=backend, **QUIET, max_epochs=1).fit(module, *batches)
    said = [line for line in lines if " program, " in line]
    assert ["loaded from the cache" in line for line in said] == [True, True]
    assert module.calls.total() == 1


def test_lightnings_own_trainer_builds_only_too(offline: str) -> None:
    csx("default", **{offline: True})
    trainer = pl.Trainer(strategy="csx", **QUIET, max_epochs=1)
    trainer.fit(Classifier(mlp()), loader(64))
    assert stages(trainer) == ["training"]
    assert trainer.global_step == 0


@pytest.mark.numbers
def test_a_run_after_it_trains_as_if_it_had_not_been(offline: str) -> None:
    losses = []
    for builds in (True, False):
        torch.manual_seed(4)
        module, batches, recorder = Classifier(mlp(0.5)), loader(64, shuffle=True), Recorder()
        if builds:
            make_trainer(offline).fit(module, batches)
        options: dict[str, Any] = {**QUIET, "max_epochs": 1, "callbacks": [recorder]}
        pl.Trainer(accelerator="cpu", **options).fit(module, batches)
        losses.append(recorder.losses)
    assert losses[0] == losses[1]


# -- what is said ----------------------------------------------------------------------------------


def test_the_summary_says_what_was_built(offline: str, lines: list[str]) -> None:
    trainer = make_trainer(offline)
    trainer.fit(Classifier(mlp(), torch.optim.SGD, momentum=0.9), loader(64))
    [program] = trainer.strategy.programs
    how = {"validate_only": "checked", "compile_only": "compiled in 1.0 s"}[offline]
    first, inputs, state = lines[0].splitlines()
    assert first.startswith("CSX on host fabric")
    assert first.endswith(f": training program, {program.operations} operations, {how}")
    assert inputs == "  inputs: batch[0]: float32[16, 8], batch[1]: int64[16]"
    weights = 4 * sum(p.numel() for p in mlp().parameters())
    assert state == f"  state: 8 tensors, {2 * weights:,} bytes"
    assert lines[1:] == [
        {
            "validate_only": "validate_only: the model is static. Nothing was compiled or trained.",
            "compile_only": "compile_only: nothing was trained. The next run loads these programs;"
            " others that later batches need it compiles.",
        }[offline]
    ]


def test_artifact_dir_receives_the_programs(tmp_path: Path, offline: str) -> None:
    trainer = make_trainer(offline, backend={"artifact_dir": tmp_path})
    trainer.fit(Everything(), loader(64), loader(32))
    names = sorted(path.name for path in tmp_path.iterdir())
    programs = ["training.txt", "training_passes", "validation.txt", "validation_passes"]
    assert names == ["report.html", "report.json", *programs]
    assert "models.py" in (tmp_path / "training.txt").read_text()


# -- what is wrong ---------------------------------------------------------------------------------


class Reading(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.net(batch[0]).mean()
        self.log("loss", loss.item())
        return loss


def test_a_step_that_is_not_static_is_the_same_error(offline: str, tmp_path: Path) -> None:
    module, trainer = Reading(mlp()), make_trainer(offline, logger=CSVLogger(tmp_path))
    states = random_states()
    with pytest.raises(HostRead, match=r"loss\.item\(\)"):
        trainer.fit(module, loader(64))
    assert random_states() == states
    assert [type(logger) for logger in trainer.loggers] == [CSVLogger]
    assert list(tmp_path.iterdir()) == []


def test_an_error_of_validation_stands_alone(offline: str) -> None:
    class Branching(Classifier):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            if self.net(batch[0]).mean() > 0:
                self.log("positive", 1.0)

    trainer = make_trainer(offline)
    with pytest.raises(ConditionalOnTensor) as caught:
        trainer.fit(Branching(mlp()), loader(64), loader(32))
    assert stages(trainer) == ["training"]
    assert not isinstance(caught.value.__context__, BuiltOnly)


@pytest.mark.parametrize("sizes", [(40, 32), (64, 40)])
def test_a_smaller_last_batch_is_the_same_error(sizes: tuple[int, int], offline: str) -> None:
    with pytest.raises(InputChanged, match="last batch"):
        make_trainer(offline, backend={"max_programs": 1}).fit(Measured(), *map(loader, sizes))


def test_both_options_are_an_error_that_names_them() -> None:
    with pytest.raises(ValueError, match=r"compile_only.*validate_only.*Give one"):
        csx("default", compile_only=True, validate_only=True)


def test_compile_only_without_compiling_is_an_error_with_the_remedy() -> None:
    with pytest.raises(ValueError, match=r"compile_only=True.*'disabled'.*validate_only=True"):
        csx("disabled", compile_only=True)
    csx("disabled", validate_only=True)


def test_compile_only_without_a_compiler_is_an_error_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(toolchain, "toolchain_missing", lambda: "no C++ compiler was found")
    with pytest.raises(RuntimeError, match=r"no C\+\+ compiler was found.*validate_only=True"):
        make_trainer("compile_only").fit(Classifier(mlp()), loader(64))


def test_lightning_s_cli_checks_a_model_any_number_of_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cli = pytest.importorskip("lightning.pytorch.cli")

    class Fed(Classifier):
        def __init__(self) -> None:
            super().__init__(mlp())

        def train_dataloader(self) -> Any:
            return loader(32)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["train.py"])
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # Lightning's
    options = ["--trainer.max_epochs=1", "--trainer.enable_progress_bar=false"]
    backend = {"backend_type": "CSX", "validate_only": True}
    args = ["fit", *options, *(f"--trainer.backend.{k}={v}" for k, v in backend.items())]
    for _ in range(2):
        fulgurite.backends.reset_backend()
        cli.LightningCLI(Fed, trainer_class=fulgurite.Trainer, args=args, seed_everything_default=1)
    assert list(tmp_path.iterdir()) == []
