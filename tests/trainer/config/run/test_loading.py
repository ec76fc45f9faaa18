"""What ``load`` builds of a file: Trainer, callbacks, loggers, and the file as it was used."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from parts import Net, Plain, Steps, described

import fulgurite
from fulgurite.callbacks import DEFAULT_CALLBACKS, Checkpoint, KeepNCheckpoints
from fulgurite.config.document.problems import ParameterFileError
from fulgurite.config.document.reading import parse
from fulgurite.config.run import loading
from fulgurite.config.run.resolved import as_yaml
from fulgurite.config.schema.checking import check


def trainer_of(file: dict[str, Any], **init: Any) -> fulgurite.Trainer:
    file["trainer"]["init"] |= init
    return fulgurite.load(file).trainer


def names(trainer: fulgurite.Trainer) -> list[str]:
    return [type(callback).__name__ for callback in trainer.callbacks]


@pytest.mark.process
def test_a_list_of_trainers_needs_to_be_told_which(tmp_path: Path) -> None:
    first = described(tmp_path / "a", max_epochs=1)["trainer"]
    second = described(tmp_path / "b", max_epochs=2)["trainer"]
    file = {"trainer": [first, second]}
    with pytest.raises(ValueError, match="has 2 trainers: say which one"):
        fulgurite.load(file)
    with pytest.raises(ValueError, match="phase=2: <dict> has 2"):
        fulgurite.load(file, phase=2)
    assert fulgurite.load(file, phase=1).trainer.max_epochs == 2


@pytest.mark.parametrize(
    ("init", "expected"),
    [
        ({}, {"max_epochs": 1, "max_steps": -1}),
        ({"max_steps": 5}, {"max_epochs": None, "max_steps": 5}),
        ({"max_time": "00:01:00:00"}, {"max_epochs": None, "max_steps": -1}),
        ({"loop": {"max_steps": 5}}, {"max_epochs": None, "max_steps": 5}),
        ({"loop": {"num_steps": 5, "max_steps": 3}}, {"max_epochs": None, "max_steps": 3}),
        ({"loop": {"num_epochs": 2, "max_steps": 3}}, {"max_epochs": 2, "max_steps": 3}),
        ({"loop": {"grad_accum_steps": 4}}, {"max_epochs": 1, "accumulate_grad_batches": 4}),
        (
            {"loop": {"steps_per_epoch": 3, "grad_accum_steps": 2, "eval_steps": 7}},
            {"limit_train_batches": 6, "limit_val_batches": 7},
        ),
        (
            {"loop": {"steps_per_epoch": 3}, "accumulate_grad_batches": 2},
            {"limit_train_batches": 6, "accumulate_grad_batches": 2},
        ),
        ({}, {"log_every_n_steps": 50}),
        ({"logging": {"log_steps": 3}}, {"log_every_n_steps": 3}),
        ({"precision": "bf16-mixed"}, {"precision": "bf16-mixed"}),
        ({"precision": {"enabled": False, "max_gradient_norm": 0.5}}, {"gradient_clip_val": 0.5}),
    ],
)
def test_sections_become_the_trainers_arguments(
    init: dict[str, Any], expected: dict[str, Any], tmp_path: Path
) -> None:
    trainer = trainer_of(described(tmp_path, **init))
    assert {key: getattr(trainer, key) for key in expected} == expected
    assert trainer.default_root_dir == str(tmp_path)


@pytest.mark.parametrize(
    ("init", "key", "other"),
    [
        ({"loop": {"max_steps": 1}, "max_steps": 1}, "max_steps", "loop.max_steps"),
        ({"loop": {"num_steps": 1}, "max_steps": 1}, "max_steps", "loop.num_steps"),
        ({"loop": {"eval_steps": 1}, "limit_val_batches": 1}, "limit_val", "loop.eval_steps"),
        ({"logging": {"log_steps": 1}, "log_every_n_steps": 1}, "log_every", "logging.log_steps"),
        ({"loggers": [{"CSVLogger": {}}], "logger": True}, "logger", "loggers"),
        ({"default_root_dir": "a"}, "default_root_dir", "model_dir"),
    ],
)
def test_what_is_said_twice_is_an_error_that_names_both(
    init: dict[str, Any], key: str, other: str, tmp_path: Path
) -> None:
    with pytest.raises(ParameterFileError, match=rf"trainer.init.{key}.*given as {other} too"):
        check(described(tmp_path, **init))


def test_checkpoints_cannot_be_described_and_turned_off(tmp_path: Path) -> None:
    file = described(tmp_path, enable_checkpointing=False, checkpoint={"steps": 3})
    with pytest.raises(ParameterFileError, match="enable_checkpointing: false contradicts"):
        check(file)


def test_default_callbacks_are_there_unless_listed_or_removed(tmp_path: Path) -> None:
    file = described(tmp_path)
    file["trainer"]["init"]["callbacks"] = [
        {"checkloss": None},
        {"logoptimizerparamgroup": {"keys": ["lr", "weight_decay"]}},
        {"EarlyStopping": {"monitor": "val_loss"}},
        "KeepNCheckpoints",
        {"ComputeNorm": None},
    ]
    trainer = trainer_of(file)
    made = names(trainer)
    assert "CheckLoss" not in made
    assert set(DEFAULT_CALLBACKS) - {"CheckLoss"} <= set(made)
    assert made.count("LogOptimizerParamGroup") == 1
    assert {EarlyStopping.__name__, KeepNCheckpoints.__name__, "Checkpoint"} <= set(made)
    assert trainer.callbacks[-1].__class__ is Checkpoint


def test_only_defaults_can_be_removed(tmp_path: Path) -> None:
    with pytest.raises(ParameterFileError, match="EarlyStopping is none"):
        check(described(tmp_path, callbacks=[{"EarlyStopping": None}]))


def test_who_writes_checkpoints(tmp_path: Path) -> None:
    own = {"ModelCheckpoint": {"monitor": "val_loss"}}
    for init, kinds in (
        ({}, [Checkpoint]),
        ({"checkpoint": {"steps": 7}}, [Checkpoint]),
        ({"enable_checkpointing": False}, []),
        ({"callbacks": [own]}, [ModelCheckpoint]),
        ({"callbacks": [own], "checkpoint": {"steps": 7}}, [ModelCheckpoint, Checkpoint]),
        ({"callbacks": [{"Checkpoint": {"steps": 2}}]}, [Checkpoint]),
    ):
        trainer = trainer_of(described(tmp_path, **init))
        assert [type(one) for one in trainer.checkpoint_callbacks] == kinds


def without_logger(folder: Path, *loggers: Any) -> dict[str, Any]:
    file = described(folder)
    for key in ("logger", "enable_progress_bar"):
        del file["trainer"]["init"][key]
    file["trainer"]["init"]["loggers"] = list(loggers)
    return file


def test_loggers_write_to_model_dir(tmp_path: Path) -> None:
    [default] = fulgurite.load(without_logger(tmp_path)).trainer.loggers
    trainer = trainer_of(without_logger(tmp_path, {"CSVLogger": {"name": "own"}}))
    assert trainer.progress_bar_callback is not None
    assert CSVLogger in map(type, trainer.loggers)
    assert all(logger.save_dir == str(tmp_path) for logger in [default, *trainer.loggers])
    elsewhere = {"csvlogger": {"save_dir": str(tmp_path / "b")}}
    trainer = trainer_of(without_logger(tmp_path, elsewhere, {"TensorBoardLogger": None}))
    assert [logger.save_dir for logger in trainer.loggers] == [str(tmp_path / "b")]


def test_the_progress_bar_is_a_default_logger(tmp_path: Path) -> None:
    none = [{"ProgressLogger": None}, {"TensorBoardLogger": None}]
    trainer = trainer_of(without_logger(tmp_path, *none))
    assert trainer.loggers == []
    assert trainer.progress_bar_callback is None
    assert trainer_of(without_logger(tmp_path, "ProgressLogger")).progress_bar_callback is not None


def test_a_file_can_be_barebones(tmp_path: Path) -> None:
    file = described(tmp_path, barebones=True, callbacks=[])
    for key in ("logger", "enable_progress_bar", "enable_model_summary", "num_sanity_val_steps"):
        del file["trainer"]["init"][key]
    file["trainer"]["init"]["callbacks"] = []
    assert names(trainer_of(file)) == ["SaveParams"]


def test_the_log_level_is_set(tmp_path: Path) -> None:
    levels = {name: logging.getLogger(name).level for name in ("fulgurite", "lightning")}
    try:
        fulgurite.load(described(tmp_path, logging={"log_level": "error"}))
        assert logging.getLogger("fulgurite").level == logging.ERROR
        assert logging.getLogger("lightning").level == logging.ERROR
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


def test_an_error_of_a_users_class_keeps_its_type_and_says_where(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("trainer:\n  init:\n    device: CPU\n    model: {class_path: parts.Broken}\n")
    with pytest.raises(ZeroDivisionError, match="no such width") as caught:
        fulgurite.load(file, {"trainer.init.model_dir": str(tmp_path)})
    assert caught.value.__notes__ == [
        f"while making parts.Broken, at {file}:4:5: trainer.init.model"
    ]


def test_the_model_is_that_of_the_seed(tmp_path: Path) -> None:
    first, second = (fulgurite.load(described(tmp_path, seed=3)).module for _ in range(2))
    other = fulgurite.load(described(tmp_path, seed=4)).module
    assert isinstance(first, Net)
    assert isinstance(first.net, Plain)
    assert first.net.first.weight.equal(second.net.first.weight)
    assert not first.net.first.weight.equal(other.net.first.weight)


@pytest.mark.parametrize(
    "init",
    [
        {},
        {"loop": {"max_steps": 5, "eval_frequency": 0.5}},
        {"loop": {"eval_steps": 2}, "check_val_every_n_epoch": 1, "max_epochs": 3},
        {"checkpoint": {"steps": 4}, "logging": {"log_steps": 3}},
        {"model": {"parts.Net": {"lr": 1e-20}}, "seed": 12, "callbacks": ["parts.Steps"]},
        {"optimizer": {"AdamW": {"params": [{"params": "*.bias", "tag": "no"}], "eps": 1e-8}}},
    ],
)
def test_the_file_with_its_defaults_loads_back_to_the_same(
    init: dict[str, Any], tmp_path: Path
) -> None:
    file = described(tmp_path, **{"callbacks": [], **init} if init else {})
    plan = check(file)
    text = as_yaml(plan)
    again = check(parse(text, "again").data)
    assert as_yaml(again) == text
    places = {"device": "CPU", "model_dir": str(tmp_path)}
    said = parse(text, "again").data["trainer"]["init"]
    assert places.items() <= said.items()
    one, other = (loading.trainer_arguments(p, p.phases[0].init, []) for p in (plan, again))
    for made in (one, other):
        made["callbacks"] = [vars(callback) for callback in made["callbacks"]]
    assert {**one, "log_every_n_steps": 0} == {**other, "log_every_n_steps": 0}


def test_a_dict_may_have_paths_and_null_for_what_is_not_given(tmp_path: Path) -> None:
    file = described(tmp_path, model_dir=tmp_path / "a", optimizer=None)
    assert fulgurite.load(file).trainer.default_root_dir == str(tmp_path / "a")
    assert fulgurite.load(file, {"trainer.init.model_dir": None}).trainer.default_root_dir.endswith(
        "model_dir"
    )


def test_odd_texts_come_back_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HERE", "a$b")
    odd = ["${HERE}/1", "1e-3", "yes", "~x", "- x", "a: b", "#", "", "$${HERE}", "ü"]
    file = described(tmp_path)
    file["trainer"]["fit"]["train_dataloader"] = {"data_processor": "parts.odd", "texts": odd}
    data = parse(as_yaml(check(file)), "again").data
    again = check(data).phases[0].stages["fit"]["train_dataloader"]
    assert again.arguments["texts"] == ["a$b/1", *odd[1:8], "${HERE}", "ü"]


@pytest.mark.fits
def test_the_file_of_a_training_is_kept_in_its_folder(tmp_path: Path) -> None:
    file = described(tmp_path, loop={"max_steps": 1})
    for overrides in ({}, {}, {"trainer.init.seed": 5}, {"trainer.init.seed": 5}, {}):
        fulgurite.run_config(file, "fit", {**overrides, "trainer.fit.ckpt_path": None})
    fulgurite.run_config(file, "validate")
    texts = {path.name: path.read_text() for path in tmp_path.glob("*.yaml")}
    assert sorted(texts) == ["params.yaml", "params_1.yaml", "params_2.yaml"]
    assert texts["params.yaml"] == texts["params_2.yaml"]
    assert "seed: 5" in texts["params_1.yaml"]
    fulgurite.run_config(tmp_path / "params_1.yaml", "fit", {"trainer.fit.ckpt_path": None})
    assert len(Steps.seen[-1].losses) == 1
    assert len(list(tmp_path.glob("*.yaml"))) == 4  # it is the newest now
