"""Messages about published code: the line that is to blame, and a remedy that is the same."""

from __future__ import annotations

import math
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import assert_close, both, fit
from models import CLASSES, Classifier, loader, mlp
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader
from torchmetrics.functional import accuracy

from fulgurite.backends.csx.contract.rules import IN_PACKAGES
from fulgurite.backends.csx.diagnostics.trace_errors import (
    ConditionalOnTensor,
    GraphChanged,
    HostRead,
    InputChanged,
    TraceError,
)

pytestmark = pytest.mark.numbers

ROWS, BATCH = 64, 16


def refused(make: Any, loaders: Any = lambda: (loader(96),), **options: Any) -> TraceError:
    """What a fit of three epochs ends with."""
    with pytest.raises(TraceError) as told:
        fit(make, loaders, static=True, max_epochs=3, **options)
    return told.value


class Queue(Classifier):
    """MoCo's, as published: a pointer into a ring of the last outputs."""

    queue_ptr: Tensor
    queue: Tensor

    def __init__(self) -> None:
        super().__init__(mlp())
        self.register_buffer("queue", torch.zeros(4, ROWS))
        self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        outputs = self.net(batch[0])
        loss = (
            nn.functional.cross_entropy(outputs, batch[1]) + (outputs @ self.queue.clone()).mean()
        )
        self.enqueue(outputs.detach())
        return loss

    def enqueue(self, keys: Tensor) -> None:
        pointer = int(self.queue_ptr)
        self.queue[:, pointer : pointer + BATCH] = keys.T
        self.queue_ptr[0] = (pointer + BATCH) % ROWS


class QueueOfTensors(Queue):
    """What the remedy says."""

    def enqueue(self, keys: Tensor) -> None:
        rows = (self.queue_ptr + torch.arange(BATCH)) % ROWS
        self.queue[:, rows] = keys.T
        self.queue_ptr.copy_((self.queue_ptr + BATCH) % ROWS)


def test_the_remedy_for_a_pointer_is_the_same_queue() -> None:
    error = refused(Queue)
    assert isinstance(error, HostRead)
    assert error.line is not None
    assert error.line.source == "pointer = int(self.queue_ptr)"
    for text in (
        "rows = (self.queue_ptr + torch.arange(n)) % K",
        "self.queue[rows] = new  # self.queue[:, rows]",
        "self.queue_ptr.copy_((self.queue_ptr + n) % K)",
        "(torch.rand(k) * self.queue_ptr).long()",
    ):
        assert text in str(error)
    ours, published = (
        fit(make, lambda: (loader(96),), static=make is QueueOfTensors, max_epochs=2)
        for make in (QueueOfTensors, Queue)
    )
    assert_close(ours.losses, published.losses, 1e-5)
    assert_close(ours.module.state_dict(), published.module.state_dict(), 1e-5)


class Flag(Queue):
    """One that says whether something was initialized keeps its own remedy."""

    def enqueue(self, keys: Tensor) -> None:
        if not self.queue_ptr.bool():
            self.queue_ptr.fill_(1)


@pytest.mark.fits
def test_a_flag_has_another_remedy() -> None:
    assert "run one batch before fit" in str(refused(Flag))


class Truncated(Classifier):
    def __init__(self) -> None:
        super().__init__(mlp())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        noise = self.noise(torch.empty_like(batch[0]))
        return nn.functional.cross_entropy(self.net(batch[0] + noise), batch[1])

    def noise(self, x: Tensor) -> Tensor:
        return nn.init.trunc_normal_(x, mean=0.1, std=0.5, a=-0.5, b=1.0)


class TruncatedAtOnce(Truncated):
    """What the remedy says."""

    def noise(self, x: Tensor) -> Tensor:
        mean, std, a, b = 0.1, 0.5, -0.5, 1.0
        lo, hi = (math.erf((bound - mean) / (std * 2**0.5)) for bound in (a, b))
        return x.uniform_(lo, hi).erfinv_().mul_(std * 2**0.5).add_(mean)


def test_the_remedy_for_trunc_normal_is_the_same_distribution() -> None:
    error = refused(Truncated)
    assert isinstance(error, ConditionalOnTensor)
    assert "x.uniform_(lo, hi).erfinv_()" in str(error)
    torch.manual_seed(0)
    drawn = [kind.noise(None, torch.empty(200_000)) for kind in (Truncated, TruncatedAtOnce)]  # type: ignore[arg-type]
    quantiles = torch.linspace(0, 1, 101)
    assert_close(*(one.quantile(quantiles) for one in drawn), 2e-2)
    ours, stock = both(TruncatedAtOnce, lambda: (loader(96),))
    assert_close(ours.losses, stock.losses, 1e-5)


class ByText(Classifier):
    def __init__(self) -> None:
        super().__init__(mlp())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.net(batch["x"]), batch["y"])
        if batch["kind"][0] == "a":
            return loss
        return loss * 2


@pytest.mark.fits
def test_a_text_of_the_batch_is_told_by_the_line_that_read_it() -> None:
    rows = [
        {"x": torch.randn(8), "y": torch.tensor(1), "kind": "ab"[i // BATCH]}
        for i in range(2 * BATCH)
    ]
    error = refused(ByText, lambda: (DataLoader(rows, batch_size=BATCH),))
    assert isinstance(error, InputChanged)
    assert error.line is not None
    assert error.line.source == 'if batch["kind"][0] == "a":'


class ByFile(Classifier):
    """Nothing that is compared says that the branch is another one."""

    path: Path

    def __init__(self) -> None:
        super().__init__(mlp())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        if self.path.read_text() == "twice":
            loss = loss * 2
        return loss

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 2:
            self.path.write_text("twice")


@pytest.mark.fits
def test_lightnings_division_of_the_loss_is_the_steps(tmp_path: Path) -> None:
    ByFile.path = tmp_path / "file"
    ByFile.path.write_text("once")
    error = refused(ByFile, accumulate_grad_batches=2, backend={"audit": True})
    assert isinstance(error, GraphChanged)
    assert "configure_optimizers" not in str(error)
    assert "loss = loss * 2" in str(error)


TABLE: Tensor | None = None


class MakesATable(Classifier):
    """In every step, and keeps it in a global: a trace that finds it makes another one."""

    def __init__(self) -> None:
        super().__init__(mlp())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        global TABLE
        TABLE = torch.arange(4.0)
        loss = nn.functional.cross_entropy(self.net(batch[0]) * TABLE, batch[1])
        assert isinstance(loss, Tensor)
        return loss


@pytest.mark.long
def test_a_constant_that_every_step_puts_into_a_global_ends_the_tracing() -> None:
    ours, stock = both(MakesATable, lambda: (loader(96),))
    assert_close(ours.losses, stock.losses, 1e-5)
    assert TABLE is not None
    assert TABLE.tolist() == [0, 1, 2, 3]


class Steps(Classifier):
    """Steps a scheduler of torch's that Lightning was not given."""

    def __init__(self, where: str, make: Any) -> None:
        super().__init__(mlp())
        self.where, self.make = where, make
        self.automatic_optimization = where != "manual"

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        self.own = self.make(optimizer)
        return optimizer

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if self.where == "manual":
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.own.step()
        elif self.where == "training_step":
            self.own.step()  # here
        return loss

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        if self.where == "optimizer_step":
            self.own.step()


SCHEDULERS = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 4, 0.5),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda n: 1 / (n + 1)),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.2, total_steps=30),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)], [5]
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("where", ["manual", "optimizer_step"])
def test_a_scheduler_that_was_not_returned_steps_too(where: str, name: str) -> None:
    ours, stock = both(lambda: Steps(where, SCHEDULERS[name]), lambda: (loader(96),), fresh=True)
    assert_close(ours.losses, stock.losses, 1e-5, "losses")
    rates = [run.module.own.get_last_lr() for run in (ours, stock)]
    assert_close(rates[0], rates[1], 1e-6, "rates")
    assert ours.module.own.last_epoch == stock.module.own.last_epoch == 6


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_one_that_steps_before_the_optimizer_names_the_hook_to_step_it_in() -> None:
    error = refused(lambda: Steps("training_step", SCHEDULERS["StepLR"]))
    assert "after scheduler.step()" in error.what
    assert "in on_train_batch_start" in str(error)

    class InHook(Steps):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.own.step()

    [ours] = [fit(lambda: InHook("", SCHEDULERS["StepLR"]), lambda: (loader(96),), static=True)]
    stock = fit(
        lambda: Steps("training_step", SCHEDULERS["StepLR"]), lambda: (loader(96),), static=False
    )
    assert_close(ours.losses, stock.losses, 1e-5, "losses")


class Predicts(Classifier):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        classes = self.net(batch[0]).argmax(1)
        self.log("acc", accuracy(classes, batch[1], task="multiclass", num_classes=CLASSES))


def test_functional_metrics_of_predicted_classes_are_not_checked_for_their_values() -> None:
    ours, stock = both(lambda: Predicts(mlp()), lambda: (loader(96), loader(40)))
    assert_close(ours.final["acc"], stock.final["acc"], 1e-5, "accuracy")


@pytest.mark.parametrize(
    ("package", "function", "remedy"),
    [
        ("torch_geometric.nn.pool", "global_mean_pool", "global_mean_pool(x, batch, size=8)"),
        ("torch_geometric.utils", "add_remaining_self_loops", "add_self_loops=False in the layer"),
        ("transformers.moe", "grouped_mm_experts_forward", "experts_implementation('batched_mm')"),
    ],
)
def test_what_to_give_a_function_of_a_package_is_said(
    package: str, function: str, remedy: str
) -> None:
    names: dict[str, Any] = {"__name__": package}
    source = f"def scatter(x): return int(x.sum())\ndef {function}(x): return scatter(x)"
    exec(compile(source, f"/x/site-packages/{package}.py", "exec"), names)

    class Pools(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) * names[function](batch[1])

    assert remedy in str(refused(lambda: Pools(mlp())))


class MeanAggregation(nn.Module):
    """A mean of the rows of each molecule, as a package has it: it looks how many there are."""

    def forward(self, H: Tensor, batch: Tensor) -> Tensor:
        index, zeros = batch[:, None].expand_as(H), H.new_zeros(int(batch.max()) + 1, H.shape[1])
        return zeros.scatter_reduce(0, index, H, "mean", include_self=False)


def test_what_is_said_of_molecules_gives_the_same_means() -> None:
    [code] = {one for (package, _), one in IN_PACKAGES.items() if package == "chemprop"}
    names: dict[str, Any] = {"MeanAggregation": MeanAggregation, "N": 4}
    exec(textwrap.dedent(code.partition("\n")[2]), names)
    rows, batch = torch.randn(9, 3), torch.tensor([0, 0, 1, 1, 1, 3, 3, 2, 2])
    assert_close(names["Mean"]()(rows, batch), MeanAggregation()(rows, batch), 1e-6)
