"""The lean batch does what Lightning's does: every hook that somebody overrides, in its order."""

from __future__ import annotations

import copy
from typing import Any
from unittest.mock import Mock

import lightning.pytorch as pl
import pytest
from harness import assert_close, assert_same_run, both, fit
from lightning.pytorch.callbacks import ProgressBar, RichProgressBar, TQDMProgressBar
from lightning.pytorch.profilers import SimpleProfiler
from models import Classifier, Measured, loader, mlp
from torch import nn
from torch.utils.data import DataLoader

from fulgurite.callbacks import RateProfiler

pytestmark = pytest.mark.numbers


class Skip(pl.Callback):
    """Counts the batches that it sees."""

    def __init__(self) -> None:
        self.started, self.ended = 0, 0

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        assert module._current_fx_name == "on_train_batch_start"
        self.started += 1

    def on_train_batch_end(self, *args: Any) -> None:
        self.ended += 1


def test_a_hook_that_returns_minus_one_skips_the_rest_of_the_epoch() -> None:
    class Skipping(Classifier):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if batch_idx == 3 else None

    counted = []
    for static in (True, False):
        skip = Skip()
        run = fit(
            lambda: Skipping(mlp()),
            lambda: (loader(),),
            static=static,
            callbacks=(skip,),
            max_epochs=2,
        )
        progress = run.trainer.fit_loop.epoch_loop.batch_progress.state_dict()
        counted.append((skip.started, skip.ended, run.losses, progress))
    assert counted[0][:2] == counted[1][:2] == (8, 6)
    assert_close(counted[0][2], counted[1][2])
    assert counted[0][3] == counted[1][3]


@pytest.mark.parametrize("bar", [RichProgressBar, TQDMProgressBar])
def test_a_progress_bar_is_told_of_some_batches_and_of_the_last(
    bar: type[ProgressBar], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[str, int]] = []

    def told_of(name: str, hook: Any) -> Any:
        def call(self: Any, *args: Any) -> None:
            told.append((name, args[-1]))
            hook(self, *args)

        return call

    for name in ("train", "validation"):
        hook = f"on_{name}_batch_end"
        monkeypatch.setattr(bar, hook, told_of(name, getattr(bar, hook)))
    shown = bar()
    fit(
        Measured,
        lambda: (loader(2000), loader(2000)),
        static=True,
        callbacks=(shown,),
        enable_progress_bar=True,
        num_sanity_val_steps=0,
        max_epochs=2,
        val_check_interval=60,
    )
    for name, ends in (("train", [59, 119, 124, 59, 119, 124]), ("validation", [124] * 4)):
        numbers = [number for stage, number in told if stage == name]
        assert len(numbers) < 150
        assert [n for n in numbers if n in ends] == ends


def test_a_progress_bar_of_the_users_is_told_of_each_batch() -> None:
    numbers: list[int] = []

    class Bar(TQDMProgressBar):
        def get_metrics(self, trainer: Any, pl_module: Any) -> Any:
            numbers.append(trainer.fit_loop.epoch_loop.batch_idx)
            return super().get_metrics(trainer, pl_module)

    fit(
        lambda: Classifier(mlp()),
        lambda: (loader(),),
        static=True,
        callbacks=(Bar(),),
        enable_progress_bar=True,
        max_steps=10,
    )
    assert [*dict.fromkeys(numbers)] == [*range(10)]


@pytest.mark.parametrize("ends", [ValueError, KeyboardInterrupt])
def test_a_bar_ends_at_the_batch_that_raised(ends: type[BaseException]) -> None:
    class Raises(pl.Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            if args[-1] == 7:
                raise ends

    shown = []
    for static in (True, False):
        bar = TQDMProgressBar(refresh_rate=1)
        with pytest.raises((ends, SystemExit)):
            fit(
                lambda: Classifier(mlp()),
                lambda: (loader(160),),
                static=static,
                callbacks=(bar, Raises()),
                enable_progress_bar=True,
            )
        shown.append(bar.train_progress_bar.n)
    assert shown == [8, 8]


def test_a_callback_that_is_added_in_the_middle_of_an_epoch_is_called() -> None:
    class Adding(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step == 4:
                trainer.callbacks.append(late)

    for static in (True, False):
        late = Skip()
        fit(
            lambda: Classifier(mlp()),
            lambda: (loader(160),),
            static=static,
            callbacks=(Adding(),),
        )
        assert late.started == 6, static


@pytest.mark.fits
def test_a_hook_of_a_subclass_is_called_on_every_batch_unless_it_says_how_seldom() -> None:
    class EveryBatch(RateProfiler):
        batches = 0

        def on_train_batch_end(self, *args: Any) -> None:
            super().on_train_batch_end(*args)
            self.batches += 1

    class EveryFifth(EveryBatch):
        def every_n_steps(self, trainer: pl.Trainer) -> int:
            return 5

    every, fifth, on_object = EveryBatch(), EveryFifth(), RateProfiler()
    on_object.on_train_batch_end = seen = Mock()
    callbacks = (every, fifth, on_object)
    fit(lambda: Classifier(mlp()), lambda: (loader(160),), static=True, callbacks=callbacks)
    assert (every.batches, fifth.batches, seen.call_count) == (10, 3, 10)


def test_what_fetches_batches_can_be_copied_in_the_middle_of_an_epoch() -> None:
    fetched: dict[bool, list[int]] = {True: [], False: []}

    class Copying(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            fetched[static].append(copy.deepcopy(trainer.fit_loop._data_fetcher).fetched)

    for static in (True, False):
        fit(
            lambda: Classifier(mlp()),
            lambda: (loader(48),),
            static=static,
            callbacks=(Copying(),),
        )
    assert fetched[True] == fetched[False] == [1, 2, 3]


class Moved(Classifier):
    """Changes the batch on its way to the device."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] * 2, batch[1]]

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return {"x": batch[0] + 1, "y": batch[1]}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return nn.functional.cross_entropy(self.net(batch["x"]), batch["y"])


def test_transfer_hooks_of_the_module_change_the_batch() -> None:
    ours, stock = both(lambda: Moved(mlp()), lambda: (loader(160),))
    assert_same_run(ours, stock)


def test_transfer_hooks_of_a_datamodule_change_the_batch() -> None:
    class Data(pl.LightningDataModule):
        def train_dataloader(self) -> Any:
            return loader(160)

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return [batch[0] * 3, batch[1]]

    ours, stock = both(lambda: Classifier(mlp()), lambda: (Data(),))
    assert_same_run(ours, stock)


@pytest.mark.long
def test_a_profiler_gets_lightning_s_own_batches() -> None:
    profilers = {True: SimpleProfiler(), False: SimpleProfiler()}
    runs = {
        static: fit(
            Measured,
            lambda: (loader(160), loader(48)),
            static=static,
            profiler=profilers[static],
        )
        for static in (True, False)
    }
    assert_same_run(runs[True], runs[False])
    seen = {static: profiler.recorded_durations for static, profiler in profilers.items()}
    assert len(seen[True]["run_training_batch"]) == len(seen[False]["run_training_batch"]) == 10


def test_a_batch_of_none_is_left_out() -> None:
    rows: list[Any] = [[*batch] for batch in loader(160)]
    rows[4] = None
    runs = []
    for static in (True, False):
        data = DataLoader(rows, batch_size=None, collate_fn=lambda batch: batch)
        with pytest.warns(UserWarning, match="yielded None"):
            runs.append(fit(lambda: Classifier(mlp()), lambda: (data,), static=static))  # noqa: B023
    assert [run.trainer.global_step for run in runs] == [9, 9]
    assert_close(runs[0].losses, runs[1].losses)


class Limits(pl.Callback):
    """Sets an attribute of the Trainer after two steps."""

    def __init__(self, name: str, value: Any) -> None:
        self.name, self.value = name, value
        self.validated_at: list[int] = []

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == 2:
            setattr(trainer, self.name, self.value)

    def on_validation_start(self, trainer: Any, *args: Any) -> None:
        self.validated_at.append(trainer.global_step)


@pytest.mark.parametrize(
    ("name", "before", "after", "validated_at"),
    [
        ("limit_val_batches", 1, 0, []),
        ("limit_val_batches", 0, 1, [6]),
        ("check_val_every_n_epoch", 1, 9, []),
        ("check_val_every_n_epoch", 9, 1, [6]),
    ],
)
def test_a_limit_of_validation_that_changes_in_an_epoch_holds_at_once(
    name: str, before: int, after: int, validated_at: list[int]
) -> None:
    for static in (True, False):
        limits = Limits(name, after)
        fit(
            Measured,
            lambda: (loader(96), loader(48)),
            static=static,
            callbacks=(limits,),
            num_sanity_val_steps=0,
            **{name: before},
        )
        assert limits.validated_at == validated_at, static


class Called:
    """A callable object, which has no code of its own."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, *args: Any) -> None:
        self.count += 1


def test_callable_objects_are_hooks_also_where_they_are_set_in_an_epoch() -> None:
    class Setting(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
            if trainer.global_step == 4:
                vars(module)["on_train_batch_start"] = late

    for static in (True, False):
        late, early, ends = Called(), Called(), Mock()

        def make() -> Classifier:
            module = Classifier(mlp())
            vars(module)["on_train_batch_end"] = ends  # noqa: B023
            return module

        callbacks = (Setting(), pl.callbacks.LambdaCallback(on_train_batch_end=early))
        fit(make, lambda: (loader(160),), static=static, callbacks=callbacks)
        assert (late.count, early.count, ends.call_count) == (6, 10, 10), static
