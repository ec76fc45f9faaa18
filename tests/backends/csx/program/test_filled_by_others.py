"""What one program leaves in an attribute, a dict or an object, others find there.

Without hooks: nothing runs on the host between the steps after which somebody would look.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness import assert_close, make_trainer
from models import Classifier, loader, mlp
from torch import Tensor, nn

Step = Callable[["Fills", Tensor], Tensor]


class Fills(Classifier):
    """The fourth batch's step, a smaller batch's or a validation fills what others read."""

    def __init__(self, use: Step, fill: Callable[[Fills, Tensor], Any], when: str) -> None:
        super().__init__(mlp())
        self.use, self.fill, self.when = use, fill, when
        self.none: Tensor | None = None
        self.flag = False
        self.table: dict[str, Any] = {"none": None}
        self.holder = SimpleNamespace(none=None)

    def loss(self, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.use(self, self.loss(batch))
        if (self.when == "one step" and batch_idx == 3) or (
            self.when == "a smaller batch" and len(batch[0]) < 16
        ):
            self.fill(self, loss.detach())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss(batch)
        if self.when == "a validation":
            self.fill(self, loss)


def away(loss: Tensor, other: Any) -> Tensor:
    return loss if other is None else loss + 0.1 * (loss - other).abs()


KINDS: dict[str, tuple[Step, Callable[[Any, Tensor], Any]]] = {
    "an attribute that is not there": (
        lambda m, loss: away(loss, m.ref) if hasattr(m, "ref") else loss,
        lambda m, loss: setattr(m, "ref", loss),
    ),
    "an attribute that is None": (
        lambda m, loss: away(loss, m.none),
        lambda m, loss: setattr(m, "none", loss),
    ),
    "a flag": (
        lambda m, loss: loss * 2 if m.flag else loss,
        lambda m, loss: setattr(m, "flag", True),
    ),
    "a key that is not there": (
        lambda m, loss: away(loss, m.table["a"]) if "a" in m.table else loss,
        lambda m, loss: m.table.update(a=loss),
    ),
    "a key that may be there": (
        lambda m, loss: away(loss, m.table.get("a")),
        lambda m, loss: m.table.__setitem__("a", loss),
    ),
    "a value that is None": (
        lambda m, loss: away(loss, m.table["none"]),
        lambda m, loss: m.table.__setitem__("none", loss),
    ),
    "an object's": (
        lambda m, loss: away(loss, m.holder.none),
        lambda m, loss: setattr(m.holder, "none", loss),
    ),
}
WHEN = ["one step", "a smaller batch", "a validation"]


def weights(static: bool, name: str, when: str, **options: Any) -> dict[str, Tensor]:
    """What two epochs leave."""
    torch.manual_seed(0)
    module = Fills(*KINDS[name], when)
    trainer = make_trainer(static, max_epochs=2, val_check_interval=3, **options)
    trainer.fit(module, loader(16 * 6 - 4), loader(32))
    return module.net.state_dict()


@pytest.mark.numbers
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("when", WHEN)
def test_it_is_found_as_under_stock(name: str, when: str) -> None:
    assert_close(weights(True, name, when), weights(False, name, when))


@pytest.mark.numbers
@pytest.mark.parametrize("name", ["an attribute that is None", "a flag", "a key that is not there"])
def test_within_a_window_too(name: str) -> None:
    ours, stock = (
        weights(static, name, "one step", accumulate_grad_batches=2) for static in (True, False)
    )
    assert_close(ours, stock)
