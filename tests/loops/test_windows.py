"""Windows of accumulation that something disturbs, and code that reads ``.grad`` between them.

What Lightning clears, and when, is all that there is to it: when a window begins, after
``training_step``; before a validation, where no window is open. All else is left as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from harness import assert_close, assert_same_run, both, csx, fit
from torch import Tensor, nn

import fulgurite
from fulgurite.errors import GradientNotKept, StateChanged, UnsupportedState


class Net(pl.LightningModule):
    """A layer that no loss reaches, beside two that all do."""

    def __init__(self, optimizer: Any, reads: str = "nowhere", by_hand: bool = False) -> None:
        super().__init__()
        self.a, self.b, self.unused = nn.Linear(6, 5), nn.Linear(5, 1), nn.Linear(6, 1)
        self.optimizer, self.reads, self.automatic_optimization = optimizer, reads, not by_hand

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = (self.b(self.a(batch[0]).tanh()) - batch[1]).square().mean()
        if self.reads == "in the step" and (gradient := self.a.weight.grad) is not None:
            loss = loss / (1 + gradient.norm().detach())
        if not self.automatic_optimization:
            optimizer: Any = self.optimizers()
            if batch_idx % 2 == 0:
                optimizer.zero_grad()
            self.manual_backward(loss)
            if batch_idx % 2 == 1:
                optimizer.step()
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.a(batch[0])

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters(), lr=0.05, weight_decay=0.1)


class Batches:
    """Batches of eight rows, None at some places."""

    def __init__(self, *none: int, count: int = 10) -> None:
        drawn = torch.Generator().manual_seed(1)
        rows = [torch.randn(8, 7, generator=drawn).split((6, 1), 1) for _ in range(count)]
        self.batches = [None if i in none else list(rows[i]) for i in range(count)]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


class Hook(pl.Callback):
    """A host hook of each batch's begin or end."""

    def __init__(self, function: Callable[..., Any], at: str = "end") -> None:
        setattr(self, f"on_train_batch_{at}", function)


def skip(trainer: pl.Trainer, module: Any, batch: Any, i: int) -> int | None:
    return -1 if trainer.current_epoch == 0 and i == 3 else None


def stop(trainer: pl.Trainer, module: Any, out: Any, batch: Any, i: int) -> None:
    trainer.should_stop = i == 4


def two_in_place_of_four(trainer: pl.Trainer, module: Any, batch: Any, i: int) -> None:
    if trainer.accumulate_grad_batches == 4 and i == 2:
        trainer.accumulate_grad_batches = 2


def norms(trainer: pl.Trainer, module: Any, out: Any, batch: Any, i: int) -> None:
    found = [p.grad for p in module.parameters()]
    for k, gradient in enumerate(found):
        trainer.callback_metrics[f"{k}"] = (
            torch.tensor(-1.0) if gradient is None else gradient.norm()
        )


DISTURBED: dict[str, dict[str, Any]] = {
    "not at all": {},
    "None begins a window": {"data": lambda: (Batches(2),)},
    "None ends one": {"data": lambda: (Batches(1),)},
    "None comes first": {"data": lambda: (Batches(0),)},
    "a batch is skipped": {"hook": (skip, "start")},
    "the epoch is cut": {"limit_train_batches": 5},
    "it leaves a rest": {"data": lambda: (Batches(count=7),)},
    "the run stops": {"hook": (stop,)},
    "the factor changes": {"hook": (two_in_place_of_four, "start"), "accumulate_grad_batches": 4},
    "a validation": {"val_check_interval": 3, "data": lambda: (Batches(), Batches(count=2))},
}
WAYS = ("each batch", "windows of 2", "windows of 3", "by hand")
READS = ("nowhere", "in the step", "in a hook")
SGD, ADAMW = torch.optim.SGD, torch.optim.AdamW


def marks(disturbed: str, reads: str, way: str) -> tuple[Any, ...]:
    """Of what is a part of each `make test`."""
    core = way == "windows of 2" and disturbed == "None begins a window"
    core |= way == "each batch" and (disturbed, reads) == ("a validation", "in the step")
    return (pytest.mark.core,) if core else ()


TABLE = [
    pytest.param(*case, SGD if i % 2 else ADAMW, id=", ".join(case), marks=marks(*case))
    for i, case in enumerate(product(DISTURBED, READS, WAYS))
    if case[0] != "the factor changes" or case[2] == "windows of 2"
]


@pytest.mark.numbers
@pytest.mark.filterwarnings("ignore:train_dataloader yielded None")
@pytest.mark.parametrize(("disturbed", "reads", "way", "optimizer"), TABLE)
def test_gradients_are_those_of_stock(disturbed: str, reads: str, way: str, optimizer: Any) -> None:
    options: dict[str, Any] = {"max_epochs": 2, "num_sanity_val_steps": 0, **DISTURBED[disturbed]}
    data, hooks = options.pop("data", lambda: (Batches(),)), [options.pop("hook", None)]
    hooks = [one for one in hooks if one] + ([(norms,)] if reads == "in a hook" else [])
    if way.startswith("windows"):
        options = {"accumulate_grad_batches": int(way[-1]), **options}
    ours, stock = both(
        lambda: Net(optimizer, reads, way == "by hand"),
        data,
        callbacks=tuple(Hook(*one) for one in hooks),
        fresh=True,
        # compiled is a part: the programs of all are much the same
        policy=None if (reads, way) == ("in the step", "windows of 2") else "disabled",
        **options,
    )
    assert_same_run(ours, stock)


@pytest.mark.numbers
@pytest.mark.parametrize("reads", READS)
def test_a_window_that_an_exception_ends_is_there_for_the_next_fit(reads: str) -> None:
    class Ends(Exception):
        pass

    def fails(trainer: pl.Trainer, module: Any, out: Any, batch: Any, i: int) -> None:
        if i == 4:
            raise Ends

    runs = []
    for static in (True, False):
        made: list[Net] = []

        def make(made: list[Net] = made) -> Net:
            made.append(made[0] if made else Net(SGD, reads))
            return made[-1]

        options: dict[str, Any] = {"static": static, "accumulate_grad_batches": 2}
        with pytest.raises(Ends):
            fit(make, lambda: (Batches(),), callbacks=(Hook(fails),), **options)
        others = (Hook(norms),) if reads == "in a hook" else ()
        runs.append(fit(make, lambda: (Batches(),), callbacks=others, **options))
    assert_same_run(*runs)


@pytest.mark.numbers
def test_hooks_around_zero_grad_run_where_a_window_begins() -> None:
    class Hooked(Net):
        def on_before_zero_grad(self, optimizer: Any) -> None:
            found = [p.grad for p in self.parameters() if p.grad is not None]
            self.log("before", torch.stack([one.norm() for one in found]).sum() if found else 0.0)

        def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
            for p in self.a.parameters():
                p.grad = None if p.grad is None else p.grad * 0.5
            self.b.zero_grad()

    ours, stock = both(
        lambda: Hooked(SGD), lambda: (Batches(),), max_epochs=2, accumulate_grad_batches=2
    )
    assert_same_run(ours, stock)


@pytest.mark.numbers
def test_a_gradient_of_weights_that_were_frozen_within_a_window_still_counts() -> None:
    def freeze(trainer: pl.Trainer, module: Any, batch: Any, i: int) -> None:
        module.b.requires_grad_(i % 4 == 0)

    ours, stock = both(
        lambda: Net(ADAMW),
        lambda: (Batches(),),
        callbacks=(Hook(freeze, "start"),),
        fresh=True,
        accumulate_grad_batches=2,
    )
    assert_same_run(ours, stock)


class ClearsAtTheEnd(Net):
    """Windows of three by hand."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = (self.b(self.a(batch[0]).tanh()) - batch[1]).square().mean()
        self.manual_backward(loss / 3)
        if (batch_idx + 1) % 3 == 0:
            optimizer: Any = self.optimizers()
            optimizer.step()
            optimizer.zero_grad()
        return loss


@pytest.mark.numbers
@pytest.mark.parametrize(
    ("by_hand", "begins"), [(False, 0), (False, 4), (True, 0), (True, 1), (True, 4)]
)
def test_what_is_left_is_used_though_its_weights_are_frozen_again(
    by_hand: bool, begins: int
) -> None:
    """The program of steps in which they are frozen was traced where there was nothing."""

    def freeze(trainer: pl.Trainer, module: Any, batch: Any, i: int) -> None:
        module.a.requires_grad_(i >= begins)

    ours, stock = both(
        lambda: ClearsAtTheEnd(ADAMW, by_hand=True) if by_hand else Net(ADAMW),
        lambda: (Batches(count=8),),
        callbacks=(Hook(freeze, "start"),),
        fresh=True,
        max_epochs=3,
        **({} if by_hand else {"accumulate_grad_batches": 3}),
    )
    assert_same_run(ours, stock)


@pytest.mark.fits
def test_a_gradient_that_was_not_kept_is_asked_for_in_vain() -> None:
    class Now(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            if batch_idx == 5 and self.a.weight.grad is not None:
                loss = loss + self.a.weight.grad.norm()
            return loss

    with pytest.raises(GradientNotKept, match=r"a\.weight\.grad of a step before"):
        fit(lambda: Now(SGD), lambda: (Batches(),), static=True)


@pytest.mark.fits
def test_a_window_that_needs_two_programs_may_have_but_one() -> None:
    with pytest.raises(StateChanged, match="whether a window of accumulation begins"):
        fit(
            lambda: Net(SGD, "in the step"),
            lambda: (Batches(),),
            static=True,
            backend={"max_programs": 1},
            accumulate_grad_batches=2,
        )


def test_a_function_begins_with_none_as_its_loop_does() -> None:
    csx()
    net, losses = Net(SGD), []
    optimizer = net.configure_optimizers()

    def step(x: Tensor, y: Tensor) -> Tensor:
        none = net.a.weight.grad is None
        loss = (net.b(net.a(x).tanh()) - y).square().mean() * (1 if none else 2)
        loss.backward()
        optimizer.step()
        return loss.detach()

    start = {name: one.clone() for name, one in net.state_dict().items()}
    for run in (fulgurite.trace(step), step):
        net.load_state_dict(start)
        net.zero_grad()
        losses.append([float(run(*batch)) for batch in Batches(count=4)])
    assert losses[0] == pytest.approx(losses[1])


class TwoHeads(pl.LightningModule):
    """Each batch reaches one of two layers; subclasses clear gradients in ways of their own."""

    by_hand = False

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 4), nn.Linear(4, 1), nn.Linear(4, 1)
        self.automatic_optimization = not self.by_hand

    def loss(self, batch: Any, batch_idx: int) -> Tensor:
        head = self.c if batch_idx % 2 else self.b
        return (head(self.a(batch[0]).tanh()) - batch[1]).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class ClearsTheOther(TwoHeads):
    """In the step, whose program does not reach it."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        (self.b if batch_idx % 2 else self.c).zero_grad()
        return self.loss(batch, batch_idx)

    def optimizer_zero_grad(self, *args: Any) -> None:
        pass


class ClearsTheOtherInAHook(TwoHeads):
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        (self.b if batch_idx % 2 else self.c).zero_grad()


class ClearsAfterTheStep(TwoHeads):
    def optimizer_step(self, epoch: Any, index: Any, optimizer: Any, closure: Any = None) -> None:
        optimizer.step(closure)
        if index % 2:
            for p in self.parameters():
                p.grad = None


class ClearsEverySecond(TwoHeads):
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        if batch_idx % 2 == 0:
            optimizer.zero_grad()


class ClearsToZero(TwoHeads):
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)


class ClearsToZeroSeen(ClearsToZero):
    def on_train_batch_end(self, *args: Any) -> None:
        none = torch.tensor(-1.0)
        for name, p in self.named_parameters():
            self.log(name, none if p.grad is None else p.grad.norm())


class ComputesOnTheHost(TwoHeads):
    """Adds to a window, for a layer that no step reaches, too."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx % 2:
            self.loss(batch, 0).backward()


class InBackward(TwoHeads):
    """An optimizer for each parameter, which steps as soon as its gradient is there."""

    by_hand = True

    def configure_optimizers(self) -> Any:
        self.held = {p: torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in self.parameters()}

        def step(p: Any) -> None:
            self.held[p].step()
            self.held[p].zero_grad()

        for p in self.parameters():
            p.register_post_accumulate_grad_hook(step)
        return list(self.held.values())

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.loss(batch, batch_idx))


CLEARING = [
    *(ClearsTheOther, ClearsTheOtherInAHook, ClearsAfterTheStep, ClearsEverySecond, ClearsToZero),
    *(ClearsToZeroSeen, ComputesOnTheHost, InBackward),
]


@pytest.mark.numbers
@pytest.mark.parametrize("make", CLEARING)
def test_whatever_clears_them_and_whenever(make: type[TwoHeads]) -> None:
    window = {"accumulate_grad_batches": 2} if make is ComputesOnTheHost else {}
    assert_same_run(*both(make, lambda: (Batches(count=6),), fresh=True, **window))


@pytest.mark.fits
def test_a_gradient_that_is_a_buffer_is_refused_where_more_is_added_to_it() -> None:
    class Averaged(TwoHeads):
        by_hand = True

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("ema", torch.zeros(4, 6))

        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.manual_backward(self.loss(batch, 0))
            self.ema.lerp_(self.a.weight.grad, 0.5)
            self.a.weight.grad = self.ema
            self.optimizers().step()

    with pytest.raises(UnsupportedState, match=r"a\.weight\.grad is another tensor of the step's"):
        fit(Averaged, lambda: (Batches(),), static=True)


@pytest.mark.compiler
def test_compiled_a_loop_that_clears_at_the_end_is_not_called_wrong() -> None:
    csx("default")
    net = nn.Linear(6, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    @fulgurite.trace
    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = (net(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    for batch in Batches(count=4):  # a MiscompiledWarning is an error here
        step(*batch)


@pytest.mark.core
@pytest.mark.compiler
def test_compiled_gradients_add_up_over_the_calls_of_a_function() -> None:
    csx("default")
    net = nn.Linear(6, 1)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = (net(x) - y).square().mean()
        loss.backward()
        return loss

    found = []
    for run in (fulgurite.trace(step), step):
        net.zero_grad()
        for batch in Batches(count=3):
            run(*batch)
        found.append([p.grad.clone() for p in net.parameters() if p.grad is not None])
    assert_close(*found)


class Keeps(Net):
    """Keeps what ``.grad`` was, in a list or an attribute, as it is or a view of it."""

    last: Tensor | None = None

    def __init__(self, where: str, view: Callable[[Tensor], Tensor]) -> None:
        super().__init__(torch.optim.AdamW)
        self.where, self.view = where, view
        self.kept: list[Tensor] = []
        self.before: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.keep("training_step")
        return super().training_step(batch, batch_idx)

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.keep("on_before_zero_grad")

    def on_train_batch_end(self, *args: Any) -> None:
        self.keep("on_train_batch_end")
        if self.last is not None:
            self.before.append(float(self.last.sum()))

    def keep(self, where: str) -> None:
        if where == self.where and (gradient := self.a.weight.grad) is not None:
            self.kept.append(self.view(gradient))
            self.last = self.view(gradient)


@pytest.mark.core
@pytest.mark.numbers
@pytest.mark.parametrize("where", ["training_step", "on_before_zero_grad", "on_train_batch_end"])
@pytest.mark.parametrize(
    "view", [lambda g: g, torch.flatten, torch.detach], ids=["it", "flat", ".data"]
)
@pytest.mark.parametrize("window", [1, 2])
def test_a_gradient_that_is_kept_stays_as_it_was(
    where: str, view: Callable[[Tensor], Tensor], window: int
) -> None:
    """The next step's gradient is another tensor, as under stock."""
    options: dict[str, Any] = {"accumulate_grad_batches": window, "max_epochs": 1, "fresh": True}
    ours, stock = both(lambda: Keeps(where, view), lambda: (Batches(),), **options)
    assert_same_run(ours, stock)
    assert len(ours.module.kept) == len(stock.module.kept) > 3
    assert_close(ours.module.kept, stock.module.kept)
    assert ours.module.before == pytest.approx(stock.module.before, rel=1e-4)


class KeptAfterBackward(Keeps):
    """A later batch of the window adds to what is kept."""

    def on_after_backward(self) -> None:
        self.keep("on_after_backward")


@pytest.mark.core
@pytest.mark.fits
def test_a_gradient_that_is_kept_and_added_to_is_refused() -> None:
    """In stock the one that is kept is the sum: a program has a copy of it."""
    make = lambda: KeptAfterBackward("on_after_backward", lambda g: g)  # noqa: E731
    with pytest.raises(UnsupportedState, match=r"memory of a\.weight\.grad") as raised:
        fit(make, lambda: (Batches(),), static=True, accumulate_grad_batches=2)
    assert ".clone()" in raised.value.remedy
    fit(make, lambda: (Batches(),), static=True)
    copies = lambda: KeptAfterBackward("on_after_backward", torch.clone)  # noqa: E731
    fit(copies, lambda: (Batches(),), static=True, accumulate_grad_batches=2)


class FreezesInAWindow(Net):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen = self.b.weight.grad  # the gradients are shown from here on
        if (self.current_epoch, batch_idx) == (1, 4):
            self.a.requires_grad_(False)

    def on_before_zero_grad(self, optimizer: Any) -> None:
        pass


@pytest.mark.numbers
def test_a_trace_of_a_step_that_cleared_what_was_left_is_the_same_where_nothing_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fulgurite.backends.csx.program.audit.EVERY_STEP", True)
    ours, stock = both(
        lambda: FreezesInAWindow(ADAMW),
        lambda: (Batches(count=8),),
        fresh=True,
        backend={"audit": True},
        max_epochs=3,
        accumulate_grad_batches=3,
    )
    assert_same_run(ours, stock)
