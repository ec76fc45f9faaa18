"""Checkpoints: resume to the bit, and exchange with stock Lightning both ways."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from harness import QUIET, csx, make_trainer
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from models import Classifier, loader, mlp, rows
from torch import Tensor, nn
from torch.utils.data import DataLoader

import fulgurite
from fulgurite.backends import reset_backend
from fulgurite.backends.checkpoints.damage import CheckpointError
from fulgurite.backends.safe_load import UnsafeCheckpoint

pytestmark = pytest.mark.fits

SAVE = {**QUIET, "enable_checkpointing": True}


class Seen(pl.Callback):
    """First feature of every sample, and the loss, of each step; draws on the host too."""

    def __init__(self) -> None:
        self.data: list[list[float]] = []
        self.losses: list[float] = []
        self.drawn: list[float] = []

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.data.append(batch[0][:, 0].tolist())
        self.losses.append(outputs["loss"].item())
        self.drawn.append(random.random() + float(np.random.rand()))


class Scheduled(Classifier):
    """Dropout, a scheduler, validation."""

    def __init__(self) -> None:
        super().__init__(mlp(0.3))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def make(static: bool, folder: Path, epochs: int = 3, **options: Any) -> tuple[pl.Trainer, Seen]:
    """A trainer that keeps a checkpoint of every third step."""
    seen = Seen()
    options = {**SAVE, "max_epochs": epochs, **options}
    options["callbacks"] = [
        seen,
        ModelCheckpoint(folder, every_n_train_steps=3, save_top_k=-1, filename="{step}"),
    ]
    if static:
        return fulgurite.Trainer(backend=csx(), **options), seen
    return pl.Trainer(accelerator="cpu", **options), seen


def seeded(**options: Any) -> DataLoader[Any]:
    """Ten shuffled batches an epoch, from torch's global seed."""
    return DataLoader(rows(160), batch_size=16, shuffle=True, **options)


def own_generator() -> DataLoader[Any]:
    """The same from a generator of the loader's own."""
    return seeded(generator=torch.Generator().manual_seed(5))


def two_workers() -> DataLoader[Any]:
    """The same with worker processes, which draw the order when the iterator is made."""
    return seeded(num_workers=2)


@pytest.mark.process
@pytest.mark.parametrize("make_loader", [seeded, own_generator, two_workers])
@pytest.mark.parametrize("step", [3, 9, 12, 15])
def test_resume_gives_the_same_batches_losses_and_draws(
    tmp_path: Path, make_loader: Callable[[], DataLoader[Any]], step: int
) -> None:
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    trainer, whole = make(True, tmp_path / "a")
    first = Scheduled()
    trainer.fit(first, make_loader(), loader(32))
    torch.manual_seed(99)
    random.seed(99)
    trainer, rest = make(True, tmp_path / "b")
    second = Scheduled()
    trainer.fit(second, make_loader(), loader(32), ckpt_path=tmp_path / "a" / f"step={step}.ckpt")
    assert trainer.global_step == 30
    assert rest.data == whole.data[step:]
    assert rest.losses == whole.losses[step:]
    assert rest.drawn == whole.drawn[step:]
    for name, value in first.state_dict().items():
        assert torch.equal(second.state_dict()[name], value), name


def test_resume_at_the_end_of_an_epoch(tmp_path: Path) -> None:
    def options() -> dict[str, Any]:
        keep = ModelCheckpoint(tmp_path, save_top_k=-1, filename="{epoch}")
        return {**SAVE, "max_epochs": 3, "callbacks": [keep]}

    losses = []
    for path in (None, tmp_path / "epoch=0.ckpt"):
        torch.manual_seed(1 if path is None else 50)
        seen = Seen()
        arguments = options()
        arguments["callbacks"].append(seen)
        trainer = fulgurite.Trainer(backend=csx(), **arguments)
        trainer.fit(Scheduled(), seeded(), loader(32), ckpt_path=path)
        losses.append(seen.losses)
    assert losses[1] == losses[0][10:]


@pytest.mark.parametrize("make_loader", [seeded, own_generator])
@pytest.mark.parametrize("step", [5, 10])
def test_resume_from_a_checkpoint_that_was_written_just_before_a_validation(
    tmp_path: Path, make_loader: Callable[[], DataLoader[Any]], step: int
) -> None:
    def run(seed: int, path: Path | None) -> list[list[float]]:
        torch.manual_seed(seed)
        seen = Seen()
        keep = ModelCheckpoint(tmp_path, every_n_train_steps=5, save_top_k=-1, filename="{step}")
        options = {**SAVE, "max_epochs": 2, "val_check_interval": 5, "callbacks": [seen, keep]}
        trainer = fulgurite.Trainer(backend=csx(), **options)
        trainer.fit(Scheduled(), make_loader(), loader(32), ckpt_path=path)
        return seen.data

    whole = run(1, None)
    assert run(99, tmp_path / f"step={step}.ckpt") == whole[step:]


@pytest.mark.numbers
@pytest.mark.parametrize("ours_first", [True, False])
def test_checkpoints_interchange_with_stock(tmp_path: Path, ours_first: bool) -> None:
    """Saved by one and resumed by the other, a run goes on as either alone would."""

    def plain() -> Classifier:
        return Classifier(mlp())

    def data() -> DataLoader[Any]:
        return loader(160)

    torch.manual_seed(3)
    trainer, whole = make(False, tmp_path / "whole", epochs=2)
    reference = plain()
    trainer.fit(reference, data())
    torch.manual_seed(3)
    trainer, _ = make(ours_first, tmp_path / "first", epochs=1)
    trainer.fit(plain(), data())
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    trainer, rest = make(not ours_first, tmp_path / "second", epochs=2)
    resumed = plain()
    trainer.fit(resumed, data(), ckpt_path=tmp_path / "end.ckpt")
    assert trainer.global_step == 20
    assert rest.losses == pytest.approx(whole.losses[10:], rel=1e-5)
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(resumed.state_dict()[name], value, rtol=1e-5, atol=1e-5)


@pytest.mark.numbers
def test_a_checkpoint_has_lightning_s_keys_and_loads_with_weights_only(tmp_path: Path) -> None:
    states = []
    for static in (True, False):
        trainer, _ = make(static, tmp_path / str(static), epochs=1)
        trainer.fit(Scheduled(), loader(160), loader(32))
        trainer.save_checkpoint(tmp_path / f"{static}.ckpt")
        states.append(torch.load(tmp_path / f"{static}.ckpt", weights_only=True))
    ours, stock = states
    assert set(ours) == {*stock, "fulgurite"}
    assert list(ours["loops"]) == list(stock["loops"])
    assert ours["loops"]["fit_loop"] == stock["loops"]["fit_loop"]
    assert list(ours["optimizer_states"][0]["state"]) == list(stock["optimizer_states"][0]["state"])


def test_the_best_checkpoint_is_used_for_test(tmp_path: Path) -> None:
    class Tested(Scheduled):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("test_loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

        def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.net(batch[0])

    keep = ModelCheckpoint(tmp_path, monitor="val_loss", mode="max", filename="worst")
    trainer = fulgurite.Trainer(backend=csx(), max_epochs=3, **{**SAVE, "callbacks": [keep]})
    module = Tested()
    trainer.fit(module, loader(160), loader(32))
    [result] = trainer.test(module, loader(32), ckpt_path="best", verbose=False)
    assert result["test_loss"] == pytest.approx(float(keep.best_model_score), rel=1e-5)


@pytest.mark.parametrize("device", ["CSX", "CPU"])
def test_damaged_and_foreign_files_are_errors_that_name_them(device: str, tmp_path: Path) -> None:
    make: dict[str, Any] = {"backend": csx()} if device == "CSX" else {"device": "CPU"}
    reset_backend()
    trainer = fulgurite.Trainer(**make, **QUIET, max_epochs=1)
    module = Classifier(mlp())
    trainer.fit(module, loader(32))
    path = tmp_path / "a.ckpt"
    trainer.save_checkpoint(path)
    content = bytearray(path.read_bytes())
    content[content.index(module.net[0].weight.detach().numpy().tobytes())] ^= 4
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=f"^{path} is damaged or cut off"):
        trainer.fit(Classifier(mlp()), loader(32), ckpt_path=path)
    torch.save(mlp().state_dict(), path)
    with pytest.raises(CheckpointError, match=f"^{path} is a file of torch's, but no Lightning"):
        trainer.validate(Scheduled(), loader(32), ckpt_path=path)


class Early(Scheduled):
    """Saves itself, or fails, in a hook that is called before training begins."""

    def __init__(self, hook: str, do: Callable[[pl.Trainer], None]) -> None:
        super().__init__()
        setattr(self, hook, lambda *args: do(self.trainer))


def test_a_fit_that_has_not_begun_can_be_saved(tmp_path: Path) -> None:
    path = tmp_path / "early.ckpt"
    for hook in ("on_fit_start", "on_validation_end"):  # this one in the sanity check
        module = Early(hook, lambda trainer: trainer.save_checkpoint(path))
        make(True, tmp_path, epochs=1)[0].fit(module, loader(32), loader(32))
        assert torch.load(path, weights_only=True)["global_step"] in (0, 2)
    trainer, module = make(True, tmp_path)[0], Scheduled()
    trainer.validate(module, loader(32), verbose=False)
    trainer.save_checkpoint(path)
    saved = torch.load(path, weights_only=True)["state_dict"]
    assert all(torch.equal(saved[name], value) for name, value in module.state_dict().items())


def test_a_strategy_reads_a_checkpoint_for_a_module_that_no_trainer_has_run(tmp_path: Path) -> None:
    path = tmp_path / "fitted.ckpt"
    trainer = make(True, tmp_path, epochs=1)[0]
    trainer.fit(Scheduled(), loader(32))
    trainer.save_checkpoint(path)
    other = make(True, tmp_path)[0]
    other.strategy.connect(Scheduled())
    found = other.strategy.load_checkpoint(path)
    assert found["global_step"] == trainer.global_step


@pytest.mark.filterwarnings(r"ignore:.*fit\(ckpt_path=")
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("hook", ["on_fit_start", "on_validation_batch_end"])
def test_an_error_before_training_is_saved_with_and_seen(
    hook: str, error: type[BaseException], tmp_path: Path
) -> None:
    def fail(trainer: pl.Trainer) -> None:
        raise error("mine")

    keep = OnExceptionCheckpoint(tmp_path, "left")
    reset_backend()
    trainer = fulgurite.Trainer(backend=csx(), max_epochs=1, **{**SAVE, "callbacks": [keep]})
    with pytest.raises((ValueError, SystemExit)) as caught:
        trainer.fit(Early(hook, fail), loader(32), loader(32))
    assert str(caught.value) == ("mine" if error is ValueError else "1")
    assert torch.load(tmp_path / "left.ckpt", weights_only=True)["global_step"] == 0


def test_a_model_that_was_connected_by_hand_is_saved(tmp_path: Path) -> None:
    reset_backend()
    trainer, module = fulgurite.Trainer(backend=csx(), **QUIET), Scheduled()
    trainer.strategy.connect(module)
    trainer.save_checkpoint(tmp_path / "only.ckpt")
    found = torch.load(tmp_path / "only.ckpt", weights_only=True)["state_dict"]
    assert all(torch.equal(value, found[name]) for name, value in module.state_dict().items())


def written(tmp_path: Path, **changes: Any) -> Path:
    """A checkpoint of two steps, with other things in it."""
    trainer = make_trainer(True, max_steps=2)
    trainer.fit(Classifier(mlp()), loader(64))
    path = tmp_path / "changed.ckpt"
    trainer.save_checkpoint(path)
    torch.save({**torch.load(path, weights_only=False), **changes}, path)
    return path


def resumed(path: Path) -> pl.Trainer:
    trainer = make_trainer(True, max_steps=4)
    trainer.fit(Classifier(mlp()), loader(64), ckpt_path=path)
    return trainer


def test_states_of_optimizers_that_are_missing_are_told(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="has no state of optimizers: they begin anew"):
        resumed(written(tmp_path, optimizer_states=[]))


@pytest.mark.filterwarnings("ignore:The loss became NaN")
def test_weights_that_are_not_finite_are_told(tmp_path: Path) -> None:
    weights = Classifier(mlp()).state_dict()
    weights["net.0.bias"][1] = float("nan")
    with pytest.warns(UserWarning, match=r"not finite, in net\.0\.bias\. .*CheckLoss"):
        resumed(written(tmp_path, state_dict=weights))


@pytest.mark.filterwarnings("ignore:Detected pickle protocol 4")
def test_another_protocol_of_pickles_is_told_in_our_words(tmp_path: Path) -> None:
    path = written(tmp_path)
    torch.save(torch.load(path, weights_only=False), path, pickle_protocol=4)
    with pytest.raises(UnsafeCheckpoint, match=r"a pickle of another protocol .*instruction 149"):
        resumed(path)
