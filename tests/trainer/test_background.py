"""A run whose programs are compiled while it trains is the same, whenever compiled code takes over.

Most tests compile in this process, at the n-th run of a graph that waits for it, so that the step
at which compiled code takes over is known. The last ones use the worker.
"""

from __future__ import annotations

import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from harness import Run, assert_same_run, fit, make_trainer
from models import GAN, Classifier, Measured, convnet, loader, mlp, pictures

from fulgurite.backends.csx.compile.background import later
from fulgurite.backends.csx.compile.background import queue as background
from fulgurite.backends.csx.compile.background.compilation import Compilation
from fulgurite.backends.csx.compile.fabric import Call, Loaded
from fulgurite.backends.csx.compile.inductor.headers import HEADER
from fulgurite.backends.csx.costs import stock
from fulgurite.backends.csx.costs.stock import Used
from fulgurite.backends.csx.program import announcements, speed
from fulgurite.backends.csx.program.speed import STRETCH_STEPS
from fulgurite.backends.csx.program.step_function import StepFunction
from fulgurite.callbacks import Checkpoint

compiled = pytest.mark.compiler
linux = pytest.mark.skipif(not background.AVAILABLE, reason="waits elsewhere")
pytestmark = linux


@pytest.fixture
def folder() -> Iterator[str]:
    """A compile_dir in which nothing is compiled."""
    found = tempfile.mkdtemp(prefix="fulgurite-test-")
    yield found
    shutil.rmtree(found)


@pytest.fixture
def compile_at(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Compile what waits at the n-th run of a waiting graph, in this process."""
    runs = 0

    def choose(number: int) -> None:
        def poll() -> None:
            nonlocal runs
            runs += 1
            if runs >= number:
                waiting, background.queue._waiting = background.queue._waiting, []
                for job in waiting:
                    if job.name[-1] != HEADER:
                        job.failure, job.ended = job.run(), True

        monkeypatch.setattr(background.queue, "poll", poll)

    yield choose
    background.queue.end()


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The lines on the screen."""
    lines: list[str] = []
    monkeypatch.setattr(announcements, "say", lambda trainer, line: lines.append(line))
    return lines


def steps_of(run: Run) -> list[StepFunction]:
    """The steps of a run."""
    return [*run.trainer.strategy.step_functions.values()]


def hows(run: Run) -> set[str]:
    """How each entry point was run in the end."""
    return {one.loaded.how for step in steps_of(run) for one in step.executables()}


class Draws(pl.Callback):
    """The random state after each step."""

    def __init__(self) -> None:
        self.states: list[torch.Tensor] = []

    def on_train_batch_end(self, *args: Any) -> None:
        self.states.append(torch.get_rng_state())


CASES: dict[str, tuple[Callable[[], pl.LightningModule], Callable[[], Any], dict[str, Any]]] = {
    "plain": (lambda: Classifier(mlp()), lambda: (loader(64),), {}),
    "in the middle of a window": (
        lambda: Classifier(mlp()),
        lambda: (loader(96),),
        {"accumulate_grad_batches": 4},
    ),
    "before a validation": (
        Measured,
        lambda: (loader(64), loader(32)),
        {"val_check_interval": 2},
    ),
    "two optimizers": (GAN, lambda: (loader(64),), {}),
    "loss scaling": (lambda: Classifier(mlp()), lambda: (loader(64),), {"precision": "16-mixed"}),
    "dropout": (lambda: Classifier(mlp(dropout=0.5)), lambda: (loader(64),), {}),
    "convolutions": (lambda: Classifier(convnet()), lambda: (pictures(48),), {}),
    "clipping": (
        lambda: Classifier(mlp(), torch.optim.SGD, momentum=0.9),
        lambda: (loader(64),),
        {"gradient_clip_val": 0.1},
    ),
}


@pytest.mark.fits
@compiled
@pytest.mark.parametrize("case", CASES)
def test_compiled_code_takes_over_in_the_middle(
    case: str, folder: str, compile_at: Callable[[int], None]
) -> None:
    make, loaders, options = CASES[case]
    policy, waits = "default", {"compile_dir": folder, "background": False}
    draws = Draws(), Draws()
    compile_at(3 if case != "before a validation" else 2)
    later = fit(
        make,
        loaders,
        static=True,
        policy=policy,
        backend={**waits, "background": True},
        callbacks=(draws[0],),
        **options,
    )
    assert hows(later) == {"compiled"}
    first = fit(
        make, loaders, static=True, policy=policy, backend=waits, callbacks=(draws[1],), **options
    )
    loose = {"losses": 1e-3, "weights": 1e-3} if "precision" in options else {}
    noise = ("net.0.bias", "net.1.running_mean") if case == "convolutions" else ()
    assert_same_run(later, first, noise, **loose)
    assert all(map(torch.equal, draws[0].states, draws[1].states))


class Keeps(Classifier):
    """Reads its gradients between steps."""

    def __init__(self) -> None:
        super().__init__(mlp())
        self.seen: list[float] = []

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        grad = self.net[0].weight.grad
        assert grad is not None
        self.seen.append(float(grad.abs().sum()))


@pytest.mark.fits
def test_a_fit_that_ends_first_says_so(
    folder: str, compile_at: Callable[[int], None], said: list[str]
) -> None:
    compile_at(1000)
    fit(
        lambda: Classifier(mlp()),
        lambda: (loader(32),),
        static=True,
        policy="default",
        backend={"compile_dir": folder, "background": True},
    )
    assert said[-1].startswith("CSX: 2 batches in ")
    assert "compiled   no: " in said[-1]


@pytest.mark.numbers
@compiled
def test_gradients_that_the_host_reads_are_there_before_and_after(
    folder: str, compile_at: Callable[[int], None]
) -> None:
    compile_at(3)
    options: dict[str, Any] = {"static": True, "policy": "default"}
    backend = {"compile_dir": folder, "background": True}
    later = fit(Keeps, lambda: (loader(64),), backend=backend, **options)
    stock = fit(Keeps, lambda: (loader(64),), static=False)
    assert hows(later) == {"compiled"}
    assert later.module.seen == pytest.approx(stock.module.seen, rel=1e-5)


@pytest.mark.fits
@pytest.mark.long
@compiled
def test_a_checkpoint_of_either_kind_of_step_goes_on(
    folder: str, tmp_path: Path, compile_at: Callable[[int], None]
) -> None:
    compile_at(4)
    options: dict[str, Any] = {
        "static": True,
        "policy": "default",
        "backend": {"compile_dir": folder, "background": True},
    }
    whole = fit(
        lambda: Classifier(mlp()),
        lambda: (loader(96),),
        callbacks=(Checkpoint(steps=1),),
        enable_checkpointing=True,
        model_dir=str(tmp_path),
        **options,
    )
    assert hows(whole) == {"compiled"}
    for step in (2, 4, 5):
        [path] = tmp_path.rglob(f"*_{step}.ckpt")
        torch.manual_seed(0)
        module = Classifier(mlp())
        trainer = make_trainer(True, "default", options["backend"], max_epochs=1)
        trainer.fit(module, loader(96), ckpt_path=str(path), weights_only=True)
        for name, value in whole.module.state_dict().items():
            torch.testing.assert_close(module.state_dict()[name], value, rtol=2e-5, atol=2e-5)


@pytest.mark.fits
@pytest.mark.long
@compiled
def test_deterministic_waits(folder: str) -> None:
    try:
        run = fit(
            lambda: Classifier(mlp()),
            lambda: (loader(32),),
            static=True,
            policy="default",
            backend={"compile_dir": folder, "background": True},
            deterministic=True,
        )
    finally:
        torch.use_deterministic_algorithms(False)
    assert hows(run) == {"compiled"}


LINE = re.compile(
    r"CSX: training program compiled in \d+\.\d s, from batch (?P<first>[\d,]+) on"
    r"(: [\d.,]+ ms a batch, [\d.,]+ before \(\d+\.\d times as fast\))?"
)


@pytest.mark.fits
@pytest.mark.parametrize(
    ("steps_before", "known"), [(STRETCH_STEPS + 1, True), (STRETCH_STEPS, False)]
)
def test_it_is_said_how_much_faster_compiled_code_is(
    steps_before: int,
    known: bool,
    compile_at: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
    folder: str,
) -> None:
    """The operations go on one by one here: what takes over, and how fast that is, is the same."""

    def settle(own: later.Later, loaded: Loaded, reference: Call, *rest: object) -> Call:
        loaded.compiling, loaded.compiled, loaded.call = False, True, reference
        loaded.settled()
        return reference

    def say(trainer: pl.Trainer, line: str) -> None:
        said.append((trainer.global_step, line))

    said: list[tuple[int, str]] = []
    monkeypatch.setattr(announcements, "say", say)
    monkeypatch.setattr(speed, "STRETCH_S", 0)
    monkeypatch.setattr(Used, "is_busy", False)  # beside other tests there may be no estimate
    monkeypatch.setattr(stock, "measured_before", lambda name: [])  # by the other of these tests
    monkeypatch.setattr(Compilation, "in_background", lambda compilation: None)
    monkeypatch.setattr(later.Later, "_settle", settle)
    compile_at(steps_before + 1)
    fit(
        lambda: Classifier(mlp()),
        lambda: (loader(64),),
        static=True,
        policy="default",
        backend={"compile_dir": folder, "background": True, "audit": False},
        max_epochs=12,
    )
    [(step, line)] = [(step, line) for step, line in said if " compiled in " in line]
    found = LINE.fullmatch(line)
    assert found is not None, line
    assert int(found["first"]) == steps_before + 1
    assert step == steps_before + (STRETCH_STEPS if known else 0)  # done when it is said
    assert ("times as fast" in line) == known
    assert re.search(r"a batch .*, Lightning about .* times as fast", said[-1][1])


class UntilCompiled(pl.Callback):
    """Ends the run when it is said that its programs were compiled, or after a minute or two."""

    def __init__(self) -> None:
        self.until, self.left = time.monotonic() + 200, STRETCH_STEPS + 2

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        loads = [one.loaded for one in trainer.strategy.training.executables()]
        self.left -= not any(load.compiling for load in loads)
        trainer.should_stop = self.left == 0 or time.monotonic() > self.until
        time.sleep(0.01)


@pytest.mark.fits
@compiled
def test_the_worker_compiles_and_the_screen_says_so(
    folder: str, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speed, "STRETCH_S", 0)
    options: dict[str, Any] = {
        "static": True,
        "policy": "default",
        "backend": {"compile_dir": folder, "background": True},
        "max_epochs": -1,
    }
    run = fit(
        lambda: Classifier(mlp()), lambda: (loader(64),), callbacks=(UntilCompiled(),), **options
    )
    assert hows(run) == {"compiled"}
    assert said[0].endswith("running operation by operation until it is compiled")
    found = LINE.fullmatch(said[1])
    assert found is not None, said[1]
    assert int(found["first"].replace(",", "")) == run.trainer.global_step - STRETCH_STEPS - 1
    again = fit(
        lambda: Classifier(mlp()), lambda: (loader(64),), callbacks=(UntilCompiled(),), **options
    )
    assert hows(again) == {"loaded from the cache"}


@pytest.mark.long
@pytest.mark.numbers
def test_a_failed_compilation_does_not_end_the_run(
    folder: str,
    compile_at: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
    said: list[str],
) -> None:
    compile_at(2)
    add = background.queue.add

    def added(job: background.Job) -> background.Job:
        job.run = lambda: "torch's compiler failed: no such thing"
        return add(job)

    monkeypatch.setattr(background.queue, "add", added)
    run = fit(
        lambda: Classifier(mlp()),
        lambda: (loader(64),),
        static=True,
        policy="default",
        backend={"compile_dir": folder, "background": True},
    )
    stock = fit(lambda: Classifier(mlp()), lambda: (loader(64),), static=False)
    assert_same_run(run, stock)
    why = "run operation by operation (torch's compiler failed: no such thing)"
    assert hows(run) == {why}
    assert said[1] == f"CSX: training program is {why}"
    assert "compiled   no: torch's compiler failed: no such thing" in said[-1]
