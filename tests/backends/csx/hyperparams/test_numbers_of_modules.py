"""Numbers in attributes of modules that steps set and change are followed, as eagerly."""

from __future__ import annotations

import copy
import warnings
from collections import Counter, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from harness import assert_close, assert_same_run, both
from models import Classifier, loader, mlp
from torch import Tensor, nn

from fulgurite.errors import FrozenValueWarning, UnsupportedState

pytestmark = pytest.mark.fits


class Keeps(Classifier):
    """``work(module, loss, batch_idx)`` weighs the loss; ``noted`` has what is left after steps."""

    def __init__(self, work: Callable[..., Any], **attributes: Any) -> None:
        super().__init__(mlp())
        self.work, self.noted = work, list[Any]()
        for name, value in attributes.items():
            setattr(self, name, value)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        worked = self.work(self, loss, batch_idx)
        return loss if worked is None else worked

    def on_train_batch_end(self, *args: Any) -> None:
        """Note number and type of each attribute with a short name."""
        own = {key: value for key, value in vars(self).items() if len(key) == 1}
        self.noted.append([(key, type(value).__name__, str(value)) for key, value in own.items()])


def count(module: Any, loss: Tensor, batch_idx: int) -> Tensor:
    module.n += 1
    return loss / module.n


def decay(module: Any, loss: Tensor, batch_idx: int) -> Tensor:
    module.n *= 0.9
    module.log("n", module.n)
    return loss * (1 + module.n)


def anneal(module: Any, loss: Tensor, batch_idx: int) -> Tensor:
    module.n = min(1.0, module.global_step / 4)
    return loss * (1 + module.n)


def every_third(module: Any, loss: Tensor, batch_idx: int) -> Tensor:
    module.n = module.n + 1 if module.n < 2 else 0
    return loss * 2 if module.n == 0 else loss


def previous(module: Any, loss: Tensor, batch_idx: int) -> Tensor:
    before, module.n = module.n, batch_idx
    return loss * (2 + before)


def size(module: Any, loss: Tensor, batch_idx: int) -> None:
    module.n = module.net[0].weight.ndim


def begun(module: Any, loss: Tensor, batch_idx: int) -> Tensor:
    module.n = 1 if module.n is None else module.n + 1
    return loss / module.n


def not_there(module: Any, loss: Tensor, batch_idx: int) -> Tensor:
    module.n = getattr(module, "n", 0) + 1
    return loss / module.n


def begun_with_data(module: Any, loss: Tensor, batch_idx: int) -> Tensor:
    if module.mean is None:
        module.mean, module.n = loss.detach(), 0
    else:
        module.n += 1
        module.mean = 0.9 * module.mean + 0.1 * loss.detach()
    return loss + module.mean * module.n


def becomes_a_float(module: Any, loss: Tensor, batch_idx: int) -> Tensor:
    module.n = module.n + 0.25
    return loss * module.n


def taken_away(module: Any, loss: Tensor, batch_idx: int) -> Tensor:
    del module.n
    module.n = 7
    return loss * module.n


def bits(module: Any, loss: Tensor, batch_idx: int) -> Tensor:
    module.n += 1
    if module.n & 1:
        loss = loss * 2
    return loss * (1 + (module.n >> 1)) * (1 + (batch_idx ^ 1))


def by_turns(module: Any, loss: Tensor, batch_idx: int) -> None:
    word = isinstance(module.n, str)
    module.n = 0 if word else "word" if module.n == 2 else module.n + 1


def in_a_dict(module: Any, loss: Tensor, batch_idx: int) -> Tensor:
    module.d["of"]["n"] += 1
    return loss / module.d["of"]["n"]


def in_a_new_key(module: Any, loss: Tensor, batch_idx: int) -> Tensor:
    module.d["n"] = module.d.get("n", 0) + 1
    module.c["rows"] += len(loss[None])
    return loss / (module.d["n"] + module.c["rows"])


def in_containers(module: Any, loss: Tensor, batch_idx: int) -> Tensor:
    """A later step reads there what this one leaves."""
    weight = module.pair[1] + module.cell[0] + module.of.n + sum(module.window) + sum(module.last)
    module.n += 1
    module.pair, module.cell[0], module.of.n = (module.pair[1], module.n), module.n, module.n
    module.window = [*module.window, module.n][-3:]
    module.last.append(module.n / 2)
    return loss / (1 + weight)


def by_constants(module: Any, loss: Tensor, batch_idx: int) -> Tensor:
    module.n = 1.0 if batch_idx < 1 else 0.5 if batch_idx < 3 else 0.1
    return loss * module.n


def with_a_flag(module: Any, loss: Tensor, batch_idx: int) -> Tensor:
    module.n += 1
    module.f = module.n % 2 == 0
    return loss * (1 + module.f)


def in_functions(module: Any, loss: Tensor, batch_idx: int) -> Tensor:
    module.n += 0.1
    w = module.net[0].weight
    least = nn.functional.gaussian_nll_loss(w[0], w[1], w[2].square(), eps=module.n)
    placed = w.scatter(1, torch.zeros(len(w), 1, dtype=torch.long), module.n).square().mean()
    return loss + least + placed + w.quantile(module.n / 4) + pow(batch_idx, 2, 3)


WORK: dict[str, tuple[Callable[..., Any], dict[str, Any], int]] = {
    "counted": (count, {"n": 0}, 1),
    "a factor": (decay, {"n": 1.0}, 1),
    "annealed": (anneal, {"n": 0.0}, 2),
    "annealed, not there before": (anneal, {}, 2),
    "every third": (every_third, {"n": 0}, 2),
    "the one before": (previous, {"n": -1}, 1),
    "the same each time": (size, {"n": 0}, 1),
    "None before": (begun, {"n": None}, 2),
    "not there before": (not_there, {}, 2),
    "begun with data": (begun_with_data, {"mean": None, "n": None}, 1),
    "an int that becomes a float": (becomes_a_float, {"n": 1}, 2),
    "taken away and set": (taken_away, {"n": 0}, 1),
    "bits": (bits, {"n": 0}, 2),
    "a number and a string by turns": (by_turns, {"n": 0}, 3),
    "in a dict": (in_a_dict, {"d": {"of": {"n": 0}}}, 1),
    "under new keys of dicts": (in_a_new_key, {"d": {}, "c": Counter()}, 2),
    "by constants": (by_constants, {"n": 1.0}, 3),
    "a flag that follows": (with_a_flag, {"n": 0, "f": False}, 2),
    "in functions of torch": (in_functions, {"n": 0.0}, 1),
}


@pytest.mark.numbers
@pytest.mark.parametrize("name", WORK)
def test_they_are_what_they_are_under_stock(name: str) -> None:
    work, attributes, programs = WORK[name]

    def make() -> Keeps:
        return Keeps(work, **copy.deepcopy(attributes))

    with warnings.catch_warnings():
        warnings.simplefilter("error", FrozenValueWarning)
        ours, stock = both(make, lambda: (loader(64),), max_epochs=2)
    assert_same_run(ours, stock)
    assert ours.module.noted == stock.module.noted
    assert len(ours.trainer.strategy.programs) == programs  # not one for each value


@pytest.mark.numbers
def test_what_later_steps_find_in_containers_is_followed() -> None:
    def make() -> Keeps:
        last, of = deque([0.0] * 3, maxlen=3), SimpleNamespace(n=0)
        return Keeps(in_containers, n=0, pair=(0, 0), cell=[0], of=of, window=[], last=last)

    ours, stock = both(make, lambda: (loader(64),), max_epochs=2)
    assert_same_run(ours, stock)
    assert list(map(float, ours.module.last)) == list(stock.module.last)
    assert len(ours.trainer.strategy.programs) == 1


def grows(module: Any, loss: Tensor, batch_idx: int) -> Tensor:
    module.n = (module.n * 1103515245 + 12345) % 2**31  # here
    return loss * (module.n / 2**31)


def test_whole_numbers_that_no_float64_has_are_an_error() -> None:
    with pytest.raises(UnsupportedState) as caught:
        both(lambda: Keeps(grows, n=1), lambda: (loader(64),))
    assert "a program has whole numbers up to 2**53" in str(caught.value)
    assert caught.value.line is not None
    assert caught.value.line.source.endswith("# here")


class SetsThem(pl.Callback):
    """Begins anew with each epoch, with a number and then with nothing."""

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        pl_module.n = None if trainer.current_epoch == 2 else 3


@pytest.mark.numbers
def test_a_hook_may_set_them_too() -> None:
    made = lambda: Keeps(begun, n=None)  # noqa: E731
    ours, stock = both(made, lambda: (loader(64),), callbacks=(SetsThem(),), max_epochs=3)
    assert_same_run(ours, stock)
    assert ours.module.noted == stock.module.noted


class Validated(Keeps):
    """Asks in validation for what the training step keeps, and counts batches there."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.v += 1
        self.log("mean", loss * (1 + self.n) / self.v)
        self.log("n", self.n)
        self.log("either", loss if self.n < 0.9 else -loss)


@pytest.mark.numbers
def test_an_evaluation_asks_for_what_training_steps_keep() -> None:
    made = lambda: Validated(anneal, n=0.0, v=0)  # noqa: E731
    ours, stock = both(made, lambda: (loader(64), loader(32)), max_epochs=3)
    assert_same_run(ours, stock)
    assert_close(ours.trainer.callback_metrics, stock.trainer.callback_metrics)
    assert (ours.module.n, ours.module.v) == (stock.module.n, stock.module.v) == (1.0, 8)


def stops(module: Any, loss: Tensor, batch_idx: int) -> None:
    module.n += 1
    if module.n > 5:
        module.trainer.should_stop = True


@pytest.mark.numbers
def test_a_run_stops_at_a_number_that_the_step_counts() -> None:
    made = lambda: Keeps(stops, n=0)  # noqa: E731
    ours, stock = both(made, lambda: (loader(64),), max_epochs=3)
    assert ours.trainer.global_step == stock.trainer.global_step == 6


def takes_the_value(module: Any, loss: Tensor, batch_idx: int) -> Tensor:
    module.n += 1
    return loss * len(range(module.n))  # here


@pytest.mark.numbers
def test_who_takes_the_value_is_warned_once() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        both(lambda: Keeps(takes_the_value, n=0), lambda: (loader(64),), max_epochs=2)
    [warning] = [one for one in caught if one.category is FrozenValueWarning]
    text = "self.n was read while the step was traced; the program keeps its value, 1, in "
    assert str(warning.message).startswith(text)
    assert warning.lineno == takes_the_value.__code__.co_firstlineno + 2


def becomes_a_tensor(module: Any, loss: Tensor, batch_idx: int) -> None:
    module.n = module.n + 1 if batch_idx < 2 else loss.detach()


def test_a_number_that_becomes_a_tensor_is_an_error() -> None:
    with pytest.raises(UnsupportedState) as caught:
        both(lambda: Keeps(becomes_a_tensor, n=0), lambda: (loader(64),))
    assert "self.n is a Python number, and the step made it a " in str(caught.value)
    assert caught.value.remedy == "keep it a number, or a tensor from the start"


@pytest.mark.numbers
def test_they_go_on_where_steps_run_as_in_lightning() -> None:
    def batches() -> tuple[Any, ...]:
        drawn = torch.Generator().manual_seed(0)
        sizes = [4, 5, 6, 7, 8, 9, 10, 4, 9, 5, 10]
        rows = [torch.randn(size, 8, generator=drawn) for size in sizes]
        return (torch.utils.data.DataLoader([(x, x[:, 0].gt(0).long()) for x in rows], None),)

    made = lambda: Keeps(count, n=0)  # noqa: E731
    ours, stock = both(made, batches, max_epochs=2)
    assert_same_run(ours, stock)
    assert ours.module.noted == stock.module.noted
