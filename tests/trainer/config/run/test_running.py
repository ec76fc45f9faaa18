"""Parameter files run: the numbers of the same thing in Python, phases, checkpoints, modes."""

from __future__ import annotations

import copy
import os
import signal
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from parts import DEVICES, QUIET, Net, Rows, Steps, described
from torch.utils.data import DataLoader

import fulgurite
from fulgurite.backends.checkpoints.damage import CheckpointError
from fulgurite.callbacks import StopOnSignal
from fulgurite.config.document.problems import ParameterFileError
from fulgurite.config.run import running
from fulgurite.config.schema.checking import check

pytestmark = pytest.mark.fits

MID_EPOCH = pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended")
"""Eager Lightning cannot go on within an epoch."""
BOTH = pytest.mark.parametrize("device", ["CSX", "CPU"])


def fitted(file: dict[str, Any], **overrides: Any) -> Steps:
    """What the callback saw of the last trainer."""
    dotted = {key.replace("__", "."): value for key, value in overrides.items()}
    fulgurite.run_config(file, "fit", dotted)
    return Steps.seen[-1]


def in_python(device: str, folder: Path, module: Any = None, **options: Any) -> Steps:
    """The same thing as ``described`` in Python."""
    steps = Steps()
    pl.seed_everything(0, workers=True, verbose=False)
    module = Net(dropout=0.5) if module is None else module()
    trainer = fulgurite.Trainer(
        **{**DEVICES[device], **QUIET, "max_epochs": 1, **options},
        model_dir=folder,
        callbacks=[steps],
        enable_checkpointing=False,
    )
    train = DataLoader(Rows(), batch_size=8, shuffle=True)
    trainer.fit(module, train, DataLoader(Rows(16, 2), batch_size=8))
    return steps


@BOTH
def test_losses_are_those_of_the_same_thing_in_python(device: str, tmp_path: Path) -> None:
    file = described(tmp_path, device, model={"parts.Net": {"dropout": 0.5}}, max_epochs=2)
    ours = fitted(file)
    theirs = in_python(device, tmp_path, max_epochs=2)
    assert len(ours.losses) == 16
    assert ours.losses == theirs.losses
    assert ours.validated == theirs.validated == [8, 16]


@BOTH
def test_the_default_callbacks_change_no_number(device: str, tmp_path: Path) -> None:
    file = described(tmp_path / "a", device, model={"parts.Net": {"dropout": 0.5}})
    bare = fitted(file).losses
    file["trainer"]["init"] |= {
        "callbacks": [{"parts.Steps": {}}],
        "model_dir": str(tmp_path / "b"),
    }
    assert fitted(file).losses == bare


@pytest.mark.parametrize(
    ("loop", "lightnings", "validated"),
    [
        ({}, {}, [8]),
        ({"num_epochs": 2}, {}, [16]),
        ({"num_epochs": 2, "eval_frequency": 3}, {}, [3, 6, 9, 12, 15, 16]),
        ({"max_steps": 11, "eval_frequency": 4}, {}, [4, 8, 11]),
        ({"max_steps": 11, "eval_frequency": 0.5}, {}, [6, 11]),
        ({"max_steps": 20, "eval_frequency": 100}, {}, [20]),
        ({"num_steps": 5, "eval_frequency": 1.0}, {}, [5]),
        ({"num_epochs": 2, "eval_frequency": 0.3, "grad_accum_steps": 3}, {}, [2, 4, 6]),
        ({"num_epochs": 2, "eval_frequency": 1, "grad_accum_steps": 5}, {}, [1, 2, 3, 4]),
        ({"num_epochs": 2, "eval_frequency": 3, "grad_accum_steps": 5}, {}, [3, 4]),
        ({"num_epochs": 2, "steps_per_epoch": 3, "eval_frequency": 2}, {}, [2, 4, 6]),
        ({"eval_frequency": None}, {}, []),
        ({"eval_frequency": 0}, {}, []),
        ({"num_epochs": 2}, {"check_val_every_n_epoch": 1}, [8, 16]),
        ({"max_steps": 8}, {"val_check_interval": 4}, [4, 8]),
        ({"num_epochs": 2, "steps_per_epoch": 3}, {"check_val_every_n_epoch": 1}, [3, 6]),
        ({"num_epochs": 2, "steps_per_epoch": 3}, {"val_check_interval": 2}, [2, 5]),
        ({"eval_frequency": 2}, {"max_steps": 5}, [2, 4, 5]),
    ],
)
def test_validation_runs_after_so_many_steps_and_at_the_end(
    loop: dict[str, Any], lightnings: dict[str, Any], validated: list[int], tmp_path: Path
) -> None:
    assert fitted(described(tmp_path, loop=loop, **lightnings)).validated == validated


def test_the_program_validates_at_the_same_steps(tmp_path: Path) -> None:
    loop = {"num_epochs": 2, "eval_frequency": 3, "grad_accum_steps": 2}
    assert fitted(described(tmp_path, "CSX", loop=loop)).validated == [3, 6, 8]


@pytest.mark.parametrize("step", [3, 8], ids=["in an epoch", "at its end"])
def test_a_validation_that_a_signal_broke_off_is_done_anew(step: int, tmp_path: Path) -> None:
    class Kill(pl.Callback):
        def on_validation_batch_start(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step == step:
                os.kill(os.getpid(), signal.SIGTERM)

    options: dict[str, Any] = {"model": {"parts.Net": {"dropout": 0.5}}}
    options["loop"] = {"num_epochs": 2, "eval_frequency": step}
    whole = fitted(described(tmp_path / "whole", "CSX", **options))
    file = described(tmp_path / "broken", "CSX", checkpoint={"steps": 100}, **options)
    plan = check(file)
    with StopOnSignal() as stop:
        running.run_phase(plan, plan.phases[0], "fit", [stop, Kill()])
    assert stop.signal == signal.SIGTERM
    rest = fitted(file)
    assert rest.losses == whole.losses[step:]
    assert rest.validated == whole.validated


def test_without_a_loop_lightnings_rules_hold(tmp_path: Path) -> None:
    assert fitted(described(tmp_path, max_epochs=2)).validated == [8, 16]


def test_a_stream_validates_by_steps_and_after_its_last_epoch(tmp_path: Path) -> None:
    stream = {"data_processor": "parts.stream", "batch_size": 8}
    file = described(tmp_path, loop={"num_epochs": 2, "eval_frequency": 3})
    file["trainer"]["fit"]["train_dataloader"] = stream
    assert fitted(file).validated == [3, 6, 9, 12, 15]
    file["trainer"]["init"] |= {"loop": {"num_epochs": 2}, "model_dir": str(tmp_path / "b")}
    assert fitted(file).validated == [16]
    file["trainer"]["init"]["loop"]["eval_frequency"] = 0.5
    with pytest.raises(ValueError, match="has no length"):
        fitted(file, trainer__fit__ckpt_path=None)


def test_manual_optimization_validates_at_the_end_or_by_batches(tmp_path: Path) -> None:
    file = described(tmp_path, model="parts.Manual", loop={"num_epochs": 2})
    assert fitted(file).validated == [16]
    file["trainer"]["init"]["loop"]["eval_frequency"] = 3
    with pytest.raises(ValueError, match="Give val_check_interval"):
        fitted(file, trainer__fit__ckpt_path=None)


def test_more_steps_per_epoch_than_batches_are_an_error(tmp_path: Path) -> None:
    loop = {"steps_per_epoch": 5, "grad_accum_steps": 2}
    with pytest.raises(ValueError, match=r"needs 10 batches of the training loader, which has 8"):
        fitted(described(tmp_path, loop=loop))


@pytest.mark.parametrize(
    ("step", "frequency", "accumulate"),
    [(6, 5, 1), (10, 5, 1), (4, 4, 1), (8, 4, 1), (1, 1, 1), (4, 2, 2), (4, 0.25, 2)],
)
def test_a_run_on_csx_goes_on_exactly(
    step: int, frequency: float, accumulate: int, tmp_path: Path
) -> None:
    """Also from a step that is validated: the validation was not done, and is done now."""
    loop = {"max_steps": 12, "eval_frequency": frequency, "grad_accum_steps": accumulate}
    file = described(tmp_path, "CSX", model={"parts.Net": {"dropout": 0.5}}, loop=loop)
    file["trainer"]["init"]["checkpoint"] = {"steps": step}
    whole = fitted(file)
    second = fitted(file, trainer__fit__ckpt_path=str(tmp_path / f"checkpoint_{step}.ckpt"))
    assert second.losses == whole.losses[step * accumulate :]
    assert second.validated == [at for at in whole.validated if at >= step]


def test_an_epoch_that_goes_on_steps_the_schedulers_of_a_metric(tmp_path: Path) -> None:
    plateau = {"factor": 0.5, "patience": 0, "threshold": 10.0, "monitor": "val_loss"}
    file = described(
        tmp_path,
        "CSX",
        optimizer={"SGD": {"lr": 0.1}},
        schedulers={"ReduceLROnPlateau": plateau},
        loop={"num_epochs": 2, "steps_per_epoch": 3},
        check_val_every_n_epoch=1,
        checkpoint={"steps": 1},
    )
    whole = fitted(file)
    second = fitted(file, trainer__fit__ckpt_path=str(tmp_path / "checkpoint_1.ckpt"))
    assert second.lrs == whole.lrs[1:] == [[0.1], [0.1], [0.05], [0.05], [0.05]]
    assert second.losses == whole.losses[1:]


@BOTH
def test_a_run_goes_on_from_its_newest_checkpoint(device: str, tmp_path: Path) -> None:
    file = described(tmp_path, device, loop={"num_epochs": 3, "eval_frequency": 7})
    assert len(fitted(file, trainer__init__loop__num_epochs=1).losses) == 8
    second = fitted(file)
    assert len(second.losses) == 16
    assert second.validated == [14, 21, 24]
    assert sorted(path.name for path in tmp_path.glob("*.ckpt")) == [
        "checkpoint_24.ckpt",
        "checkpoint_8.ckpt",
    ]


@pytest.mark.parametrize("loop", [{"max_steps": 4}, {"num_epochs": 1}])
def test_a_repeated_run_finds_the_work_done(
    loop: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(running, "rank_zero_info", said.append)
    file = described(tmp_path, loop=loop)
    steps = len(fitted(file).losses)
    assert said == []
    before = len(Steps.seen)
    assert fitted(file).losses == []
    assert len(Steps.seen) == before + 1
    newest = tmp_path / f"checkpoint_{steps}.ckpt"
    assert said[-1] == f"Nothing left to train: {newest} has all {steps} steps."
    assert len(fitted(file, trainer__fit__ckpt_path=None).losses) == steps


@pytest.mark.parametrize("loop", [{"num_epochs": 1}, {"max_steps": 3}], ids=str)
def test_a_run_that_asks_for_less_than_was_done_finds_it_done(
    loop: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(running, "rank_zero_info", said.append)
    fitted(described(tmp_path, loop={"num_epochs": 3}))
    assert fitted(described(tmp_path, loop=loop)).losses == []
    assert said[-1].startswith("Nothing left to train: ")


@MID_EPOCH
def test_steps_beyond_a_named_checkpoint(tmp_path: Path) -> None:
    fitted(described(tmp_path / "a", loop={"num_steps": 4}))
    file = described(tmp_path / "b", loop={"num_steps": 3, "eval_frequency": 2})
    file["trainer"]["fit"]["ckpt_path"] = str(tmp_path / "a/checkpoint_4.ckpt")
    steps = fitted(file)
    assert len(steps.losses) == 3
    assert steps.validated == [6, 7]


def test_steps_beyond_weights_alone_are_counted_from_0(tmp_path: Path) -> None:
    fitted(described(tmp_path / "a", loop={"num_steps": 4}))
    weights = {"LoadCheckpointStates": {"load_checkpoint_states": "model"}}
    callbacks = [{"parts.Steps": {}}, weights]
    file = described(tmp_path / "b", loop={"num_steps": 3}, callbacks=callbacks)
    file["trainer"]["fit"]["ckpt_path"] = str(tmp_path / "a/checkpoint_4.ckpt")
    assert fitted(file).validated == [3]


@pytest.mark.process
@BOTH
def test_a_checkpoint_of_something_else_is_named(device: str, tmp_path: Path) -> None:
    file = described(tmp_path, device, loop={"max_steps": 4}, optimizer="AdamW")
    fitted(file)
    newest = tmp_path / "checkpoint_4.ckpt"
    note = f"while loading {newest}, the newest in model_dir (ckpt_path: null takes none)"
    sgd = {"SGD": {"lr": 0.1, "momentum": 0.9}}
    more = {"trainer__init__loop__max_steps": 6}
    with pytest.raises(ValueError, match=r"the optimizer is SGD.* has no momentum, d") as raised:
        fitted(file, trainer__init__optimizer=sgd, **more)
    assert raised.value.__notes__ == [note]
    with pytest.raises(RuntimeError, match="Missing key") as raised_too:
        fitted(file, trainer__init__model="parts.Plain", **more)
    assert raised_too.value.__notes__ == [note]
    newest.write_bytes(newest.read_bytes()[:1000])
    told = rf"^{newest} is damaged or cut off.* No older one is whole. .*null in a file"
    with pytest.raises(CheckpointError, match=told):
        fitted(file, **more)
    named = {"trainer__fit__ckpt_path": str(newest)}
    with pytest.raises(CheckpointError, match=rf"^{newest} is damaged or cut off"):
        fitted(file, **more, **named)


@MID_EPOCH
def test_an_older_checkpoint_is_taken_where_the_newest_is_damaged(tmp_path: Path) -> None:
    file = described(tmp_path, loop={"max_steps": 4}, checkpoint={"steps": 2})
    assert len(fitted(file).losses) == 4
    (tmp_path / "checkpoint_4.ckpt").write_bytes(b"")
    said = rf"checkpoint_4.ckpt is empty\. An older one is taken: {tmp_path}/checkpoint_2.ckpt"
    with pytest.warns(UserWarning, match=said):
        assert len(fitted(file).losses) == 2


def test_a_missing_checkpoint_is_an_error_before_the_model_is_built(tmp_path: Path) -> None:
    file = described(tmp_path, model="parts.Broken")
    with pytest.raises(ParameterFileError, match=r"trainer.fit.ckpt_path: there is no file 'no'"):
        fitted(file, trainer__fit__ckpt_path="no")


def test_a_missing_section_is_an_error_before_the_model_is_built(tmp_path: Path) -> None:
    file = described(tmp_path, model="parts.Broken")
    for mode in ("fit", "validate", "test", "predict"):
        del file["trainer"][mode]
    for mode in ("fit", "validate", "validate_all", "test", "predict"):
        with pytest.raises(ParameterFileError, match=f"{mode} requested, but the file has no"):
            fulgurite.run_config(file, mode)
    with pytest.raises(ValueError, match="mode must be one of fit, validate"):
        fulgurite.run_config(file, "train")


@BOTH
def test_validate_and_test_and_predict_use_the_newest_checkpoint(
    device: str, tmp_path: Path
) -> None:
    file = described(tmp_path, device)
    [trained] = fulgurite.run_config(file, "fit")
    assert fulgurite.run_config(file, "validate") == [
        [{"val_loss": pytest.approx(trained["val_loss"], rel=1e-6)}]
    ]
    [[tested]] = fulgurite.run_config(file, "test")
    assert tested["test_loss"] == pytest.approx(trained["val_loss"], rel=1e-6)
    [predicted] = fulgurite.run_config(file, "predict")
    assert float(torch.stack(predicted).mean()) == pytest.approx(trained["val_loss"], rel=1e-6)
    [[fresh]] = fulgurite.run_config(file, "validate", {"trainer.validate.ckpt_path": None})
    assert fresh["val_loss"] > trained["val_loss"]


def loader(count: int, size: int = 8) -> dict[str, Any]:
    return {"data_processor": "parts.Rows", "count": count, "batch_size": size}


@BOTH
def test_all_loaders_are_validated_for_all_checkpoints(device: str, tmp_path: Path) -> None:
    file = described(tmp_path, device, loop={"num_epochs": 1}, checkpoint={"steps": 4})
    fitted(file)
    file["trainer"]["validate_all"] = {"val_dataloaders": [loader(16), loader(8, 4)]}
    [everything] = fulgurite.run_config(file, "validate_all")
    names = [(Path(one["ckpt_path"]).name, one["loader"]) for one in everything]
    assert names == [(f"checkpoint_{s}.ckpt", i) for s in (4, 8) for i in (0, 1)]
    losses = [one["metrics"]["val_loss"] for one in everything]
    assert len(set(losses)) == 4
    file["trainer"]["validate_all"] |= {"ckpt_paths": str(tmp_path / "checkpoint_*.ckpt")}
    assert fulgurite.run_config(file, "validate_all") == [everything]
    file["trainer"]["validate_all"]["ckpt_paths"] = [str(tmp_path / "checkpoint_8.ckpt")]
    assert fulgurite.run_config(file, "validate_all") == [everything[2:]]
    file["trainer"]["validate_all"]["ckpt_paths"] = ["no_*.ckpt"]
    with pytest.raises(ParameterFileError, match=r"validate_all.ckpt_paths.0: there is no file"):
        fulgurite.run_config(file, "validate_all")


def test_loggers_tell_the_loaders_apart(tmp_path: Path) -> None:
    file = described(tmp_path, loggers=[{"CSVLogger": {}}, {"TensorBoardLogger": None}])
    del file["trainer"]["init"]["logger"]
    file["trainer"]["validate_all"] = {"val_dataloaders": [loader(16), loader(8)]}
    fulgurite.run_config(file, "validate_all")
    text = (tmp_path / "lightning_logs/version_0/metrics.csv").read_text()
    assert text.splitlines()[0] == "epoch,step,validate_0/val_loss,validate_1/val_loss"


@MID_EPOCH
@BOTH
def test_trainers_of_a_list_run_in_order(device: str, tmp_path: Path) -> None:
    first = described(tmp_path, device, loop={"max_steps": 4}, seed=0)["trainer"]
    second = copy.deepcopy(first)
    second["init"] |= {"model": {"parts.Net": {"lr": 0.01}}, "loop": {"max_steps": 6}, "seed": 1}
    found = fulgurite.run_config({"trainer": [first, {"trainer": second}]}, "fit")
    assert len(found) == 2
    before, after = Steps.seen[-2:]
    assert (len(before.losses), len(after.losses)) == (4, 2)
    if device == "CSX":  # which goes on where it was
        alone = fitted(described(tmp_path / "alone", device, loop={"max_steps": 6}))
        assert after.losses[0] == alone.losses[4]


def test_trainers_of_a_list_are_of_one_device(tmp_path: Path) -> None:
    both = [described(tmp_path, device)["trainer"] for device in ("CPU", "CSX")]
    with pytest.raises(ParameterFileError, match=r"trainer.1.init: runs on CSX, and the first"):
        fulgurite.run_config({"trainer": both}, "fit")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"autorestart": {"min_num_csx": 2}}, "min_num_csx: 2 systems: only 1 is built"),
        ({"sparsity": 0.5}, "sparsity: sparse training is not built"),
    ],
)
def test_what_is_not_built_checks_and_does_not_run(
    change: dict[str, Any], text: str, tmp_path: Path
) -> None:
    file = described(tmp_path, "CSX", model="parts.Broken", **change)
    check(file)
    with pytest.raises(ParameterFileError, match=text):
        fulgurite.run_config(file, "fit")
    with pytest.raises(ParameterFileError, match=text):
        fulgurite.load(file)
