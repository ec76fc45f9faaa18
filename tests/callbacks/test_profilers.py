"""Rates, time that remains, operations per second, and the file of them."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from harness import fit, make_trainer
from lightning.pytorch.loggers import CSVLogger
from models import GAN, Classifier, Measured, loader, mlp
from torch import nn

from fulgurite.callbacks import (
    DurationProfiler,
    FlopUtilization,
    RateProfiler,
    SavePerformanceData,
)
from fulgurite.callbacks.profilers import TrainingClock

pytestmark = pytest.mark.fits

devices = pytest.mark.parametrize("static", [True, False], ids=["CSX", "stock"])


class Clock:
    """A clock that goes one second a call."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        self.now += 1.0
        return self.now


def classifier() -> Classifier:
    return Classifier(mlp())


@devices
def test_the_first_batch_of_an_epoch_and_validation_do_not_count(static: bool) -> None:
    rate = RateProfiler()
    assert rate.steps_per_s == 0
    fit(
        Measured,
        lambda: (loader(160), loader(32)),
        static=static,
        callbacks=(rate,),
        max_epochs=2,
        val_check_interval=5,
    )
    assert rate.clock.batches == 2 * 9
    assert rate.clock.samples == 2 * 9 * 16
    assert rate.steps_per_s > 0


@devices
def test_rates_are_logged_on_log_steps(static: bool) -> None:
    rate = RateProfiler()
    run = fit(
        classifier,
        lambda: (loader(320),),
        static=static,
        callbacks=(rate,),
        log_every_n_steps=10,
    )
    assert "avg_samples_per_sec" not in run.metrics[8]
    logged = run.final
    assert logged["avg_samples_per_sec"] == pytest.approx(16 * logged["avg_steps_per_sec"])
    assert logged["local_samples_per_sec"] > 0


@devices
def test_loggers_have_them_at_the_step_of_the_other_values(static: bool, tmp_path: Path) -> None:
    fit(
        classifier,
        lambda: (loader(320),),
        static=static,
        callbacks=(RateProfiler(),),
        log_every_n_steps=10,
        logger=CSVLogger(tmp_path, name="", version=""),
    )
    with (tmp_path / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows if row["avg_samples_per_sec"]] == ["9", "19"]
    assert [row["step"] for row in rows if row["loss_step"]] == ["9", "19"]


@devices
def test_samples_of_all_micro_batches_count_and_steps_are_the_optimizers(static: bool) -> None:
    rate = RateProfiler()
    run = fit(
        classifier,
        lambda: (loader(320),),
        static=static,
        callbacks=(rate,),
        log_every_n_steps=5,
        accumulate_grad_batches=2,
    )
    logged = run.final
    assert logged["avg_samples_per_sec"] == pytest.approx(32 * logged["avg_steps_per_sec"])


def test_batches_of_other_sizes_count_as_they_are_where_programs_allow_them() -> None:
    rate = RateProfiler()
    options: dict[str, Any] = {"callbacks": (rate,), "backend": {"max_programs": 2}}
    fit(classifier, lambda: (loader(40),), static=True, **options)
    assert (rate.clock.batches, rate.clock.samples) == (2, 16 + 8)


def test_a_stopped_clock_counts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fulgurite.callbacks.profilers.time", Clock())
    trainer, clock = make_trainer(False), TrainingClock()
    progress = trainer.fit_loop.epoch_loop.batch_progress.total
    batch = (torch.zeros(3, 1), torch.zeros(3))
    for ready in (1, 2, 3):
        progress.ready = ready
        clock.read(trainer, batch)
    assert (clock.batches, clock.samples, clock.seconds) == (2, 6, 2.0)
    clock.stop(trainer)
    progress.ready = 9
    clock.start(trainer)
    clock.read(trainer, batch)
    assert (clock.batches, clock.samples) == (2, 6)


@devices
def test_time_that_remains_is_batches_left_at_the_pace_so_far(static: bool) -> None:
    seen: list[dict[str, float]] = []

    class Seen(DurationProfiler):
        def measured(self, trainer: pl.Trainer) -> Any:
            found = super().measured(trainer)
            seen.append({**found, "batch": self.clock.seconds / self.clock.batches})
            return found

    fit(
        classifier,
        lambda: (loader(320),),
        static=static,
        callbacks=(Seen(),),
        log_every_n_steps=5,
        max_epochs=3,
    )
    assert len(seen) == 12
    of_epoch = [round(one["loop_time_remaining"] / one["batch"]) for one in seen[:4]]
    assert of_epoch == [15, 10, 5, 0]
    first = seen[0]
    assert first["time_remaining"] == pytest.approx(55 * first["batch"], rel=0.5)
    assert seen[-1]["time_remaining"] == 0


@devices
def test_max_steps_ends_a_run_too_and_an_endless_one_has_no_time_left(static: bool) -> None:
    class Ending(DurationProfiler):
        def __init__(self) -> None:
            super().__init__()
            self.left: list[float] = []

        def measured(self, trainer: pl.Trainer) -> Any:
            of_epoch = trainer.num_training_batches - 1.0
            self.left.append(self._batches_left(trainer, of_epoch))
            return super().measured(trainer)

    duration = Ending()
    options: dict[str, Any] = {"callbacks": (duration,), "log_every_n_steps": 4, "max_epochs": -1}
    fit(classifier, lambda: (loader(320),), static=static, max_steps=8, **options)
    assert duration.left == [4, 0]
    duration = Ending()
    options |= {"callbacks": (duration,), "accumulate_grad_batches": 2}
    fit(classifier, lambda: (loader(320),), static=static, max_steps=8, **options)
    assert duration.left == [8, 0]

    class Stop(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
            trainer.should_stop = trainer.global_step >= 8

    options |= {"callbacks": (DurationProfiler(), Stop()), "accumulate_grad_batches": 1}
    run = fit(classifier, lambda: (loader(320),), static=static, **options)
    assert "loop_time_remaining" in run.final
    assert "time_remaining" not in run.final


def test_under_manual_optimization_a_batch_has_the_steps_it_was_seen_to_have() -> None:
    duration = DurationProfiler()
    options: dict[str, Any] = {"max_steps": 40, "max_epochs": -1, "log_every_n_steps": 10}
    run = fit(GAN, lambda: (loader(320),), static=True, callbacks=(duration,), **options)
    assert run.trainer.global_step == 40
    assert duration._batches_per_step(run.trainer) == 0.5


@devices
@pytest.mark.parametrize("window", [1, 2])
def test_operations_are_those_of_the_products(static: bool, window: int) -> None:
    flops = FlopUtilization(peak_flops_per_sec=1e9)
    run = fit(
        classifier,
        lambda: (loader(320),),
        static=static,
        callbacks=(flops,),
        log_every_n_steps=5,
        accumulate_grad_batches=window,
    )
    forward = 2 * 16 * (8 * 16 + 16 * 4)
    backward = 2 * 16 * (8 * 16 + 2 * 16 * 4)  # the first layer's input needs no gradient
    assert flops.flops_per_batch == forward + backward
    assert run.final["flops_utilization"] == pytest.approx(run.final["flops_per_sec"] / 1e7)
    assert flops.perf_metrics["flops_per_sec"] > 0


@pytest.mark.numbers
def test_operations_of_attention_and_convolutions_count_as_eagerly() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.out = nn.Conv1d(1, 4, 3), nn.Linear(24, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.conv(x[:, None]).transpose(1, 2)
            h = nn.functional.scaled_dot_product_attention(h[:, None], h[:, None], h[:, None])
            return self.out(h.flatten(1))

    counts = []
    for static in (True, False):
        flops = FlopUtilization()
        fit(lambda: Classifier(Net()), lambda: (loader(48),), static=static, callbacks=(flops,))
        counts.append(flops.flops_per_batch)
    assert counts[0] == counts[1]


def test_a_peak_is_a_number_above_zero() -> None:
    with pytest.raises(ValueError, match=r"peak_flops_per_sec must be above 0; got -1\.0"):
        FlopUtilization(peak_flops_per_sec=-1.0)


@devices
def test_what_profilers_found_is_a_file(static: bool, tmp_path: Path) -> None:
    rate = RateProfiler()
    fit(
        classifier,
        lambda: (loader(160),),
        static=static,
        callbacks=(rate, FlopUtilization(), SavePerformanceData()),
        default_root_dir=tmp_path,
    )
    found = json.loads((tmp_path / "performance.json").read_text())
    assert found["total_samples"] == 9 * 16
    assert found["samples_per_sec"] == rate.samples_per_s
    assert found["flops_per_batch"] > 0


def test_a_run_that_fails_leaves_the_file_too(tmp_path: Path) -> None:
    class Fails(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
            if trainer.global_step == 5:
                raise KeyError("here")

    callbacks = (RateProfiler(), SavePerformanceData(), Fails())
    with pytest.raises(KeyError):
        fit(
            classifier,
            lambda: (loader(160),),
            static=True,
            callbacks=callbacks,
            default_root_dir=tmp_path,
        )
    assert (tmp_path / "performance.json").exists()
