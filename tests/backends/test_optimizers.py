"""Optimizers: the numbers of every one equal eager's, whatever moves between steps."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from harness import assert_close, assert_same_run, both, fit
from models import Classifier, PerParameter, loader, mlp
from optimizers import FirstGradient, Moving, assert_equals_stock
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler

from fulgurite.backends.csx.errors import StateChanged, UnsupportedState

TORCH: list[tuple[type[Optimizer], dict[str, Any]]] = [
    (torch.optim.SGD, {}),
    (torch.optim.SGD, {"lr": 1}),
    (torch.optim.SGD, {"lr": torch.tensor(0.1), "momentum": 0.9}),
    (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.01, "maximize": True, "lr": 1e-3}),
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "foreach": True}),
    (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.5, "weight_decay": 0.01}),
    (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.1, "fused": True}),
    (torch.optim.Adam, {"amsgrad": True, "weight_decay": 0.01}),
    (torch.optim.Adam, {"foreach": True}),
    (torch.optim.Adam, {"lr": torch.tensor(0.01)}),
    (torch.optim.Adam, {"betas": (0.495, 0.9)}),
    (torch.optim.AdamW, {"fused": True, "amsgrad": True}),
    (torch.optim.AdamW, {"maximize": True, "lr": 1e-4}),
    (torch.optim.RMSprop, {}),
    (torch.optim.RMSprop, {"momentum": 0.9, "centered": True, "weight_decay": 0.01}),
    (torch.optim.Adadelta, {"lr": 1.0}),
    (torch.optim.Adadelta, {"lr": 1.0, "weight_decay": 0.01, "foreach": True}),
    (torch.optim.Adagrad, {"lr_decay": 0.1, "initial_accumulator_value": 0.1}),
    (torch.optim.Adagrad, {"maximize": True, "weight_decay": 0.01, "lr": 1e-3}),
    (torch.optim.Adamax, {}),
    (torch.optim.Adamax, {"weight_decay": 0.01, "foreach": True}),
    (torch.optim.NAdam, {}),
    (torch.optim.NAdam, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    (torch.optim.RAdam, {}),
    (torch.optim.RAdam, {"weight_decay": 0.1, "decoupled_weight_decay": True, "foreach": True}),
    (torch.optim.ASGD, {}),
    (torch.optim.ASGD, {"t0": 3.0, "lambd": 0.01, "alpha": 0.6, "weight_decay": 0.01}),
    (torch.optim.Rprop, {}),
    (torch.optim.Rprop, {"etas": (0.6, 1.3), "step_sizes": (1e-5, 1.0), "maximize": True}),
    (torch.optim.Adafactor, {}),
    (torch.optim.Adafactor, {"lr": torch.tensor(0.02), "eps": (1e-8, 1e-2), "d": 1.5}),
]


@pytest.mark.parametrize(("optimizer", "options"), TORCH)
def test_an_optimizer_of_torch_equals_stock(optimizer: Any, options: dict[str, Any]) -> None:
    assert_equals_stock(optimizer, options)


def test_every_optimizer_of_torch_is_tested() -> None:
    everyone = {
        value
        for value in vars(torch.optim).values()
        if isinstance(value, type) and issubclass(value, Optimizer) and value is not Optimizer
    }
    refused = {torch.optim.LBFGS, torch.optim.SparseAdam}
    assert everyone - refused == {optimizer for optimizer, _ in TORCH} | {torch.optim.Muon}


def test_muon_equals_stock() -> None:
    """It rounds to bfloat16 inside: a noise of 1e-9 in a gradient may show as one of 4e-3."""

    class Hidden(Classifier):
        def configure_optimizers(self) -> Any:
            return torch.optim.Muon([self.net[0].weight], lr=0.02, momentum=0.9)

    ours, stock = both(
        lambda: Hidden(mlp()), lambda: (loader(160),), callbacks=(Moving(),), max_steps=10
    )
    assert_close(ours.losses, stock.losses, 1e-3)
    moved = (stock.module.net[0].weight - Hidden(mlp()).net[0].weight).abs().mean()
    error = (ours.module.net[0].weight - stock.module.net[0].weight).abs().mean()
    assert error < 2e-2 * moved


def test_capturable_runs_where_eager_refuses_the_cpu() -> None:
    """torch's capturable optimizers insist on an accelerator; their numbers are the plain ones."""
    with pytest.raises(AssertionError, match="capturable=True"):
        fit(
            lambda: Classifier(mlp(), torch.optim.Adam, capturable=True),
            lambda: (loader(32),),
            static=False,
        )
    for optimizer in (torch.optim.Adam, torch.optim.RAdam):
        runs = [
            fit(
                lambda o=optimizer, c=c: Classifier(mlp(), o, capturable=c),
                lambda: (loader(160),),
                static=c,
            )
            for c in (True, False)
        ]
        assert_close(runs[0].losses, runs[1].losses)


def test_param_groups_with_options_of_their_own_equal_stock() -> None:
    class Grouped(Classifier):
        def configure_optimizers(self) -> Any:
            first, second = self.net[0], self.net[3]
            groups = [
                {"params": first.parameters(), "lr": 0.05, "weight_decay": 0.1},
                {"params": [second.weight], "betas": (0.8, 0.9), "amsgrad": True},
                {"params": [second.bias], "maximize": True, "lr": 1e-4, "fused": True},
            ]
            return torch.optim.AdamW(groups, lr=0.01)

    ours, stock = both(
        lambda: Grouped(mlp()), lambda: (loader(160),), callbacks=(Moving(),), max_steps=10
    )
    assert_same_run(ours, stock)


@pytest.mark.compiler
@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (torch.optim.RAdam, {}),
        (torch.optim.ASGD, {"t0": 3.0}),
        (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.5}),
    ],
)
def test_compiled_optimizers_equal_stock(optimizer: Any, options: dict[str, Any]) -> None:
    assert_equals_stock(optimizer, options, policy="default")


# -- optimizers of users -------------------------------------------------------------------------


class Lion(PerParameter):
    """Chen et al. 2023, as its authors wrote it."""

    def update(self, p: Tensor, state: dict[str, Any], lr: float) -> None:
        if not state:
            state["average"] = torch.zeros_like(p)
        p.mul_(1 - lr * 0.01)
        update = state["average"] * 0.9 + p.grad * (1 - 0.9)
        p.add_(torch.sign(update), alpha=-lr)
        state["average"].lerp_(p.grad, 1 - 0.99)


class Lamb(Optimizer):
    """You et al. 2020: a trust ratio for each parameter, bias corrections from a tensor."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(
            params, {"lr": lr, "betas": [0.9, 0.999], "eps": 1e-6, "weight_decay": 0.1}
        )

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                state = self.state[p]
                if "step" not in state:
                    state.update(step=torch.zeros(()), m=torch.zeros_like(p))
                    state.setdefault("v", torch.zeros_like(p))
                state["step"] += 1
                state["m"].mul_(first).add_(p.grad, alpha=1 - first)
                state["v"].mul_(second).addcmul_(p.grad, p.grad, value=1 - second)
                m = state["m"] / (1 - first ** state["step"])
                v = state["v"] / (1 - second ** state["step"])
                update = m / (v.sqrt() + group["eps"]) + group["weight_decay"] * p
                weight, size = p.norm(), update.norm()
                ratio = torch.where((weight > 0) & (size > 0), weight / size, 1.0)
                p.add_(update * ratio, alpha=-group["lr"])
        return loss


class Foreach(Optimizer):
    """Adam by hand, on lists of tensors."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            params = group["params"]
            grads = [p.grad for p in params]
            for p in params:
                if p not in self.state:
                    self.state[p] = {"m": torch.zeros_like(p), "v": torch.zeros_like(p)}
            m = [self.state[p]["m"] for p in params]
            v = [self.state[p]["v"] for p in params]
            first, second = group["betas"]
            torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_lerp_(m, grads, 1 - first)
            torch._foreach_mul_(v, second)
            torch._foreach_addcmul_(v, grads, grads, value=1 - second)
            size = torch._foreach_sqrt(v)
            torch._foreach_add_(size, group["eps"])
            torch._foreach_maximum_(size, group["eps"] * 10)
            torch._foreach_addcdiv_(params, m, size, value=-group["lr"])
            torch._foreach_addcdiv_(params, m, size, [-group["lr"] * 0.1] * len(params))
            torch._foreach_add_(params, grads, alpha=-group["lr"] * 0.1)
        return loss


class OldStyle(PerParameter):
    """The order of arguments of torch 1.4, which torch still takes."""

    def update(self, p: Tensor, state: dict[str, Any], lr: float) -> None:
        if len(state) == 0:
            state["average"] = torch.zeros_like(p.data)
        state["average"].mul_(1 - lr).add_(lr, p.grad.data)
        p.data.addcdiv_(-lr, state["average"], state["average"].abs().add_(1e-2))
        p.data = p.data - lr * p.grad


@pytest.mark.filterwarnings("ignore:This overload of add")
@pytest.mark.parametrize("optimizer", [Lion, Lamb, Foreach, OldStyle])
def test_an_optimizer_of_a_user_equals_stock(optimizer: Any) -> None:
    assert_equals_stock(optimizer)


def test_preinitialize_gives_birth_where_an_optimizer_defines_it() -> None:
    class Prepared(PerParameter):
        def preinitialize(self) -> None:
            for group in self.param_groups:
                for p in group["params"]:
                    self.state[p]["average"] = torch.full_like(p, 0.25, requires_grad=False)

        def update(self, p: Tensor, state: dict[str, Any], lr: float) -> None:
            state["average"].mul_(0.9).add_(p.grad, alpha=0.1)
            p.sub_(state["average"] * lr)

    run = fit(lambda: Classifier(mlp(), Prepared), lambda: (loader(16),), static=True)
    net = mlp()
    torch.manual_seed(0)
    net = mlp()
    [(x, y)] = loader(16)
    nn.functional.cross_entropy(net(x), y).backward()
    for p, before in zip(run.module.net.parameters(), net.parameters(), strict=True):
        average = run.trainer.optimizers[0].state[p]["average"]
        torch.testing.assert_close(average, 0.9 * 0.25 + 0.1 * before.grad)
        torch.testing.assert_close(p, before - 0.01 * average)


class Keyed(PerParameter):
    """State under a name, a tensor alone, and dicts in dicts; the norm is the first gradient's."""

    def update(self, p: Tensor, state: dict[str, Any], lr: float) -> None:
        shared = self.state["shared"]
        if not shared:
            shared["norms"] = {"first": p.grad.norm()}
            self.state["count"] = torch.zeros(())
        self.state["count"] += 1
        shared["norms"]["first"].mul_(0.9)
        p.sub_(p.grad * lr / (self.state["count"] + shared["norms"]["first"]))


class Chained(PerParameter):
    """Fills a dict of its own that is already in the state."""

    def update(self, p: Tensor, state: dict[str, Any], lr: float) -> None:
        if not state:
            state = self.state[p] = {}
            state["step"], state["average"] = torch.tensor(0.0), torch.zeros_like(p)
        state["step"] += 1
        state["average"].lerp_(p.grad, 0.1)
        p.sub_(state["average"] * (lr / (1 - 0.9 ** state["step"])))


@pytest.mark.parametrize("optimizer", [Keyed, Chained])
def test_state_in_any_place_equals_stock(optimizer: Any) -> None:
    ours, stock = both(
        lambda: Classifier(mlp(), optimizer), lambda: (loader(160),), callbacks=(Moving(),)
    )
    assert_close(ours.losses, stock.losses)
    mine, theirs = (run.trainer.optimizers[0].state_dict()["state"] for run in (ours, stock))
    assert mine.keys() == theirs.keys()
    for key, values in theirs.items():
        assert_close(mine[key], values, 2e-5, str(key))


class NoGroupNumbers(Optimizer):
    """Has no numbers at all, but a function, a list and a dict among its options."""

    def __init__(self, params: Any, lr: float) -> None:
        options = {"sign": torch.sign, "names": ["a"], "scales": {"all": 0.01}, "bounds": (None, 1)}
        super().__init__(params, options)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(group["sign"](p.grad) * group["scales"]["all"])
        return loss


def test_options_that_are_no_numbers_may_not_change() -> None:
    class Change(pl.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, idx: int) -> None:
            if idx == 2:
                trainer.optimizers[0].param_groups[0]["scales"]["all"] = 0.1

    assert_equals_stock(NoGroupNumbers, moving=())
    with pytest.raises(StateChanged, match="the param groups' options were"):
        assert_equals_stock(NoGroupNumbers, moving=(Change(),))


def test_two_optimizers_that_share_parameters_equal_stock() -> None:
    class Shared(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.net = mlp()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            for optimizer in self.optimizers():
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
                self.manual_backward(loss)
                optimizer.step()
            return loss

        def configure_optimizers(self) -> Any:
            buffered = {"momentum": 0.9, "dampening": 0.5}
            return [
                torch.optim.Adam(self.parameters(), lr=0.01),
                torch.optim.SGD(self.net[0].parameters(), lr=0.1, **buffered),
            ]

    ours, stock = both(Shared, lambda: (loader(160),), callbacks=(Moving(),))
    assert_same_run(ours, stock)


# -- schedules and groups that change ------------------------------------------------------------


def scheduled(make: Any, optimizer: Any = torch.optim.AdamW, **options: Any) -> Any:
    """A classifier whose optimizer has a scheduler."""

    class Scheduled(Classifier):
        def configure_optimizers(self) -> Any:
            made = super().configure_optimizers()
            return {"optimizer": made, "lr_scheduler": make(made)}

    return Scheduled(mlp(), optimizer, **options)


def each_step(schedule: Any) -> dict[str, Any]:
    return {"scheduler": schedule, "interval": "step"}


SCHEDULES: list[tuple[Any, Any, dict[str, Any]]] = [
    (lambda o: each_step(lr_scheduler.OneCycleLR(o, 0.02, total_steps=40)), torch.optim.AdamW, {}),
    (
        lambda o: each_step(lr_scheduler.CyclicLR(o, 1e-3, 0.1, step_size_up=4)),
        torch.optim.SGD,
        {"momentum": 0.9, "dampening": 0.1},
    ),
    (
        lambda o: each_step(lr_scheduler.CosineAnnealingWarmRestarts(o, 5)),
        torch.optim.RAdam,
        {"lr": 1},
    ),
    (
        lambda o: each_step(lr_scheduler.LambdaLR(o, lambda step: min(1.0, step / 100))),
        torch.optim.Adafactor,
        {},
    ),
    (lambda o: lr_scheduler.StepLR(o, 1, 0.3), torch.optim.Rprop, {}),
    (lambda o: lr_scheduler.StepLR(o, 1, 0.3), torch.optim.Adam, {"lr": torch.tensor(0.01)}),
    (
        lambda o: {
            "scheduler": lr_scheduler.ReduceLROnPlateau(o, patience=0, threshold=1.0),
            "monitor": "loss_epoch",
        },
        torch.optim.NAdam,
        {},
    ),
]


@pytest.mark.parametrize(("schedule", "optimizer", "options"), SCHEDULES)
def test_scheduler_on_the_host_equals_stock(schedule: Any, optimizer: Any, options: Any) -> None:
    def make() -> Any:
        copies = {k: v.clone() if isinstance(v, Tensor) else v for k, v in options.items()}
        return scheduled(schedule, optimizer, **copies)

    ours, stock = both(make, lambda: (loader(),), max_epochs=3, limit_train_batches=8)
    [group] = ours.trainer.optimizers[0].param_groups
    assert group["lr"] != options.get("lr", 1e-2)
    assert_same_run(ours, stock)


class Unfreeze(pl.Callback):
    """Trains the last layer alone, then all, then the last again."""

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        first = module.net[0]
        first.requires_grad_(trainer.current_epoch == 1)
        groups = trainer.optimizers[0].param_groups
        if trainer.current_epoch == 1 and len(groups) == 1:
            trainer.optimizers[0].add_param_group({"params": list(first.parameters()), "lr": 0.003})


class Head(Classifier):
    def configure_optimizers(self) -> Any:
        return self.optimizer(self.net[3].parameters(), **self.options)


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (torch.optim.AdamW, {}),
        (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.5}),
        (FirstGradient, {}),
    ],
)
def test_a_group_that_is_added_needs_another_program(optimizer: Any, options: Any) -> None:
    def make() -> Any:
        return Head(mlp(), optimizer, **options)

    common: dict[str, Any] = {"callbacks": (Unfreeze(),), "max_epochs": 3}
    ours, stock = both(make, lambda: (loader(64),), backend={"max_programs": 3}, **common)
    assert_same_run(ours, stock)
    with pytest.raises(StateChanged, match=r"max_programs=2"):
        fit(make, lambda: (loader(64),), static=True, **common)


def test_unfreezing_gives_birth_to_the_state_that_was_missing() -> None:
    class Late(pl.Callback):
        def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
            module.net[0].requires_grad_(trainer.current_epoch == 1)

    ours, stock = both(
        lambda: Classifier(mlp(), torch.optim.ASGD),
        lambda: (loader(64),),
        backend={"max_programs": 2},
        callbacks=(Late(),),
        max_epochs=3,
    )
    assert_same_run(ours, stock)
    assert len(ours.trainer.strategy.programs) == 2


# -- what cannot be static -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (torch.optim.LBFGS, "LBFGS evaluates the step again"),
        (torch.optim.SparseAdam, "SparseAdam takes sparse gradients"),
    ],
)
def test_optimizers_that_cannot_be_static_are_refused(optimizer: Any, message: str) -> None:
    with pytest.raises(UnsupportedState, match=message):
        fit(lambda: Classifier(mlp(), optimizer), lambda: (loader(),), static=True)


class CountingSGD(PerParameter):
    """Counts its steps in a Python number of its state."""

    def update(self, p: Tensor, state: dict[str, Any], lr: float) -> None:
        state["step"] = state.get("step", 0) + 1
        p.add_(p.grad, alpha=-lr / state["step"])


class EverySecond(PerParameter):
    """Updates on every second call, by a Python number of its own."""

    def step(self, closure: Any = None) -> Any:
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls % 2 == 0:
            return super().step(closure)
        return closure() if closure is not None else None

    def update(self, p: Tensor, state: dict[str, Any], lr: float) -> None:
        p.sub_(p.grad * lr)


class Flipping(EverySecond):
    """The same by a flag in its state."""

    def step(self, closure: Any = None) -> Any:
        return PerParameter.step(self, closure)

    def update(self, p: Tensor, state: dict[str, Any], lr: float) -> None:
        state["on"] = not state.get("on", False)
        if state["on"]:
            p.sub_(p.grad * lr)


class Listing(PerParameter):
    def update(self, p: Tensor, state: dict[str, Any], lr: float) -> None:
        state.setdefault("history", [torch.zeros_like(p)])[0].add_(p.grad)
        p.sub_(state["history"][0] * lr)


class OwnTensor(PerParameter):
    def update(self, p: Tensor, state: dict[str, Any], lr: float) -> None:
        self.norm = p.grad.norm()
        p.sub_(p.grad * lr)


class Wrapping(PerParameter):
    """Holds another optimizer, as Lookahead does."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        self.inner = torch.optim.Adam(self.param_groups[0]["params"], lr=lr)

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


class Sharpness(Optimizer):
    """Evaluates the step twice, and keeps a state that is the first gradient's."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        closure = torch.enable_grad()(closure)
        loss = closure()
        params = self.param_groups[0]["params"]
        for p in params:
            self.state[p]["move"] = 0.05 * p.grad / p.grad.norm()
            p.add_(self.state[p]["move"])
        closure()
        for p in params:
            p.sub_(self.state[p]["move"] + self.param_groups[0]["lr"] * p.grad)
        return loss


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (CountingSGD, r"keeps state\['step'\] as a Python number"),
        (EverySecond, r"EverySecond changed a Python number in its step \(EverySecond.calls"),
        (Flipping, r"Flipping changed a Python flag in its step"),
        (Listing, r"keeps tensors in a list, state\['history'\]"),
        (Wrapping, r"changes a tensor that no module holds"),
        (Sharpness, r"changes parameters before it evaluates its closure"),
        (OwnTensor, r"left a traced tensor in OwnTensor.norm"),
    ],
)
def test_state_that_would_be_frozen_is_refused(optimizer: Any, message: str) -> None:
    with pytest.raises(UnsupportedState, match=message):
        fit(lambda: Classifier(mlp(), optimizer), lambda: (loader(),), static=True)
