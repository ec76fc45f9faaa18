"""What users' optimizers keep between steps, as published ones do: the numbers are stock's."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import assert_close, assert_same_run, both, fit, make_trainer
from models import Classifier, PerParameter, loader, mlp
from optimizers import CountingGroup
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.utils.data import DataLoader

from fulgurite.backends.csx.diagnostics.trace_errors import UnsupportedState

pytestmark = pytest.mark.numbers


class Sam(Optimizer):
    """Foret et al. 2021 around another optimizer: two evaluations, old weights in the state."""

    def __init__(self, params: Any, lr: float, base: type[Optimizer] = SGD) -> None:
        super().__init__(params, {"lr": lr, "rho": 0.05})
        self.base_optimizer = base(self.param_groups, lr=lr)  # type: ignore[call-arg]
        self.param_groups = self.base_optimizer.param_groups
        self.defaults.update(self.base_optimizer.defaults)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        closure = torch.enable_grad()(closure)
        loss = closure()
        every = [(group, p) for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for _, p in every]).norm()
        for group, p in every:
            self.state[p]["old"] = p.data.clone()
            p.add_(p.grad * (group["rho"] / (norm + 1e-12)))
        self.zero_grad()
        closure()
        for _, p in every:
            p.data = self.state[p]["old"]
        self.base_optimizer.step()
        return loss


class SamInState(SGD):
    """The same within SGD; what it adds is in the state for as long as it needs it."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        closure = torch.enable_grad()(closure)
        loss = closure()
        every = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in every]).norm()
        for p in every:
            self.state[p]["added"] = p.grad * (0.05 / (norm + 1e-12))
            p.add_(self.state[p]["added"])
        self.zero_grad()
        closure()
        for p in every:
            p.sub_(self.state[p].pop("added"))
        super().step()
        return loss


class Lookahead(Optimizer):
    """Zhang et al. 2019 around another optimizer, without torch's ``__init__``."""

    def __init__(self, optimizer: Optimizer, every: int = 3) -> None:
        self.optimizer, self.every = optimizer, every
        self.param_groups, self.defaults = optimizer.param_groups, optimizer.defaults
        self.state: Any = defaultdict(dict)
        self._optimizer_step_pre_hooks: Any = {}
        self._optimizer_step_post_hooks: Any = {}
        for group in self.param_groups:
            group["counter"] = 0

    def step(self, closure: Any = None) -> Any:
        loss = self.optimizer.step(closure)
        for group in self.param_groups:
            if group["counter"] == 0:
                for p in group["params"]:
                    slow = self.state[p].setdefault("slow", p.detach().clone())
                    slow += (p.data - slow) * 0.5
                    p.data.copy_(slow)
            group["counter"] += 1
            if group["counter"] >= self.every:
                group["counter"] = 0
        return loss

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()


class Counting(Optimizer):
    """Adam as torch had it until 1.12: a Python count for each parameter."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.999)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = torch.enable_grad()(closure)()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, self.state[p], *group["betas"], lr=group["lr"])
        return loss

    def update(self, p: Tensor, state: Any, first: float, second: float, lr: float) -> None:
        if len(state) == 0:
            state["step"] = 0
            state["m"], state["v"] = torch.zeros_like(p), torch.zeros_like(p)
        state["step"] += 1
        state["m"].mul_(first).add_(p.grad, alpha=1 - first)
        state["v"].mul_(second).addcmul_(p.grad, p.grad, value=1 - second)
        size = (state["v"].sqrt() / math.sqrt(1 - second ** state["step"])).add_(1e-8)
        p.addcdiv_(state["m"], size, value=-lr / (1 - first ** state["step"]))


class Rectified(Counting):
    """Liu et al. 2020: another formula from the sixth step on."""

    def update(self, p: Tensor, state: Any, first: float, second: float, lr: float) -> None:
        if len(state) == 0:
            state.update(step=0, m=torch.zeros_like(p), v=torch.zeros_like(p))
        state["step"] += 1
        state["m"].mul_(first).add_(p.grad, alpha=1 - first)
        state["v"].mul_(second).addcmul_(p.grad, p.grad, value=1 - second)
        power = second ** state["step"]
        most = 2 / (1 - second) - 1
        length = most - 2 * state["step"] * power / (1 - power)
        rate = lr / (1 - first ** state["step"])
        if length < 5:
            p.sub_(state["m"] * rate)
            return
        rate *= math.sqrt((1 - power) * (length - 4) / (most - 4) * (length - 2) / length)
        p.addcdiv_(state["m"], state["v"].sqrt().add_(1e-8), value=-rate)


class Preconditioned(Counting):
    """Vyas et al. 2024 in short: matrices in lists, none in the first step, new ones in turns."""

    def update(self, p: Tensor, state: Any, first: float, second: float, lr: float) -> None:
        if "step" not in state:
            state["step"], state["GG"], state["Q"] = 0, [torch.zeros(n, n) for n in p.shape], None
            state["m"] = torch.zeros_like(p)
        for i, matrix in enumerate(state["GG"]):
            flat = p.grad.movedim(i, 0).flatten(1) if p.ndim > 1 else p.grad[:, None]
            matrix.lerp_(flat @ flat.T, 1 - second)
        if state["Q"] is None:
            eye = [torch.eye(len(matrix)) for matrix in state["GG"]]
            pairs = zip(state["GG"], eye, strict=True)
            state["Q"] = [torch.linalg.qr(g + e)[0] for g, e in pairs]
            return
        turned = p.grad
        for q in state["Q"]:
            turned = torch.tensordot(turned, q, dims=[[0], [0]])
        state["step"] += 1
        state["m"].lerp_(turned, 1 - first)
        update = state["m"] * (lr / (1 - first ** state["step"]))
        for q in state["Q"]:
            update = torch.tensordot(update, q, dims=[[0], [1]])
        p.sub_(update)
        if state["step"] > 0 and state["step"] % 3 == 0:
            pairs = zip(state["GG"], state["Q"], strict=True)
            state["Q"] = [torch.linalg.qr(matrix @ q + q)[0] for matrix, q in pairs]


class Warmed(PerParameter):
    """A flag, a number and a tensor of its own, the latter two from the first step on."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        self.is_warm, self.mean, self.numbers = False, None, {"calls": 0}

    def step(self, closure: Any = None) -> Any:
        self.numbers["calls"] += 1
        loss = super().step(closure)
        if self.numbers["calls"] == 3:
            self.is_warm = True
        return loss

    def update(self, p: Tensor, state: dict[str, Any], lr: float) -> None:
        size = p.grad.norm()
        self.mean: Any = size.clone() if self.mean is None else self.mean * 0.9 + size * 0.1
        self._total = getattr(self, "_total", 0.0) + lr
        p.sub_(p.grad * lr / ((1 + self.mean) * self._total * (2 if self.is_warm else 1)))


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


class Prodigious(Optimizer):
    """Mishchenko and Defazio 2023: how far it has come is a tensor for all weights."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": 1.0, "betas": (0.9, 0.99), "d0": 1e-3})
        self.d, self.numerator = torch.tensor(1e-3), torch.zeros(())

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = torch.enable_grad()(closure)()
        [group] = self.param_groups
        first, second = group["betas"]
        root, rate = math.sqrt(second), self.d * group["lr"]
        total, size = self.numerator * root, torch.zeros(())
        for p in group["params"]:
            state = self.state[p]
            if "step" not in state:
                state["step"], state["p0"] = 0, p.detach().clone()
                state.update({key: torch.zeros_like(p) for key in ("s", "m", "v")})
            scale = self.d / group["d0"] * rate
            total = total + scale * torch.dot(p.grad.flatten(), (state["p0"] - p).flatten())
            state["m"].mul_(first).add_(self.d * (1 - first) * p.grad)
            state["v"].mul_(second).add_(self.d**2 * (1 - second) * p.grad**2)
            state["s"].mul_(root).add_(scale * p.grad)
            size = size + state["s"].abs().sum()
        self.numerator.copy_(total)
        self.d = torch.maximum(self.d, total / size.clamp_min(1e-20))
        for p in group["params"]:
            state = self.state[p]
            state["step"] += 1
            p.sub_(rate * state["m"] / (state["v"].sqrt() + self.d * 1e-8))
        return loss


class Sometimes(PerParameter):
    """Counts what it does every third time, for others to read, and changes a flag of its group."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        self.calls, self.restarts, self.last = 0, 0, None
        self.param_groups[0].update(warm=True, restarts=0)

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        loss = super().step(closure)
        self.last: Any = self.calls
        if self.calls % 3 == 0:
            self.restarts += 1
            self.param_groups[0]["restarts"] += 1
        if self.calls == 5:
            self.param_groups[0]["warm"] = False
        return loss

    def update(self, p: Tensor, state: dict[str, Any], lr: float) -> None:
        p.sub_(p.grad * lr * (0.1 if self.param_groups[0]["warm"] else 1.0))


class Noam(Optimizer):
    """Vaswani et al. 2017: sets the rate of an optimizer inside, whose groups it shares."""

    def __init__(self, params: Any, lr: float) -> None:
        self.optimizer, self._step = Adam(params, lr), 0
        super().__init__(self.optimizer.param_groups, self.optimizer.defaults)
        self.param_groups, self.state = self.optimizer.param_groups, self.optimizer.state

    def step(self, closure: Any = None) -> Any:
        self._step += 1
        for group in self.optimizer.param_groups:
            group["lr"] = 0.1 * min(self._step**-0.5, self._step * 4**-1.5)
        return self.optimizer.step(closure)


MAKE: dict[str, Callable[[Any, float], Optimizer]] = {
    "sam": Sam,
    "sam_adamw": lambda params, lr: Sam(params, lr, AdamW),
    "sam_in_state": SamInState,
    "lookahead": lambda params, lr: Lookahead(SGD(params, lr, momentum=0.9)),
    "lookahead_adam": lambda params, lr: Lookahead(Adam(params, lr)),
    "adam": Counting,
    "rectified": Rectified,
    "preconditioned": Preconditioned,
    "prodigious": Prodigious,
    "warmed": Warmed,
    "sometimes": Sometimes,
    "noam": Noam,
    "every_second": EverySecond,
    "flipping": Flipping,
    "listing": Listing,
    "wrapping": Wrapping,
    "own_tensor": OwnTensor,
    "counting": CountingSGD,
    "group": CountingGroup,
}


class InAList(PerParameter):
    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        self.calls = [0]

    def step(self, closure: Any = None) -> Any:
        self.calls[0] += 1
        return super().step(closure)

    def update(self, p: Tensor, state: dict[str, Any], lr: float) -> None:
        p.sub_(p.grad * lr / self.calls[0])


class Phased(PerParameter):
    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        self.calls, self.phase = 0, "warm"

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        if self.calls == 2:
            self.phase = "main"
        return super().step(closure)

    def update(self, p: Tensor, state: dict[str, Any], lr: float) -> None:
        p.sub_(p.grad * lr * (0.1 if self.phase == "warm" else 1.0))


@pytest.mark.fits
def test_a_string_that_a_step_changes_is_refused() -> None:
    with pytest.raises(UnsupportedState, match=r"Phased\.phase, from 'warm' to 'main'") as raised:
        fit(lambda: Classifier(mlp(), Phased), lambda: (loader(),), static=True)
    assert raised.value.line is not None
    assert raised.value.line.source == "def step(self, closure: Any = None) -> Any:"


@pytest.mark.fits
def test_a_number_in_a_list_is_refused() -> None:
    with pytest.raises(UnsupportedState, match=r"in its step .InAList\.calls\[0\], from"):
        fit(lambda: Classifier(mlp(), InAList), lambda: (loader(),), static=True)


def state_of(optimizer: Optimizer) -> Any:
    """What a checkpoint has of it."""
    return optimizer.state_dict()


@pytest.mark.parametrize("windows", [1, 2])
@pytest.mark.parametrize("name", MAKE)
def test_what_an_optimizer_keeps_goes_on(name: str, windows: int) -> None:
    ours, stock = both(
        lambda: Classifier(mlp(), MAKE[name]),
        lambda: (loader(144),),
        fresh=True,
        max_epochs=2,
        accumulate_grad_batches=windows,
    )
    assert_same_run(ours, stock)
    mine, theirs = (state_of(run.trainer.optimizers[0]) for run in (ours, stock))
    assert_close(mine, theirs, 2e-5)


@pytest.mark.long
@pytest.mark.compiler
@pytest.mark.parametrize("name", ["sam", "lookahead", "rectified", "preconditioned"])
def test_it_goes_on_in_compiled_programs(name: str) -> None:
    ours, stock = both(
        lambda: Classifier(mlp(), MAKE[name]),
        lambda: (loader(144),),
        policy="default",
        fresh=True,
        max_epochs=2,
    )
    assert_same_run(ours, stock)


@pytest.mark.long
@pytest.mark.parametrize("name", ["sam_adamw", "rectified", "preconditioned", "flipping"])
def test_it_resumes(tmp_path: Path, name: str) -> None:
    def run(static: bool, epochs: int, path: Path | None = None) -> Any:
        torch.manual_seed(0)
        trainer = make_trainer(static, max_epochs=epochs)
        trainer.fit(Classifier(mlp(), MAKE[name]), loader(144), ckpt_path=path, weights_only=False)
        return trainer

    path = tmp_path / "half.ckpt"
    for saves in (True, False):
        run(saves, 1).save_checkpoint(path)
        ours, stock = (run(static, 2, path) for static in (True, False))
        assert_close(ours.model.state_dict(), stock.model.state_dict(), 1e-5)
        assert_close(state_of(ours.optimizers[0]), state_of(stock.optimizers[0]), 2e-5)


@pytest.mark.fits
@pytest.mark.parametrize("last", [5, 6])
def test_what_a_skipped_step_counts_does_not_count(last: int) -> None:
    """The batch that overflows comes where the counter begins anew (5), and where it does not."""
    batches = [
        (torch.randn(16, 8) * (1e3 if i == last else 1), torch.zeros(16).long()) for i in range(9)
    ]

    class Clocked(Lookahead):
        def __init__(self, params: Any, lr: float) -> None:
            super().__init__(SGD(params, lr))
            self.calls, self.is_odd = 0, False

        def step(self, closure: Any = None) -> Any:
            self.calls += 1
            self.is_odd = not self.is_odd
            return super().step(closure)

    trainer = make_trainer(True, max_epochs=1, precision="16-mixed")
    trainer.fit(Classifier(mlp(), Clocked), DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    scaler: Any = trainer.precision_plugin
    optimizer: Any = trainer.optimizers[0]
    done = 9 - int(scaler.scaler.state_dict()["skipped_steps"])
    assert done == 8
    assert optimizer.param_groups[0]["counter"] == done % 3
    assert (optimizer.calls, optimizer.is_odd) == (done, done % 2 == 1)


@pytest.mark.fits
@pytest.mark.parametrize(
    ("name", "most"), [("adam", 1), ("preconditioned", 2), ("lookahead", 3), ("warmed", 4)]
)
def test_programs_are_built_once(name: str, most: int) -> None:
    """Not at every step, because of what an optimizer has made since."""
    run = fit(
        *(lambda: Classifier(mlp(), MAKE[name]), lambda: (loader(320),)),
        **{"static": True, "backend": {"max_programs": "auto"}},
    )
    strategy: Any = run.trainer.strategy
    assert len(strategy.training._builder.programs) <= most
