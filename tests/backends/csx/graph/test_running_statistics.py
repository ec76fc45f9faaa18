"""Running statistics of 16 bits are rounded where eager kernels round them, compiled too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import both
from models import Classifier, loader, mlp
from torch import Tensor, nn

from fulgurite.backends.csx.graph.passes.decompositions import decompositions

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "turned": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
}


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("momentum", [0.1, 1 / 3, 1 / 7, 1.0])
@pytest.mark.parametrize(
    ("shape", "layout"),
    [
        ((16, 8), "contiguous"),
        ((16, 8), "turned"),
        ((16, 8, 5), "turned"),
        ((300, 8, 3, 3), "contiguous"),
        ((16, 8, 6, 6), "channels last"),
        ((4, 8, 3, 2, 2), "contiguous"),
    ],
)
def test_a_program_has_the_statistics_of_the_kernel(
    shape: tuple[int, ...], layout: str, momentum: float, kind: torch.dtype
) -> None:
    batch_norm: Any = torch.ops.aten.native_batch_norm.default
    ours = [torch.zeros(8, dtype=kind), torch.ones(8, dtype=kind)]
    kernels = [one.clone() for one in ours]
    weight, bias = torch.ones(8, dtype=kind), torch.zeros(8, dtype=kind)
    for _ in range(20):
        x = LAYOUTS[layout]((torch.randn(shape) * 2 + 0.5).to(kind))
        rest = True, momentum, 1e-5
        decompositions()[batch_norm](x, weight, bias, *ours, *rest)
        batch_norm(x, weight, bias, *kernels, *rest)
        # of float16 the kernel rounds a sum once, which it adds up in another order
        within = 0 if kind is torch.bfloat16 else torch.finfo(kind).eps
        for one, wanted in zip(ours, kernels, strict=True):
            torch.testing.assert_close(one, wanted, rtol=within, atol=within)


class Normed(Classifier):
    """Whose inputs a module with buffers normalizes first."""

    def __init__(self, shape: tuple[int, ...], norm: nn.Module, layout: str) -> None:
        super().__init__(mlp())
        self.shape, self.norm, self.layout = shape, norm, layout

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        x = self.norm(LAYOUTS[self.layout](x.view(-1, *self.shape)))
        return nn.functional.cross_entropy(self.net(x.flatten(1)), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.0)  # what differs is the statistics'


NORMS: dict[str, tuple[tuple[int, ...], Callable[[], nn.Module], str]] = {
    "BatchNorm1d": ((8,), lambda: nn.BatchNorm1d(8), "contiguous"),
    "BatchNorm1d, turned": ((4, 2), lambda: nn.BatchNorm1d(4), "turned"),
    "BatchNorm1d, an average": ((8,), lambda: nn.BatchNorm1d(8, momentum=None), "contiguous"),
    "BatchNorm2d": ((2, 2, 2), lambda: nn.BatchNorm2d(2), "channels last"),
    "BatchNorm3d": ((2, 2, 2, 1), lambda: nn.BatchNorm3d(2), "contiguous"),
    "InstanceNorm1d": (
        (2, 4),
        lambda: nn.InstanceNorm1d(2, affine=True, track_running_stats=True),
        "contiguous",
    ),
    "InstanceNorm2d": (
        (2, 2, 2),
        lambda: nn.InstanceNorm2d(2, track_running_stats=True),
        "contiguous",
    ),
    "spectral_norm": (
        (8,),
        lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)),
        "contiguous",
    ),
}


@pytest.mark.numbers
@pytest.mark.parametrize("momentum", [0.1, None])
def test_statistics_of_a_narrow_batch_are_wide_under_autocast(momentum: float | None) -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8, momentum=momentum))

    ours, stock = both(
        lambda: Normed((8,), make(), "contiguous"), lambda: (loader(320),), precision="bf16-mixed"
    )
    wanted = dict(stock.module.named_buffers())
    for one, value in ours.module.named_buffers():
        torch.testing.assert_close(value, wanted[one], rtol=1e-5, atol=1e-6)


@pytest.mark.numbers
@pytest.mark.parametrize("name", NORMS)
def test_buffers_of_modules_are_stocks(name: str) -> None:
    shape, norm, layout = NORMS[name]
    ours, stock = both(
        lambda: Normed(shape, norm(), layout), lambda: (loader(320),), precision="bf16-true"
    )
    wanted = dict(stock.module.named_buffers())
    for one, value in ours.module.named_buffers():
        assert torch.equal(value, wanted[one]), one
