"""Batches that are objects: steps work on their tensors, hooks see the user's own."""

from __future__ import annotations

import collections
import weakref
from dataclasses import dataclass, field
from functools import cached_property
from types import SimpleNamespace
from typing import Any, NamedTuple

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from harness import make_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from fulgurite.backends import reset_backend
from fulgurite.backends.csx.diagnostics.trace_errors import (
    InputChanged,
    LeakedTensor,
    UnsupportedInput,
)

COUNT = 4


def x_of(i: int) -> Tensor:
    return torch.linspace(-1, 1, 6).reshape(2, 3) + 0.1 * i


@dataclass
class Plain:
    """A dataclass."""

    x: Tensor
    name: str = "a"
    scale: float = 2.0
    more: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def doubled(self) -> Tensor:
        return self.x * 2


@dataclass(frozen=True)
class Frozen:
    """One that nobody may change."""

    x: Tensor


class Slots:
    """No ``__dict__``."""

    __slots__ = ("name", "x")

    def __init__(self, x: Tensor, name: str) -> None:
        self.x, self.name = x, name


class Encoding(collections.UserDict[str, Any]):
    """Its items are its attributes, as a tokenizer's are."""

    def __getattr__(self, name: str) -> Any:
        if name == "data":
            raise AttributeError(name)
        return self.data[name]


class Graph:
    """Objects in an object, an array, a class and a function."""

    def __init__(self, x: Tensor) -> None:
        self.store = SimpleNamespace(x=x, parent=Frozen)
        self.ids, self.made_by = np.arange(3), len

    @property
    def x(self) -> Tensor:
        return self.store.x

    def shifted(self, by: float) -> Tensor:
        return self.x + by


class Pair(NamedTuple):
    """An object within a tuple."""

    first: Plain
    weight: Tensor


def plain(i: int) -> Plain:
    return Plain(x_of(i), f"{i}.png", more={"w": torch.full((), 1.0 + i), "ids": [i, i + 1]})


MAKERS: dict[str, Any] = {
    "dataclass": (plain, lambda b: b.x * b.scale + b.more["w"]),
    "cached": (plain, lambda b: b.doubled + b.doubled),
    "in a frozen one": (lambda i: SimpleNamespace(of=Frozen(x_of(i))), lambda b: b.of.x),
    "slots": (lambda i: Slots(x_of(i), f"{i}"), lambda b: b.x),
    "encoding": (lambda i: Encoding(x=x_of(i), ids=x_of(i) + 1), lambda b: b.x * b["ids"]),
    "namespace": (lambda i: SimpleNamespace(x=x_of(i)), lambda b: b.x),
    "graph": (lambda i: Graph(x_of(i)), lambda b: b.shifted(0.5)),
    "named tuple": (lambda i: Pair(plain(i), torch.ones(2, 1) * i), lambda b: b[0].x * b.weight),
    "list": (lambda i: [plain(i), plain(i + 1)], lambda b: b[0].x - b[1].x * 3),
    "dict": (lambda i: {"a": plain(i), "w": x_of(i)}, lambda b: b["a"].x * b["w"]),
}


class Model(pl.LightningModule):
    """Every stage computes ``does`` of the batch; what hooks see is recorded."""

    def __init__(self, does: Any, look: Any = None) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.does, self.look = does, look
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.layer(self.does(batch)).square().mean()
        self.log("loss", loss, batch_size=2)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.training_step(batch, batch_idx)

    test_step = validation_step

    def see(self, outputs: Any, batch: Any) -> None:
        loss = outputs["loss"] if isinstance(outputs, dict) else outputs
        self.seen.append((float(loss), None if self.look is None else self.look(batch)))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.see(outputs, batch)

    def on_test_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.see(outputs, batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def given(batches: list[Any]) -> DataLoader[Any]:
    return DataLoader(batches, batch_size=None, collate_fn=lambda batch: batch)  # type: ignore[arg-type]


def run(make: Any, does: Any, static: bool, method: str = "fit", look: Any = None) -> Model:
    torch.manual_seed(1)
    model = Model(does, look)
    loader = given([make(i) for i in range(COUNT)])
    trainer = make_trainer(static, max_epochs=2)
    trainer.fit(model, loader, loader) if method == "fit" else trainer.test(model, loader)
    if static:
        reset_backend()
    return model


def assert_same(ours: Model, stock: Model) -> None:
    assert [one for _, one in ours.seen] == [one for _, one in stock.seen]
    losses = [[loss for loss, _ in model.seen] for model in (ours, stock)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.numbers
@pytest.mark.parametrize("method", ["fit", "test"])
@pytest.mark.parametrize("kind", MAKERS)
def test_a_step_computes_on_objects_as_eagerly(kind: str, method: str) -> None:
    make, does = MAKERS[kind]
    ours, stock = (run(make, does, static, method) for static in (True, False))
    assert_same(ours, stock)
    assert len(ours.seen) == COUNT * (2 if method == "fit" else 1)


def test_hooks_see_the_users_own_object_and_what_the_step_set_on_it() -> None:
    def does(batch: Plain) -> Tensor:
        batch.prediction = batch.x.sum(1)  # type: ignore[attr-defined]
        batch.x = batch.x + 1
        batch.more["new"] = batch.x.max()
        batch.kept = batch.name  # type: ignore[attr-defined]
        return batch.x

    def look(batch: Any) -> Any:
        kept = batch.prediction.tolist(), batch.x.tolist(), batch.more["new"].item()
        return type(batch), kept, batch.name, batch.kept, list(batch.more), sorted(vars(batch))

    def fresh(static: bool) -> Model:
        return run(plain, does, static, "test", look)

    assert_same(fresh(True), fresh(False))


@pytest.mark.numbers
def test_an_object_that_comes_again_has_what_the_step_set() -> None:
    def does(batch: Plain) -> Tensor:
        batch.prediction = batch.x.sum(1)  # type: ignore[attr-defined]
        return batch.x

    look = lambda batch: batch.prediction.tolist()  # noqa: E731
    assert_same(run(plain, does, True, look=look), run(plain, does, False, look=look))


@pytest.mark.numbers
def test_a_tensor_that_the_step_writes_in_place_is_the_users() -> None:
    def does(batch: Plain) -> Tensor:
        return batch.x.mul_(2)

    look = lambda batch: batch.x.tolist()  # noqa: E731
    assert_same(run(plain, does, True, look=look), run(plain, does, False, look=look))


@pytest.mark.fits
def test_what_the_step_read_of_an_object_may_not_change() -> None:
    def make(i: int) -> Plain:
        return Plain(x_of(i), scale=2.0 + (i == 2))

    with pytest.raises(InputChanged, match=r"batch\.scale was 2\.0.*now\s+is 3\.0"):
        run(make, lambda b: b.x * b.scale, True)


@pytest.mark.fits
def test_objects_of_other_classes_are_an_error() -> None:
    def make(i: int) -> Any:
        return Slots(x_of(i), "a") if i == 2 else SimpleNamespace(x=x_of(i))

    with pytest.raises(InputChanged, match="it had SimpleNamespace, and now Slots"):
        run(make, lambda b: b.x, True)


class Meta:
    """No tensors."""

    def __init__(self, length: int) -> None:
        self.length = length


@pytest.mark.numbers
def test_an_object_without_tensors_in_an_object_cannot_be_read() -> None:
    def make(i: int) -> Any:
        return SimpleNamespace(x=x_of(i), meta=Meta(i + 1))

    with pytest.raises(UnsupportedInput, match=r"batch\.meta is a Meta"):
        run(make, lambda b: b.x[: b.meta.length], True)
    assert_same(*(run(make, lambda b: b.x, static) for static in (True, False)))


@pytest.mark.fits
def test_a_function_of_an_object_is_compared_and_a_method_refused() -> None:
    with pytest.raises(InputChanged, match="it had SimpleNamespace, len, and now"):
        run(
            lambda i: SimpleNamespace(x=x_of(i), f=len if i < 2 else max),
            lambda b: b.x * b.f(b.x),
            True,
        )

    class Bound:
        def __init__(self, x: Tensor) -> None:
            self.x, self.f = x, self.double

        def double(self) -> Tensor:
            return self.x * 2

    with pytest.raises(UnsupportedInput, match=r"batch\.f is a method"):
        run(lambda i: Bound(x_of(i)), lambda b: b.f(), True)


@pytest.mark.fits
def test_objects_that_lead_back_are_refused() -> None:
    def ring(i: int) -> Any:
        outer = SimpleNamespace(x=x_of(i), inner=SimpleNamespace(x=x_of(i)))
        outer.inner.outer = outer
        return outer

    class Weak:
        def __init__(self, x: Tensor) -> None:
            self.x, self.me = x, weakref.ref(self)

    for make in (ring, lambda i: Weak(x_of(i))):
        with pytest.raises(UnsupportedInput, match="leads back to itself"):
            run(make, lambda b: b.x, True)
        reset_backend()


@pytest.mark.fits
def test_an_array_of_an_object_cannot_be_used() -> None:
    with pytest.raises(UnsupportedInput, match=r"batch\.ids is a ndarray"):
        run(lambda i: Graph(x_of(i)), lambda b: b.x * int(b.ids[0]), True)


class Returns(Model):
    """The step returns its batch beside the loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": self.layer(batch[0].x).mean(), "batch": batch[0], "all": batch}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append((outputs["batch"] is batch[0], outputs["all"][1] is batch[1]))


@pytest.mark.fits
def test_an_object_that_the_step_returns_is_the_users() -> None:
    model = Returns(None)
    make_trainer(True, max_epochs=1).fit(model, given([[plain(i), plain(2 * i)] for i in range(3)]))
    assert model.seen == [(True, True)] * 3


class Keeps(Model):
    """The step keeps its batch on the module."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.last = batch
        return self.layer(batch.x).mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(self.last.x.sum().item())


@pytest.mark.fits
@pytest.mark.long
def test_an_object_that_the_step_keeps_elsewhere_is_an_error() -> None:
    with pytest.raises(LeakedTensor, match=r"batch\.x"):
        make_trainer(True, max_epochs=1).fit(Keeps(None), given([plain(0), plain(1)]))
