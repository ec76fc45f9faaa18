"""A number that a program follows meets tensors of 16 bits: rounded where eager kernels round."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import both
from models import Classifier, loader, mlp
from torch import Tensor, nn


def foreach_mul(b: Tensor, x: Tensor, n: Any) -> Tensor:
    torch._foreach_mul_([b], n)
    return b * 1


WORKS: dict[str, Callable[[Tensor, Tensor, Any], Tensor]] = {
    "added": lambda b, x, n: x + n,
    "taken from": lambda b, x, n: n - x,
    "multiplied": lambda b, x, n: b.mul_(n),
    "divided by": lambda b, x, n: x / n,
    "divided": lambda b, x, n: n / (x.abs() + 1),
    "remainder": lambda b, x, n: x % n,
    "remainder of it": lambda b, x, n: n % (x.abs() + 0.1),
    "fmod": lambda b, x, n: torch.fmod(x, n),
    "power": lambda b, x, n: x.abs() ** n,
    "to the power": lambda b, x, n: n**x,
    "lerp": lambda b, x, n: b.lerp_(x, n / 2),
    "addcmul": lambda b, x, n: b.addcmul_(x, x, value=n),
    "clamped": lambda b, x, n: b.clamp_(max=n),
    "filled": lambda b, x, n: b.masked_fill_(x > 0, n),
    "in a list": foreach_mul,
    "weights that shrink where they are read": lambda b, x, n: (
        nn.functional.embedding(torch.tensor([0, 1]), b.view(4, 2), max_norm=2.0) * n
    ),
}


class Narrow(Classifier):
    """Does it with a buffer, what the net gives, and a number of every step."""

    def __init__(self, name: str) -> None:
        super().__init__(mlp())
        self.name = name
        self.register_buffer("b", torch.linspace(-2, 2, 8))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x = batch[0][0].detach()
        made = WORKS[self.name](self.b, x, (self.global_step + 1) / 7)
        # the net's own kernels round inside, where a program has several operations
        return made.float().mean() + 0 * self.net(batch[0]).float().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.0)


@pytest.mark.numbers
@pytest.mark.parametrize("name", WORKS)
def test_a_number_is_rounded_as_eagerly(name: str) -> None:
    ours, stock = both(lambda: Narrow(name), lambda: (loader(96),), precision="bf16-true")
    assert torch.equal(ours.module.b, stock.module.b)
    assert ours.losses == pytest.approx(stock.losses, rel=1e-6)
