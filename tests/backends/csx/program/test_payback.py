"""Compiling begins where what is left of a run is longer than it takes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from harness import fit, make_trainer
from models import GAN, Classifier, loader, mlp

from fulgurite.backends.csx.compile.background import queue as background
from fulgurite.backends.csx.program import announcements, speed
from fulgurite.backends.csx.program.speed import Payback

pytestmark = pytest.mark.skipif(not background.AVAILABLE, reason="waits elsewhere")


class Clock:
    """Seconds and batches as a test says them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, left: float = 10.0) -> None:
        self.in_steps_s, self.done, self.left = 100.0, 5.0, left
        monkeypatch.setattr(speed, "_batches", lambda trainer: (self.done, self.left))
        monkeypatch.setattr(speed, "measured_before", lambda name: [])

    def payback(self, compiling_s: float) -> Payback:
        trainer: Any = object()
        return Payback(trainer, compiling_s / speed.TIMES, lambda: self.in_steps_s)

    def step(self, seconds: float) -> None:
        self.in_steps_s += seconds
        self.done += 1
        self.left -= 1


def test_it_is_known_when_some_batches_were_done(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    asked = clock.payback(compiling_s=3.9)
    answers = [asked(0.0)]
    for _ in range(2):
        clock.step(0.5)
        answers.append(asked(0.0))
    assert answers == [False, False, True]  # 8 batches of 0.5 s
    clock.left = 0.0
    assert asked(0.0)  # it has begun


def test_a_validation_counts_by_what_it_takes_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, left=1000.0)
    asked = clock.payback(compiling_s=30.0)
    for _ in range(4):  # each 0.5 s in 20 batches of the training
        assert not asked(0.0)
        clock.in_steps_s += 0.5
        clock.done += 20
        clock.left -= 20
    clock.left = 1300.0
    assert asked(0.0)


def test_a_run_without_an_end_pays_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Clock(monkeypatch, left=math.inf).payback(compiling_s=100.0)(0.0)
    assert Payback(None, 100.0, lambda: 0.0)(0.0)


def test_what_cannot_become_faster_never_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Clock(monkeypatch, left=math.inf).payback(compiling_s=0.0)
    assert not asked(0.96)
    assert asked(0.94)


def test_only_what_can_become_faster_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    asked = clock.payback(compiling_s=2.0)
    clock.left = 6.0
    for _ in range(3):
        assert not asked(0.5)  # half of at most 2.5 s
        clock.step(0.5)
    clock.left = 8.0
    assert asked(0.5)


def test_what_compiling_took_before_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "measured_before", lambda name: [4.0, 20.0, 30.0])
    assert Payback(None, 0.5, lambda: 0.0).compiling_s == 10.0


class Counts(pl.Callback):
    """What was said to be left at the end of each batch."""

    def __init__(self) -> None:
        self.told: list[tuple[float, float]] = []

    def _note(self, trainer: pl.Trainer, *_: Any) -> None:
        self.told.append(speed._batches(trainer))

    on_train_batch_end = on_test_batch_end = on_predict_batch_end = _note

    def on_validation_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if not trainer.training:
            self._note(trainer)


RUNS: dict[str, tuple[Any, dict[str, Any]]] = {
    "epochs": (Classifier, {"max_epochs": 3}),
    "steps": (Classifier, {"max_epochs": -1, "max_steps": 10}),
    "steps before epochs": (Classifier, {"max_epochs": 4, "max_steps": 5}),
    "accumulated": (Classifier, {"max_epochs": 9, "max_steps": 5, "accumulate_grad_batches": 2}),
    "several optimizers": (GAN, {"max_epochs": 9, "max_steps": 12}),
}


@pytest.mark.fits
@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_what_is_left_of_a_fit(run: tuple[Any, dict[str, Any]]) -> None:
    make, options = run
    counts = Counts()
    net = (lambda: make(mlp())) if make is Classifier else make
    fit(net, lambda: (loader(64),), static=True, callbacks=(counts,), **options)
    done = range(1, len(counts.told) + 1)
    assert [told[0] for told in counts.told] == list(done)
    window = options.get("accumulate_grad_batches", 1)
    for one, (_, left) in zip(done, counts.told, strict=True):
        assert left == pytest.approx(len(counts.told) - one, abs=window - 0.5)


@pytest.mark.fits
@pytest.mark.parametrize("kind", ["validate", "test", "predict"])
def test_what_is_left_of_an_evaluation(kind: str) -> None:
    counts = Counts()
    trainer = make_trainer(True, callbacks=[counts])
    getattr(trainer, kind)(Evaluated(), loader(64))
    assert counts.told == [(one, 4.0 - one) for one in range(1, 5)]


class Evaluated(Classifier):
    def __init__(self) -> None:
        super().__init__(mlp())

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.net(batch[0]).sum())

    validation_step = test_step

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch[0])


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The jobs of workers that were started, none of which does them."""
    started: list[Any] = []

    class Idle:
        def __init__(self, jobs: list[background.Job]) -> None:
            self.jobs = jobs
            started.append([job.name[-1] for job in jobs])

        def has_ended(self) -> bool:
            return False

        pulse = SimpleNamespace(lost=lambda: None, starves=False)

        def end(self) -> None: ...

    monkeypatch.setattr(background, "_Worker", Idle)
    yield started
    background.queue.begin()


@pytest.mark.fits
@pytest.mark.parametrize("pays", [False, True])
def test_the_worker_is_started_where_it_pays(
    pays: bool, workers: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    said: list[str] = []
    monkeypatch.setattr(announcements, "say", lambda trainer, line: said.append(line))
    monkeypatch.setattr(speed, "TIMES", 0.0 if pays else 1e6)
    monkeypatch.setattr(speed, "measured_before", lambda what: [])  # by another test
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # else the choice takes more steps than these
    fit(
        Evaluated,
        lambda: (loader(64), loader(32)),
        static=True,
        policy="default",
        backend={"compile_dir": str(tmp_path), "background": True, "audit": True},
        max_epochs=2,
    )
    assert len(workers) == int(pays)
    told = " ".join(said[-1].split())
    assert ("compiled no: the fit was over before it was done" in told) is pays
    assert ("compiled no: too short; " in told) is not pays


class Wide(Classifier):
    """Its step is one product of large matrices, and little else."""

    def __init__(self) -> None:
        super().__init__(mlp())
        self.register_buffer("large", torch.randn(1200, 1200))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        large = self.large * batch[0][0, 0]
        return super().training_step(batch, batch_idx) + 1e-9 * (large @ large @ large).mean()


@pytest.mark.fits
def test_a_step_of_products_alone_is_not_compiled(
    workers: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    said: list[str] = []
    monkeypatch.setattr(announcements, "say", lambda trainer, line: said.append(line))
    monkeypatch.setattr(speed, "TIMES", 0.0)
    monkeypatch.setattr(speed, "NEARLY_ALL", 0.5)  # a busy machine's share is less than its own
    fit(
        Wide,
        lambda: (loader(256),),
        static=True,
        policy="default",
        backend={"compile_dir": str(tmp_path), "background": True, "audit": True},
        max_epochs=1,
    )
    assert not workers
    told = " ".join(said[-1].split())
    nothing = r"compiled no: nothing to gain, for \d+% of a step is in products of matrices"
    assert re.search(nothing, told), told
