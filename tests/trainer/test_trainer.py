"""What a person sees of the Trainer: default logger, progress bar, environment."""

from __future__ import annotations

import copy
import csv
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import assert_close, csx, make_trainer
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from models import Classifier, loader, mlp
from torch.utils.data import DataLoader

import fulgurite
from fulgurite import trainer as trainer_module


@pytest.mark.fits
def test_csv_is_the_default_logger_and_holds_rows_of_logged_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer_module.tensorboard, "_TENSORBOARD_AVAILABLE", False)
    monkeypatch.setattr(trainer_module.tensorboard, "_TENSORBOARDX_AVAILABLE", False)
    trainer = fulgurite.Trainer(
        backend=csx(),
        model_dir=tmp_path,
        max_epochs=1,
        log_every_n_steps=5,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    assert type(trainer.logger) is CSVLogger
    trainer.fit(Classifier(mlp()), loader())
    with Path(trainer.log_dir, "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    steps = [int(row["step"]) for row in rows if row["loss_step"]]
    assert steps == list(range(4, 50, 5))
    assert any(row["loss_epoch"] for row in rows)
    assert Path(tmp_path) in Path(trainer.checkpoint_callback.best_model_path).parents


def test_tensorboard_is_the_default_logger_where_it_is_installed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made: dict[str, Any] = {}

    class Fake(TensorBoardLogger):
        def __init__(self, save_dir: str) -> None:
            made["save_dir"] = save_dir

    monkeypatch.setattr(trainer_module.tensorboard, "_TENSORBOARD_AVAILABLE", True)
    monkeypatch.setattr(trainer_module, "TensorBoardLogger", Fake)
    trainer = fulgurite.Trainer(backend=csx(), model_dir=tmp_path)
    assert isinstance(trainer.logger, Fake)
    assert made == {"save_dir": str(tmp_path)}


@pytest.mark.fits
def test_the_progress_bar_is_rich_and_shows_loss(capsys: pytest.CaptureFixture[str]) -> None:
    trainer = fulgurite.Trainer(
        backend=csx(), max_epochs=1, logger=False, enable_checkpointing=False
    )
    assert isinstance(trainer.progress_bar_callback, RichProgressBar)
    trainer.fit(Classifier(mlp()), loader())
    shown = capsys.readouterr().out
    assert "training program" in shown
    assert "loss_step" in shown


@pytest.mark.fits
@pytest.mark.filterwarnings("ignore:You passed in a `val_dataloader`")
@pytest.mark.parametrize("step", ["validation_step", "test_step", "predict_step"])
def test_a_step_that_is_none_is_a_stage_that_the_model_does_not_have(step: str) -> None:
    module = BoringModel()
    setattr(module, step, None)
    make_trainer(True, max_epochs=1, limit_train_batches=2, limit_val_batches=2).fit(module)
    assert module.trainer.global_step == 2


def test_what_barebones_refuses_is_called_what_was_given() -> None:
    with pytest.raises(ValueError, match=r"Trainer\(barebones=True, logger=True\)"):
        fulgurite.Trainer(device="CSX", barebones=True, logger=True)


@pytest.mark.fits
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_copy_of_a_trainer_that_ran_goes_on_as_it_does(copied: Callable[[Any], Any]) -> None:
    data = DataLoader(torch.arange(128.0).sin().reshape(4, 32))
    trainer = make_trainer(True, max_epochs=1)
    trainer.fit(BoringModel(), data, data)
    weights = []
    for one in (copied(trainer), trainer):
        one.fit_loop.max_epochs = 2
        one.fit(one.lightning_module, data, data)
        assert one.global_step == 8
        weights.append(one.lightning_module.state_dict())
    assert_close(*weights)


def test_an_option_of_the_backend_is_told_where_it_belongs() -> None:
    with pytest.raises(TypeError) as caught:
        fulgurite.Trainer(device="CSX", cluster_config={"num_csx": 2})  # type: ignore[call-arg]
    assert str(caught.value) == (
        "Trainer takes no cluster_config, which is an option of the backend:"
        """ Trainer(backend=fulgurite.backend("CSX", cluster_config={'num_csx': 2}))"""
    )
