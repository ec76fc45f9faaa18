"""Closures run on the host after a step, in order, with concrete values."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from harness import QUIET, csx, make_trainer
from models import Classifier, loader, mlp
from torch import Tensor

import fulgurite
from fulgurite.backends import reset_backend
from fulgurite.utils.data import DataExecutor

BATCHES = [torch.full((2,), float(i)) for i in range(1, 7)]


@pytest.fixture(params=["CSX", "CPU"])
def backend(request: pytest.FixtureRequest) -> str:
    """Each of the two in turn."""
    csx() if request.param == "CSX" else fulgurite.backend("CPU")
    return str(request.param)


@pytest.fixture
def seen() -> list[Any]:
    """What closures saw."""
    return []


@pytest.fixture
def show(seen: list[Any]) -> Callable[..., None]:
    """A closure that remembers numbers and other arguments."""

    @fulgurite.step_closure
    def show(value: Any, *rest: Any, **named: Any) -> None:
        number = value.item() if isinstance(value, Tensor) else value
        seen.append((number, *rest, *named.values()) if rest or named else number)

    return show


@pytest.mark.filterwarnings("ignore:seen was changed")  # by the step, where it is traced
def test_a_closure_in_a_step_runs_after_every_step(
    backend: str, seen: list[Any], show: Callable[..., None]
) -> None:
    @fulgurite.trace
    def step(x: Tensor) -> Tensor:
        show(x.sum(), "text", named=3)
        seen.append("python")
        return x * 2

    for x in BATCHES[:2]:
        seen.append(step(x)[0].item())
    traced = [] if backend == "CSX" else ["python"]
    assert seen == ["python", (2, "text", 3), 2, *traced, (4, "text", 3), 4]


def test_closures_run_in_the_order_of_their_calls_and_take_values_as_they_were_then(
    backend: str, seen: list[Any], show: Callable[..., None]
) -> None:
    @fulgurite.trace
    def step(x: Tensor) -> Tensor:
        total = x.sum()
        show(total)
        total.add_(1)
        show(total)
        return total

    assert [step(x).item() for x in BATCHES[:2]] == [3, 5]
    assert seen == [2, 3, 4, 5]


def test_a_closure_outside_of_a_step_runs_at_once(
    backend: str, seen: list[Any], show: Callable[..., None]
) -> None:
    show(torch.ones((), requires_grad=True) * 3)
    assert seen == [3]


def test_tensors_are_detached_and_numbers_of_param_groups_are_numbers(backend: str) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    seen: list[Any] = []

    @fulgurite.step_closure
    def show(values: dict[str, Any]) -> None:
        assert not values["loss"].requires_grad
        seen.append((type(values["lr"]), values["lr"], values["weight"].clone()))

    @fulgurite.trace
    def step(x: Tensor) -> None:
        lr = optimizer.param_groups[0]["lr"]
        loss = model(x).sum()
        loss.backward()
        show({"loss": loss, "lr": lr, "weight": model[0].weight})  # type: ignore[index]
        optimizer.step()

    before = model[0].weight.detach().clone()  # type: ignore[index]
    step(torch.ones(2, 8))
    optimizer.param_groups[0]["lr"] = 0.25
    step(torch.ones(2, 8))
    assert [kind for kind, _, _ in seen] == [float, float]
    assert [lr for _, lr, _ in seen] == [0.5, 0.25]
    assert seen[0][2].equal(before)
    assert not seen[1][2].equal(before)


def test_an_exception_in_a_closure_reaches_the_caller_and_the_program_goes_on(
    backend: str,
) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    angry = True

    @fulgurite.step_closure
    def check(loss: Tensor) -> None:
        if angry:
            raise LookupError("mine")

    @fulgurite.trace
    def step(x: Tensor) -> Tensor:
        loss = model(x).sum()
        loss.backward()
        check(loss)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        return loss

    before = model[0].weight.detach().clone()  # type: ignore[index]
    with pytest.raises(LookupError, match=r"^mine$"):
        step(torch.ones(2, 8))
    assert not model[0].weight.equal(before)  # type: ignore[index]
    assert optimizer.param_groups[0]["lr"] == 0.25
    angry = False
    step(torch.ones(2, 8))
    assert optimizer.param_groups[0]["lr"] == 0.125


def test_closures_keep_name_and_signature_and_work_as_methods(backend: str) -> None:
    class Log:
        def __init__(self) -> None:
            self.seen: list[float] = []

        @fulgurite.step_closure
        def add(self, value: Tensor, times: int = 1) -> None:
            """Remember."""
            self.seen += [value.item()] * times

    log = Log()
    assert Log.add.__name__ == "add"
    assert Log.add.__doc__ == "Remember."
    assert list(inspect.signature(log.add).parameters) == ["value", "times"]

    @fulgurite.trace
    def step(x: Tensor) -> None:
        log.add(x[0], times=2)

    step(BATCHES[0])
    step(BATCHES[1])
    assert log.seen == [1, 1, 2, 2]


def test_activation_steps_choose_the_steps_of_closures(
    backend: str, seen: list[Any], show: Callable[..., None]
) -> None:
    @fulgurite.trace
    def step(x: Tensor) -> None:
        show(x[0])

    executor = DataExecutor(BATCHES[:5], activation_steps=2)
    for x in executor:
        step(x)
        show(x[0] * 10)
    assert seen == [2, 20, 4, 40, 5, 50]


def test_checkpoint_closures_run_on_checkpoint_steps(backend: str) -> None:
    inside, outside = [], []

    @fulgurite.checkpoint_closure
    def save(value: Tensor) -> None:
        inside.append(value.item())

    @fulgurite.checkpoint_closure
    def note(step: int) -> None:
        outside.append(step)

    @fulgurite.trace
    def step(x: Tensor) -> None:
        save(x.sum())

    executor = DataExecutor(BATCHES[:5], checkpoint_steps=2)
    for x in executor:
        step(x)
        note(executor.step)
    assert inside == [4, 8, 10]
    assert outside == [2, 4, 5]
    note_last: list[int] = []
    for _ in (executor := DataExecutor(BATCHES)):
        fulgurite.checkpoint_closure(note_last.append)(executor.step)
    assert note_last == [6]


def test_a_checkpoint_closure_needs_somebody_who_writes_checkpoints(backend: str) -> None:
    @fulgurite.checkpoint_closure
    def save(x: Tensor) -> None:
        raise AssertionError

    for call in (save, fulgurite.trace(lambda x: save(x))):
        with pytest.raises(RuntimeError, match=r"save\(\) was called outside of a DataExecutor"):
            call(BATCHES[0])


@pytest.mark.parametrize("wrap", [fulgurite.step_closure, fulgurite.checkpoint_closure])
def test_a_closure_is_made_of_a_function(wrap: Any) -> None:
    with pytest.raises(TypeError, match="takes a function; got int"):
        wrap(3)


# -- in Lightning ------------------------------------------------------------------------------


class Told(Classifier):
    """Calls closures in its training step."""

    def __init__(self) -> None:
        super().__init__(mlp())
        self.losses: list[float] = []
        self.saved: list[tuple[float, int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, 0)
        self.note(loss)
        self.on_save(loss)
        return loss

    @fulgurite.step_closure
    def note(self, loss: Tensor) -> None:
        """After each step."""
        self.losses.append(loss.item())

    @fulgurite.checkpoint_closure
    def on_save(self, loss: Tensor) -> None:
        """After each checkpoint."""
        self.saved.append((loss.item(), len(self.losses)))


class Saver(pl.Callback):
    """Writes a checkpoint after some steps."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: pl.Trainer, *rest: Any) -> None:
        if trainer.global_step % 4 == 0:
            trainer.save_checkpoint(self.folder / f"{trainer.global_step}.ckpt")


@pytest.mark.fits
@pytest.mark.parametrize("device", ["CSX", "stock CSX", "CPU"])
def test_closures_in_a_lightning_module(device: str, tmp_path: Path) -> None:
    module, options = Told(), {**QUIET, "max_steps": 10, "callbacks": [Saver(tmp_path)]}
    if device == "CSX":
        trainer: pl.Trainer = make_trainer(static=True, **options)
    elif device == "CPU":
        reset_backend()
        trainer = fulgurite.Trainer(device="CPU", **options)
    else:
        reset_backend()
        csx()
        trainer = pl.Trainer(strategy="csx", **options)
    trainer.fit(module, loader(count=160))
    assert len(module.losses) == 10
    assert len(set(module.losses)) == 10
    assert [step for _, step in module.saved] == [4, 8]
    assert [loss for loss, _ in module.saved] == [module.losses[3], module.losses[7]]
