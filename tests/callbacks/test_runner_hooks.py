"""A runner's hooks: their order, what they get and change, and what happens after an exception."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from harness import Run, assert_close, fit, make_trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from models import Classifier, loader, mlp
from torch import Tensor, nn

from fulgurite.callbacks import RunnerHooks
from fulgurite.callbacks.runner_hooks import HOOKS, Runner
from fulgurite.loops.lean import BatchHooks

pytestmark = pytest.mark.fits

both_devices = pytest.mark.parametrize("static", [True, False], ids=["CSX", "CPU"])


class Validated(Classifier):
    """A small net that returns its loss in every stage."""

    def __init__(self) -> None:
        super().__init__(mlp())

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def test_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        return {"loss": self.validation_step(batch, batch_idx)}


class Recording:
    """Writes down which hooks are called, with the numbers they get; is no ``Runner`` itself."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.losses: list[Any] = []

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name not in HOOKS:
            raise AttributeError(name)

        def record(*args: Any) -> None:
            if name.endswith("batch_end"):
                loss, *args = args  # type: ignore[assignment]
                self.losses.append(loss)
            shown = [] if name.endswith("batch_start") else args
            self.calls.append(" ".join([name.removeprefix("on_"), *map(str, shown)]))

        return record


def run(runner: Any, static: bool = True, *, val: bool = False, **options: Any) -> Run:
    """Two batches an epoch, and one of validation."""
    loaders = (loader(32), loader(16)) if val else (loader(32),)
    return fit(
        Validated, lambda: loaders, static=static, callbacks=(RunnerHooks(runner),), **options
    )


def epoch(number: int, *, validates: bool = False) -> list[str]:
    """The calls of an epoch of two batches."""
    batches = [
        f"train_batch_{edge} {number} {step}" for step in (0, 1) for edge in ("start", "end")
    ]
    batches = [call.partition(" ")[0] if "start" in call else call for call in batches]
    validation = [
        "eval_start",
        "eval_epoch_start",
        "eval_batch_start",
        f"eval_batch_end {number} 0",
        "eval_epoch_end False",
        "eval_end False",
    ]
    inside = [*batches, *(validation if validates else [])]
    return ["train_epoch_start", *inside, "train_epoch_end False"]


@both_devices
def test_the_hooks_of_a_training_come_in_their_order(static: bool) -> None:
    runner = Recording()
    run(runner, static, max_epochs=2)
    assert runner.calls == ["train_start", *epoch(0), *epoch(1), "train_end False"]


@both_devices
def test_the_hooks_of_an_evaluation_lie_within_the_epoch_and_not_in_the_sanity_check(
    static: bool,
) -> None:
    runner = Recording()
    run(runner, static, val=True, max_epochs=2, num_sanity_val_steps=1)
    epochs = [*epoch(0, validates=True), *epoch(1, validates=True)]
    assert runner.calls == ["train_start", *epochs, "train_end False"]


@both_devices
@pytest.mark.parametrize("stage", ["validate", "test"])
def test_the_hooks_of_an_evaluation_serve_validation_and_test(stage: str, static: bool) -> None:
    runner = Recording()
    trainer = make_trainer(static, callbacks=[RunnerHooks(runner)])
    getattr(trainer, stage)(Validated(), loader(16), verbose=False)
    assert runner.calls == epoch(0, validates=True)[5:-1]
    [loss] = runner.losses
    assert isinstance(loss, Tensor)


def test_predict_has_no_hooks() -> None:
    class Predicting(Validated):
        def predict_step(self, batch: Any) -> Tensor:
            logits: Tensor = self.net(batch[0])
            return logits

    runner = Recording()
    make_trainer(True, callbacks=[RunnerHooks(runner)]).predict(Predicting(), loader(16))
    assert runner.calls == []


@both_devices
@pytest.mark.parametrize(
    ("options", "ends"),
    [
        ({"max_epochs": 1}, ["train_epoch_end False", "train_end False"]),
        ({"max_steps": 1}, ["train_epoch_end True", "train_end False"]),
        ({"max_epochs": -1, "max_steps": 2}, ["train_epoch_end False", "train_end False"]),
    ],
    ids=str,
)
def test_an_epoch_ends_early_before_its_last_batch(
    options: dict[str, Any], ends: list[str], static: bool
) -> None:
    runner = Recording()
    run(runner, static, **options)
    assert [call for call in runner.calls if "_end " in call and "batch" not in call] == ends


@both_devices
def test_training_ends_early_when_somebody_stops_it(static: bool) -> None:
    class Stopping(Recording):
        def on_train_batch_end(self, loss: Any, epoch: int, step: int) -> None:
            trainers[0].should_stop = True

    class Trainers(pl.Callback):
        def setup(self, trainer: Any, module: Any, stage: str) -> None:
            trainers.append(trainer)

    trainers: list[Any] = []
    runner = Stopping()
    callbacks = (RunnerHooks(runner), Trainers())
    fit(Validated, lambda: (loader(32),), static=static, callbacks=callbacks, max_epochs=2)
    assert runner.calls[-2:] == ["train_epoch_end True", "train_end True"]


@both_devices
def test_an_endless_loader_ends_its_epoch_early(static: bool) -> None:
    runner = Recording()
    batches = iter(loader(64))

    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            return batches

    stream = torch.utils.data.DataLoader(Stream(), batch_size=None)
    fit(
        Validated,
        lambda: (stream,),
        static=static,
        callbacks=(RunnerHooks(runner),),
        max_epochs=-1,
        max_steps=2,
    )
    assert runner.calls[-2:] == ["train_epoch_end True", "train_end False"]


@pytest.mark.numbers
@both_devices
def test_a_hook_replaces_the_batch(static: bool) -> None:
    class Flipping(Runner):
        def on_train_batch_start(self, data: Any) -> Any:
            return [-data[0], data[1]]

        def on_eval_batch_start(self, data: Any) -> Any:
            return [torch.zeros_like(data[0]), data[1]]

        def on_eval_batch_end(self, loss: Tensor | None, epoch: int, step: int) -> None:
            evaluated.append(loss)

    class Flipped(Validated):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step([-batch[0], batch[1]], batch_idx)

    evaluated: list[Any] = []
    ours = run(Flipping(), static, val=True)
    theirs = fit(Flipped, lambda: (loader(32),), static=False)
    assert_close(ours.losses, theirs.losses)
    zeros = nn.functional.cross_entropy(
        ours.module.net(torch.zeros(16, 8)), next(iter(loader(16)))[1]
    )
    assert_close(evaluated[-1], zeros.detach())


@both_devices
@pytest.mark.parametrize("of_data", [False, True], ids=["module's", "datamodule's"])
def test_the_transfers_own_hook_comes_after_the_runners(static: bool, of_data: bool) -> None:
    class Halving(Runner):
        def on_train_batch_start(self, data: Any) -> Any:
            order.append("runner")
            return data

    def on_before_batch_transfer(self: Any, batch: Any, dataloader_idx: int) -> Any:
        order.append("own")
        return batch

    class Data(pl.LightningDataModule):
        def train_dataloader(self) -> Any:
            return loader(16)

    order: list[str] = []
    owner = type("Owner", (Data if of_data else Validated,), {})
    owner.on_before_batch_transfer = on_before_batch_transfer
    module, data = (Validated(), owner()) if of_data else (owner(), Data())
    trainer = make_trainer(static, callbacks=[RunnerHooks(Halving())], max_epochs=1)
    if of_data:
        trainer.fit(module, datamodule=data)
    else:
        trainer.fit(module, loader(16))
    assert order == ["runner", "own"]
    assert "on_before_batch_transfer" not in {**vars(module), **vars(data)}


@both_devices
def test_a_datamodule_without_hooks_of_its_own_is_no_obstacle(static: bool) -> None:
    class Data(pl.LightningDataModule):
        def train_dataloader(self) -> Any:
            return loader(16)

    runner = Recording()
    trainer = make_trainer(static, callbacks=[RunnerHooks(runner)], max_epochs=1)
    trainer.fit(Validated(), datamodule=Data())
    assert "train_batch_start" in runner.calls


@both_devices
def test_batch_hooks_come_for_every_micro_batch_with_the_loss_the_step_returned(
    static: bool,
) -> None:
    runner = Recording()
    window = run(runner, static, accumulate_grad_batches=2)
    assert sum("batch_end" in call for call in runner.calls) == 2
    assert_close([float(loss) for loss in runner.losses], [2 * loss for loss in window.losses])


@both_devices
@pytest.mark.parametrize("hook", HOOKS)
def test_an_exception_in_a_hook_keeps_its_type_and_is_the_last_call(
    hook: str, static: bool
) -> None:
    class Broken(Exception):
        pass

    class Breaking(Recording):
        def __getattr__(self, name: str) -> Callable[..., None]:
            record = super().__getattr__(name)

            def call(*args: Any) -> None:
                record(*args)
                if name == hook:
                    raise Broken(name)

            return call

    runner = Breaking()
    with pytest.raises(Broken, match=hook):
        run(runner, static, val=True)
    assert runner.calls[-1].split()[0] == hook.removeprefix("on_")


@both_devices
@pytest.mark.parametrize("step", ["training_step", "validation_step"])
def test_no_end_hook_runs_after_an_exception_in_a_step(step: str, static: bool) -> None:
    def broken(self: Any, batch: Any, batch_idx: int) -> Tensor:
        raise ZeroDivisionError

    runner, module = Recording(), type("Broken", (Validated,), {step: broken})
    options: dict[str, Any] = {"callbacks": [RunnerHooks(runner)], "max_epochs": 1}
    trainer = make_trainer(static, **options, num_sanity_val_steps=0)
    made = module()
    with pytest.raises(ZeroDivisionError):
        trainer.fit(made, loader(32), loader(16))
    calls = ["train_start", *epoch(0, validates=True)]
    last = "eval_batch_start" if step == "validation_step" else "train_batch_start"
    assert runner.calls == calls[: calls.index(last) + 1]
    assert "on_before_batch_transfer" not in vars(made)


def test_a_runner_that_overrides_nothing_adds_nothing_to_a_batch() -> None:
    class Idle(Runner):
        pass

    trained = run(Idle())
    hooks = BatchHooks(trained.trainer, "on_train_batch_start", "on_train_batch_end")
    recorder = trained.trainer.callbacks[0]
    assert [call.__self__ for _, call in (*hooks._start, *hooks._end)] == [recorder]
    assert not hooks._transfers


def test_hooks_that_are_overridden_by_calling_super_work() -> None:
    class Polite(Runner):
        def on_train_batch_start(self, data: Any) -> Any:
            return super().on_train_batch_start(data)

        def on_train_batch_end(self, loss: Tensor | None, epoch: int, step: int) -> None:
            super().on_train_batch_end(loss, epoch, step)
            steps.append(step)

    steps: list[int] = []
    run(Polite())
    assert steps == [0, 1]


def test_a_step_that_fetches_its_batches_is_refused() -> None:
    class Fetching(Validated):
        def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
            raise AssertionError

    trainer = make_trainer(False, callbacks=[RunnerHooks(Recording())], max_epochs=1)
    with (
        pytest.warns(UserWarning, match="dataloader_iter"),
        pytest.raises(MisconfigurationException, match="on_train_batch_start would not see them"),
    ):
        trainer.fit(Fetching(), loader(16))
