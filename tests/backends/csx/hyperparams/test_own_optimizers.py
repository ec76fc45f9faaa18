"""Optimizers of users: numbers equal eager's, and what would be frozen is refused."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from harness import Run, assert_close, assert_same_run, both, fit, make_trainer
from models import Classifier, PerParameter, loader, mlp
from optimizers import AdaBelief, CountingGroup, Moving, assert_equals_stock
from torch import Tensor
from torch.optim import Optimizer

from fulgurite.backends.csx.diagnostics.trace_errors import StateChanged, UnsupportedState

pytestmark = pytest.mark.numbers


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


def test_options_that_are_no_numbers_are_another_program() -> None:
    class Change(pl.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, idx: int) -> None:
            if idx == 2:
                trainer.optimizers[0].param_groups[0]["scales"]["all"] = 0.1

    assert_equals_stock(NoGroupNumbers, moving=())
    assert_equals_stock(NoGroupNumbers, moving=(Change(),))
    with pytest.raises(StateChanged, match="the param groups' options were"):
        fit(
            *(lambda: Classifier(mlp(), NoGroupNumbers), lambda: (loader(64),)),
            **{"static": True, "callbacks": (Change(),), "backend": {"max_programs": 1}},
        )


# -- numbers, flags, lists and other optimizers that they keep -------------------------------------


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
            self.state[p].setdefault("move", 0.05 * p.grad / p.grad.norm())
            p.add_(self.state[p]["move"])
        closure()
        for p in params:
            p.sub_(self.state[p]["move"] + self.param_groups[0]["lr"] * p.grad)
        return loss


@pytest.mark.numbers
def test_a_step_evaluates_twice_and_makes_its_state() -> None:
    assert_equals_stock(Sharpness)


class Emptied(PerParameter):
    """Takes a count away again."""

    def update(self, p: Tensor, state: dict[str, Any], lr: float) -> None:
        if "calls" in state:
            del state["calls"]
        else:
            state["calls"] = 1
        p.sub_(p.grad * lr)


@pytest.mark.fits
def test_a_count_that_is_taken_away_is_refused() -> None:
    with pytest.raises(
        UnsupportedState, match=r"state\['calls'\] is a Python number, .* took it away"
    ):
        fit(lambda: Classifier(mlp(), Emptied), lambda: (loader(),), static=True)


class CountsByGet(AdaBelief):
    def count(self, group: dict[str, Any]) -> Any:
        group["step"] = group.get("step", 0) + 1
        return group["step"]


class CountsFromDefaults(AdaBelief):
    """One that warms up: another program after the third step."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, lr, step=0, decayed=1.0)

    def count(self, group: dict[str, Any]) -> Any:
        group["step"] += 1
        group["decayed"] *= 0.9
        if group["step"] > 3:
            group["lr"] *= group["decayed"]
        return group["step"]


class BornElsewhere(AdaBelief):
    """The first step is another one."""

    def count(self, group: dict[str, Any]) -> Any:
        if "step" not in group:
            group["step"] = 7
            return 1
        group["step"] += 1
        return group["step"]


@pytest.mark.parametrize("optimizer", [AdaBelief, CountsByGet, CountingGroup, BornElsewhere])
def test_counts_in_groups_go_on(optimizer: Any) -> None:
    ours, stock = both(
        lambda: Classifier(mlp(), optimizer), lambda: (loader(96),), fresh=True, max_epochs=2
    )
    assert_same_run(ours, stock)
    assert groups_of(ours) == groups_of(stock)


def groups_of(run: Run) -> Any:
    """The param groups after a run, as a checkpoint has them."""
    return run.trainer.optimizers[0].state_dict()["param_groups"]


@pytest.mark.long
@pytest.mark.compiler
def test_counts_in_groups_go_on_in_compiled_programs() -> None:
    ours, stock = both(
        lambda: Classifier(mlp(), AdaBelief), lambda: (loader(),), policy="default", max_epochs=2
    )
    assert_same_run(ours, stock)


def test_a_number_that_a_step_computes_from_numbers_is_the_next_steps() -> None:
    module, auto = lambda: Classifier(mlp(), CountsFromDefaults), {"max_programs": "auto"}
    ours = fit(module, lambda: (loader(),), static=True, backend=auto)
    stock = fit(module, lambda: (loader(),), static=False)
    assert_same_run(ours, stock)
    assert groups_of(ours) == groups_of(stock)


@pytest.mark.long
def test_counts_in_groups_resume(tmp_path: Path) -> None:
    """From a checkpoint of ours and of Lightning's, in either."""

    def run(static: bool, epochs: int, path: Path | None = None) -> pl.Trainer:
        torch.manual_seed(0)
        trainer = make_trainer(static, max_epochs=epochs)
        trainer.fit(Classifier(mlp(), AdaBelief), loader(64), ckpt_path=path, weights_only=False)
        return trainer

    whole, path = run(False, 2), tmp_path / "half.ckpt"
    for saves in (True, False):
        run(saves, 1).save_checkpoint(path)
        for resumed in (run(True, 2, path), run(False, 2, path)):
            assert_close(resumed.model.state_dict(), whole.model.state_dict(), 1e-5)
            assert resumed.optimizers[0].param_groups[0]["step"] == 8


class WithoutInit(Optimizer):
    """Sets what torch's ``__init__`` would, as some published ones do, and in its own way."""

    def __init__(self, params: Any, lr: float) -> None:
        self.defaults = {"lr": lr}
        self.state: Any = defaultdict(dict)
        self._optimizer_step_pre_hooks: Any = {}
        self._optimizer_step_post_hooks: Any = {}
        self.param_groups = [{"params": list(params), "lr": lr}]

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                average = self.state[p].setdefault("average", p.grad.clone())
                p.sub_(average.lerp_(p.grad, 0.1) * self.param_groups[0]["lr"])
        return loss


def test_an_optimizer_may_leave_torchs_init_out() -> None:
    ours, stock = (
        fit(lambda: Classifier(mlp(), WithoutInit), lambda: (loader(160),), static=static)
        for static in (True, False)
    )
    assert_close(ours.losses, stock.losses, 1e-5)
    assert_close(ours.module.state_dict(), stock.module.state_dict(), 1e-5)


class Averaging(Optimizer):
    """Polyak's average, and numbers in the groups that are for others to read."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr, "k": 0, "scheduled_lr": 0.0, "lr_max": -1.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            group["k"] += 1
            group["scheduled_lr"] = lr = group["lr"] / group["k"] ** 0.5
            group["lr_max"] = max(lr, group["lr_max"])
            for p in group["params"]:
                state = self.state[p]
                if "average" not in state:
                    state["average"] = torch.zeros_like(p)
                p.add_(p.grad, alpha=-lr)
                state["average"].lerp_(p, weight=1 / group["k"])
                p.lerp_(state["average"], weight=0.1)
        return loss


@pytest.mark.long
def test_weights_of_averages_and_numbers_that_are_only_set() -> None:
    """``lerp`` has two formulas, below a weight of a half and above: both are programs."""
    options: dict[str, Any] = {"max_epochs": 2, "fresh": True}
    backend = {"max_programs": "auto", "audit": True}
    ours, stock = both(
        lambda: Classifier(mlp(), Averaging), lambda: (loader(),), backend=backend, **options
    )
    assert_same_run(ours, stock)
    for name in ("k", "scheduled_lr", "lr_max"):
        assert_close(groups_of(ours)[0][name], groups_of(stock)[0][name], 1e-12)
