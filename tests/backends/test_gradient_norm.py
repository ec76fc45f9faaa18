"""``fulgurite.gradient_norm()`` on every device: the norm that gradients had before clipping."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import QUIET, csx
from models import GAN, Classifier, loader, mlp
from torch import Tensor

import fulgurite
from fulgurite import Trainer
from fulgurite.backends import reset_backend

pytestmark = pytest.mark.fits


class Norms(Classifier):
    """Logs the norm that its gradients had before clipping."""

    def __init__(self) -> None:
        super().__init__(mlp())

    def configure_gradient_clipping(
        self,
        optimizer: Any,
        gradient_clip_val: Any = None,
        gradient_clip_algorithm: Any = None,
    ) -> None:
        expected = torch.stack([p.grad.norm() for p in self.parameters()]).norm()
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
        self.log("expected", expected)
        self.log("grad_norm", fulgurite.gradient_norm())


@pytest.fixture(params=["CSX", "CPU"])
def where(request: pytest.FixtureRequest) -> dict[str, Any]:
    """A device for a Trainer."""
    reset_backend()
    return {"backend": csx()} if request.param == "CSX" else {"device": request.param}


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_the_norm_before_clipping_can_be_logged(where: dict[str, Any], precision: Any) -> None:
    trainer = Trainer(**where, **QUIET, max_steps=3, gradient_clip_val=0.01, precision=precision)
    trainer.fit(Norms(), loader())
    metrics = trainer.callback_metrics
    assert metrics["grad_norm"] > 0.01
    torch.testing.assert_close(metrics["grad_norm"], metrics["expected"])


def test_the_norm_is_that_of_the_unscaled_gradients() -> None:
    reset_backend()
    trainer = Trainer(
        backend=csx(), **QUIET, max_steps=2, gradient_clip_val=0.01, precision="16-mixed"
    )
    trainer.fit(Norms(), loader())
    assert 0.01 < trainer.callback_metrics["grad_norm"] < 100


class AsksAlways(Norms):
    """Asks in every step, and clips in the first alone."""

    def configure_gradient_clipping(self, optimizer: Any, *rest: Any, **options: Any) -> None:
        self.calls["clip"] += 1
        if self.calls["clip"] == 1:
            self.clip_gradients(optimizer, 0.01, "norm")
        fulgurite.gradient_norm()


def test_a_norm_belongs_to_its_step() -> None:
    reset_backend()
    trainer = Trainer(device="CPU", **QUIET, max_steps=2)
    with pytest.raises(RuntimeError, match="nothing was clipped by norm in this step"):
        trainer.fit(AsksAlways(), loader())
    assert trainer.global_step == 1


@pytest.mark.parametrize(
    "clip", [{}, {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"}]
)
def test_without_clipping_by_norm_there_is_none(
    where: dict[str, Any], clip: dict[str, Any]
) -> None:
    trainer = Trainer(**where, **QUIET, max_steps=1, **clip)
    with pytest.raises(RuntimeError, match=r"gradient_norm\(\).*nothing was clipped by norm"):
        trainer.fit(Norms(), loader())


def test_outside_of_a_run_there_is_none() -> None:
    with pytest.raises(RuntimeError, match="no training step runs"):
        fulgurite.gradient_norm()


class ManualNorms(GAN):
    """Logs the norm after clipping by hand."""

    def clip_gradients(self, *args: Any, **options: Any) -> None:
        super().clip_gradients(*args, **options)
        self.log("grad_norm", fulgurite.gradient_norm())


def test_under_manual_optimization_it_is_there_too(where: dict[str, Any]) -> None:
    trainer = Trainer(**where, **QUIET, max_steps=2)
    trainer.fit(ManualNorms(), loader())
    norm: Tensor = trainer.callback_metrics["grad_norm"]
    assert norm > 0
