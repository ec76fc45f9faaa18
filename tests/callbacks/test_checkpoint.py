"""When checkpoints are written, under which names, and which parts of them load."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from harness import Run, assert_close, fit, make_trainer
from models import GAN, Classifier, loader, mlp

import fulgurite
from fulgurite.backends.checkpoints.damage import CheckpointError
from fulgurite.callbacks import (
    Checkpoint,
    KeepNCheckpoints,
    LoadCheckpointStates,
    SaveCheckpointState,
)

pytestmark = pytest.mark.fits

devices = pytest.mark.parametrize("static", [True, False], ids=["CSX", "stock"])


def classifier() -> Classifier:
    return Classifier(mlp(), torch.optim.Adam)


def loaders() -> tuple[Any, ...]:
    return (loader(160),)


def train(folder: Path, *callbacks: pl.Callback, static: bool = True, **options: Any) -> Run:
    options = {"enable_checkpointing": True, "default_root_dir": folder, **options}
    make = options.pop("make", classifier)
    return fit(make, loaders, static=static, callbacks=callbacks, **options)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@devices
def test_one_is_written_every_n_steps_and_at_the_end(static: bool, tmp_path: Path) -> None:
    checkpoint = Checkpoint(steps=4)
    run = train(tmp_path, checkpoint, static=static)
    assert names(tmp_path) == [f"checkpoint_{n}.ckpt" for n in (10, 4, 8)]
    assert run.trainer.checkpoint_callback is checkpoint
    assert checkpoint.best_model_path == str(tmp_path / "checkpoint_10.ckpt")
    steps = [
        torch.load(tmp_path / name, weights_only=False)["global_step"] for name in names(tmp_path)
    ]
    assert steps == [10, 4, 8]


@devices
@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, ["checkpoint_10.ckpt"]),
        ({"steps": None}, []),
        ({"steps": 5}, ["checkpoint_10.ckpt", "checkpoint_5.ckpt"]),
        ({"save_initial_checkpoint": True}, ["checkpoint_0.ckpt", "checkpoint_10.ckpt"]),
        ({"steps": None, "save_initial_checkpoint": True}, []),
        ({"checkpoint_name": "s{step}.pt"}, ["s10.pt"]),
    ],
)
def test_what_is_written_follows_the_arguments(
    static: bool, tmp_path: Path, options: dict[str, Any], wanted: list[str]
) -> None:
    train(tmp_path, Checkpoint(**options), static=static)
    assert names(tmp_path) == wanted


def test_with_accumulation_steps_are_the_optimizers(tmp_path: Path) -> None:
    train(tmp_path, Checkpoint(steps=2), accumulate_grad_batches=2)
    assert names(tmp_path) == [f"checkpoint_{n}.ckpt" for n in (2, 4, 5)]


@devices
def test_under_manual_optimization_none_is_missed(static: bool, tmp_path: Path) -> None:
    train(tmp_path, Checkpoint(steps=5), static=static, make=GAN)
    # two steps a batch: the first batch after 5, 10, 15
    assert names(tmp_path) == [f"checkpoint_{n}.ckpt" for n in (10, 16, 20, 6)]


def test_a_name_that_exists_is_not_overwritten(tmp_path: Path) -> None:
    taken = tmp_path / "checkpoint_10.ckpt"
    taken.write_bytes(b"mine")
    checkpoint = Checkpoint()
    train(tmp_path, checkpoint)
    assert taken.read_bytes() == b"mine"
    [other] = set(tmp_path.iterdir()) - {taken}
    assert other.name.startswith("checkpoint_10_2")
    assert checkpoint.newest(tmp_path) == other


def test_the_newest_is_the_last_by_step_and_then_by_time(tmp_path: Path) -> None:
    checkpoint = Checkpoint()
    assert checkpoint.newest(tmp_path / "nowhere") is None
    assert checkpoint.newest(tmp_path) is None
    for name in (
        "checkpoint_9.ckpt",
        "checkpoint_10.ckpt",
        "checkpoint_10_20300101_000000_000001.ckpt",
        "checkpoint_10_20300101_000000_000000.ckpt",
        ".checkpoint_99.ckpt.part",
        "checkpoint_99.ckpt.part",
        "model_checkpoint_99.ckpt",
        "checkpoint_99_mine.ckpt",
    ):
        (tmp_path / name).touch()
    (tmp_path / "checkpoint_100.ckpt").mkdir()
    found = checkpoint.newest(tmp_path)
    assert found == tmp_path / "checkpoint_10_20300101_000000_000001.ckpt"
    assert Checkpoint(checkpoint_name="s{step}.pt").newest(tmp_path) is None


def test_a_write_that_fails_leaves_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut_off(sink: Any, data: Any) -> int:
        sink._file.write(b"half")
        raise OSError(28, "no space left")

    monkeypatch.setattr("fulgurite.backends.checkpoints.files.Sink.write", cut_off)
    with pytest.raises(OSError, match=r"No space left on device.*checkpoint_4\.ckpt"):
        train(tmp_path, Checkpoint(steps=4))
    assert names(tmp_path) == []


def damage(path: Path) -> None:
    """Flip one bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_the_next_older_one_is_taken_where_the_newest_are_damaged(tmp_path: Path) -> None:
    train(tmp_path, Checkpoint(steps=3))
    damage(tmp_path / "checkpoint_10.ckpt")
    (tmp_path / "checkpoint_9.ckpt").write_bytes(b"")
    trainer = make_trainer(
        True,
        callbacks=[Checkpoint(steps=None)],
        max_epochs=2,
        enable_checkpointing=True,
        default_root_dir=tmp_path,
    )
    said = (
        r"checkpoint_10\.ckpt is damaged or cut off.* An older one is taken: .*checkpoint_6\.ckpt"
    )
    with (
        pytest.warns(UserWarning, match=said),
        pytest.warns(UserWarning, match=r"checkpoint_9\.ckpt is empty\. An older one is taken"),
    ):
        trainer.fit(classifier(), *loaders(), ckpt_path="last")
    assert trainer.global_step == 20
    for path in tmp_path.glob("*.ckpt"):
        path.write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"is empty\. No older one is whole"):
        trainer.fit(classifier(), *loaders(), ckpt_path="last")


@devices
def test_a_run_that_goes_on_from_one_ends_as_if_it_had_not_stopped(
    static: bool, tmp_path: Path
) -> None:
    whole = fit(classifier, loaders, static=static, max_epochs=3)
    first = train(tmp_path, Checkpoint(), static=static, max_epochs=1)
    resumed = classifier()
    trainer = make_trainer(
        static,
        callbacks=[Checkpoint()],
        max_epochs=3,
        enable_checkpointing=True,
        default_root_dir=tmp_path,
    )
    trainer.fit(resumed, *loaders(), ckpt_path="last")
    assert first.trainer.global_step == 10
    assert trainer.global_step == 30
    assert_close(resumed.state_dict(), whole.module.state_dict(), 2e-5)
    assert names(tmp_path) == ["checkpoint_10.ckpt", "checkpoint_30.ckpt"]


def test_one_from_the_middle_of_an_epoch_resumes_exactly(tmp_path: Path) -> None:
    whole = train(tmp_path, Checkpoint(steps=7), max_epochs=2)
    resumed = classifier()
    trainer = make_trainer(True, max_epochs=2)
    trainer.fit(resumed, *loaders(), ckpt_path=tmp_path / "checkpoint_14.ckpt")
    for name, value in whole.module.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], value)


@pytest.mark.numbers
def test_stock_lightning_loads_ours(tmp_path: Path) -> None:
    run = train(tmp_path, Checkpoint())
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = classifier()
    trainer.fit(module, *loaders(), ckpt_path=tmp_path / "checkpoint_10.ckpt")
    assert trainer.global_step == 20
    assert not torch.equal(module.net[0].weight, run.module.net[0].weight)


def test_checkpoint_closures_run_when_one_is_written(tmp_path: Path) -> None:
    seen: list[float] = []

    @fulgurite.checkpoint_closure
    def note(loss: torch.Tensor) -> None:
        seen.append(float(loss))

    class Noting(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            note(loss)
            return loss

    run = train(tmp_path, Checkpoint(steps=4), make=lambda: Noting(mlp()))
    assert_close(seen, [run.losses[3], run.losses[7], run.losses[9]])


def test_a_run_that_only_builds_writes_none(tmp_path: Path) -> None:
    checkpoint = Checkpoint(steps=2, save_initial_checkpoint=True)
    train(tmp_path, checkpoint, backend={"validate_only": True})
    assert names(tmp_path) == []


@pytest.mark.parametrize("strict", [True, False])
def test_strictness_is_the_modules(tmp_path: Path, strict: bool) -> None:
    run = train(tmp_path, Checkpoint())
    checkpoint = torch.load(tmp_path / "checkpoint_10.ckpt", weights_only=False)
    del checkpoint["state_dict"]["net.3.bias"]
    torch.save(checkpoint, tmp_path / "less.ckpt")
    callback = Checkpoint(steps=None, disable_strict_checkpoint_loading=not strict)
    trainer = make_trainer(True, callbacks=[callback], max_epochs=1, enable_checkpointing=True)
    module = classifier()
    if strict:
        with pytest.raises(RuntimeError, match="Missing key"):
            trainer.fit(module, *loaders(), ckpt_path=tmp_path / "less.ckpt")
    else:
        trainer.fit(module, *loaders(), ckpt_path=tmp_path / "less.ckpt")
        assert torch.equal(module.net[0].weight, run.module.net[0].weight)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "at least 1; got 0"),
        ({"steps": True}, "at least 1; got True"),
        ({"steps": "often"}, "got 'often'"),
        ({"checkpoint_name": "checkpoint.ckpt"}, r"got 'checkpoint\.ckpt'"),
        ({"checkpoint_name": "{step}_{epoch}.ckpt"}, "nothing else in braces"),
        ({"checkpoint_name": "a/{step}.ckpt"}, "the name of a file"),
        ({"checkpoint_name": "{step"}, "once"),
    ],
)
def test_bad_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Checkpoint(**options)


@devices
def test_only_the_newest_n_stay(static: bool, tmp_path: Path) -> None:
    mine = tmp_path / "checkpoint_1.ckpt"
    mine.touch()
    keep = KeepNCheckpoints(n=2)
    train(tmp_path, Checkpoint(steps=2), keep, static=static)
    assert names(tmp_path) == [f"checkpoint_{n}.ckpt" for n in (1, 10, 8)]
    train(tmp_path / "all", Checkpoint(steps=2), KeepNCheckpoints(), static=static)
    assert len(names(tmp_path / "all")) == 5


def test_a_resumed_run_goes_on_deleting(tmp_path: Path) -> None:
    train(tmp_path, Checkpoint(steps=5), KeepNCheckpoints(n=2), max_epochs=1)
    trainer = make_trainer(
        True,
        callbacks=[Checkpoint(steps=5), KeepNCheckpoints(n=2)],
        max_epochs=2,
        enable_checkpointing=True,
        default_root_dir=tmp_path,
    )
    trainer.fit(classifier(), *loaders(), ckpt_path=tmp_path / "checkpoint_10.ckpt")
    assert names(tmp_path) == ["checkpoint_15.ckpt", "checkpoint_20.ckpt"]


@pytest.mark.parametrize("copied", [False, True], ids=["in its folder", "copied beside"])
def test_a_run_that_begins_from_another_ones_checkpoint_leaves_it_alone(
    copied: bool, tmp_path: Path
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    train(first, Checkpoint(steps=5), KeepNCheckpoints(n=1), max_epochs=1)
    begin = first / "checkpoint_10.ckpt"
    if copied:
        second.mkdir()
        begin = shutil.copy(begin, second / "pretrained.ckpt")
    trainer = make_trainer(
        True,
        callbacks=[Checkpoint(steps=5), KeepNCheckpoints(n=1)],
        max_epochs=2,
        enable_checkpointing=True,
        default_root_dir=second,
    )
    trainer.fit(classifier(), *loaders(), ckpt_path=begin)
    assert names(first) == ["checkpoint_10.ckpt"]
    assert names(second) == ["checkpoint_20.ckpt", *["pretrained.ckpt"] * copied]


@pytest.mark.parametrize("callback", [KeepNCheckpoints(2), SaveCheckpointState(2)])
def test_those_that_follow_checkpoints_need_some(callback: pl.Callback) -> None:
    name = type(callback).__name__
    with pytest.raises(ValueError, match=f"{name} follows .*Checkpoint, and the trainer has none"):
        fit(classifier, loaders, static=True, callbacks=(callback,))


@devices
def test_a_smaller_one_is_written_beside_every_kth(static: bool, tmp_path: Path) -> None:
    train(
        tmp_path,
        Checkpoint(steps=2),
        KeepNCheckpoints(1),
        SaveCheckpointState(2),
        static=static,
    )
    smaller = ["model_checkpoint_4.ckpt", "model_checkpoint_8.ckpt"]
    assert names(tmp_path) == ["checkpoint_10.ckpt", *smaller]
    part = torch.load(tmp_path / smaller[0], weights_only=False)
    assert "optimizer_states" not in part
    assert part["pytorch-lightning_version"] == pl.__version__

    # stock Lightning reads it
    class Plain(Classifier):
        def __init__(self) -> None:
            super().__init__(mlp(), torch.optim.Adam)

    loaded = Plain.load_from_checkpoint(tmp_path / smaller[1])
    assert_close(loaded.state_dict(), torch.load(tmp_path / smaller[1])["state_dict"])


def test_parts_and_name_of_the_smaller_one_are_arguments(tmp_path: Path) -> None:
    states = SaveCheckpointState(1, ["model", "optimizer"], "{ckpt_name}.{checkpoint_states}")
    train(tmp_path, Checkpoint(), states)
    part = torch.load(tmp_path / "checkpoint_10.ckpt.model_optimizer", weights_only=False)
    assert {"state_dict", "optimizer_states"} <= set(part)
    assert {"loops", "lr_schedulers", "callbacks"}.isdisjoint(part)


@devices
@pytest.mark.parametrize(
    ("states", "moments"), [("model", False), ("model,optimizer", True), ("all", True)]
)
def test_only_chosen_parts_load(static: bool, tmp_path: Path, states: str, moments: bool) -> None:
    first = train(tmp_path, Checkpoint(), static=static)
    loaded: dict[str, Any] = {}

    class Look(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
            loaded["begins_at"] = trainer.global_step
            loaded["weights"] = {k: v.clone() for k, v in module.state_dict().items()}
            loaded["state"] = trainer.optimizers[0].state_dict()["state"]

    trainer = make_trainer(static, callbacks=[LoadCheckpointStates(states), Look()], max_epochs=2)
    trainer.fit(classifier(), *loaders(), ckpt_path=tmp_path / "checkpoint_10.ckpt")
    assert trainer.global_step == 20
    assert_close(loaded["weights"], first.module.state_dict())
    assert loaded["begins_at"] == (10 if states == "all" else 0)
    has_moments = bool(loaded["state"]) and bool(loaded["state"][0]["exp_avg"].any())
    assert has_moments == moments
    assert "load_checkpoint" not in vars(trainer.strategy)


@pytest.mark.core
@pytest.mark.parametrize("states", ["model", "model,random"])
def test_random_states_are_those_of_the_checkpoint_where_they_are_chosen(
    tmp_path: Path, states: str
) -> None:
    train(tmp_path, Checkpoint())
    found: list[Any] = []

    class Look(pl.Callback):
        def on_train_batch_start(self, *args: Any) -> None:
            found.append(torch.get_rng_state())

    for seed in (7, 8):
        callbacks = [LoadCheckpointStates(states), Look()]
        trainer = make_trainer(True, callbacks=callbacks, max_steps=1)
        module = classifier()
        torch.manual_seed(seed)
        trainer.fit(module, *loaders(), ckpt_path=tmp_path / "checkpoint_10.ckpt")
    assert torch.equal(*found) == ("random" in states)


@devices
def test_a_run_may_keep_its_own_weights(static: bool, tmp_path: Path) -> None:
    train(tmp_path, Checkpoint(), static=static)
    own = classifier()
    with torch.no_grad():
        own.net[0].weight.fill_(0.5)
    trainer = make_trainer(static, callbacks=[LoadCheckpointStates("global_step")], max_epochs=1)
    trainer.fit(own, *loaders(), ckpt_path=tmp_path / "checkpoint_10.ckpt")
    assert trainer.global_step == 10
    assert bool((own.net[0].weight == 0.5).all())


@pytest.mark.filterwarnings("ignore:.*has no state of optimizers")
def test_a_part_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    train(tmp_path, Checkpoint(), SaveCheckpointState(1))
    trainer = make_trainer(True, callbacks=[LoadCheckpointStates("model,optimizer")], max_epochs=1)
    with pytest.raises(ValueError, match=r"has no optimizer\. It has model\."):
        trainer.fit(classifier(), *loaders(), ckpt_path=tmp_path / "model_checkpoint_10.ckpt")
    trainer = make_trainer(True, callbacks=[LoadCheckpointStates("model")], max_epochs=1)
    trainer.fit(classifier(), *loaders(), ckpt_path=tmp_path / "model_checkpoint_10.ckpt")
    assert trainer.global_step == 10


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: KeepNCheckpoints(0), "KeepNCheckpoints: n .* got 0"),
        (lambda: SaveCheckpointState(0), "SaveCheckpointState: k .* got 0"),
        (lambda: SaveCheckpointState(1, "weights"), r"got \['weights'\].* parts are model, "),
        (lambda: SaveCheckpointState(1, checkpoint_name="x"), "checkpoint_name .* got 'x'"),
        (lambda: LoadCheckpointStates("optimiser"), "Did you mean 'optimizer'"),
        (lambda: LoadCheckpointStates([]), r"got \[\]"),
        (lambda: LoadCheckpointStates(3), "got 3"),  # type: ignore[arg-type]
    ],
)
def test_bad_arguments_of_the_others_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
