"""Fused regions: one kernel forward, one backward, whatever the policy; or an error."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from harness import Run, assert_same_run, fit
from loss_cases import loads
from models import CLASSES, loader
from torch import Tensor, nn

from fulgurite.backends.csx.compile.fabric import Loaded
from fulgurite.backends.csx.compile.inductor import toolchain
from fulgurite.backends.csx.compile.programs.kernels import KernelCall, Maker
from fulgurite.backends.csx.diagnostics.regions import fused_region
from fulgurite.errors import UnfusedLoss

POLICIES = ("disabled", "default", "aggressive")


class Fused(nn.Module):
    """A function of (logits, classes) as one region."""

    def __init__(self, function: Callable[..., Tensor] = nn.functional.cross_entropy) -> None:
        super().__init__()
        self.function = function

    def forward(self, *given: Tensor) -> Tensor:
        with fused_region("Fused"):
            return self.function(*given)


class Centered(nn.Module):
    """A loss that writes a state in the midst of its region."""

    def __init__(self) -> None:
        super().__init__()
        self.center: Tensor
        self.register_buffer("center", torch.zeros(CLASSES))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with fused_region("Centered"):
            far = (x - self.center).square()
            self.center.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
            right = nn.functional.one_hot(y, CLASSES) * x.exp().mean(1, keepdim=True)
            return (far * right).mean() - x.gather(1, y[:, None]).mean()


class Net(pl.LightningModule):
    """A net with a loss, whose value is used outside of it too."""

    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, CLASSES))
        self.loss = loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        out = self.net(x) * 2
        loss: Tensor = self.loss(out, y)
        self.log("loss", loss.mean())
        return loss.mean() * 0.5 + out.square().mean() * 0.01

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 0.01)


@pytest.fixture(name="loads")
def _loads() -> Iterator[list[Loaded]]:
    with loads() as found:
        yield found


def run(make: Callable[[], nn.Module], policy: str | None, **backend: Any) -> Run:
    """A fit of a net with a loss, in stock Lightning where there is no policy."""
    return fit(
        lambda: Net(make()),
        lambda: (loader(96),),
        static=policy is not None,
        policy=policy,
        backend=backend,
    )


def regions(loaded: Loaded) -> list[KernelCall]:
    """The calls that are of a region."""
    return [call for call in loaded.kernels().calls if call.region]


def no_reduction(x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(x, y, reduction="none")


@pytest.mark.numbers
@pytest.mark.compiler
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "make", [Fused, lambda: Fused(no_reduction), Centered], ids=["mean", "none", "state"]
)
def test_a_region_is_one_kernel_forward_and_one_backward(
    make: Callable[[], nn.Module], policy: str, loads: list[Loaded]
) -> None:
    assert_same_run(run(make, policy), run(make, None))
    [loaded] = loads
    assert loaded.compiled
    found = regions(loaded)
    name = type(make()).__name__
    assert [call.region for call in found] == [f"{name} forward", f"{name} backward"]
    assert {call.maker for call in found} == {Maker.GENERATED}
    others = {call.maker for call in loaded.kernels().calls if not call.region}
    assert (Maker.GENERATED in others) == (policy != "disabled")
    assert loaded.how.startswith("its fused losses") == (policy == "disabled")


@pytest.mark.long
@pytest.mark.numbers
@pytest.mark.compiler
def test_two_losses_are_two_regions(loads: list[Loaded]) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = Fused(), Fused(lambda x, y: x.square().mean())

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.a(x, y) + self.b(x, y)  # type: ignore[no-any-return]

    assert_same_run(run(Two, "default"), run(Two, None))
    assert loads[0].compiled, loads[0].how
    assert len(regions(loads[0])) == 4


def product(x: Tensor, y: Tensor) -> Tensor:
    return (x @ x.T).mean()


def sorting(x: Tensor, y: Tensor) -> Tensor:
    return x.sort(1).values[:, 0].mean()


def largest(x: Tensor, y: Tensor) -> Tensor:
    return (x - 1).abs().topk(2).values.mean()


@pytest.mark.fits
@pytest.mark.compiler
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("policy", ["disabled", "default"])
@pytest.mark.parametrize(
    ("function", "operation"),
    [(product, "aten.mm"), (sorting, "aten.sort"), (largest, "aten.topk")],
)
def test_what_cannot_be_generated_is_named_with_its_line(
    function: Callable[..., Tensor], operation: str, policy: str, background: bool
) -> None:
    with pytest.raises(UnfusedLoss) as caught:
        run(lambda: Fused(function), policy, background=background)
    text = str(caught.value)
    assert operation in text
    assert "forward pass of Fused" in text
    assert f"in {function.__name__}" in text
    assert "use_autogen=False" in text


@pytest.mark.fits
@pytest.mark.parametrize("policy", ["disabled", "default"])
def test_without_a_compiler_a_region_is_an_error(
    policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    why = "no C++ compiler was found"
    monkeypatch.setattr(toolchain, "toolchain_missing", lambda starts=True: why)
    with pytest.raises(UnfusedLoss, match=rf"(?s){re.escape(why)}.*test_fused"):
        run(Fused, policy, compile_dir=tmp_path)


def test_where_nothing_is_traced_a_region_does_nothing() -> None:
    x, y = torch.randn(6, CLASSES), torch.arange(6) % CLASSES
    assert torch.equal(Fused()(x, y), nn.functional.cross_entropy(x, y))
