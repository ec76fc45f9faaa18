"""``preinitialize()``: called once, before the trace, for parameters that have no state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Run, assert_close, assert_same_run, both, fit
from models import Classifier, PerParameter, loader, mlp
from torch import Tensor, nn

import fulgurite
from fulgurite.backends.csx.diagnostics.trace_errors import UnsupportedState
from fulgurite.backends.csx.state import optimizer_state

pytestmark = pytest.mark.fits


class Prepared(PerParameter):
    """Heavy ball; its state is made new at each call, whatever was there."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        self.calls: list[list[torch.dtype]] = []

    def preinitialize(self) -> None:
        params = [p for group in self.param_groups for p in group["params"]]
        self.calls.append([p.dtype for p in params])
        for p in params:
            self.state[p].update(self.made(p))

    def made(self, p: Tensor) -> dict[str, Any]:
        return {"average": torch.full_like(p, 0.25, requires_grad=False)}

    def update(self, p: Tensor, state: dict[str, Any], lr: float) -> None:
        state["average"].mul_(0.9).add_(p.grad, alpha=0.1)
        p.sub_(state["average"] * lr)


class Eager(Prepared):
    """The style of scripts that run on GPUs too: made in ``__init__``."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        self.preinitialize()


class Abstract(torch.optim.Optimizer, ABC):
    """A base that demands both methods."""

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        super().__init__(params, defaults)
        self.preinitialize()

    @abstractmethod
    def preinitialize(self) -> None: ...

    @abstractmethod
    def step(self, closure: Any = None) -> Any: ...


class Derived(Abstract):
    """Adam as such bases have it: powers of the betas are state."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99)})

    def preinitialize(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["m"], self.state[p]["v"] = torch.zeros_like(p), torch.zeros_like(p)
                self.state[p]["powers"] = torch.tensor(group["betas"])

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                state = self.state[p]
                state["m"].mul_(first).add_(p.grad, alpha=1 - first)
                state["v"].mul_(second).addcmul_(p.grad, p.grad, value=1 - second)
                rest = 1 - state["powers"]
                size = group["lr"] * rest[1].sqrt() / rest[0]
                p.sub_(size * state["m"] / (state["v"].sqrt() + 1e-8))
                state["powers"].mul_(torch.tensor([first, second]))
        return loss


def fitted(optimizer: Any, **options: Any) -> Run:
    """Ten steps on CSX."""
    return fit(lambda: Classifier(mlp(), optimizer), lambda: (loader(160),), static=True, **options)


def calls(run: Run) -> list[list[torch.dtype]]:
    """The dtypes of the parameters at each call."""
    found: list[list[torch.dtype]] = run.trainer.optimizers[0].calls
    return found


def test_it_is_called_once_and_its_values_are_those_of_the_first_step() -> None:
    run = fitted(Prepared, limit_train_batches=1)
    torch.manual_seed(0)
    net = mlp()
    x, y = next(iter(loader(160)))
    nn.functional.cross_entropy(net(x), y).backward()
    for p, before in zip(run.module.net.parameters(), net.parameters(), strict=True):
        average = run.trainer.optimizers[0].state[p]["average"]
        assert_close(average, 0.9 * 0.25 + 0.1 * before.grad)
        assert_close(p.detach(), before.detach() - 0.01 * average)
    assert len(calls(run)) == 1


def test_it_is_called_once_for_all_entry_points_and_programs() -> None:
    run = fitted(Prepared, accumulate_grad_batches=3, limit_val_batches=0)
    assert run.trainer.global_step == 4
    assert len(calls(run)) == 1


def test_parameters_have_their_final_form() -> None:
    run = fitted(Prepared, precision="bf16-true")
    assert calls(run) == [[torch.bfloat16] * 4]
    states = run.trainer.optimizers[0].state.values()
    assert {state["average"].dtype for state in states} == {torch.bfloat16}


@pytest.mark.numbers
@pytest.mark.parametrize("optimizer", [Eager, Derived])
def test_state_made_by_the_constructor_is_taken_as_it_is(optimizer: Any) -> None:
    ours, stock = both(lambda: Classifier(mlp(), optimizer), lambda: (loader(160),))
    assert_same_run(ours, stock)
    if optimizer is Eager:
        assert calls(ours) == calls(stock) == [[torch.float32] * 4]


def test_state_from_a_checkpoint_is_not_made_again(tmp_path: Path) -> None:
    whole = fitted(Prepared, max_epochs=2)
    fitted(Prepared).trainer.save_checkpoint(tmp_path / "half.ckpt")
    module = Classifier(mlp(), Prepared)
    trainer = fulgurite.Trainer(
        backend=whole.trainer.backend,
        max_epochs=2,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    trainer.fit(module, loader(160), ckpt_path=tmp_path / "half.ckpt", weights_only=False)
    assert trainer.optimizers[0].calls == []
    assert_close(module.state_dict(), whole.module.state_dict(), 0.0)


class Late(Classifier):
    """Adds a group to an optimizer whose constructor made the state of the first."""

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer(self.net[0].parameters(), **self.options)
        for state in optimizer.state.values():
            state["average"].fill_(-0.5)  # as if loaded
        optimizer.add_param_group({"params": self.net[3].parameters(), "lr": 0.02})
        return optimizer


def test_a_group_added_later_gets_its_state_and_the_first_keeps_its_own() -> None:
    run = fit(lambda: Late(mlp(), Eager), lambda: (loader(16),), static=True)
    assert len(calls(run)) == 2
    states = run.trainer.optimizers[0].state
    first, last = (states[run.module.net[i].bias]["average"] for i in (0, 3))
    assert_close(first, torch.full_like(first, -0.45), 0.05)
    assert_close(last, torch.full_like(last, 0.225), 0.05)


class Frozen(Classifier):
    """One layer does not train, another is not used."""

    def __init__(self) -> None:
        super().__init__(mlp(), Prepared)
        self.net[0].requires_grad_(False)
        self.unused = nn.Linear(2, 2)


def test_state_of_parameters_that_are_not_updated_is_dropped() -> None:
    class Careful(Prepared):
        def step(self, closure: Any = None) -> Any:
            loss = closure() if closure is not None else None
            with torch.no_grad():
                for p in self.param_groups[0]["params"]:
                    if p.grad is not None:
                        self.update(p, self.state[p], 0.01)
            return loss

    def make() -> Frozen:
        module = Frozen()
        module.optimizer = Careful
        return module

    run = fit(make, lambda: (loader(32),), static=True)
    assert set(run.trainer.optimizers[0].state) == set(run.module.net[3].parameters())


class InAGroup(Prepared):
    """Counts in a tensor that its param group holds."""

    def preinitialize(self) -> None:
        super().preinitialize()
        self.param_groups[0]["count"] = torch.zeros(())

    def update(self, p: Tensor, state: dict[str, Any], lr: float) -> None:
        self.param_groups[0]["count"] += 1
        super().update(p, state, lr)


def test_a_tensor_in_a_param_group_is_state_too() -> None:
    assert fitted(InAGroup).trainer.optimizers[0].param_groups[0]["count"] == 40


# -- what goes wrong -----------------------------------------------------------------------------


class Raising(Prepared):
    def preinitialize(self) -> None:
        raise KeyError("mine")


def test_its_own_error_stays() -> None:
    with pytest.raises(KeyError, match="mine") as caught:
        fitted(Raising)
    assert caught.traceback[-1].name == "preinitialize"


def making(**values: Any) -> type[Prepared]:
    """An optimizer whose state has these beside its own; functions are given the parameter."""

    class Making(Prepared):
        def made(self, p: Tensor) -> dict[str, Any]:
            more = {key: make(p) if callable(make) else make for key, make in values.items()}
            return {**super().made(p), **more}

    return Making


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (making(past=lambda p: {p.clone()}), r"keeps tensors in a set, state\['past'\]"),
        (making(sum=lambda p: p.double()), r"keeps state\['sum'\] in torch.float64"),
        (making(sum=lambda p: p.to("meta")), r"keeps state\['sum'\] on the device meta"),
        (making(sum=lambda p: p.to_sparse()), r"keeps state\['sum'\] as a torch.sparse_coo tensor"),
    ],
)
def test_state_that_no_program_can_hold_is_refused_before_the_trace(
    optimizer: Any, message: str
) -> None:
    with pytest.raises(UnsupportedState, match=message) as caught:
        fitted(optimizer)
    assert "in preinitialize" in str(caught.value)
    assert "Remedy: " in str(caught.value)


class Forgetful(Prepared):
    """Makes a part of its state only in its step."""

    def update(self, p: Tensor, state: dict[str, Any], lr: float) -> None:
        if "count" not in state:
            state["count"] = torch.zeros(())
        state["count"] += 1
        super().update(p, state, lr)


@pytest.mark.numbers
def test_state_that_it_forgot_is_made_in_the_first_step() -> None:
    class Both(Forgetful):
        """Makes its state in ``__init__``, for stock's sake."""

        def __init__(self, params: Any, lr: float) -> None:
            super().__init__(params, lr)
            self.preinitialize()

    ours, stock = both(lambda: Classifier(mlp(), Both), lambda: (loader(160),))
    assert_same_run(ours, stock)
    counts = [state["count"] for state in ours.trainer.optimizers[0].state.values()]
    assert counts == [10] * 4


@pytest.mark.parametrize("kind", ["AdamW", "SGD", "Rprop", "NAdam", "ASGD", "Adafactor"])
def test_state_of_large_models_is_made_in_turns_as_all_at_once(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, turns = [], list[int]()
    monkeypatch.setattr(optimizer_state, "_TURN_BYTES", 0)
    for told in (None, lambda: turns.append(1)):
        torch.manual_seed(0)
        net = mlp()
        groups = [{"params": [one]} for one in net.parameters()][:2]
        groups.append({"params": [*net.parameters()][2:]})
        options: dict[str, Any] = {"momentum": 0.9} if kind == "SGD" else {}
        optimizer = getattr(torch.optim, kind)(groups, lr=0.1, **options)
        new = optimizer_state.init_state(optimizer, made=told)
        assert new is not None
        assert set(new.keys) == set(net.parameters())
        assert all(p.grad is None for p in net.parameters())
        made.append([optimizer.state[p] for p in net.parameters()])
    assert_close(made[1], made[0], tolerance=0.0)
    assert len(turns) == (0 if kind == "Adafactor" else 4)  # whose state is of the whole's shape
