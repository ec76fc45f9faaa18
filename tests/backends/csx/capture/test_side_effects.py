"""What a step leaves behind on the host: each idiom equals stock's, or is refused by name."""

from __future__ import annotations

from typing import Any, ClassVar

import lightning.pytorch as pl
import pytest
import torch
from harness import assert_close, assert_same_run, both, fit
from models import CLASSES, Classifier, PerParameter, loader, mlp
from torch import Tensor, nn
from torchmetrics import CatMetric, Metric

from fulgurite.backends.csx.diagnostics.trace_errors import StateChanged, UnsupportedState

pytestmark = pytest.mark.numbers

FEW: dict[str, Any] = {"limit_train_batches": 6, "max_epochs": 2}


class Rows(Classifier):
    """``leave`` does something with the loss of every step."""

    def __init__(self) -> None:
        super().__init__(mlp())
        self.outs: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        return self.leave(loss, batch)

    def leave(self, loss: Tensor, batch: Any) -> Tensor:
        raise NotImplementedError


def test_swapped_buffers_are_read_before_they_are_written() -> None:
    class Swaps(Rows):
        def __init__(self) -> None:
            super().__init__()
            self.now, self.before = torch.zeros(()), torch.zeros(())

        def leave(self, loss: Tensor, batch: Any) -> Tensor:
            self.before = self.now
            self.now = loss.detach()
            return loss + self.before * 0.1

    ours, stock = both(Swaps, lambda: (loader(),), **FEW)
    assert_same_run(ours, stock)
    torch.testing.assert_close(ours.module.before, stock.module.before)


def test_one_value_in_two_buffers_gives_each_its_own_memory() -> None:
    class Doubles(Rows):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("one", torch.zeros(()))
            self.register_buffer("two", torch.zeros(()))

        def leave(self, loss: Tensor, batch: Any) -> Tensor:
            total = self.one + self.two
            self.one = self.two = loss.detach()
            return loss + total * 0.1

    ours, stock = both(Doubles, lambda: (loader(),), **FEW)
    assert_same_run(ours, stock)


def test_tied_buffers_stay_tied() -> None:
    class Tied(Rows):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("one", torch.zeros(()))
            self.register_buffer("two", self.one)

        def leave(self, loss: Tensor, batch: Any) -> Tensor:
            self.one = self.two = 0.5 * self.one + loss.detach()
            return loss + self.two * 0.1

    ours, stock = both(Tied, lambda: (loader(),), **FEW)
    assert_same_run(ours, stock)
    assert ours.module.one is ours.module.two


class Momentum(PerParameter):
    """Keeps the last update in its state by handing tensors on."""

    def update(self, p: Tensor, state: dict[str, Any], lr: float) -> None:
        if not state:
            state["new"], state["old"] = torch.zeros_like(p), torch.zeros_like(p)
        state["old"] = state["new"]
        state["new"] = p.grad.clone()
        p.data = p.data - lr * (2 * state["new"] - state["old"])


@pytest.mark.long
def test_state_that_an_optimizer_hands_on_and_data_that_it_sets_are_kept() -> None:
    ours, stock = both(lambda: Classifier(mlp(), Momentum), lambda: (loader(),), **FEW)
    assert_same_run(ours, stock)


class Turns(Metric):
    """Two states that take turns."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("now", torch.tensor(1.0), "sum")
        self.add_state("next", torch.tensor(3.0), "sum")

    def update(self) -> None:
        self.now, self.next = self.next, self.now

    def compute(self) -> Tensor:
        return self.now - self.next


class Turning(PerParameter):
    """Every other step is a longer one: two numbers of its state take turns."""

    def update(self, p: Tensor, state: dict[str, Any], lr: float) -> None:
        if not state:
            state["now"], state["next"] = torch.zeros(()), torch.ones(())
        state["now"], state["next"] = state["next"], state["now"]
        p.sub_(p.grad * lr * state["now"])


def test_states_that_take_turns_stay_two() -> None:
    class Takes(Rows):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.optimizer = nn.Linear(8, CLASSES), Turning
            self.turns = Turns()

        def leave(self, loss: Tensor, batch: Any) -> Tensor:
            self.turns.update()
            return loss

        def on_train_batch_end(self, *args: Any) -> None:
            self.outs.append(float(self.turns.compute()))

    ours, stock = both(Takes, lambda: (loader(),), limit_train_batches=3)
    assert ours.module.outs == [2.0, -2.0, 2.0]
    assert_same_run(ours, stock)


def test_references_that_host_code_keeps_are_not_overwritten() -> None:
    class Average(Rows):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("average", torch.zeros(()))

        def leave(self, loss: Tensor, batch: Any) -> Tensor:
            self.average = 0.9 * self.average + 0.1 * loss.detach()
            return loss

        def on_train_batch_end(self, *args: Any) -> None:
            self.outs.append(self.average)

    ours, stock = both(Average, lambda: (loader(),), **FEW)
    torch.testing.assert_close(torch.stack(ours.module.outs), torch.stack(stock.module.outs))
    assert len({float(value) for value in ours.module.outs}) == 12


def test_dicts_appended_to_a_list_that_the_host_replaces_each_epoch() -> None:
    class Collects(Rows):
        def __init__(self) -> None:
            super().__init__()
            self.means: list[float] = []

        def leave(self, loss: Tensor, batch: Any) -> Tensor:
            self.outs.append({"loss": loss.detach(), "label": batch[1]})
            return loss

        def on_train_epoch_end(self) -> None:
            self.means.append(float(torch.stack([o["loss"] for o in self.outs]).mean()))
            self.outs = []

    ours, stock = both(Collects, lambda: (loader(),), **FEW)
    assert len(ours.module.means) == 2
    assert_close(ours.module.means, stock.module.means)


@pytest.mark.parametrize("renewed", ["cleared", "on the module", "in the class"])
def test_a_list_in_the_class_body_gets_every_step_s_tensors(renewed: str) -> None:
    means: list[list[float]] = []

    def make() -> Rows:
        means.append([])

        class Collects(Rows):
            kept: ClassVar[list[Tensor]] = []
            last: ClassVar[dict[str, Tensor]] = {}

            def leave(self, loss: Tensor, batch: Any) -> Tensor:
                self.kept.append(loss.detach())
                self.last["label"] = batch[1]
                return loss

            def on_train_epoch_end(self) -> None:
                means[-1].append(float(torch.stack(self.kept).mean()))
                self.outs.append(self.last["label"])
                if renewed == "cleared":
                    self.kept.clear()
                elif renewed == "on the module":
                    self.kept = []
                else:
                    type(self).kept = []

        return Collects()

    ours, stock = both(make, lambda: (loader(),), True, limit_train_batches=6, max_epochs=3)
    assert len(set(means[0])) == 3
    assert_close(means[0], means[1])
    assert_close(ours.module.outs, stock.module.outs)


def test_a_list_that_the_step_makes_anew_holds_the_last_step_s() -> None:
    class Renews(Rows):
        def leave(self, loss: Tensor, batch: Any) -> Tensor:
            self.outs = [loss.detach(), batch[1]]
            return loss

    ours, stock = both(Renews, lambda: (loader(),), **FEW)
    assert_close(ours.module.outs, stock.module.outs)


def test_a_metric_with_a_list_state_grows() -> None:
    class Cats(Rows):
        def __init__(self) -> None:
            super().__init__()
            self.cat = CatMetric(nan_strategy="disable")

        def leave(self, loss: Tensor, batch: Any) -> Tensor:
            self.cat(loss.detach())
            return loss

    ours, stock = both(Cats, lambda: (loader(),), **FEW)
    torch.testing.assert_close(ours.module.cat.compute(), stock.module.cat.compute())
    assert ours.module.cat.compute().shape == (12,)


def test_a_hidden_state_in_a_tuple_is_carried_on() -> None:
    class Carries(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.LSTM(8, 6, batch_first=True)
            self.head = nn.Linear(6, CLASSES)
            self.hidden = (torch.zeros(1, 16, 6), torch.zeros(1, 16, 6))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            out, hidden = self.rnn(batch[0][:, None], self.hidden)
            self.hidden = tuple(h.detach() for h in hidden)
            return nn.functional.cross_entropy(self.head(out[:, -1]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    ours, stock = both(Carries, lambda: (loader(),), **FEW)
    assert_same_run(ours, stock)
    assert_close(list(ours.module.hidden), list(stock.module.hidden))


def test_old_spectral_norm_leaves_its_weight_alone() -> None:
    def make() -> Classifier:
        return Classifier(nn.Sequential(nn.utils.spectral_norm(nn.Linear(8, 8)), nn.Linear(8, 4)))

    ours, stock = both(make, lambda: (loader(),), **FEW)
    assert_same_run(ours, stock)


def test_accumulation_with_a_scheduler_equals_stock() -> None:
    class Decays(Classifier):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    ours, stock = both(
        lambda: Decays(mlp()), lambda: (loader(),), accumulate_grad_batches=4, max_epochs=2
    )
    assert_same_run(ours, stock)


@pytest.mark.fits
def test_checkpointing_with_dropout_has_one_mask() -> None:
    class Recomputes(Rows):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp(0.3)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            from torch.utils.checkpoint import checkpoint

            logits = checkpoint(self.net, batch[0], use_reentrant=False)
            return nn.functional.cross_entropy(logits, batch[1])

    ours, stock = both(Recomputes, lambda: (loader(),), **FEW)
    assert_same_run(ours, stock)


@pytest.mark.parametrize(
    "policy", ["disabled", pytest.param("default", marks=pytest.mark.compiler)]
)
def test_draws_of_every_kind_equal_eager_s(policy: str) -> None:
    class Draws(Rows):
        def leave(self, loss: Tensor, batch: Any) -> Tensor:
            x = batch[0]
            noise = torch.empty_like(x).exponential_() + torch.rand_like(x) + torch.randn(16, 8)
            noise = noise + nn.functional.rrelu(-x, training=True) + torch.empty(8).uniform_(-1, 1)
            return loss + noise.mean() + torch.randint(0, 9, (4,)).float().mean()

    ours, stock = both(Draws, lambda: (loader(),), policy=policy, **FEW)
    assert_same_run(ours, stock)


def a_new_module(module: Any, loss: Tensor) -> None:
    module.late = nn.Linear(2, 2)


def growing(module: Any, loss: Tensor) -> None:
    module.sums[len(module.sums)] = sum(module.sums.values()) * loss.detach()


PLACES = [
    (growing, r"The step adds float32\[\] to self\.sums\[\d\], and reads it"),
    (a_new_module, r"added, removed or replaced a module"),
]


@pytest.mark.fits
@pytest.mark.parametrize(("keep", "message"), PLACES, ids=lambda v: getattr(v, "__name__", ""))
def test_what_is_refused_leaves_nothing_behind(keep: Any, message: str) -> None:
    made: list[Any] = []

    class Keeps(Rows):
        def __init__(self) -> None:
            super().__init__()
            self.sums = {"loss": 0.0}
            made.append(self)

        def leave(self, loss: Tensor, batch: Any) -> Tensor:
            keep(self, loss)
            return loss

    with pytest.raises(UnsupportedState, match=message):
        fit(Keeps, lambda: (loader(),), static=True)
    [module] = made
    assert module.sums == {"loss": 0.0}
    assert not hasattr(module, "late")


def step_on_the_host(trainer: Any) -> None:
    trainer.optimizers[0].step()


def flip(trainer: Any) -> None:
    trainer.optimizers[0].param_groups[0]["maximize"] = True


HOST = [
    (step_on_the_host, UnsupportedState, r"AdamW\.step\(\) was called on the host"),
    (flip, StateChanged, "param groups' options were"),
]


@pytest.mark.fits
@pytest.mark.parametrize(
    ("act", "error", "message"), HOST, ids=lambda v: getattr(v, "__name__", "")
)
def test_what_the_host_does_to_an_optimizer_is_never_ignored(
    act: Any, error: Any, message: str
) -> None:
    class Acts(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
            if trainer.global_step == 3:
                act(trainer)

    options: dict[str, Any] = {"callbacks": (Acts(),), "backend": {"max_programs": 1}}
    with pytest.raises(error, match=message):
        fit(lambda: Classifier(mlp()), lambda: (loader(),), static=True, **options)


@pytest.mark.fits
def test_after_fit_an_optimizer_is_the_user_s_again() -> None:
    run = fit(lambda: Classifier(mlp()), lambda: (loader(),), static=True, limit_train_batches=2)
    before = run.module.net[0].weight.detach().clone()
    run.module.zero_grad()
    nn.functional.cross_entropy(run.module.net(torch.ones(1, 8)), torch.zeros(1).long()).backward()
    run.trainer.optimizers[0].step()
    assert not torch.equal(run.module.net[0].weight, before)


@pytest.mark.parametrize("before", ["nothing", "None", "zeros", "a buffer"])
def test_what_nobody_reads_may_change_its_shape(before: str) -> None:
    """As where the last batch is smaller."""

    class KeepsLast(Rows):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[tuple[int, float]] = []
            if before == "None":
                self.last: Any = None
            elif before == "zeros":
                self.last = torch.zeros(16, CLASSES)
            elif before == "a buffer":
                self.register_buffer("last", torch.zeros(16, CLASSES), persistent=False)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            logits = self.net(batch[0])
            self.last = logits.detach()
            return nn.functional.cross_entropy(logits, batch[1])

        def on_train_batch_end(self, *args: Any) -> None:
            self.seen.append((len(self.last), float(self.last.sum())))

    options: dict[str, Any] = {"max_epochs": 2, "fresh": True}
    ours, stock = both(
        KeepsLast, lambda: (loader(40),), backend={"max_programs": "auto"}, **options
    )
    assert_same_run(ours, stock)
    assert [rows for rows, _ in stock.module.seen] == [16, 16, 8] * 2
    assert_close(ours.module.seen, stock.module.seen, 1e-4)


def test_an_average_that_a_step_takes_away_is_to_go_on_the_host() -> None:
    """The remedy for a weight, parametrizations before fit, would be of no use here."""

    class Forgets(Rows):
        average: Tensor | None = None

        def leave(self, loss: Tensor, batch: Any) -> Tensor:
            self.average = loss.detach() if self.average is None else self.average.lerp(loss, 0.1)
            return loss + self.average.detach()

        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.average = None

    run = fit(Forgets, lambda: (loader(),), static=True, **FEW)
    with pytest.raises(UnsupportedState, match=r"took self\.average.* away") as raised:
        run.trainer.test(run.module, loader(), verbose=False)
    assert raised.value.remedy.startswith("None in a host hook")
