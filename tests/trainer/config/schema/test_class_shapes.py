"""Data of a file, in each form that it may have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import parts
import pytest
import torch
from parts import Module, Steps, described
from torch.utils.data import DataLoader

import fulgurite
from fulgurite.config.document.problems import ParameterFileError
from fulgurite.config.schema.checking import check

pytestmark = pytest.mark.fits

BOTH = pytest.mark.parametrize("device", ["CSX", "CPU"])


def with_data(file: dict[str, Any], train: Any, **fit: Any) -> dict[str, Any]:
    file["trainer"]["fit"] = {"train_dataloader": train, **fit}
    return file


def losses(folder: Path, train: Any, device: str = "CPU") -> list[float]:
    fulgurite.run_config(
        with_data(described(folder, device, checkpoint={"steps": None}), train), "fit"
    )
    return Steps.seen[-1].losses


FORMS: list[Any] = [
    {"data_processor": "parts.Rows", "batch_size": 8},
    {"data_processor": "parts.rows", "batch_size": 8},
    {"data_processor": "parts.row_list", "batch_size": 8},
    {"data_processor": "parts.stream", "batch_size": 8},
    {"data_processor": "parts.WholeBatches", "batch_size": 8},
    {"data_processor": "parts.Loader", "batch_size": 8},
    {"data_processor": "parts.Processor", "batch_size": 8},
    {"name": "parts.Loader"},
    {"class_path": "parts.Rows", "init_args": {"batch_size": 8}},
    {"parts.Processor": {}},
    "parts.Loader",
]


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_every_form_gives_the_same_batches(form: Any, tmp_path: Path) -> None:
    assert losses(tmp_path, form) == losses(tmp_path, FORMS[0])


@pytest.mark.process
@BOTH
def test_arguments_of_the_loader_stand_beside_those_of_the_dataset(
    device: str, tmp_path: Path
) -> None:
    train = {
        "data_processor": "parts.Rows",
        "count": 30,
        "seed": 3,
        "batch_size": 8,
        "shuffle": True,
        "drop_last": True,
        "num_workers": 1,
        "persistent_workers": True,
        "prefetch_factor": 3,
    }
    trainer, module, data = fulgurite.load(with_data(described(tmp_path, device), train))
    trainer.fit(module, data)
    loader = trainer.train_dataloader
    assert isinstance(loader, DataLoader)
    assert (loader.batch_size, loader.drop_last, len(loader)) == (8, True, 3)
    assert (loader.num_workers, loader.persistent_workers, loader.prefetch_factor) == (1, True, 3)
    assert len(Steps.seen[-1].losses) == 3


def test_a_smaller_last_batch_is_trained_on_csx(tmp_path: Path) -> None:
    train = {"data_processor": "parts.Rows", "count": 30, "batch_size": 8}
    assert len(losses(tmp_path / "a", train, "CSX")) == 4
    assert len(losses(tmp_path / "b", {**train, "drop_last": True}, "CSX")) == 3


def test_mistakes_in_arguments_of_the_loader_are_told(tmp_path: Path) -> None:
    train = {"data_processor": "parts.Rows", "batch_size": "many", "shufle": True}
    with pytest.raises(ParameterFileError) as caught:
        check(with_data(described(tmp_path), train))
    assert "train_dataloader.batch_size: expected" in str(caught.value)
    wanted = "train_dataloader.shufle: DataLoader takes no 'shufle'. Did you mean 'shuffle'?"
    assert wanted in str(caught.value)


def test_a_function_that_makes_a_loader_takes_no_arguments_of_one(tmp_path: Path) -> None:
    file = with_data(described(tmp_path), {"data_processor": "parts.batches", "shuffle": True})
    trainer, module, data = fulgurite.load(file)
    with pytest.raises(TypeError, match="shuffle beside its arguments would have no effect"):
        trainer.fit(module, data)


def test_a_function_that_makes_no_data_is_an_error(tmp_path: Path) -> None:
    trainer, module, data = fulgurite.load(with_data(described(tmp_path), "parts.number"))
    with pytest.raises(TypeError, match=r"parts.number made a int; expected a LightningDataModule"):
        trainer.fit(module, data)


@BOTH
@pytest.mark.parametrize("again", [False, True])
def test_a_datamodule_is_one_with_all_its_hooks(again: bool, device: str, tmp_path: Path) -> None:
    named: dict[str, Any] = {"class_path": "parts.Module", "init_args": {"batch_size": 16}}
    fit = {"val_dataloader": dict(named)} if again else {}
    file = with_data(described(tmp_path, device), named, **fit)
    trainer, module, data = fulgurite.load(file)
    trainer.fit(module, data)
    ours = Steps.seen[-1]
    [datamodule] = {id(made): made for _, made in data._made}.values()
    assert datamodule.calls == ["prepare_data", "setup fit", "teardown fit"]
    torch.manual_seed(0)
    reference = fulgurite.load(file)
    reference.trainer.fit(reference.module, datamodule=Module(16))
    assert ours.losses == Steps.seen[-1].losses
    assert len(ours.losses) == 4
    assert ours.validated == [4]


def test_what_a_datamodule_keeps_is_in_the_checkpoint(tmp_path: Path) -> None:
    file = with_data(described(tmp_path, loop={"num_epochs": 1}), {"class_path": "parts.Module"})
    fulgurite.run_config(file, "fit")
    trainer, module, data = fulgurite.load(file, {"trainer.init.loop.num_epochs": 2})
    trainer.fit(module, data, ckpt_path=str(tmp_path / "checkpoint_8.ckpt"))
    [(_, datamodule)] = data._made
    assert "load 2" in datamodule.calls


def test_each_stage_has_its_own_loaders(tmp_path: Path) -> None:
    file = described(tmp_path)
    file["trainer"]["validate"]["val_dataloader"]["count"] = 32
    trainer, module, data = fulgurite.load(file)
    trainer.fit(module, data)
    assert trainer.num_val_batches == [2]
    trainer.validate(module, data)
    assert trainer.num_val_batches == [4]
    del file["trainer"]["validate"]
    trainer, module, data = fulgurite.load(file)
    trainer.validate(module, data)
    assert trainer.num_val_batches == [2]


def test_several_loaders_are_validated_within_a_fit(tmp_path: Path) -> None:
    file = described(tmp_path, model={"parts.Plain": {}}, optimizer="SGD")
    one = file["trainer"]["fit"]["val_dataloader"]
    file["trainer"]["fit"]["val_dataloader"] = [one, {**one, "count": 32}]
    [metrics] = fulgurite.run_config(file, "fit")
    assert {"val_loss/dataloader_idx_0", "val_loss/dataloader_idx_1"} <= metrics.keys()


def test_modules_beside_the_file_are_found(tmp_path: Path) -> None:
    text = "from parts import Rows\n\ndef samples(count):\n    return Rows(count)\n"
    (tmp_path / "beside_the_file.py").write_text(text)
    file = tmp_path / "run.yaml"
    file.write_text(
        "imports: [beside_the_file]\n"
        "trainer:\n"
        "  init: {device: CPU, model: {class_path: parts.Net}, logger: false}\n"
        "  fit: {train_dataloader: {data_processor: samples, count: 16, batch_size: 8}}\n"
    )
    overrides = {
        "trainer.init.model_dir": str(tmp_path / "out"),
        "trainer.init.enable_progress_bar": False,
        "trainer.init.enable_model_summary": False,
    }
    [metrics] = fulgurite.run_config(file, "fit", overrides)
    assert metrics["loss"] > 0


@pytest.mark.parametrize(("every", "count"), [(0, 1), (1, 3), (2, 2)])
def test_loaders_are_made_anew_where_the_trainer_reloads_them(
    every: int, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def counted() -> Any:
        calls.append(1)
        return parts.rows()

    monkeypatch.setattr(parts, "batches", counted)
    more = {"max_epochs": 3, "reload_dataloaders_every_n_epochs": every}
    data = {"data_processor": "parts.batches", "batch_size": 8}
    fulgurite.run_config(with_data(described(tmp_path, **more), data), "fit")
    assert len(calls) == count
