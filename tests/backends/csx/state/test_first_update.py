"""State that a first update makes: it equals eager's, and runs as a step of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from harness import assert_close, assert_same_run, both, fit, make_trainer
from models import Classifier, PerParameter, loader, mlp
from optimizers import AdaBelief, Alternating, FirstGradient, Moving, assert_equals_stock
from torch import Tensor, nn
from torch.optim import Optimizer

from fulgurite.backends.csx.diagnostics.trace_errors import UnsupportedState
from fulgurite.backends.csx.state import around_steps


class Averaging(PerParameter):
    """Its average begins with the first gradient, and moves at once."""

    def update(self, p: Tensor, state: dict[str, Any], lr: float) -> None:
        if not state:
            state["average"] = p.grad.clone()
        state["average"].mul_(0.9).add_(p.grad, alpha=0.1)
        p.add_(state["average"], alpha=-lr)


@pytest.mark.numbers
@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2, "limit_train_batches": 9}])
def test_state_of_the_first_gradient_equals_stock(options: dict[str, Any]) -> None:
    for optimizer in (FirstGradient, Averaging):
        ours = assert_equals_stock(optimizer, **options)
        assert len(ours.trainer.strategy.programs) == 1


@pytest.mark.numbers
def test_state_of_the_first_gradient_under_manual_optimization_equals_stock() -> None:
    def optimizers(net: nn.Module) -> list[Optimizer]:
        dampened = {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}
        one = torch.optim.SGD(net[0].parameters(), **dampened)
        return [one, FirstGradient(net[3].parameters(), lr=0.1)]

    ours, stock = both(lambda: Alternating(optimizers), lambda: (loader(160),))
    assert_same_run(ours, stock)


class Uneven:
    """Batches of 5 and 8 rows in turn."""

    def __len__(self) -> int:
        return 12

    def __iter__(self) -> Iterator[Any]:
        [(x, y)] = loader(16, batch_size=16)
        return ((x[:n], y[:n]) for n in (5, 8) * 6)


@pytest.mark.numbers
@pytest.mark.parametrize("optimizer", [FirstGradient, torch.optim.SGD, AdaBelief])
def test_programs_of_one_window_make_the_same_state(optimizer: Any) -> None:
    """Both are built before the first update, and step in turns."""
    options = {"momentum": 0.9, "dampening": 0.5} if optimizer is torch.optim.SGD else {}
    ours, stock = both(
        lambda: Classifier(mlp(), optimizer, **options),
        lambda: (Uneven(),),
        accumulate_grad_batches=3,
    )
    assert_same_run(ours, stock)
    assert len(ours.trainer.strategy.programs) == 2


class Clearing(pl.Callback):
    """Clears the state of the optimizer in the middle, or puts another one's into its place."""

    def __init__(self, loads: bool) -> None:
        self.loads = loads

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        [optimizer] = trainer.optimizers
        if trainer.global_step == 1 and self.loads:  # just after the first update
            for p, state in [*optimizer.state.items()]:
                optimizer.state[p] = {**state, "buf": state["buf"] * 0.5}
        if trainer.global_step == 4 and not self.loads:
            optimizer.state.clear()


@pytest.mark.numbers
@pytest.mark.parametrize("loads", [False, True])
def test_state_that_the_host_takes_away_or_replaces_is_as_in_stock(loads: bool) -> None:
    ours, stock = both(
        lambda: Classifier(mlp(), FirstGradient),
        lambda: (loader(160),),
        callbacks=(Clearing(loads),),
    )
    assert_same_run(ours, stock)


class Anchored(Optimizer):
    """From its fourth step on it is drawn to the weights of that step."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "n": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = torch.enable_grad()(closure)()
        for group in self.param_groups:
            group["n"] += 1
            for p in group["params"]:
                state = self.state[p]
                if group["n"] == 4:
                    state["anchor"] = p.detach().clone()
                p.sub_(group["lr"] * p.grad)
                if "anchor" in state:
                    p.lerp_(state["anchor"], 0.1)
        return loss


@pytest.mark.numbers
def test_a_program_from_before_some_state_was_made_does_not_run_on() -> None:
    ours = assert_equals_stock(Anchored)
    assert len(ours.trainer.optimizers[0].state) == 4


class OnTensors(PerParameter):
    """Keeps its momentum on the parameters themselves."""

    def update(self, p: Tensor, state: dict[str, Any], lr: float) -> None:
        kept: Any = p
        if not hasattr(p, "velocity"):
            kept.velocity = torch.zeros_like(p)
        p.sub_(kept.velocity.mul_(0.9).add_(p.grad) * lr)


@pytest.mark.fits
def test_what_a_step_sets_on_a_tensor_is_refused() -> None:
    with pytest.raises(UnsupportedState, match=r"The step set self\.net\.0\.weight\.velocity"):
        fit(lambda: Classifier(mlp(), OnTensors), lambda: (loader(64),), static=True)


class Shared(PerParameter):
    """Keeps a norm of all its parameters."""

    def update(self, p: Tensor, state: dict[str, Any], lr: float) -> None:
        if p.grad is None:
            return
        self.state["all"].setdefault("norm", p.grad.norm())
        p.sub_(p.grad * lr / (1 + self.state["all"]["norm"]))


@pytest.mark.numbers
def test_state_of_no_parameter_waits_for_the_first_gradient() -> None:
    class Late(Classifier):
        def __init__(self) -> None:
            super().__init__(mlp(), Shared)
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.optimizers().step()
            self.optimizers().zero_grad()
            self.manual_backward(nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    ours, stock = both(Late, lambda: (loader(64),))
    assert_close(ours.losses, stock.losses)


@pytest.mark.core
@pytest.mark.numbers
@pytest.mark.parametrize("hook", ["on_train_start", "on_train_batch_end"])
def test_state_that_is_loaded_waits_for_no_gradient(hook: str) -> None:
    """In the middle of the first window of accumulation the program is there, and no update was."""

    class Loading(Classifier):
        def _load(self, *args: Any) -> None:
            if self.trainer.global_step:
                return
            optimizer = self.trainer.optimizers[0]
            state = optimizer.state_dict()
            sizes = enumerate(p.shape for p in self.parameters())
            state["state"] = {i: {"momentum_buffer": torch.ones(size)} for i, size in sizes}
            optimizer.load_state_dict(state)

    setattr(Loading, hook, Loading._load)
    options = {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}
    ours, stock = both(
        lambda: Loading(mlp(), torch.optim.SGD, **options),
        lambda: (loader(64),),
        accumulate_grad_batches=2,
    )
    assert_same_run(ours, stock)
    assert len(ours.trainer.strategy.programs) == (2 if hook == "on_train_batch_end" else 1)


@pytest.mark.fits
@pytest.mark.parametrize("optimizer", [FirstGradient, torch.optim.SGD, torch.optim.ASGD])
def test_a_resumed_run_equals_the_uninterrupted_one(optimizer: Any, tmp_path: Any) -> None:
    options = {"momentum": 0.9, "dampening": 0.5} if optimizer is torch.optim.SGD else {}

    def make() -> Classifier:
        return Classifier(mlp(), optimizer, **options)

    def run(**more: Any) -> Any:
        return fit(make, lambda: (loader(160),), static=True, **more)

    whole = run(max_epochs=2)
    first = run(max_epochs=1)
    first.trainer.save_checkpoint(tmp_path / "middle.ckpt")

    module = make()
    trainer = make_trainer(True, max_epochs=2)
    trainer.fit(module, loader(160), ckpt_path=tmp_path / "middle.ckpt")
    for name, value in whole.module.state_dict().items():
        assert torch.equal(module.state_dict()[name], value), name


@pytest.mark.numbers
def test_hooks_on_an_optimizer_run_once_around_the_first_update() -> None:
    class Hooked(Classifier):
        def __init__(self) -> None:
            super().__init__(mlp(), torch.optim.SGD, momentum=0.9, dampening=0.5)
            self.register_buffer("average", torch.zeros(4))

        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()

            def center(optimizer: Any, args: Any, kwargs: Any) -> None:
                """Here the gradients are those of the last step; the closure makes new ones."""
                with torch.no_grad():
                    self.net[0].weight.mul_(0.999)

            def average(optimizer: Any, args: Any, kwargs: Any) -> None:
                with torch.no_grad():
                    self.average.lerp_(self.net[3].bias, 0.1)

            optimizer.register_step_pre_hook(center)
            optimizer.register_step_post_hook(average)
            return optimizer

    ours, stock = both(Hooked, lambda: (loader(160),), callbacks=(Moving(),))
    assert_same_run(ours, stock)


@pytest.mark.fits
def test_a_checkpoint_before_the_first_update_holds_no_state_of_it(tmp_path: Any) -> None:
    class Save(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step == 0:
                trainer.save_checkpoint(tmp_path / "early.ckpt")

    fit(
        lambda: Classifier(mlp(), FirstGradient),
        lambda: (loader(64),),
        static=True,
        callbacks=(Save(),),
        accumulate_grad_batches=2,
    )
    saved = torch.load(tmp_path / "early.ckpt", weights_only=False)
    assert saved["optimizer_states"][0]["state"] == {}


class Nested(torch.optim.SGD):
    """Calls its parent's step, which has hooks of its own."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def test_code_around_a_step_runs_once_within_the_users_hooks() -> None:
    weights = [torch.zeros(2, requires_grad=True)]
    torch.optim.SGD(weights, lr=0.1)  # from now on torch runs hooks around SGD's own step too
    optimizer, calls = Nested(weights, lr=0.1), list[str]()
    optimizer.register_step_pre_hook(lambda *_: calls.append("user before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("user after"))
    with around_steps(
        optimizer, lambda *_: calls.append("before"), lambda *_: calls.append("after")
    ):
        optimizer.step()
    outer, inner = ["user before", "before", "after", "user after"], ["user before", "user after"]
    assert calls == [*outer[:2], *inner, *outer[2:]]
    optimizer.step()
    assert calls[6:] == ["user before", *inner, "user after"]


class Renamed(pl.LightningModule):
    """A manual step that has another name for a gradient, which ``zero_grad`` then clears."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization, self.net = False, mlp()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """SGD whose momentum begins as the first gradient."""
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.net(batch[0]).square().mean()
        self.manual_backward(loss)
        gradient = self.net[0].bias.grad
        optimizer.step()
        self.log("before", gradient.abs().sum())
        optimizer.zero_grad(set_to_none=False)
        self.log("after", gradient.abs().sum())
        return loss.detach()

    def configure_optimizers(self) -> Any:
        """With dampening."""
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.5, dampening=0.1)


@pytest.mark.numbers
def test_a_gradient_keeps_its_identity() -> None:
    ours, stock = both(Renamed, lambda: (loader(64),))
    assert_close(ours.metrics, stock.metrics)
    assert ours.final["after"] == 0 < ours.final["before"]


class SharpnessAware(torch.optim.SGD):
    """Sharpness-aware minimization as published: the closure runs twice in each step."""

    def step(self, closure: Any = None) -> Any:
        closure = torch.enable_grad()(closure)
        loss = closure()
        everyone = [p for group in self.param_groups for p in group["params"]]
        with torch.no_grad():
            norm = torch.stack([p.grad.norm() for p in everyone]).norm()
            moves = [p.grad * (0.5 / norm) for p in everyone]
            torch._foreach_add_(everyone, moves)
            closure()
            torch._foreach_sub_(everyone, moves)
        super().step()
        return loss


def sharpness_aware(**options: Any) -> Any:
    return lambda: Classifier(mlp(), SharpnessAware, **{"lr": 0.1, **options})


@pytest.mark.numbers
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": 0.9},
        {"momentum": 0.9, "nesterov": True},
        {"momentum": 0.9, "dampening": 0.1},
    ],
)
def test_a_closure_that_runs_twice_in_a_step_does_so(options: dict[str, Any]) -> None:
    assert_same_run(*both(sharpness_aware(**options), lambda: (loader(64),), max_epochs=2))
