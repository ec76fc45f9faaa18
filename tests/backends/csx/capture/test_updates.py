"""Audits leave out what torch's and our optimizers do, and still see all that goes into it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import defaults, fit
from models import Classifier, loader, mlp
from torch import Tensor, nn

import fulgurite
from fulgurite.backends.csx.diagnostics.trace_errors import GraphChanged
from fulgurite.backends.csx.program import audit

pytestmark = pytest.mark.fits

BATCHES, CHANGES_AT = 6, 4


@pytest.fixture(autouse=True)
def every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step is looked at again."""
    monkeypatch.setitem(defaults, "audit", True)
    monkeypatch.setattr(audit, "EVERY_STEP", True)


@pytest.fixture
def outlines(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each trace of an audit, whether it left updates out."""
    found: list[bool] = []
    trace = audit.Audits._trace

    def noted(self: Any, first: Any, *args: Any) -> Any:
        found.append(first.is_outline)
        return trace(self, first, *args)

    monkeypatch.setattr(audit.Audits, "_trace", noted)
    return found


class OwnSGD(torch.optim.SGD):
    """Of a class of the user's, whose code may be anything."""


OPTIMIZERS = {
    "torch": lambda p: torch.optim.AdamW(p, fused=False),
    "fused": lambda p: torch.optim.Adam(p, fused=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "ours": lambda p: fulgurite.optim.Lamb(p, lr=0.1),
}


class Trained(Classifier):
    """An ``optimizer`` under a schedule, clipped."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__(mlp())
        self.make = optimizer

    def configure_optimizers(self) -> Any:
        optimizer = self.make(self.parameters())
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


def run(module: Any, **options: Any) -> Any:
    return fit(module, lambda: (loader(16 * BATCHES),), static=True, **options)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_of_torch_and_ours_are_left_out(name: str, outlines: list[bool]) -> None:
    run(lambda: Trained(OPTIMIZERS[name]), gradient_clip_val=1.0, max_epochs=2)
    assert outlines == [True] * (2 * BATCHES - 1)


def test_those_of_other_classes_are_traced(outlines: list[bool]) -> None:
    run(lambda: Trained(lambda p: OwnSGD(p, lr=0.1)))
    assert set(outlines) == {False}


def test_a_loss_scale_needs_the_whole_update(outlines: list[bool]) -> None:
    run(lambda: Trained(OPTIMIZERS["torch"]), precision="16-mixed")
    assert set(outlines) == {False}


class Changing(Classifier):
    """A manual step whose ``flag`` the host changes."""

    def __init__(self) -> None:
        super().__init__(mlp())
        self.automatic_optimization = False
        self.flag = True
        self.register_buffer("mean", torch.zeros(()))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.flag = batch_idx < CHANGES_AT or not self.changes

    changes = True

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(nn.functional.cross_entropy(self.net(batch[0]), batch[1]))
        self.rest(optimizer)

    def rest(self, optimizer: Any) -> None:
        optimizer.step()


class ReadsWhatWasUpdated(Changing):
    changes = False

    def rest(self, optimizer: Any) -> None:
        super().rest(optimizer)
        self.mean.lerp_(self.net[0].weight.detach().mean(), 0.5)


class Steps(Changing):
    def rest(self, optimizer: Any) -> None:
        if vars(self)["flag"]:
            optimizer.step()


class DropsAGradient(Changing):
    def rest(self, optimizer: Any) -> None:
        if not vars(self)["flag"]:
            self.net[0].weight.grad = None
        optimizer.step()


class ScalesAGradient(Changing):
    def rest(self, optimizer: Any) -> None:
        gradient: Tensor = self.net[0].weight.grad
        gradient.mul_(1.0 if vars(self)["flag"] else 0.5)
        optimizer.step()


class ReadsBefore(Changing):
    def rest(self, optimizer: Any) -> None:
        first = vars(self)["flag"]
        if first:
            self.mean.copy_(self.net[0].weight.detach().sum())
        optimizer.step()
        if not first:
            self.mean.copy_(self.net[0].weight.detach().sum())


def test_what_reads_updated_parameters_is_the_same_program(outlines: list[bool]) -> None:
    run(ReadsWhatWasUpdated)
    assert outlines == [True] * (BATCHES - 1)


@pytest.mark.parametrize("kind", [Steps, DropsAGradient, ScalesAGradient, ReadsBefore])
def test_what_changes_around_an_update_is_told(kind: type[Changing]) -> None:
    with pytest.raises(GraphChanged, match=f"between step {CHANGES_AT} and step {CHANGES_AT + 1}"):
        run(kind)
