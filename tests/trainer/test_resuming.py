"""A run that goes on from a checkpoint is the run that nobody disturbed, to the bit."""

from __future__ import annotations

import copy
import random
import subprocess
import sys
import warnings
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from harness import make_trainer
from lightning.pytorch.callbacks import (
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    ModelCheckpoint,
)
from lightning.pytorch.loggers.logger import DummyLogger
from models import CLASSES, WithTotals, mlp, rows
from resuming import Ended, Scenario, checkpoints, differences, run
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from fulgurite.callbacks import Checkpoint

pytestmark = pytest.mark.filterwarnings(
    "ignore:Your `val_dataloader`'s sampler has shuffling enabled"
)


class Net(WithTotals):
    """Dropout, a metric, values of steps and epochs, a scheduler if given."""

    def __init__(self, scheduler: Callable[[Any], dict[str, Any]] | None = None) -> None:
        super().__init__(mlp(0.3))
        self.scheduler = scheduler

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("highest", loss, on_step=False, on_epoch=True, reduce_fx="max")
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        if self.scheduler is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": self.scheduler(optimizer)}


class Averaging(Net):
    """Hooks that change buffers, and a step that writes tensors which no ``state_dict`` has."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(CLASSES))
        self.register_buffer("ends", torch.zeros(()))
        self.register_buffer("hidden", torch.zeros(CLASSES), persistent=False)
        self.plain = torch.zeros(CLASSES)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.hidden.mul_(0.9).add_(0.1 * self.net[3].bias.detach())
        self.plain.mul_(0.9).add_(0.1 * self.net[3].bias.detach())
        pull = (self.hidden + self.plain) @ self.net[3].bias
        return super().training_step(batch, batch_idx) + pull

    def on_train_batch_end(self, *args: Any) -> None:
        self.mean.mul_(0.9).add_(0.1 * self.net[3].bias.detach())

    def on_validation_end(self) -> None:
        self.ends += 10

    def on_train_epoch_end(self) -> None:
        self.ends += 1


class Skipping(Net):
    """Ends its first epoch with its third batch."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if self.current_epoch == 0 and batch_idx == 2 else None


class Memory:
    """An object that a module holds."""

    def __init__(self) -> None:
        self.trace = torch.zeros(CLASSES)


class Remembering(Net):
    """A step that writes tensors in lists, tuples, deques, dicts and objects, in place and anew."""

    def __init__(self) -> None:
        super().__init__()
        self.anew = torch.zeros(CLASSES)
        self.list = [torch.zeros(CLASSES), torch.zeros(CLASSES)]
        self.pair = torch.zeros(CLASSES), torch.zeros(CLASSES)
        self.nested = {"a": [(torch.zeros(CLASSES),)]}
        self.memory = Memory()
        self.last = deque([torch.zeros(CLASSES)] * 3, maxlen=3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        bias = self.net[3].bias
        self.anew = 0.9 * self.anew + bias.detach()
        self.list[0].mul_(0.8).add_(bias.detach())
        self.list[1] = 0.7 * self.list[1] + bias.detach()
        self.pair = self.pair[1] + bias.detach(), 0.6 * self.pair[0]
        self.nested["a"][0][0].mul_(0.5).add_(bias.detach())
        self.memory.trace = 0.4 * self.memory.trace + bias.detach()
        oldest = self.last[0]
        self.last.append(0.3 * self.last[2] + bias.detach())
        held = [self.anew, *self.list, *self.pair, self.nested["a"][0][0]]
        held += [self.memory.trace, oldest]
        return super().training_step(batch, batch_idx) + torch.stack(held).tanh().sum(0) @ bias


def on_plateau(optimizer: Any) -> dict[str, Any]:
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
    scheduler = plateau(optimizer, patience=0, factor=0.5, threshold=0.3)
    return {"scheduler": scheduler, "monitor": "val_loss"}


def after_steps(optimizer: Any) -> dict[str, Any]:
    return {**on_plateau(optimizer), "interval": "step", "frequency": 2, "strict": False}


class Noisy(Dataset[Any]):
    """Adds noise from one of the global generators."""

    def __init__(self, draw: Callable[[], float]) -> None:
        self._draw, self._data = draw, rows(96)

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> Any:
        x, y = self._data[index]
        return x + self._draw(), y


def train(data: Any = None, **options: Any) -> DataLoader[Any]:
    """Six shuffled batches."""
    return DataLoader(rows(96) if data is None else data, 16, shuffle=True, **options)


def both(**options: Any) -> tuple[Any, ...]:
    return train(**options), DataLoader(rows(48, seed=2), 16)


def with_own_generator() -> tuple[Any, ...]:
    drawn = torch.Generator().manual_seed(8)
    return train(), DataLoader(rows(48, seed=2), 16, shuffle=True, generator=drawn)


class EachBatch(pl.Callback):
    """Saves after every batch of training or validation, in the middle of windows too."""

    def __init__(self, hook: str) -> None:
        setattr(self, hook, self._save)

    def _save(self, trainer: Any, *args: Any) -> None:
        loop = trainer.fit_loop.epoch_loop
        if not trainer.sanity_checking:
            batches = loop.batch_progress.total.ready, loop.val_loop.batch_progress.total.ready
            name = "batch-{:02}-{:02}.ckpt".format(*batches)
            trainer.save_checkpoint(Path(trainer.default_root_dir) / name)


MIDDLE: dict[str, Any] = {"val_check_interval": 2, "limit_val_batches": 2}
LONG: dict[str, Any] = {"max_epochs": 3}
SCENARIOS = {
    "at every step": Scenario(make=Net, loaders=both),
    "plateau": Scenario(make=lambda: Net(on_plateau), loaders=both, options=LONG),
    "plateau, epoch's end": Scenario(
        make=lambda: Net(on_plateau), loaders=both, options=LONG, keep={}
    ),
    "plateau, validation's end": Scenario(
        make=lambda: Net(on_plateau), loaders=both, options=LONG, keep={"monitor": "val_loss"}
    ),
    "plateau, steps": Scenario(
        make=lambda: Net(after_steps), loaders=with_own_generator, options=MIDDLE
    ),
    "hooks": Scenario(make=Averaging, loaders=both, options=MIDDLE),
    "state in containers": Scenario(make=Remembering, loaders=both),
    "hooks, epoch's end": Scenario(make=Averaging, loaders=both, keep={}),
    "hooks, validation's end": Scenario(
        make=Averaging, loaders=both, options=MIDDLE, keep={"save_on_train_epoch_end": False}
    ),
    "-1": Scenario(make=Skipping, loaders=both, options=LONG),
    "accumulated": Scenario(
        make=Net,
        loaders=both,
        options={"accumulate_grad_batches": 4},
        keep={},
        callbacks=lambda: [EachBatch("on_train_batch_end")],
    ),
    "windows of each epoch's own": Scenario(
        make=Net,
        loaders=both,
        keep={},
        callbacks=lambda: [
            EachBatch("on_train_batch_end"),
            GradientAccumulationScheduler({0: 2, 1: 3}),
        ],
    ),
    "loss scale": Scenario(make=Net, loaders=both, options={"precision": "16-mixed"}),
    "callbacks": Scenario(
        make=Net,
        loaders=both,
        options={"max_epochs": 5},
        callbacks=lambda: [EMAWeightAveraging(), EarlyStopping("val_loss", patience=1)],
    ),
    "first": Scenario(
        make=Net,
        loaders=lambda: both(num_workers=1),
        keep=lambda folder: Checkpoint(100, save_initial_checkpoint=True),
    ),
}


def some(paths: list[Path]) -> list[Path]:
    """At most four, from the begin to the end; the ends of epochs are among them."""
    count = len(paths)
    return [paths[i] for i in sorted({0, count // 2 - 1, count // 2, count - 1} & {*range(count)})]


@pytest.mark.fits
@pytest.mark.process
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.core] * (name == "accumulated")) for name in SCENARIOS],
)
def test_what_follows_a_checkpoint_is_what_followed_it(name: str, tmp_path: Path) -> None:
    scenario = SCENARIOS[name]
    whole = run(scenario, tmp_path / "whole")
    written = list(checkpoints(tmp_path / "whole"))
    assert written
    for path in some(written):
        rest = run(scenario, tmp_path / path.stem, path=path, start=50)
        assert differences(whole, rest) == [], path.name


@pytest.mark.fits
@pytest.mark.long
def test_state_for_which_the_module_has_no_place_is_named(tmp_path: Path) -> None:
    run(Scenario(make=Remembering, loaders=both), tmp_path / "whole", max_steps=2)
    path = next(checkpoints(tmp_path / "whole"))
    with pytest.warns(UserWarning, match="The run does not go on exactly: self") as caught:
        run(Scenario(make=Net, loaders=both), tmp_path / "other", path=path, max_steps=2)
    told = [str(one.message) for one in caught if "does not go on exactly" in str(one.message)]
    assert len(told) == 10
    assert "self.list[0], which steps write, was float32[4] in the checkpoint" in told[1]
    assert "the module begins with nothing there" in told[1]


@pytest.mark.fits
@pytest.mark.long
def test_a_validation_that_was_broken_off_is_done_anew(tmp_path: Path) -> None:
    scenario = Scenario(
        make=Averaging,
        loaders=with_own_generator,
        options=MIDDLE,
        keep={},
        callbacks=lambda: [EachBatch("on_validation_batch_end")],
    )
    whole = run(scenario, tmp_path / "whole")
    path = tmp_path / "whole" / "batch-04-03.ckpt"
    rest = run(scenario, tmp_path / "rest", path=path, start=50)
    rest.events.before["hooks"] -= 1  # it begins once more
    assert differences(whole, rest) == []


@pytest.mark.fits
@pytest.mark.parametrize("hook", ["on_train_epoch_start", "on_train_batch_start"])
@pytest.mark.parametrize("of_module", [True, False])
def test_saving_where_an_epoch_or_a_batch_begins_warns_once(
    hook: str, of_module: bool, tmp_path: Path
) -> None:
    """A run that goes on from there shuffles otherwise, and calls hooks again."""
    made = Net

    class Saving(Net):
        def _save(self, *args: Any) -> None:
            self.trainer.save_checkpoint(tmp_path / "whole" / "own.ckpt")

    if of_module:
        made = type("Saving", (Saving,), {hook: Saving._save})
    callbacks: Any = list if of_module else lambda: [EachBatch(hook)]
    scenario = Scenario(make=made, loaders=lambda: (train(),), keep={}, callbacks=callbacks)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(scenario, tmp_path / "whole")
    [told] = [str(one.message) for one in caught if "A checkpoint was saved" in str(one.message)]
    assert f"in {hook}, " in told
    assert "Save it in on_train_start, on_train_batch_end or on_train_epoch_end" in told


@pytest.mark.long
@pytest.mark.fits
@pytest.mark.process
@pytest.mark.parametrize("draw", [random.random, np.random.rand, lambda: float(torch.rand(()))])
def test_workers_draw_what_they_drew(draw: Callable[[], float], tmp_path: Path) -> None:
    scenario = Scenario(make=Net, loaders=lambda: (train(Noisy(draw), num_workers=2),))
    whole = run(scenario, tmp_path / "whole")
    path = tmp_path / "whole" / "epoch=1-step=8.ckpt"
    assert differences(whole, run(scenario, tmp_path / "rest", path=path, start=50)) == []


def persistent(tmp_path: Path, draw: Callable[[], float], step: int) -> tuple[Ended, Ended]:
    scenario = Scenario(
        make=Net,
        loaders=lambda: (train(Noisy(draw), num_workers=1, persistent_workers=True),),
    )
    whole = run(scenario, tmp_path / "whole")
    path = tmp_path / "whole" / f"epoch={step // 7}-step={step}.ckpt"
    return whole, run(scenario, tmp_path / "rest", path=path, start=50)


@pytest.mark.core
@pytest.mark.long
@pytest.mark.fits
@pytest.mark.process
def test_workers_that_persist_go_on_in_the_first_epoch(tmp_path: Path) -> None:
    whole, rest = persistent(tmp_path, random.random, 4)
    assert rest.events.batches[:2] == whole.events.batches[4:6]


@pytest.mark.core
@pytest.mark.long
@pytest.mark.fits
@pytest.mark.process
def test_workers_that_persist_are_no_obstacle_where_they_draw_nothing(tmp_path: Path) -> None:
    assert differences(*persistent(tmp_path, lambda: 0.0, 8)) == []


@pytest.mark.long
@pytest.mark.fits
@pytest.mark.process
def test_a_run_that_cannot_go_on_exactly_says_so(tmp_path: Path) -> None:
    with pytest.warns(
        UserWarning, match="batch 1 of the epoch.* is not the batch that was trained"
    ):
        persistent(tmp_path, random.random, 8)


@pytest.mark.fits
@pytest.mark.long
def test_a_loader_that_became_shorter_ends_the_epoch_and_is_named(tmp_path: Path) -> None:
    scenario = Scenario(make=Net, loaders=lambda: (train(),))
    run(scenario, tmp_path / "whole")
    shorter = Scenario(make=Net, loaders=lambda: (train(rows(48)),))
    path = tmp_path / "whole" / "epoch=0-step=5.ckpt"
    with pytest.warns(UserWarning, match="after 5 batches of an epoch, .* loader has 3"):
        rest = run(shorter, tmp_path / "rest", path=path)
    assert rest.trainer.current_epoch == 2


class Rows(DummyLogger):
    """The steps of the rows with a loss, in order."""

    steps: ClassVar[list[int]] = []

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        if "loss_step" in metrics and step is not None:
            self.steps.append(step)


@pytest.mark.fits
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
@pytest.mark.parametrize("saver", [Checkpoint(steps=4), ModelCheckpoint(every_n_train_steps=4)])
def test_the_row_of_the_step_that_was_saved_is_not_logged_again(
    saver: pl.Callback, tmp_path: Path
) -> None:
    Rows.steps = []
    for steps in (5, 9):
        saved = sorted(tmp_path.rglob("*.ckpt"), key=lambda path: path.stat().st_mtime_ns)
        trainer = make_trainer(
            True,
            max_steps=steps,
            log_every_n_steps=2,
            logger=Rows(),
            callbacks=[copy.deepcopy(saver)] if steps == 5 else [],
            default_root_dir=str(tmp_path),
            enable_checkpointing=steps == 5,
        )
        trainer.fit(Net(), train(), ckpt_path=[*saved, None][0], weights_only=False)
    assert Rows.steps == [1, 3, 5, 7]


@pytest.mark.fits
@pytest.mark.long
@pytest.mark.parametrize("steps", [2, 6, 8])
@pytest.mark.parametrize("at_epoch_end", [True, False])
def test_max_steps_may_end_a_run_anywhere(steps: int, at_epoch_end: bool, tmp_path: Path) -> None:
    keep: Any = {"save_on_train_epoch_end": True}
    if not at_epoch_end:
        keep = lambda folder: Checkpoint()  # noqa: E731
    scenario = Scenario(make=lambda: Net(on_plateau), loaders=both, keep=keep)
    whole = run(scenario, tmp_path / "whole")
    first = run(scenario, tmp_path / "first", max_steps=steps, max_epochs=-1)
    path = list(checkpoints(tmp_path / "first"))[-1]
    rest = run(scenario, tmp_path / "rest", path=path, start=50)
    assert first.events.losses + rest.events.losses == whole.events.losses
    rest.events.before = {"losses": steps}
    assert differences(whole, rest) == []


@pytest.mark.long
@pytest.mark.numbers
def test_other_checkpoints_go_on_as_lightning_s(tmp_path: Path) -> None:
    """One that Lightning wrote has no moment; one of ours goes on in Lightning."""
    scenario = Scenario(make=lambda: Net(on_plateau), loaders=both, options=LONG)
    for static in (True, False):
        folder = tmp_path / str(static)
        run(scenario, folder, static=static)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="You're resuming from a checkpoint")
            path = folder / "epoch=1-step=9.ckpt"
            rest = run(scenario, tmp_path / "rest", static=not static, path=path)
        assert (rest.trainer.global_step, rest.trainer.current_epoch) == (18, 3)


@pytest.mark.long
@pytest.mark.compiler
def test_kills_leave_readable_files_and_change_nothing() -> None:
    """In a process of its own: it forks, which OpenMP's threads do not survive."""
    tool = Path(__file__).parents[1] / "tools" / "kills.py"
    command = [sys.executable, str(tool), "--kills", "3", "--compiling", "0"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.startswith("3 kills")
