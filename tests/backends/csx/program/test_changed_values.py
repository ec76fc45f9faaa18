"""A Python value that the host changes has the next step looked at, however little time is left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from changing import KINDS
from harness import defaults, fit, make_trainer
from models import Classifier, loader, mlp
from torch import Tensor, nn

from fulgurite.backends.csx.diagnostics.trace_errors import FrozenValueChanged, GraphChanged
from fulgurite.backends.csx.program import audit

pytestmark = pytest.mark.fits

EPOCHS, BATCHES = 3, 10


@pytest.fixture(autouse=True)
def no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are audits, and after those of the second batch no time for them."""
    monkeypatch.setitem(defaults, "audit", True)
    monkeypatch.setattr(audit, "SHARE", 0.0)


class Reading(Classifier):
    """Reads a weight in a dict and one of the hyperparameters, and a function."""

    def __init__(self) -> None:
        super().__init__(mlp())
        self.weights, self.loss = {"a": 1.0}, nn.functional.cross_entropy
        self.history: list[float] = []
        self.save_hyperparameters({"beta": 1.0})

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(self.net(batch[0]), batch[1])
        return loss * self.weights["a"] * self.hparams["beta"]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.history.append(1.0)  # no step reads it


class WeightAtAnEpoch(Reading):
    def on_train_epoch_start(self) -> None:
        self.weights["a"] = 1.0 - 0.5 * self.current_epoch


class Hyperparameter(Reading):
    def on_train_epoch_start(self) -> None:
        self.hparams["beta"] = 1.0 - 0.5 * self.current_epoch


class Function(Reading):
    def on_train_epoch_start(self) -> None:
        if self.current_epoch:
            self.loss = nn.functional.multi_margin_loss


class Hook(Reading):
    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.net.register_forward_hook(lambda module, given, out: out * 2)


class WeightInMidEpoch(Reading):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.global_step == 15:
            self.weights["a"] = 0.5


class Irrelevant(Reading):
    def on_train_epoch_start(self) -> None:
        self.weights["b"] = self.weights["c"] = float(self.current_epoch)


class Counting(pl.Callback):
    """Has a value for itself."""

    def __init__(self) -> None:
        self.epochs = 0

    def on_train_epoch_end(self, *args: Any) -> None:
        self.epochs += 1


def run(kind: type[Reading], callbacks: tuple[pl.Callback, ...] = (), epochs: int = EPOCHS) -> Any:
    options: dict[str, Any] = {"max_epochs": epochs, "callbacks": callbacks}
    return fit(kind, lambda: (loader(16 * BATCHES),), static=True, **options)


@pytest.mark.parametrize("kind", [WeightAtAnEpoch, Hyperparameter, Function, Hook])
def test_what_changes_between_epochs_is_told_at_the_first_step_that_would_read_it(
    kind: type[Reading],
) -> None:
    with pytest.raises(GraphChanged, match=f"between step 2 and step {BATCHES + 1};"):
        run(kind)


def test_what_a_lambda_callback_s_function_reads_is_seen_too() -> None:
    factors = {"a": 1.0}

    def scale(trainer: Any, module: Any) -> None:
        for parameter in module.parameters():
            parameter.grad.mul_(factors["a"])

    def change(trainer: Any, module: Any) -> None:
        factors["a"] = 1.0 - 0.5 * trainer.current_epoch

    callback = pl.callbacks.LambdaCallback(on_after_backward=scale, on_train_epoch_start=change)
    with pytest.raises(GraphChanged, match=f"between step 2 and step {BATCHES + 1};"):
        run(Reading, (callback,))


@pytest.mark.parametrize("options", [{}, {"max_steps": BATCHES + 3, "max_epochs": -1}])
def test_it_is_told_there_too_where_a_smaller_last_batch_has_a_program_of_its_own(
    options: dict[str, Any],
) -> None:
    with pytest.raises(GraphChanged, match=f"between step 2 and step {BATCHES + 1};"):
        fit(
            WeightAtAnEpoch,
            lambda: (loader(16 * BATCHES - 4),),
            static=True,
            **{"max_epochs": EPOCHS, **options},
        )


def test_what_changes_within_an_epoch_is_told_at_its_end_at_the_latest() -> None:
    with pytest.raises(GraphChanged, match=r"between step 2 and step (1[6-9]|20);"):
        run(WeightInMidEpoch)


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The steps that are looked at again."""
    found: list[int] = []
    look = audit.Audits._look

    def counted(self: Any, executable: Any, again: Any, step: int) -> None:
        found.append(step)
        look(self, executable, again, step)

    monkeypatch.setattr(audit.Audits, "_look", counted)
    return found


def test_a_value_that_changes_nothing_has_steps_looked_at_less_and_less_often(
    looked: list[int],
) -> None:
    assert len(run(Irrelevant, epochs=6).losses) == 6 * BATCHES
    assert looked == [2, *(BATCHES * changed + 1 for changed in (1, 2, 4)), 6 * BATCHES]
    looked.clear()
    run(Reading, callbacks=(Counting(),))
    assert looked == [2, EPOCHS * BATCHES]


AT_EVERY_TURN = ("AFrozenDataclass", "ASetThatGrew", "AnArrayFilled", "ALayersForward", "AGlobal")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in AT_EVERY_TURN else pytest.mark.long) for n in KINDS]
)
def test_each_kind_of_value(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three epochs of six steps: the seventh is the first that would read the other value."""
    # whatever comparing takes: for a name that is made up as it runs, all that there is
    monkeypatch.setattr(audit, "AT_FIRST_S", 60.0)
    with pytest.raises((GraphChanged, FrozenValueChanged)) as told:
        fit(KINDS[name], lambda: (loader(16 * 6),), static=True, max_epochs=3)
    if isinstance(told.value, GraphChanged):
        assert "between step 2 and step 7;" in str(told.value)
        assert "\n  on the host: " in str(told.value)


class AFile(Reading):
    """What no comparison sees."""

    path: Path

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * float(self.path.read_text())

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.path.write_text("2.0")


@pytest.mark.parametrize("limits", [{}, {"max_epochs": -1, "max_steps": EPOCHS * BATCHES}])
def test_a_run_with_hooks_of_the_users_ends_with_an_audit(
    tmp_path: Path, limits: dict[str, Any]
) -> None:
    AFile.path = tmp_path / "scale.txt"
    AFile.path.write_text("1.0")
    options = {"max_epochs": EPOCHS, **limits}
    with pytest.raises(GraphChanged, match=f"between step 2 and step {EPOCHS * BATCHES};"):
        fit(AFile, lambda: (loader(16 * BATCHES),), static=True, **options)


class Watching(Classifier):
    """Writes no hook but for an epoch's end."""

    def __init__(self) -> None:
        super().__init__(mlp())

    def on_train_epoch_end(self) -> None:
        self.done = self.current_epoch


@pytest.mark.parametrize(("epochs", "last"), [(1, []), (2, [2 * BATCHES])])
def test_but_not_where_no_hook_ran_since_the_last_audit(
    epochs: int, last: list[int], looked: list[int]
) -> None:
    make_trainer(True, max_epochs=epochs).fit(Watching(), loader(16 * BATCHES))
    assert looked == [2, *last]
