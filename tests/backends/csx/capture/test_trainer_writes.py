"""What a step sets on the Trainer."""

from __future__ import annotations

from typing import Any

import pytest
from harness import both, fit
from idioms.base import Example
from models import loader

from fulgurite import FrozenValueWarning
from fulgurite.errors import UnsupportedState

pytestmark = pytest.mark.fits


class Always(Example):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.trainer.should_stop = True
        return super().training_step(batch, batch_idx)


class Later(Example):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.trainer.global_step >= 2:
            self.trainer.should_stop = True
        return super().training_step(batch, batch_idx)


class LaterElsewhere(Example):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.global_step == 2:
            self.stop()

    def stop(self) -> None:
        self.trainer.should_stop = True


class Configured(Example):
    def __init__(self) -> None:
        super().__init__()
        self.settings = {"stop": False}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.settings["stop"]:
            self.trainer.should_stop = True
        return super().training_step(batch, batch_idx)


class Counts(Example):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.trainer.seen = getattr(self.trainer, "seen", 0) + 1
        return super().training_step(batch, batch_idx)


@pytest.mark.numbers
@pytest.mark.parametrize("options", [{}, {"min_steps": 4, "max_epochs": 3}])
def test_a_step_that_always_stops_the_run_stops_it_as_in_stock(options: dict[str, Any]) -> None:
    ours, stock = both(Always, lambda: (loader(96),), **options)
    assert ours.trainer.global_step == stock.trainer.global_step


@pytest.mark.numbers
@pytest.mark.parametrize("make", [Later, LaterElsewhere])
def test_one_that_stops_it_later_stops_it_as_in_stock(make: Any) -> None:
    ours, stock = both(make, lambda: (loader(96),))
    assert ours.trainer.global_step == stock.trainer.global_step == 3


class LaterByValue(Example):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if int(self.trainer.global_step) >= 2:
            self.trainer.should_stop = True
        return super().training_step(batch, batch_idx)


class LaterByFlag(Example):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        trainer, flag = self.trainer, int(self.trainer.global_step) >= 2
        trainer.should_stop = flag
        return super().training_step(batch, batch_idx)


WITHOUT_SOURCE: dict[str, Any] = {"Example": Example, "__name__": __name__}
exec(
    """
class LaterWithoutSource(Example):
    def training_step(self, batch, batch_idx):
        if int(self.trainer.global_step) >= 2:
            self.trainer.should_stop = True
        return super(LaterWithoutSource, self).training_step(batch, batch_idx)
""",
    WITHOUT_SOURCE,
)


@pytest.mark.filterwarnings("ignore:global_step was read")
@pytest.mark.parametrize("make", [WITHOUT_SOURCE["LaterWithoutSource"], LaterByFlag])
def test_one_that_would_stop_it_later_is_an_error(make: Any) -> None:
    with pytest.raises(UnsupportedState, match="the program never sets it"):
        fit(make, lambda: (loader(96),), static=True)


@pytest.mark.filterwarnings("ignore:global_step was read")
@pytest.mark.parametrize("make", [LaterByValue])
def test_one_that_would_stop_it_later_is_an_error_on_its_line(make: Any) -> None:
    with pytest.raises(UnsupportedState, match="the program never sets it") as caught:
        fit(make, lambda: (loader(96),), static=True)
    assert caught.value.line is not None
    assert caught.value.line.source == "self.trainer.should_stop = True"
    assert "on_train_batch_end" in caught.value.remedy


def test_where_nothing_is_known_of_the_condition_it_warns() -> None:
    with pytest.warns(FrozenValueWarning, match="the program never sets it, in "):
        fit(Configured, lambda: (loader(96),), static=True)


def test_another_change_of_the_trainer_happens_once_and_warns() -> None:
    with pytest.warns(FrozenValueWarning, match=r"trainer\.seen was changed while"):
        run = fit(Counts, lambda: (loader(96),), static=True)
    assert run.trainer.seen == 1
