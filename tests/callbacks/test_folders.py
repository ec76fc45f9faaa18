"""Before the first step: can this run write its checkpoints?"""

from __future__ import annotations

import os
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from harness import QUIET
from lightning.pytorch.callbacks import ModelCheckpoint
from models import Classifier, loader, mlp

import fulgurite
from fulgurite.backends import reset_backend
from fulgurite.backends.checkpoints.files import part
from fulgurite.callbacks import Checkpoint

pytestmark = pytest.mark.fits


def fitted(folder: Path, *callbacks: pl.Callback, **options: Any) -> pl.Trainer:
    reset_backend()
    options = {**QUIET, "enable_checkpointing": True, "max_steps": 1, **options}
    trainer = fulgurite.Trainer(device="CPU", model_dir=folder, callbacks=[*callbacks], **options)

    class Never(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.stepped = True
            return super().training_step(batch, batch_idx)

    module = Never(mlp(), torch.optim.Adam)
    module.stepped = False
    try:
        trainer.fit(module, loader(32))
    except OSError:
        assert not module.stepped
        raise
    return trainer


@pytest.mark.parametrize("where", ["model_dir", "dirpath", "no folder yet"])
def test_a_folder_that_cannot_be_written_is_an_error_before_the_first_step(
    tmp_path: Path, where: str
) -> None:
    taken = tmp_path / "taken"
    taken.touch()
    folder = taken / "below" if where == "no folder yet" else taken
    message = rf"could not be written \(.*\)\. Nothing was trained.*'{folder}'"
    is_dirpath = where == "dirpath"
    callback = ModelCheckpoint(folder) if is_dirpath else Checkpoint()
    with pytest.raises(OSError, match=message):
        fitted(tmp_path if is_dirpath else folder, callback)


def test_a_folder_without_permission_is_an_error_before_the_first_step(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    tmp_path.chmod(0o500)
    with pytest.raises(PermissionError, match="Nothing was trained"):
        fitted(tmp_path, Checkpoint())


Usage = namedtuple("Usage", "total used free")


def test_too_little_space_for_one_is_an_error_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def free(n_bytes: int) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**9, 0, n_bytes))

    module = Classifier(mlp(), torch.optim.Adam)
    needed = 3 * sum(one.nbytes for one in module.parameters())  # weights and two moments
    free(needed)
    fitted(tmp_path / "enough", Checkpoint())
    free(needed - 1)
    with pytest.raises(OSError, match=r"takes about 0\.0 MB, and 0\.0 MB are free"):
        fitted(tmp_path / "short", Checkpoint())
    assert not (tmp_path / "short").exists()


@pytest.mark.parametrize(
    ("callback", "options"),
    [
        (Checkpoint(steps=None), {}),
        (ModelCheckpoint("nowhere", save_top_k=0), {}),
        (Checkpoint(), {"fast_dev_run": True}),
    ],
)
def test_a_run_that_saves_nothing_asks_for_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, callback: pl.Callback, options: dict[str, Any]
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**9, 0, 0))
    fitted(tmp_path, callback, **options)


def test_nothing_is_left_of_the_trial_and_no_folder_is_made(tmp_path: Path) -> None:
    class Looks(pl.Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            assert list(tmp_path.iterdir()) == []

    fitted(tmp_path, ModelCheckpoint(tmp_path / "a" / "b"), Looks())
    assert [path.name for path in (tmp_path / "a" / "b").iterdir()] == ["epoch=0-step=1.ckpt"]


def test_what_a_killed_process_left_is_swept_and_what_a_living_one_writes_is_not(
    tmp_path: Path,
) -> None:
    left = tmp_path / ".fulgurite-1-0123abcd.part"
    left.write_bytes(b"half")
    with part(tmp_path) as living:
        fitted(tmp_path, Checkpoint())
        assert Path(str(living.name)).exists()
        assert not left.exists()
