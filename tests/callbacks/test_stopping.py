"""Ctrl-C and SIGTERM: where a run ends, what it leaves, and that it goes on as if nothing was."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from harness import QUIET, csx, numbers
from lightning.pytorch.callbacks import ModelCheckpoint
from models import Classifier, loader, mlp, rows
from torch import nn
from torch.utils.data import DataLoader

import fulgurite
from fulgurite.backends import reset_backend
from fulgurite.callbacks import Checkpoint, StopOnSignal

pytestmark = pytest.mark.fits

EPOCHS, BATCHES = 2, 6
both_signals = pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
both_devices = pytest.mark.parametrize("static", [True, False], ids=["CSX", "CPU"])


class Module(Classifier):
    """Dropout, validation, and a scheduler that steps on every step."""

    def __init__(self) -> None:
        super().__init__(mlp(0.3))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)

    def predict_step(self, batch: Any) -> Any:
        return self.net(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Losses(pl.Callback):
    """Losses of training, and results of validation, by what was done before."""

    def __init__(self) -> None:
        self.trained: dict[tuple[int, int], float] = {}
        self.validated: dict[int, dict[str, float]] = {}

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.trained[trainer.current_epoch, batch_idx] = float(outputs["loss"])

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        if not trainer.sanity_checking:
            metrics = numbers(trainer.callback_metrics)
            self.validated[trainer.global_step] = {"val_loss": metrics["val_loss"]}


class Kill(pl.Callback):
    """Sends this process a signal at an event, once ``when`` holds."""

    def __init__(
        self, event: str, number: int, when: Callable[[pl.Trainer], bool] = lambda _: True
    ) -> None:
        def send(trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
            if when(trainer) and not self.sent:
                self.sent = True
                self.steps = trainer.global_step
                os.kill(os.getpid(), number)

        self.sent = False
        setattr(self, event, send)


def trainer(folder: Path, *callbacks: pl.Callback, static: bool = True, **options: Any) -> Any:
    """A Trainer of two epochs on CSX, or on the CPU."""
    reset_backend()
    given: dict[str, Any] = {**QUIET, "max_epochs": EPOCHS, "model_dir": folder, **options}
    where: dict[str, Any] = {"backend": csx()} if static else {"device": "CPU"}
    return fulgurite.Trainer(**where, callbacks=list(callbacks), **given)


def data() -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Six shuffled batches an epoch, and four of validation."""
    return DataLoader(rows(16 * BATCHES), batch_size=16, shuffle=True), loader(64)


def start(trainer: Any, **options: Any) -> None:
    """Fit a fresh module from the seed."""
    pl.seed_everything(3, verbose=False)
    trainer.fit(Module(), *data(), **options)


def uninterrupted(folder: Path, **options: Any) -> Losses:
    """The losses of the whole run."""
    losses = Losses()
    start(trainer(folder, losses, **options))
    return losses


WHERE: dict[str, tuple[str, Callable[[Any], bool], int]] = {
    "in the first step, while it is built": ("on_train_batch_start", lambda t: True, 1),
    "in the middle of an epoch": ("on_train_batch_start", lambda t: t.global_step == 2, 3),
    "in an epoch's last step": ("on_train_batch_start", lambda t: t.global_step == 5, 6),
    "in a validation": ("on_validation_batch_end", lambda t: t.global_step == 3, 3),
    "in a validation at an epoch's end": (
        "on_validation_batch_end",
        lambda t: t.global_step > 5,
        6,
    ),
    "in a validation's last batch": ("on_validation_end", lambda t: t.global_step == 3, 3),
    "in the second epoch": ("on_train_batch_end", lambda t: t.global_step == 8, 8),
}
"""Where a signal comes: event, condition, and the steps done when the fit ends."""


@both_signals
@pytest.mark.parametrize("where", WHERE)
def test_a_run_that_was_stopped_goes_on_as_if_nothing_was(
    where: str, number: signal.Signals, tmp_path: Path
) -> None:
    event, when, steps = WHERE[where]
    halves = {"val_check_interval": 0.5}
    whole = uninterrupted(tmp_path, **halves)

    first, kill = Losses(), Kill(event, number, when)
    with StopOnSignal() as stop:
        start(trainer(tmp_path, first, kill, stop, **halves))
        raise AssertionError("the rest of the block is left out")
    assert kill.sent
    assert (stop.signal, stop.exit_status) == (number, 128 + number)
    assert stop.checkpoint == tmp_path / f"stopped-step={steps}.ckpt"

    second = Losses()
    start(trainer(tmp_path, second, **halves), ckpt_path=stop.checkpoint)
    assert {**first.trained, **second.trained} == whole.trained
    assert not set(first.trained) & set(second.trained)
    assert {**first.validated, **second.validated} == whole.validated


@both_devices
def test_the_step_in_flight_ends_and_no_other_begins(static: bool, tmp_path: Path) -> None:
    kill = Kill("on_train_batch_start", signal.SIGINT, lambda t: t.global_step == 2)
    losses = Losses()
    with StopOnSignal() as stop:
        start(trainer(tmp_path, losses, kill, stop, static=static))
    assert list(losses.trained) == [(0, 0), (0, 1), (0, 2)]
    assert stop.checkpoint is not None
    assert torch.load(stop.checkpoint, weights_only=True)["global_step"] == 3


@both_devices
def test_a_validation_ends_after_its_batch_and_is_done_anew(static: bool, tmp_path: Path) -> None:
    batches = 0

    class Count(pl.Callback):
        def on_validation_batch_end(self, *args: Any) -> None:
            nonlocal batches
            batches += 1

    options: dict[str, Any] = {"static": static, "num_sanity_val_steps": 0, "max_epochs": 1}
    with StopOnSignal() as stop:
        kill = Kill("on_validation_batch_start", signal.SIGTERM)
        start(trainer(tmp_path, Count(), kill, stop, **options))
    assert batches == 1
    losses = Losses()
    start(trainer(tmp_path, Count(), losses, **options), ckpt_path=stop.checkpoint)
    assert batches == 1 + 4
    assert (losses.trained, list(losses.validated)) == ({}, [6])


@both_signals
@pytest.mark.parametrize("batch", [0, 1])
def test_a_window_of_micro_batches_is_finished(
    batch: int, number: signal.Signals, tmp_path: Path
) -> None:
    windows = {"accumulate_grad_batches": 2}
    whole = uninterrupted(tmp_path, **windows)
    first, second = Losses(), Losses()
    kill = Kill(
        "on_train_batch_start",
        number,
        lambda t: t.fit_loop.epoch_loop.batch_progress.current.ready == 3 + batch,
    )
    with StopOnSignal() as stop:
        start(trainer(tmp_path, first, kill, stop, **windows))
    assert list(first.trained)[-1] == (0, 3)
    start(trainer(tmp_path, second, **windows), ckpt_path=stop.checkpoint)
    assert {**first.trained, **second.trained} == whole.trained


@both_devices
def test_an_error_in_the_middle_of_a_window_leaves_no_checkpoint(
    static: bool, tmp_path: Path
) -> None:
    class Fails(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
            if trainer.fit_loop.epoch_loop.batch_progress.current.ready == 3:
                raise ValueError("in the middle")

    kill = Kill("on_train_batch_start", signal.SIGINT, lambda trainer: trainer.global_step == 1)
    stop = StopOnSignal()
    made = trainer(tmp_path, kill, stop, Fails(), static=static, accumulate_grad_batches=2)
    with pytest.raises(KeyboardInterrupt), stop:
        start(made)
    assert (stop.signal, stop.checkpoint) == (signal.SIGINT, None)
    assert not list(tmp_path.rglob("*.ckpt"))


@both_devices
@pytest.mark.parametrize("event", ["setup", "on_fit_start", "on_sanity_check_start"])
def test_nothing_begins_after_a_signal_and_nothing_is_written(
    event: str, static: bool, tmp_path: Path
) -> None:
    losses, kill = Losses(), Kill(event, signal.SIGTERM)
    with StopOnSignal() as stop:
        start(trainer(tmp_path, losses, kill, stop, static=static))
    assert stop.signal == signal.SIGTERM
    assert (losses.trained, stop.checkpoint, list(tmp_path.iterdir())) == ({}, None, [])


@both_devices
@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_other_stages_end_after_their_batch(stage: str, static: bool, tmp_path: Path) -> None:
    class Count(pl.Callback):
        batches = 0

        def _count(self, *args: Any) -> None:
            self.batches += 1

        on_validation_batch_end = on_test_batch_end = on_predict_batch_end = _count

    name = {"validate": "validation"}.get(stage, stage)
    count, kill = Count(), Kill(f"on_{name}_batch_end", signal.SIGINT)
    with StopOnSignal() as stop:
        made = trainer(tmp_path, count, kill, stop, static=static)
        getattr(made, stage)(Module(), loader(64))
    assert (count.batches, stop.signal, stop.checkpoint) == (1, signal.SIGINT, None)


@both_devices
def test_a_second_ctrl_c_ends_at_once(static: bool, tmp_path: Path) -> None:
    losses = Losses()
    twice = [Kill("on_train_batch_start", signal.SIGINT) for _ in range(2)]
    with pytest.raises(KeyboardInterrupt), StopOnSignal() as stop:
        start(trainer(tmp_path, losses, *twice, stop, static=static))
    assert (losses.trained, stop.checkpoint) == ({}, None)


def test_a_second_sigterm_changes_nothing(tmp_path: Path) -> None:
    twice = [Kill("on_train_batch_start", signal.SIGTERM) for _ in range(2)]
    with StopOnSignal() as stop:
        start(trainer(tmp_path, *twice, stop))
    assert stop.checkpoint == tmp_path / "stopped-step=1.ckpt"


def test_the_handlers_are_put_back(tmp_path: Path) -> None:
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in numbers]
    with StopOnSignal() as stop:
        start(trainer(tmp_path, Kill("on_train_start", signal.SIGTERM), stop))
    assert [signal.getsignal(number) for number in numbers] == before


def test_an_error_after_a_signal_is_the_cause_of_the_interrupt(tmp_path: Path) -> None:
    class Broken(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            os.kill(os.getpid(), signal.SIGINT)
            raise ZeroDivisionError

    with pytest.raises(KeyboardInterrupt) as raised, StopOnSignal() as stop:
        trainer(tmp_path, stop).fit(Broken(), loader(16))
    assert isinstance(raised.value.__cause__, ZeroDivisionError)


def test_what_was_trained_is_kept_where_a_signal_breaks_something(tmp_path: Path) -> None:
    class Workers(pl.Callback):
        def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step == 2:
                os.kill(os.getpid(), signal.SIGTERM)
                raise RuntimeError("DataLoader worker (pid 1) exited unexpectedly")

    whole, first, second = uninterrupted(tmp_path), Losses(), Losses()
    stop = StopOnSignal()
    with pytest.raises(SystemExit) as raised, stop:
        start(trainer(tmp_path, first, Workers(), stop))
    assert raised.value.code == 143
    assert stop.checkpoint == tmp_path / "stopped-step=2.ckpt"
    start(trainer(tmp_path, second), ckpt_path=stop.checkpoint)
    assert {**first.trained, **second.trained} == whole.trained


def test_an_error_without_a_signal_is_that_error(tmp_path: Path) -> None:
    class Broken(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), StopOnSignal() as stop:
        trainer(tmp_path, stop).fit(Broken(), loader(16))
    assert (stop.signal, stop.exit_status) == (None, 0)


def test_the_checkpoint_lies_beside_the_runs_others(tmp_path: Path) -> None:
    kept = ModelCheckpoint(tmp_path / "kept", save_top_k=0)
    with StopOnSignal() as stop:
        kill = Kill("on_train_batch_start", signal.SIGINT)
        start(trainer(tmp_path, kill, stop, kept, enable_checkpointing=True))
    assert stop.checkpoint == tmp_path / "kept" / "stopped-step=1.ckpt"


def test_checkpoint_writes_it_so_that_it_is_found_again(tmp_path: Path) -> None:
    whole, first, second = uninterrupted(tmp_path), Losses(), Losses()
    options: dict[str, Any] = {"enable_checkpointing": True}
    with StopOnSignal() as stop:
        kill = Kill("on_train_batch_start", signal.SIGINT, lambda t: t.global_step == 2)
        start(trainer(tmp_path, first, kill, stop, Checkpoint(), **options))
    assert stop.checkpoint == tmp_path / "checkpoint_3.ckpt" == Checkpoint().newest(tmp_path)
    start(trainer(tmp_path, second, Checkpoint(), **options), ckpt_path="last")
    assert {**first.trained, **second.trained} == whole.trained


@pytest.mark.process
def test_data_workers_leave_ctrl_c_to_their_parent(tmp_path: Path) -> None:
    class Group(Kill):
        """As a terminal: every process of the group gets the signal."""

        def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step == 1 and not self.sent:
                self.sent = True
                workers = trainer.fit_loop._data_fetcher.combined_loader._iterator.iterators[0]
                for process in (*(worker.pid for worker in workers._workers), os.getpid()):
                    os.kill(process, signal.SIGINT)

    losses = Losses()
    batches = DataLoader(rows(96), batch_size=16, num_workers=1, multiprocessing_context="fork")
    with StopOnSignal() as stop:
        made = trainer(tmp_path, losses, Group("on_train_end", signal.SIGINT), stop)
        made.fit(Module(), batches)
    assert len(losses.trained) == 2
    assert stop.checkpoint is not None


def test_in_another_thread_nothing_is_changed(tmp_path: Path) -> None:
    seen = []

    def run() -> None:
        with StopOnSignal() as stop:
            seen.append(signal.getsignal(signal.SIGINT))
            start(trainer(tmp_path, stop, max_epochs=1))

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [before]


def test_without_a_context_it_says_what_to_write(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="with StopOnSignal"):
        start(trainer(tmp_path, StopOnSignal()))


def test_it_adds_nothing_to_a_batch(tmp_path: Path) -> None:
    stop = StopOnSignal()
    assert not {"on_train_batch_start", "on_train_batch_end"} & {*vars(stop), *vars(type(stop))}
