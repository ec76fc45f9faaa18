"""A step that asks for the trainer's state has a program for each answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from harness import make_trainer
from models import Classifier, loader, mlp
from torch import Tensor, nn
from torch.utils.data import DataLoader

from fulgurite.backends.csx.diagnostics.trace_errors import InputChanged


class Asks(Classifier):
    """Validation that is another one in the sanity check, in fit and in ``validate``."""

    def __init__(self) -> None:
        super().__init__(mlp())
        self.ends: list[dict[str, float]] = []
        self.results: list[Any] = []

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.results.append((str(self.trainer.state.stage), outputs))

    def on_validation_epoch_end(self) -> None:
        named = {k: float(v) for k, v in self.trainer.callback_metrics.items() if "/" in k}
        self.ends.append(named)


class Returns(Asks):
    """Nothing is computed in the sanity check."""

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        if self.trainer.sanity_checking:
            return None
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("val/loss", loss)
        return loss


class Names(Asks):
    """What is logged is called by the stage."""

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log(f"{self.trainer.state.stage}/loss", loss)
        self.log(f"{self.trainer.state.fn}/twice", 2 * loss)
        return loss


def runs(kind: type[Asks], static: bool, **options: Any) -> tuple[Asks, pl.Trainer]:
    torch.manual_seed(0)
    module = kind()
    trainer = make_trainer(static, max_epochs=2, **options)
    torch.manual_seed(7)
    trainer.fit(module, loader(64), loader(32))
    trainer.validate(module, loader(32), verbose=False)
    trainer.validate(module, loader(32), verbose=False)
    return module, trainer


def assert_same(ours: Asks, stock: Asks) -> None:
    assert [list(one) for one in ours.ends] == [list(one) for one in stock.ends]
    for a, b in zip(ours.ends, stock.ends, strict=True):
        assert a == pytest.approx(b, rel=1e-5)
    assert [stage for stage, _ in ours.results] == [stage for stage, _ in stock.results]
    for (_, a), (_, b) in zip(ours.results, stock.results, strict=True):
        assert (a is None) == (b is None)
        assert a is None or float(a) == pytest.approx(float(b), rel=1e-5)


@pytest.mark.numbers
@pytest.mark.parametrize(("kind", "programs"), [(Returns, 2), (Names, 3)])
def test_each_answer_has_a_program_and_none_counts(kind: type[Asks], programs: int) -> None:
    ours, trainer = runs(kind, True)
    stock, _ = runs(kind, False)
    assert_same(ours, stock)
    built: list[Any] = trainer.strategy.step_functions["validation"].programs  # type: ignore[attr-defined]
    assert len(built) == programs


@pytest.mark.long
@pytest.mark.numbers
@pytest.mark.process
def test_compiled_programs_of_equal_graphs_are_compiled_once(tmp_path: Path) -> None:
    ours, _ = runs(Names, True, policy="default", backend={"compile_dir": str(tmp_path)})
    stock, _ = runs(Names, False)
    assert_same(ours, stock)
    entries = [entry for entry in tmp_path.iterdir() if len(entry.name) == 64]
    assert len(entries) == 2  # training's, and one for three validations


@pytest.mark.fits
def test_a_step_that_does_not_ask_has_one_program() -> None:
    class Silent(Asks):
        def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.net(batch[0]).sum()

    _, trainer = runs(Silent, True)
    assert len(trainer.strategy.step_functions["validation"].programs) == 1  # type: ignore[attr-defined]


@pytest.mark.fits
def test_another_shape_is_still_another_program() -> None:
    data: Any = [(torch.ones(n, 8), torch.zeros(n).long()) for n in (16, 16, 8)]
    options: dict[str, Any] = {"max_epochs": 1, "num_sanity_val_steps": 1}
    trainer = make_trainer(True, backend={"max_programs": 1}, **options)
    with pytest.raises(InputChanged, match="allows 1 per stage"):
        trainer.fit(Names(), loader(32), DataLoader(data, batch_size=None))


@pytest.mark.fits
def test_training_may_ask(recwarn: pytest.WarningsRecorder) -> None:
    class Trains(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            assert self.trainer.training
            assert not self.trainer.sanity_checking
            assert not self.trainer.evaluating
            assert self.trainer.state.fn == "fit"
            return super().training_step(batch, batch_idx)

    make_trainer(True, max_epochs=2).fit(Trains(mlp()), loader(32))
