"""What is loaded runs nothing: every way to read a checkpoint, and what the refusal says."""

from __future__ import annotations

import ast
import contextlib
import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from harness import QUIET, csx
from lightning.pytorch.strategies import FSDPStrategy, SingleDeviceStrategy
from models import Classifier, loader, mlp
from torch import nn

import fulgurite
from fulgurite.backends.safe_load import (
    UnsafeCheckpoint,
    loading_safely,
    naming_classes,
    read_checkpoint,
)
from fulgurite.callbacks import Checkpoint, SaveCheckpointState

ROOT = Path(__file__).parents[2]

READS_ANYTHING = {
    *("pickle.load", "pickle.loads", "pickle.Unpickler", "marshal.load", "marshal.loads"),
    *("yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.full_load", "shelve.open"),
    *("torch.jit.load", "torch.hub.load", "joblib.load", "dill.load", "dill.loads"),
}


def unsafe_reads(tree: ast.AST) -> list[str]:
    """Calls that read a file and may run what is in it."""
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        given = {item.arg: ast.unparse(item.value) for item in node.keywords}
        saves = name.rpartition(".")[2].startswith("save")  # there it is: the weights alone
        says = (given.get("weights_only"), given.get("allow_pickle"))
        if (
            name in READS_ANYTHING
            or (says[0] == "False" and not saves)
            or (name == "torch.load" and says[0] not in ("True", "weights_only"))
            or says[1] == "True"
        ):
            found.append(f"{node.lineno}: {ast.unparse(node)}")
    return found


@pytest.mark.parametrize(
    "code",
    [
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "torch.load(path, weights_only=safe)",
        "trainer.fit(net, ckpt_path=path, weights_only=False)",
        "pickle.loads(text)",
        "np.load(path, allow_pickle=True)",
    ],
)
def test_a_read_that_may_run_something_is_seen(code: str) -> None:
    assert unsafe_reads(ast.parse(code))


PIPES = ("attempt.py", "restarting.py")
"""Files of ``trainer/config/run`` that unpickle what a run sends to the process that watches it."""


def test_nothing_here_reads_a_file_and_may_run_what_is_in_it() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{call}"
        for folder in ("trainer", "loops", "callbacks", "backends", "examples")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for call in unsafe_reads(ast.parse(path.read_text(encoding="utf-8")))
        if path.name not in PIPES or "pickle.loads(" not in call
    ]
    assert wrong == []


class Width:
    """A class of somebody's own, as a hyperparameter."""

    def __init__(self, count: int) -> None:
        self.count = count


class Runs:
    """Makes a folder when it is read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


class Net(Classifier):
    """A classifier with a hyperparameter."""

    def __init__(self, width: Any = 3) -> None:
        super().__init__(mlp())
        self.save_hyperparameters()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch[0])


EPOCHS = {"max_epochs": 1, "limit_train_batches": 1}
WHERE = {"CSX": lambda: {"backend": csx()}, "CPU": lambda: {"device": "CPU"}}
BOTH = pytest.mark.parametrize("device", WHERE)


def trainer(device: str, **options: Any) -> fulgurite.Trainer:
    return fulgurite.Trainer(**{**QUIET, **WHERE[device](), **EPOCHS, "max_epochs": 2, **options})


def saved(path: Path, width: Any) -> Path:
    """A checkpoint with a hyperparameter."""
    made = pl.Trainer(**{**QUIET, **EPOCHS, "accelerator": "cpu"})
    made.fit(Net(), loader())
    made.save_checkpoint(path)
    data = torch.load(path, weights_only=True)
    torch.save({**data, "hyper_parameters": {"width": width}}, path)
    return path


@pytest.mark.numbers
@BOTH
@pytest.mark.parametrize("stage", ["fit", "validate", "test", "predict"])
def test_a_stage_runs_nothing_unless_it_is_told_to(
    device: str, stage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    path = saved(tmp_path / "a.ckpt", Runs(tmp_path / "made"))
    with pytest.raises(UnsafeCheckpoint, match=r"a\.ckpt holds posix\.mkdir: "):
        getattr(trainer(device), stage)(Net(), loader(), ckpt_path=path)
    assert not (tmp_path / "made").exists()
    getattr(trainer(device), stage)(Net(), loader(), ckpt_path=path, weights_only=False)
    assert (tmp_path / "made").exists()


@pytest.mark.numbers
@BOTH
def test_a_class_that_was_allowed_loads(device: str, tmp_path: Path) -> None:
    path = saved(tmp_path / "a.ckpt", Width(3))
    with pytest.raises(UnsafeCheckpoint) as caught:
        trainer(device).fit(Net(), loader(), ckpt_path=path)
    assert caught.value.names == [f"{__name__}.Width"]
    for part in (str(path), "add_safe_globals", "weights_only=False", "save_hyperparameters"):
        assert part in str(caught.value)
    with torch.serialization.safe_globals([Width]):
        trainer(device).fit(Net(), loader(), ckpt_path=path)


@pytest.mark.fits
def test_lightnings_own_trainer_on_csx_runs_nothing_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    path = saved(tmp_path / "a.ckpt", Runs(tmp_path / "made"))
    with pytest.raises(UnsafeCheckpoint):
        pl.Trainer(**QUIET, strategy="csx").validate(Net(), loader(), ckpt_path=path)
    assert not (tmp_path / "made").exists()


def test_all_that_a_file_names_is_told_at_once(tmp_path: Path) -> None:
    torch.save({"a": Width(1), "b": Path("x"), "c": torch.ones(2)}, tmp_path / "a.ckpt")
    with pytest.raises(UnsafeCheckpoint) as caught:
        read_checkpoint(tmp_path / "a.ckpt")
    assert caught.value.names == sorted(
        [f"{__name__}.Width", f"{type(Path()).__module__}.PosixPath"]
    )


@pytest.mark.fits
def test_a_smaller_checkpoint_is_made_of_one_that_runs_nothing(tmp_path: Path) -> None:
    class Swaps(Checkpoint):
        """Somebody replaces the file that was written."""

        @staticmethod
        def _write(trainer: pl.Trainer, path: Path) -> None:
            torch.save({"state_dict": Runs(tmp_path / "made")}, path)

    callbacks = [Swaps(steps=1), SaveCheckpointState(k=1)]
    with contextlib.suppress(UnsafeCheckpoint):
        trainer("CPU", callbacks=callbacks, enable_checkpointing=True, model_dir=tmp_path).fit(
            Net(), loader()
        )
    assert (tmp_path / "checkpoint_1.ckpt").exists()
    assert not (tmp_path / "made").exists()


def test_the_old_format_is_read_too(tmp_path: Path) -> None:
    path = tmp_path / "old.ckpt"
    torch.save({"a": torch.ones(2)}, path, _use_new_zipfile_serialization=False)
    assert read_checkpoint(path)["a"].tolist() == [1, 1]


class Strategy(SingleDeviceStrategy):
    """Keeps what it is asked to load with."""

    def load_checkpoint(self, path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        self.asked = weights_only
        return {}


def test_an_address_is_read_like_a_file() -> None:
    """Lightning's own default for an address is to run what is there."""
    strategy = Strategy(device="cpu")
    loading_safely(strategy, strategy.load_checkpoint)(
        "https://example.com/a.ckpt", weights_only=None
    )
    assert strategy.asked is True
    loading_safely(strategy, strategy.load_checkpoint)(
        "https://example.com/a.ckpt", weights_only=False
    )
    assert strategy.asked is False


class Sharded(FSDPStrategy):
    """As Lightning's, which reads whatever it finds."""

    def __init__(self) -> None:
        self.loaded = 0

    def load_checkpoint(self, path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        self.loaded += 1
        return {}


def test_a_strategy_that_reads_by_itself_gets_what_was_looked_at(tmp_path: Path) -> None:
    strategy, path = Sharded(), tmp_path / "a.ckpt"
    torch.save({"a": Width(1)}, path)
    with pytest.raises(UnsafeCheckpoint):
        loading_safely(strategy, strategy.load_checkpoint)(path)
    with pytest.raises(UnsafeCheckpoint, match="holds the shards of Sharded"):
        loading_safely(strategy, strategy.load_checkpoint)(tmp_path)
    assert strategy.loaded == 0
    loading_safely(strategy, strategy.load_checkpoint)(tmp_path, weights_only=False)
    torch.save({"a": 1}, path)
    loading_safely(strategy, strategy.load_checkpoint)(path)
    assert strategy.loaded == 2


def test_the_refusal_is_the_same_whoever_wraps_it(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    torch.save({"a": Width(1)}, path)

    def reads() -> None:
        try:
            torch.load(path, weights_only=True)
        except Exception as error:
            raise ValueError("damaged") from error

    with pytest.raises(UnsafeCheckpoint), naming_classes(path):
        reads()
    with pytest.raises(ValueError, match="damaged"), naming_classes(path):
        raise ValueError("damaged")
