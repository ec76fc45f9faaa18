"""Gradients that live from one step to the next, and those that the host reads between steps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from harness import Run, assert_close, assert_same_run, both, fit
from idioms.base import Example, Manual
from lightning.pytorch.utilities import grad_norm
from models import CLASSES, loader
from torch import Tensor, nn
from torch.utils.data import DataLoader

from fulgurite.errors import GradientNotKept, StateChanged


class Adam(Manual):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.05)

    def back(self, batch: Any) -> Tensor:
        loss = self.loss(*batch)
        self.manual_backward(loss)
        return loss.detach()


class StepFirst(Adam):
    """The optimizer uses the gradients of the step before; in the first step there are none."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.optimizers().step()
        self.optimizers().zero_grad()
        return self.back(batch)


class Nesterov(StepFirst):
    def configure_optimizers(self) -> Any:
        options = {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}
        return torch.optim.SGD(self.parameters(), lr=0.05, **options)


class Dampened(StepFirst):
    """Its momentum is made of the first gradient, which comes with the second step."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, dampening=0.5)


class NeverCleared(Adam):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.optimizers().step()
        return self.back(batch)


class ClearedAtTheEnd(Adam):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.back(batch)
        self.optimizers().step()
        self.optimizers().zero_grad()
        return loss


class NoneAtTheStart(Adam):
    """Its code asks which gradients are there; a layer that is not used never has one."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(3, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert all(p.grad is None for p in self.parameters())
        loss = self.back(batch)
        norms = [p.grad.norm() for p in self.parameters() if p.grad is not None]
        self.log("norm", torch.stack(norms).mean())
        self.optimizers().step()
        self.optimizers().zero_grad()
        return loss


class NoneSeenByHost(NoneAtTheStart):
    """Gradients are kept for the hook, and are None for it too."""

    def on_train_batch_end(self, *args: Any) -> None:
        self.log("none", float(sum(p.grad is None for p in self.parameters())))


class PutThereUnseen(NoneAtTheStart):
    """Code on the host that does not name the attribute."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            setattr(self.unused.weight, "".join(("gr", "ad")), torch.ones(3, 3))


class ClearedToZero(Adam):
    """A zero is no None: Adam counts the step."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(3, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.optimizers().step()
        self.optimizers().zero_grad(set_to_none=False)
        return self.back(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05, weight_decay=0.3)


class HalfCleared(Adam):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.optimizers().step()
        self.net[0].zero_grad()
        loss = self.back(batch)
        self.net[2].zero_grad()
        return loss


class TwoOptimizers(Adam):
    """One steps by the gradients of the step before, the other accumulates."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        now, late = self.optimizers()
        late.step()
        late.zero_grad()
        loss = self.back(batch)
        now.step()
        return loss

    def configure_optimizers(self) -> Any:
        first = torch.optim.Adam(self.net[0].parameters(), lr=0.01)
        return [first, torch.optim.AdamW(self.net[2].parameters(), lr=0.05)]


class Toggled(TwoOptimizers):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        now, late = self.optimizers()
        self.toggle_optimizer(now)
        loss = self.back(batch)
        self.untoggle_optimizer(now)
        late.step()
        now.step()
        now.zero_grad()
        self.toggle_optimizer(late)
        late.zero_grad()
        self.back(batch)
        self.untoggle_optimizer(late)
        return loss


class Accumulating(Adam):
    """A closure adds to what is there."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.optimizers().step(lambda: self.back(batch))


class ClearedByHost(StepFirst):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.zero_grad()
        if batch_idx == 4:
            self.net[2].zero_grad()


class ZeroedByHost(StepFirst):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.optimizers().zero_grad(set_to_none=False)


STEPS = [
    *(StepFirst, Nesterov, Dampened, NeverCleared, ClearedAtTheEnd, ClearedToZero, HalfCleared),
    *(NoneAtTheStart, NoneSeenByHost),
    *(TwoOptimizers, Toggled, Accumulating, ClearedByHost, ZeroedByHost),
]


def six() -> tuple[Any, ...]:
    return (loader(96),)


@pytest.mark.numbers
@pytest.mark.parametrize("make", STEPS)
def test_gradients_of_the_step_before_train_as_in_stock(make: Callable[[], Any]) -> None:
    ours, stock = both(make, six)
    assert_same_run(ours, stock)


@pytest.mark.numbers
@pytest.mark.process
@pytest.mark.parametrize("make", [Dampened, NoneAtTheStart])
def test_so_they_do_compiled(make: Callable[[], Any]) -> None:
    ours, stock = both(make, six, policy="default")
    assert_same_run(ours, stock)


@pytest.mark.fits
@pytest.mark.parametrize("static", [True, False])
def test_a_gradient_where_the_steps_before_began_with_none_is_seen(static: bool) -> None:
    with pytest.raises(AssertionError):  # by the step's own code, which runs again
        fit(PutThereUnseen, six, static=static)


@pytest.mark.fits
def test_and_named_where_there_may_be_no_other_program() -> None:
    with pytest.raises(StateChanged, match=r"unused\.weight\.grad was None, and now is a tensor"):
        fit(PutThereUnseen, six, static=True, backend={"max_programs": 1})


@pytest.mark.fits
@pytest.mark.parametrize("batches", [1, 2])
def test_an_optimizer_has_counted_one_step_less_than_there_were(batches: int) -> None:
    run = fit(StepFirst, six, static=True, limit_train_batches=batches)
    counts = [int(state["step"]) for state in run.trainer.optimizers[0].state.values()]
    assert counts == [1] * 4 * (batches - 1)  # in the first step it finds no gradient


@pytest.mark.numbers
@pytest.mark.parametrize("make", [StepFirst, NeverCleared])
def test_a_second_fit_begins_with_the_gradients_of_the_first(make: Callable[[], Any]) -> None:
    runs = []
    for static in (True, False):
        module = fit(make, six, static=static).module
        runs.append(fit(lambda module=module: module, six, static=static))
    assert_same_run(*runs)


class ByShape(Adam):
    """Large batches make gradients, small ones use them: two programs."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if len(batch[0]) == 8:
            self.optimizers().step()
            return self.loss(*batch).detach()
        self.optimizers().zero_grad()
        return self.back(batch)


def in_turn(*sizes: int) -> Any:
    """Batches of these sizes."""
    generator = torch.Generator().manual_seed(3)
    batches = [(torch.randn(n, 8, generator=generator), torch.arange(n) % CLASSES) for n in sizes]
    return DataLoader(batches, batch_size=None)


@pytest.mark.numbers
@pytest.mark.parametrize("sizes", [(8, 16, 8, 8, 16, 8), (16, 8, 8, 16)])
def test_one_program_uses_what_another_left(sizes: tuple[int, ...]) -> None:
    ours, stock = both(ByShape, lambda: (in_turn(*sizes),))
    assert_same_run(ours, stock)


class Norms(pl.Callback):
    """Reads gradients in host hooks, and keeps some."""

    def __init__(self) -> None:
        self.norms: list[Any] = []
        self.kept: list[Tensor | None] = []

    def on_train_batch_start(self, trainer: Any, module: Any, *args: Any) -> None:
        self.look(module)

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        self.look(module)

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.look(module)

    def look(self, module: Any) -> None:
        grads = [p.grad for p in module.parameters()]
        self.norms.append([-1.0 if g is None else float(g.norm()) for g in grads])
        self.kept.append(module.net[0].weight.grad)


class Edits(Norms):
    """Puts other gradients there, too."""

    def on_train_batch_end(self, trainer: Any, module: Any, out: Any, batch: Any, i: int) -> None:
        self.look(module)
        if i % 2:
            for p in module.parameters():
                p.grad.mul_(0.5)
        else:
            module.net[0].weight.grad = torch.ones_like(module.net[0].weight)
        if i == 3:
            module.net[2].weight.grad = None


WINDOW = {"accumulate_grad_batches": 4, "max_epochs": 2, "gradient_clip_val": 0.1}


@pytest.mark.numbers
@pytest.mark.process
@pytest.mark.parametrize(
    ("make", "callback", "options"),
    [
        *((make, Norms, {}) for make in (Example, StepFirst, ClearedAtTheEnd, HalfCleared)),
        (Example, Norms, {"gradient_clip_val": 0.1}),
        (Example, Norms, WINDOW),
        (Example, Norms, {"policy": "default"}),
        *((make, Edits, {}) for make in (Example, StepFirst, NeverCleared)),
    ],
)
def test_host_hooks_read_gradients_as_in_stock(
    make: Any, callback: Any, options: dict[str, Any]
) -> None:
    watching = callback(), callback()
    ours = fit(make, six, static=True, callbacks=(watching[0],), **options)
    options = {key: value for key, value in options.items() if key != "policy"}
    stock = fit(make, six, static=False, callbacks=(watching[1],), **options)
    assert_same_run(ours, stock)
    assert_close(watching[0].norms, watching[1].norms, 1e-4)
    assert_close(watching[0].kept, watching[1].kept, 1e-4)


class LogsNorm(Example):
    """Lightning's own way to a norm, in a hook of the module."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log_dict(grad_norm(self, 2))


@pytest.mark.numbers
def test_norms_that_a_host_hook_logs_are_stocks() -> None:
    ours, stock = both(LogsNorm, six)
    assert_same_run(ours, stock)


@pytest.mark.numbers
def test_the_function_that_called_fit_reads_gradients_after_it() -> None:
    ours, stock = both(Example, six)
    for a, b in zip(ours.module.parameters(), stock.module.parameters(), strict=True):
        assert_close(a.grad, b.grad)


@pytest.mark.numbers
def test_its_comprehensions_read_them_too() -> None:
    ours, stock = both(Example, six)
    norms = [[float(p.grad.norm()) for p in one.module.parameters()] for one in (ours, stock)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def hidden(p: Tensor) -> Any:
    """``p.grad``, where no code names it."""
    return getattr(p, "gr" + "ad")


def unseen(**options: Any) -> Run:
    return fit(Example, six, static=True, **options)


class Unseen(pl.Callback):
    def __init__(self, use: Callable[[Any], Any]) -> None:
        self.use = use

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        self.use(hidden(module.net[0].weight))


@pytest.mark.fits
@pytest.mark.parametrize(
    "use",
    [Tensor.norm, repr, lambda g: g.tolist(), lambda g: g[0], lambda g: torch.stack([g]), list],
)
def test_a_read_that_was_not_foreseen_is_an_error_on_its_line(use: Callable[[Any], Any]) -> None:
    with pytest.raises(GradientNotKept, match=r"net\.0\.weight\.grad was used(.|\n)*on_before"):
        unseen(callbacks=(Unseen(use),))


@pytest.mark.fits
def test_it_hinders_nothing_that_needs_no_gradient() -> None:
    module = unseen().module
    copy.deepcopy(module.double().cpu().float())
    module.share_memory()
    module.net(torch.ones(1, 8)).sum().backward()  # adds to what is not known
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with pytest.raises(GradientNotKept):
        optimizer.step()
    module.zero_grad()
    module.net(torch.ones(1, 8)).sum().backward()
    optimizer.step()


@pytest.mark.fits
def test_where_nobody_reads_a_gradient_it_is_not_written() -> None:
    [program] = unseen().trainer.strategy.programs
    assert ".grad" not in str(program)
