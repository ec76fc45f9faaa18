"""``@autogen_loss`` gives a class of losses ``use_autogen``, and changes nothing else."""

from __future__ import annotations

import contextlib
import copy
import inspect
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from harness import csx
from loss_cases import fused_kernels, loads
from pasted import blocks
from torch import Tensor, nn

import fulgurite
from fulgurite.nn import autogen, autogen_loss

X, Y = torch.randn(4, 3), torch.randn(4, 3)


@pytest.fixture
def entered(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the regions that a test enters."""
    names: list[str] = []

    @contextlib.contextmanager
    def fused_region(name: str) -> Iterator[None]:
        names.append(name)
        yield

    monkeypatch.setattr(autogen, "fused_region", fused_region)
    return names


@autogen_loss
class Plain(nn.Module):
    """A loss without a constructor."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (x - y).abs().mean()


@autogen_loss
class Scaled(nn.Module):
    """A loss with arguments of its own."""

    def __init__(self, scale: float, power: int = 2) -> None:
        super().__init__()
        self.scale, self.power = scale, power

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.scale * ((x - y) ** self.power).mean()


@autogen_loss
class Handing(Scaled):
    """One that hands its arguments on, and builds on its base."""

    def __init__(self, extra: float = 0.5, **rest: Any) -> None:
        super().__init__(**rest)
        self.extra = extra

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x, y) + self.extra * x.mean()


@autogen_loss
class Knowing(nn.Module):
    """One that names the argument itself, as a type checker wants it."""

    def __init__(self, scale: float = 1.0, *, use_autogen: bool = True) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.scale * (x * y).mean()


class Inheriting(Scaled):
    """Not decorated: a forward of its own is fused too."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (x - y).mean()


class Constructing(Scaled):
    """Not decorated, with a constructor of its own."""

    def __init__(self) -> None:
        super().__init__(3.0, use_autogen=True)


class Outer(nn.Module):
    """One that calls another."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = fulgurite.nn.MSELoss(use_autogen=True)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.inner(x, y).sqrt()


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        (Plain, {}),
        (Scaled, {"scale": 2.0, "power": 3}),
        (Handing, {"scale": 2.0}),
        (Knowing, {}),
        (Inheriting, {"scale": 2.0}),
    ],
)
def test_a_loss_enters_a_region_where_it_is_asked_to(
    kind: type[nn.Module], given: dict[str, Any], entered: list[str]
) -> None:
    unfused = kind(**given, use_autogen=False)
    wanted = unfused(X, Y)
    assert entered == []
    fused = kind(**given, use_autogen=True)
    assert torch.equal(fused(X, Y), wanted)
    assert {*entered} == {kind.__name__}
    assert (unfused.use_autogen, fused.use_autogen) == (False, True)


def test_a_constructor_that_names_the_argument_has_its_own_default(entered: list[str]) -> None:
    Knowing(2.0)(X, Y)
    assert entered == ["Knowing"]


def test_a_constructor_of_a_subclass_says_what_it_wants(entered: list[str]) -> None:
    assert torch.equal(Constructing()(X, Y), Scaled(3.0)(X, Y))
    assert entered == ["Constructing"]
    with pytest.raises(TypeError, match="unexpected keyword argument 'use_autogen'"):
        Constructing(use_autogen=True)


def test_the_class_is_the_same_and_its_signature_has_the_argument() -> None:
    class Loss(nn.Module):
        def __init__(self, a: int, *, b: int = 1, **rest: Any) -> None:
            super().__init__()

    assert autogen_loss(Loss) is Loss
    shown = "(a: 'int', *, b: 'int' = 1, use_autogen: bool = False, **rest: 'Any') -> 'None'"
    assert str(inspect.signature(Loss)) == shown
    once = Loss.__init__
    assert autogen_loss(Loss).__init__ is once  # a second time changes nothing


def test_losses_are_pickled_copied_and_shown() -> None:
    loss = Scaled(2.0, use_autogen=True)
    for same in (pickle.loads(pickle.dumps(loss)), copy.deepcopy(loss)):
        assert vars(same).keys() == vars(loss).keys()
        assert (same.scale, same.use_autogen) == (2.0, True)
    assert repr(loss) == "Scaled()"


def test_a_mixin_between_a_loss_and_its_base_is_constructed() -> None:
    class Mixin(nn.MSELoss):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.mixed = True

    class Mixed(autogen_loss(type("Ours", (nn.MSELoss,), {})), Mixin):
        pass

    loss = Mixed(reduction="sum", use_autogen=True)
    assert loss.mixed
    assert torch.equal(loss(X, Y), nn.MSELoss(reduction="sum")(X, Y))


def test_an_init_subclass_of_the_loss_is_called() -> None:
    seen = []

    @autogen_loss
    class Base(nn.Module):
        def __init_subclass__(cls, tag: str) -> None:
            seen.append((cls.__name__, tag))

    class Derived(Base, tag="a"):
        pass

    assert seen == [("Derived", "a")]


def square(x: Tensor) -> Tensor:
    return x.square()


@pytest.mark.parametrize(
    ("wrong", "told"),
    [(square, "got function square"), (dict, "got the class dict"), (nn.L1Loss(), "got L1Loss")],
)
def test_what_is_no_class_of_modules_is_refused(wrong: Any, told: str) -> None:
    with pytest.raises(TypeError, match="decorates a class of losses") as caught:
        autogen_loss(wrong)
    assert told in str(caught.value)


@pytest.mark.parametrize("loss", [Plain, fulgurite.nn.L1Loss])
def test_use_autogen_is_a_bool(loss: type[nn.Module]) -> None:
    with pytest.raises(TypeError, match=f"{loss.__name__}: use_autogen is True or False; got 'no'"):
        loss(use_autogen="no")


@pytest.mark.compiler
def test_a_custom_loss_is_one_kernel_each_way_with_what_it_calls() -> None:
    csx("default")
    outer = autogen_loss(Outer)(use_autogen=True)
    losses = nn.ModuleList([outer, Handing(scale=2.0, use_autogen=True), Scaled(3.0)])

    def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        x = x.detach().requires_grad_()
        total = torch.stack([loss(x.tanh(), y) for loss in losses]).sum()
        return total, torch.autograd.grad(total, x)[0]

    with loads() as found:
        got = fulgurite.trace(step)(X, Y)
    torch.testing.assert_close(got, step(X, Y))
    wanted = {
        f"{name} {way}": 1 for name in ("Outer", "Handing") for way in ("forward", "backward")
    }
    assert fused_kernels(found[0]) == wanted


@autogen_loss
class Seen(nn.Module):
    """One whose forward and backward read a view of what it computes."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return ((x * x).sum(1).unsqueeze(1) * (x - y)).mean()


@pytest.mark.compiler
@pytest.mark.parametrize("policy", ["disabled", "default"])
def test_a_view_in_a_loss_may_be_read_by_its_backward(policy: str) -> None:
    csx(policy)
    loss = Seen(use_autogen=True)

    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.detach().requires_grad_()
        value = loss(x.tanh(), Y)
        return value, torch.autograd.grad(value, x)[0]

    with loads() as found:
        got = fulgurite.trace(step)(X)
    torch.testing.assert_close(got, step(X))
    assert fused_kernels(found[0]) == {"Seen forward": 1, "Seen backward": 1}


@pytest.mark.long
@pytest.mark.compiler
def test_what_two_losses_share_is_right_without_a_policy() -> None:
    """Both divide one gradient by six and spread it; operations that repeat are computed once."""
    csx("disabled")
    losses = [fulgurite.nn.MarginRankingLoss(use_autogen=True), nn.MarginRankingLoss()]
    losses.append(fulgurite.nn.MultiLabelSoftMarginLoss(use_autogen=True))
    x, y, sign = torch.randn(6), torch.randn(6), torch.tensor([1.0, -1] * 3)
    scores, targets = torch.randn(6, 4), torch.rand(6, 4)

    def step(x: Tensor, scores: Tensor) -> tuple[Tensor, ...]:
        x, scores = x.detach().requires_grad_(), scores.detach().requires_grad_()
        values = losses[0](x, y, sign), losses[1](x, -y, sign), losses[2](scores, targets)
        return *values, *torch.autograd.grad(values[0] + values[1] + values[2], [x, scores])

    torch.testing.assert_close(fulgurite.trace(step)(x, scores), step(x, scores))


@pytest.mark.compiler
def test_the_loss_of_the_documentation_is_one_kernel_each_way() -> None:
    csx("default")
    [code] = [block.text for block in blocks("autogen", "python") if "FocalLoss" in block.text]
    shown: dict[str, Any] = {}
    exec(code, shown)
    loss = shown["loss"]

    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.detach().requires_grad_()
        value = loss(x, Y.sign())
        return value, torch.autograd.grad(value, x)[0]

    with loads() as found:
        got = fulgurite.trace(step)(X)
    torch.testing.assert_close(got, step(X))
    assert fused_kernels(found[0]) == {"FocalLoss forward": 1, "FocalLoss backward": 1}
