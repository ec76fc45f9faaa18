"""retrace_every_iteration: the step's Python runs on every batch, and must give one program."""

from __future__ import annotations

import copy
import inspect
import random
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from harness import Run, assert_close, fit, make_trainer
from models import GAN, Classifier, Measured, loader, mlp
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.data import DataLoader

from fulgurite.backends.csx.diagnostics.trace_errors import GraphChanged
from fulgurite.backends.csx.graph import rng

pytestmark = pytest.mark.fits

RETRACE = {"retrace_every_iteration": True}
BATCHES = 3


def batches(**options: Any) -> DataLoader[Any]:
    return loader(16 * BATCHES, **options)


def retraced(
    make: Callable[[], pl.LightningModule],
    loaders: Callable[[], tuple[Any, ...]] = lambda: (batches(),),
    **options: Any,
) -> Run:
    return fit(make, loaders, static=True, backend=RETRACE, **options)


# -- the numbers -----------------------------------------------------------------------------------


class Scheduled(Classifier):
    """A learning rate that changes after every step."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Leaving(Classifier):
    """Leaves results and a mask in attributes, appends to a list; one layer is never used."""

    def __init__(self, **options: Any) -> None:
        super().__init__(mlp(), torch.optim.SGD, momentum=0.9, **options)
        self.idle = nn.Linear(3, 3)
        self.outs: list[Tensor] = []
        self.mask: Tensor | None = None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.mask is None:
            self.mask = torch.ones(4, 4).triu()
        self.last = nn.functional.cross_entropy(self.net(batch[0]) @ self.mask, batch[1])
        self.outs.append(self.last)
        return self.last


RUNS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "two optimizers, clipping, a scheduler in the step": (GAN, {}),
    "metrics and validation": (
        Measured,
        {"max_epochs": 2, "limit_train_batches": 2, "limit_val_batches": 1},
    ),
    "dropout and accumulation": (
        lambda: Classifier(mlp(0.5)),
        {"accumulate_grad_batches": 2, "max_epochs": 2},
    ),
    "a scheduler and clipping": (lambda: Scheduled(mlp()), {"gradient_clip_val": 0.1}),
    "attributes and lists": (Leaving, {}),
    "state of the first gradient": (lambda: Leaving(dampening=0.3), {}),
}


@pytest.mark.parametrize(("make", "options"), RUNS.values(), ids=RUNS.keys())
def test_the_numbers_are_those_of_a_run_that_traces_once(
    make: Callable[[], Any], options: dict[str, Any]
) -> None:
    def loaders() -> tuple[Any, ...]:
        return (batches(shuffle=True), batches())[: 2 if make is Measured else 1]

    runs = []
    for backend in (RETRACE, {}):
        runs.append(fit(make, loaders, static=True, backend=backend, **options))
    again, once = runs
    assert_close(again.losses, once.losses, 0.0)
    assert again.metrics == once.metrics
    assert again.final == once.final
    assert again.trainer.global_step == once.trainer.global_step
    assert_close(again.module.state_dict(), once.module.state_dict(), 0.0)
    for mine, theirs in zip(again.trainer.optimizers, once.trainer.optimizers, strict=True):
        assert_close(mine.state_dict(), theirs.state_dict(), 0.0)
    if make is Leaving:
        assert_close(again.module.outs, once.module.outs, 0.0)
        assert torch.equal(again.module.last, again.module.outs[-1])


def test_the_random_state_ends_where_it_does_without_retracing() -> None:
    ends = []
    for backend in (RETRACE, {}):
        fit(lambda: Classifier(mlp(0.5)), lambda: (batches(),), static=True, backend=backend)
        ends.append(rng.collect()["torch"])
    assert torch.equal(*ends)


# -- what Python does, every time ------------------------------------------------------------------


class Speaking(Classifier):
    """Does on the host what users do there."""

    def __init__(self) -> None:
        super().__init__(mlp(), torch.optim.SGD)
        self.seen: list[Any] = []
        self.drawn: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        print("batch", batch_idx, "of step", self.global_step)
        self.seen.append((batch_idx, self.global_step, self.current_epoch))
        self.drawn.append(random.random())
        loss = super().training_step(batch, batch_idx)
        self.log(f"loss_{batch_idx}", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen.append(("validation", batch_idx))
        return self.net(batch[0])

    test_step = predict_step = validation_step


def test_side_effects_happen_on_every_batch_without_a_warning(
    capsys: pytest.CaptureFixture[str],
) -> None:
    random.seed(3)
    run = retraced(Speaking, max_epochs=2)
    numbers = [(i % BATCHES, i, i // BATCHES) for i in range(2 * BATCHES)]
    assert run.module.seen == numbers
    assert run.module.calls.total() == 2 * BATCHES
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("batch")]
    assert printed == [f"batch {batch} of step {step}" for batch, step, _ in numbers]
    random.seed(3)
    assert run.module.drawn == [random.random() for _ in numbers]


def test_a_name_that_follows_the_batch_logs_the_value_of_its_batch() -> None:
    run = retraced(Speaking)
    logged = [run.final[f"loss_{i}"] for i in range(BATCHES)]
    assert_close(logged, run.losses, 1e-7)


def test_means_over_an_epoch_go_to_the_name_that_was_logged() -> None:
    class Named(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            self.log(f"half_{batch_idx % 2}", loss, on_step=False, on_epoch=True)
            return loss

    run = retraced(lambda: Named(mlp(), torch.optim.SGD))
    assert_close(run.final["half_0"], (run.losses[0] + run.losses[2]) / 2, 1e-6)
    assert_close(run.final["half_1"], run.losses[1], 1e-6)


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_every_stage_is_traced_each_time(stage: str) -> None:
    module = Speaking()
    getattr(make_trainer(True, backend=RETRACE), stage)(module, batches())
    assert module.seen == [("validation", i) for i in range(BATCHES)]


def test_with_accumulation_the_entry_point_that_runs_is_traced() -> None:
    """Both are traced on the first batch, for they are one program; what is appended is not."""
    run = retraced(Speaking, accumulate_grad_batches=2)
    assert [batch for batch, *_ in run.module.seen] == [0, 1, 2]
    assert len(run.module.drawn) == 4


def test_a_string_of_the_batch_may_change_where_only_python_reads_it() -> None:
    class Named(Classifier):
        def __init__(self) -> None:
            super().__init__(mlp())
            self.names: list[str] = []

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.names.append(f"{batch['name']}!")
            return self.net(batch["x"]).square().mean()

    data = [{"x": torch.randn(4, 8), "name": name} for name in ("a", "b")]
    run = retraced(Named, lambda: (DataLoader(data, batch_size=None),))  # type: ignore[arg-type]
    assert run.module.names == ["a!", "b!"]


def test_batches_of_other_strides_are_traced_in_the_first_layout() -> None:
    x, y = torch.randn(3, 8, 16).mT, torch.randint(4, (3, 16))
    data = [(x[0].contiguous(), y[0]), (x[1], y[1]), (x[2], y[2])]

    class Flat(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step((batch[0].reshape(-1).view(16, 8), batch[1]), batch_idx)

    run = retraced(
        lambda: Flat(mlp(), torch.optim.SGD), lambda: (DataLoader(data, batch_size=None),)
    )  # type: ignore[arg-type]
    assert len(run.losses) == 3


def test_a_constant_made_anew_with_the_same_values_is_the_same() -> None:
    class Weighted(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            weight = torch.tensor([1.0, 2.0, float("nan"), 1.0]).nan_to_num(1.0)
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1], weight)

    assert len(retraced(lambda: Weighted(mlp(), torch.optim.SGD)).losses) == BATCHES


def test_each_of_several_programs_is_compared_with_its_own_first_trace() -> None:
    backend = {**RETRACE, "max_programs": 2}
    run = fit(Speaking, lambda: (loader(40),), static=True, backend=backend, max_epochs=2)
    assert [batch for batch, *_ in run.module.seen] == [0, 1, 2] * 2
    assert len(run.trainer.strategy.programs) == 2


# -- another program -------------------------------------------------------------------------------


class Changing(Classifier):
    """``change`` makes the loss, and something else in batch 1."""

    def __init__(self, change: Callable[..., Any]) -> None:
        super().__init__(mlp(), torch.optim.SGD)
        self.change = change
        self.register_buffer("count", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        return self.change(self, loss, batch_idx == 1)


def another_operation(module: Any, loss: Tensor, late: bool) -> Any:
    if late:
        return loss + 2
    return loss * 2


def a_number(module: Any, loss: Tensor, late: bool) -> Any:
    return loss * (1.0 + late)


def a_literal(module: Any, loss: Tensor, late: bool) -> Any:
    weights = torch.tensor([1.0, float(late)])
    return loss * weights.sum()


TABLES = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0])


def a_table(module: Any, loss: Tensor, late: bool) -> Any:
    return loss * TABLES[late].sum()


def another_operand(module: Any, loss: Tensor, late: bool) -> Any:
    a, b = loss.exp(), loss.tanh()
    return (a * b) / (b if late else a)


def more_operations(module: Any, loss: Tensor, late: bool) -> Any:
    if late:
        loss = loss.exp()
    return loss


def fewer_operations(module: Any, loss: Tensor, late: bool) -> Any:
    if not late:
        loss = loss.exp()
    return loss


def a_log_less(module: Any, loss: Tensor, late: bool) -> Any:
    if not late:
        module.log("loss", loss)
    return loss


def more_state(module: Any, loss: Tensor, late: bool) -> Any:
    if late:
        module.count.add_(1)
    return loss


def another_attribute(module: Any, loss: Tensor, late: bool) -> Any:
    if late:
        module.last = loss
    return loss


def another_result(module: Any, loss: Tensor, late: bool) -> Any:
    twice = loss * 2
    return {"loss": twice * 2, "twice": twice} if late else {"loss": twice * 2}


def the_result_of_another_operation(module: Any, loss: Tensor, late: bool) -> Any:
    a, b = loss.exp(), loss.tanh()
    module.last = b if late else a
    return a + b


def another_value_for_a_buffer(module: Any, loss: Tensor, late: bool) -> Any:
    a, b = loss.exp(), loss.tanh()
    module.count = (b if late else a).detach()
    return a + b


CHANGES: list[tuple[Callable[..., Any], str, str, str]] = [
    (another_operation, "return loss + 2", "mul, ", "add, "),
    (a_number, "return loss *", "mul(nll_loss_forward, 1.0), ", "mul(nll_loss_forward, 2.0), "),
    (a_literal, "weights = ", "the constant [1.0, 0.0], ", "the constant [1.0, 1.0], "),
    (a_table, "return loss *", "TABLES[0], ", "TABLES[1], "),
    (another_operand, "return (a * b)", "div(mul, exp), ", "div(mul, tanh), "),
    (more_operations, "loss = loss.exp()", "nothing\n", "exp, "),
    (fewer_operations, "loss = loss.exp()", "exp, ", "nothing\n"),
    (a_log_less, "module.log(", "", ""),
    (more_state, "module.count.add_(1)", "nothing\n", "add_, "),
    (the_result_of_another_operation, "a, b =", "the result of exp, ", "the result of tanh, "),
    (another_value_for_a_buffer, "a, b =", "the result of exp, ", "the result of tanh, "),
    (another_attribute, "", "returned {'loss': *}", "returned {'loss': *}, set last"),
    (another_result, "", "returned {'loss': *}", "returned {'loss': *, 'twice': *}"),
]


@pytest.mark.parametrize(
    ("change", "source", "before", "now"), CHANGES, ids=[change[0].__name__ for change in CHANGES]
)
def test_another_graph_is_an_error_with_the_first_difference_before_and_now(
    change: Callable[..., Any], source: str, before: str, now: str
) -> None:
    with pytest.raises(GraphChanged) as caught:
        retraced(lambda: Changing(change))
    error, text = caught.value, str(caught.value)
    assert text.startswith("The training step was traced again, and is another program than")
    assert f"\n  before: {before}" in text
    assert f"\n  now:    {now}" in text
    assert "torch.where" in error.remedy
    assert "buffer" in error.remedy
    assert error.line is not None
    if source:
        lines, first = inspect.getsourcelines(change)
        [line] = [first + i for i, text in enumerate(lines) if text.strip().startswith(source)]
        assert (error.line.file, error.line.line) == (__file__, line)
    assert len(text.splitlines()) <= 12


def test_a_step_of_the_optimizer_that_is_left_out_is_named_with_its_line() -> None:
    class Stepping(Classifier):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer: Any = self.optimizers()
            self.manual_backward(nn.functional.cross_entropy(self.net(batch[0]), batch[1]))
            if batch_idx == 0:
                optimizer.step()
            optimizer.zero_grad()

    with pytest.raises(GraphChanged) as caught:
        retraced(lambda: Stepping(mlp(), torch.optim.SGD))
    line = caught.value.line
    assert line is not None
    assert line.source == "optimizer.step()"
    assert "optimizer.step()\n  now:    nothing\n" in str(caught.value)


def test_nothing_has_changed_when_the_error_is_raised() -> None:
    class Watching(Changing):
        def __init__(self) -> None:
            super().__init__(another_operation)
            self.counted, self.outs = 0, []

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.trainer.optimizers[0]
            self.before = (
                copy.deepcopy(self.state_dict()),
                copy.deepcopy(optimizer.state_dict()),
                rng.collect()["torch"],
                self.counted,
                len(self.outs),
            )

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.counted += 1
            loss = super().training_step(batch, batch_idx)
            self.outs.append(loss)
            return loss

    module = Watching()
    trainer = make_trainer(True, backend=RETRACE, max_epochs=1)
    with pytest.raises(GraphChanged):
        trainer.fit(module, batches())
    weights, optimizer, random_state, counted, outs = module.before
    assert trainer.global_step == counted == outs == 1
    assert_close(module.state_dict(), weights, 0.0)
    assert_close(trainer.optimizers[0].state_dict(), optimizer, 0.0)
    assert torch.equal(rng.collect()["torch"], random_state)
    assert (module.counted, len(module.outs)) == (1, 1)
    assert not any(isinstance(p.grad, FakeTensor) for p in module.parameters())


@pytest.mark.long
def test_without_the_option_each_branch_is_a_program() -> None:
    run = fit(lambda: Changing(another_operation), lambda: (batches(),), static=True)
    assert len(run.losses) == BATCHES
    assert len(run.trainer.strategy.programs) == 2  # type: ignore[attr-defined]


def test_validation_may_not_change_its_graph_either() -> None:
    class Alternating(Classifier):
        def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
            y = self.net(batch[0])
            return y.exp() if batch_idx else y

    trainer = make_trainer(True, backend=RETRACE)
    with pytest.raises(GraphChanged, match=r"The validation step.*\n  before: .*\n  now:    exp"):
        trainer.validate(Alternating(mlp()), batches())
