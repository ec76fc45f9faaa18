"""What a fit saves is written beside its steps, and is there when somebody may look."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from harness import QUIET, csx
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from models import Classifier, loader, mlp

import fulgurite
from fulgurite.backends import reset_backend
from fulgurite.backends.checkpoints import plugin
from fulgurite.backends.checkpoints.damage import check_file
from fulgurite.backends.checkpoints.plugin import CheckpointFiles
from fulgurite.callbacks import Checkpoint, KeepNCheckpoints, SaveCheckpointState, checkpoint

pytestmark = pytest.mark.fits

DEVICES = {"CSX": lambda: {"backend": csx()}, "CPU": lambda: {"device": "CPU"}}
devices = pytest.mark.parametrize("device", DEVICES)


class Watch(pl.Callback):
    """The weights after each step, and what is in the folder when each begins and at the end."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.weights = folder, dict[int, torch.Tensor]()
        self.there: list[set[str]] = []
        self.at_end: set[str] | None = None

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, i: int) -> None:
        self.there.append(names(self.folder))

    def on_train_batch_end(self, trainer: Any, module: Any, *rest: Any) -> None:
        self.weights[trainer.global_step] = module.net[0].weight.detach().clone()

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.at_end = names(self.folder)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


def trained(device: str, folder: Path, *callbacks: pl.Callback, **options: Any) -> Watch:
    """A fit of 10 steps."""
    reset_backend()
    watch = Watch(folder)
    options = {**QUIET, "enable_checkpointing": True, "max_epochs": 1, **options}
    trainer = fulgurite.Trainer(
        **DEVICES[device](), model_dir=folder, callbacks=[watch, *callbacks], **options
    )
    trainer.fit(Classifier(mlp(), torch.optim.Adam), loader(160))
    return watch


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that takes its time."""
    write = plugin.write

    def slowly(checkpoint: Any, path: Path, **options: Any) -> None:
        time.sleep(0.3)
        write(checkpoint, path, **options)

    monkeypatch.setattr(plugin, "write", slowly)


@devices
@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("kind", ["Checkpoint", "ModelCheckpoint"])
def test_steps_go_on_and_no_two_are_mixed(tmp_path: Path, device: str, kind: str) -> None:
    save: pl.Callback = Checkpoint(steps=3)
    if kind == "ModelCheckpoint":
        name = "checkpoint_{step}"
        save = ModelCheckpoint(
            tmp_path,
            name,
            every_n_train_steps=3,
            save_top_k=-1,
            auto_insert_metric_name=False,
        )
    watch = trained(device, tmp_path, save)
    assert watch.there[3] == set()  # step 4 begins, and the file of step 3 is not there yet
    saved = [3, 6, 9, 10] if kind == "Checkpoint" else [3, 6, 9]
    assert names(tmp_path) == {f"checkpoint_{step}.ckpt" for step in saved}
    assert watch.at_end == {f"checkpoint_{step}.ckpt" for step in (3, 6, 9)}
    for step in saved:
        found = torch.load(tmp_path / f"checkpoint_{step}.ckpt", weights_only=True)
        assert found["global_step"] == step
        assert torch.equal(found["state_dict"]["net.0.weight"], watch.weights[step])


@pytest.mark.usefixtures("slow")
def test_the_line_that_names_a_file_comes_when_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[str, bool]] = []

    def info(text: str) -> None:
        told.append((text, Path(text.removeprefix("Checkpoint: ")).exists()))

    monkeypatch.setattr(checkpoint, "rank_zero_info", info)
    trained("CSX", tmp_path, Checkpoint(steps=3))
    steps = (3, 6, 9, 10)
    assert told == [(f"Checkpoint: {tmp_path}/checkpoint_{step}.ckpt", True) for step in steps]


@pytest.mark.usefixtures("slow")
def test_a_link_to_a_file_of_its_own_name_leaves_the_file(tmp_path: Path) -> None:
    files, last = CheckpointFiles(), tmp_path / "last.ckpt"
    with files.beside():
        files.save_checkpoint({"step": 1}, last)
        files.link(last, last)
    files.wait()
    assert not last.is_symlink()
    assert torch.load(last)["step"] == 1


@pytest.mark.numbers
@pytest.mark.parametrize("save_last", [True, "link"])
def test_a_model_checkpoint_leaves_what_it_leaves_in_stock(tmp_path: Path, save_last: Any) -> None:
    def saves(folder: str) -> list[pl.Callback]:
        """Both in one folder: the best two with the same name, and all of them with another."""
        best: dict[str, Any] = {"monitor": "step", "mode": "max", "filename": "same"}
        each: dict[str, Any] = {"dirpath": tmp_path / folder, "every_n_train_steps": 2}
        return [
            ModelCheckpoint(save_top_k=2, save_last=save_last, **best, **each),
            ModelCheckpoint(save_top_k=-1, filename="same", **each),
        ]

    trained("CPU", tmp_path / "ours", *saves("ours"))
    options = {**QUIET, "enable_checkpointing": True, "callbacks": saves("stock")}
    stock = pl.Trainer(accelerator="cpu", max_epochs=1, **options)
    stock.fit(Classifier(mlp(), torch.optim.Adam), loader(160))
    assert names(tmp_path / "ours") == names(tmp_path / "stock")
    assert len(names(tmp_path / "ours")) == 4
    for name in names(tmp_path / "ours"):
        ours, theirs = tmp_path / "ours" / name, tmp_path / "stock" / name
        check_file(ours)
        steps = [torch.load(path)["global_step"] for path in (ours, theirs)]
        assert steps[0] == steps[1]
        assert ours.is_symlink() == theirs.is_symlink()


@pytest.mark.usefixtures("slow")
def test_who_reads_the_file_at_once_has_it(tmp_path: Path) -> None:
    seen = []

    class Reads(CSVLogger):
        def after_save_checkpoint(self, callback: Any) -> None:
            seen.append(Path(callback.best_model_path).exists())

    class Own(ModelCheckpoint):
        def _save_checkpoint(self, trainer: Any, path: str) -> None:
            super()._save_checkpoint(trainer, path)
            seen.append(Path(path).exists())

    class Saves(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *rest: Any) -> None:
            trainer.save_checkpoint(tmp_path / "now.ckpt")
            seen.append((tmp_path / "now.ckpt").exists())

    trained("CPU", tmp_path / "a", Checkpoint(steps=4), logger=Reads(tmp_path))
    own = Own(tmp_path / "b", every_n_train_steps=4)
    trained("CPU", tmp_path / "b", own, Saves(), limit_train_batches=4)
    assert seen == [True] * 8


@pytest.mark.usefixtures("slow")
@devices
def test_smaller_ones_and_those_that_go_keep_their_order(tmp_path: Path, device: str) -> None:
    watch = trained(
        device, tmp_path, Checkpoint(steps=2), KeepNCheckpoints(1), SaveCheckpointState(2)
    )
    smaller = {"model_checkpoint_4.ckpt", "model_checkpoint_8.ckpt"}
    assert names(tmp_path) == {"checkpoint_10.ckpt", *smaller}
    for step in (4, 8):
        found = torch.load(tmp_path / f"model_checkpoint_{step}.ckpt", weights_only=True)
        assert torch.equal(found["state_dict"]["net.0.weight"], watch.weights[step])
        assert ("fulgurite" in found, "callbacks" in found) == (False, False)


def test_a_disk_that_fills_up_ends_the_fit_and_keeps_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = plugin.write

    def fills(checkpoint: Any, path: Path) -> None:
        if "4" in path.name:
            raise OSError(28, "No space left on device", str(path))
        write(checkpoint, path)

    monkeypatch.setattr(plugin, "write", fills)
    with pytest.raises(OSError, match=r"checkpoint_4\.ckpt"):
        trained("CPU", tmp_path, Checkpoint(steps=2), KeepNCheckpoints(1))
    assert names(tmp_path) == {"checkpoint_2.ckpt"}


def test_the_error_of_a_fit_is_not_hidden_by_one_of_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Fails(pl.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, i: int) -> None:
            if i == 3:
                raise ValueError("mine")

    def full(checkpoint: Any, path: Path) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(plugin, "write", full)
    with pytest.raises(ValueError, match="mine") as error:
        trained("CPU", tmp_path, Checkpoint(steps=3), Fails())
    assert "checkpoint_3.ckpt" in error.value.__notes__[0]


@pytest.mark.usefixtures("slow")
def test_an_error_waits_for_what_was_saved_before(tmp_path: Path) -> None:
    class Fails(pl.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, i: int) -> None:
            if i == 3:
                raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        trained("CPU", tmp_path, Checkpoint(steps=3), Fails())
    assert names(tmp_path) == {"checkpoint_3.ckpt"}


def test_a_plugin_of_the_users_own_is_used(tmp_path: Path) -> None:
    from lightning.pytorch.plugins.io import TorchCheckpointIO

    class Own(TorchCheckpointIO):
        pass

    own = Own()
    reset_backend()
    options = {**QUIET, "enable_checkpointing": True, "max_epochs": 1}
    trainer = fulgurite.Trainer(device="CPU", plugins=[own], model_dir=tmp_path, **options)
    assert trainer.strategy.checkpoint_io is own
    trainer.fit(Classifier(mlp()), loader(32))
    assert [path.name for path in tmp_path.rglob("*.ckpt")] == ["epoch=0-step=2.ckpt"]
