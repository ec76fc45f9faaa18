"""What runs now: each piece of code finds in the step context what it is part of."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import QUIET, csx
from models import Classifier, loader, mlp
from torch import Tensor

import fulgurite
from fulgurite.backends.step_context import StepContext, running, step_context

stepped_by: set[tuple[bool, bool]] = set()


class Asking(torch.optim.Adam):
    """Notes who steps it: (a trace, this package on the host)."""

    def step(self, closure: Any = None) -> Any:
        now = step_context.get()
        stepped_by.add((now.trace is not None, now.steps_optimizer))
        return super().step(closure)


class Module(Classifier):
    """Notes what runs in its step, and in a hook on the host."""

    found: dict[str, StepContext]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.found["step"] = step_context.get()
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, *args: Any) -> None:
        self.found["host"] = step_context.get()

    def configure_optimizers(self) -> Any:
        return Asking(self.parameters())


def test_a_field_is_inherited_until_somebody_sets_it_and_is_put_back() -> None:
    def inside() -> None:
        with running(steps_optimizer=True):
            assert step_context.get() == StepContext(norms=[], steps_optimizer=True)
            raise ValueError("stop")

    with running(norms=[]):
        with pytest.raises(ValueError, match="stop"):
            inside()
        assert step_context.get() == StepContext(norms=[])
    assert step_context.get() == StepContext()


@pytest.mark.fits
def test_a_step_and_a_hook_know_what_they_are_part_of() -> None:
    module = Module(mlp())
    module.found = {}
    trainer = fulgurite.Trainer(backend=csx(), max_steps=2, **QUIET)
    trainer.fit(module, loader())
    step, host = module.found["step"], module.found["host"]
    assert None not in (step.trace, step.note, step.schedules, step.reads)
    assert host.is_on_host
    assert (host.trace, host.note, host.schedules, host.reads) == (None,) * 4
    assert step.norms is not host.norms
    assert stepped_by == {(True, False)}
    assert step_context.get() == StepContext()
