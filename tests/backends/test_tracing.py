"""Misuse of tensors in a traced step: which error, which line of the user's, which remedy."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from harness import QUIET, csx, fit
from models import Classifier, loader, mlp
from torch import Tensor, nn

import fulgurite
from fulgurite import TraceError
from fulgurite.backends.csx.errors import (
    ConditionalOnTensor,
    DynamicShape,
    HostRead,
    NoLoss,
    TensorPrinted,
    UnsupportedState,
)

GLOBAL = torch.zeros(4)


class Step(pl.LightningModule):
    """Runs ``body(x, module)`` in its training step; the misuse is on the body's own line."""

    def __init__(self, body: Any) -> None:
        super().__init__()
        self.net, self.body = nn.Linear(8, 4), body

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.body(self.net(batch[0]), self)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def branch(x: Tensor, _: Any) -> Tensor:
    return x.sum() if x.mean() > 0 else -x.sum()  # here


def loop(x: Tensor, _: Any) -> Tensor:
    while x.norm() > 1:  # here
        x = x / 2
    return x.sum()


def greater(x: Tensor, _: Any) -> Tensor:
    return max(x[0, 0], x[0, 1])  # here


def member(x: Tensor, _: Any) -> Tensor:
    return x.sum() * (x[0, 0] in [x[0, 1], x[0, 2]])  # here


def certain(x: Tensor, _: Any) -> Tensor:
    assert torch.isfinite(x).all()  # here
    return x.sum()


def alike(x: Tensor, _: Any) -> Tensor:
    return x.sum() if torch.allclose(x, x) else x.mean()  # here


def item(x: Tensor, _: Any) -> Tensor:
    return x.sum() * x.max().item()  # here


def as_float(x: Tensor, _: Any) -> Tensor:
    return x.sum() * float(x.mean())  # here


def as_index(x: Tensor, _: Any) -> Tensor:
    return x[[0, 1][x.argmax()]].sum()  # here


def as_list(x: Tensor, _: Any) -> Tensor:
    return x.sum() * x[0].tolist()[0]  # here


def as_numpy(x: Tensor, _: Any) -> Tensor:
    return x.sum() * x.detach().numpy().mean()  # here


def to_cpu(x: Tensor, _: Any) -> Tensor:
    return x.cpu().sum()  # here


def to_cpu_by_name(x: Tensor, _: Any) -> Tensor:
    return x.to("cpu").sum()  # here


def printed(x: Tensor, _: Any) -> Tensor:
    print("loss", x.sum())  # here
    return x.sum()


def formatted(x: Tensor, _: Any) -> Tensor:
    _ = f"{x.sum():.3f}"  # here
    return x.sum()


def nonzero(x: Tensor, _: Any) -> Tensor:
    return x[torch.nonzero(x[:, 0])].sum()  # here


def masked(x: Tensor, _: Any) -> Tensor:
    return x[x > 0].sum()  # here


def selected(x: Tensor, _: Any) -> Tensor:
    return x.masked_select(x > 0).sum()  # here


def unique(x: Tensor, _: Any) -> Tensor:
    return x.sum() * torch.unique(x.argmax(1)).shape[0]  # here


def below_functions(x: Tensor, _: Any) -> Tensor:
    with torch._C.DisableTorchFunction():
        return torch.ops.aten.nonzero.default(x).float().sum()  # here


def of_weight(x: Tensor, module: Any) -> Tensor:
    return x.sum() * module.net.weight.norm().item()  # here


def in_lambda(x: Tensor, _: Any) -> Tensor:
    return (lambda row: row.sum() * row[0].item())(x[0])  # here


def foreign(x: Tensor, _: Any) -> Tensor:
    GLOBAL.add_(x.detach().sum(0))  # here
    return x.sum()


def foreign_constant(x: Tensor, _: Any) -> Tensor:
    GLOBAL.add_(1)  # here
    return x.sum()


MISUSES = [
    (branch, ConditionalOnTensor, "torch.where"),
    (loop, ConditionalOnTensor, "torch.where"),
    (greater, ConditionalOnTensor, "torch.where"),
    (member, ConditionalOnTensor, "torch.where"),
    (certain, ConditionalOnTensor, "torch.where"),
    (alike, ConditionalOnTensor, "torch.where"),
    (item, HostRead, "on_train_batch_end"),
    (as_float, HostRead, "on_train_batch_end"),
    (as_index, HostRead, "on_train_batch_end"),
    (as_list, HostRead, "on_train_batch_end"),
    (as_numpy, HostRead, "on_train_batch_end"),
    (to_cpu, HostRead, "on_train_batch_end"),
    (to_cpu_by_name, HostRead, "on_train_batch_end"),
    (printed, TensorPrinted, "on_train_batch_end"),
    (formatted, TensorPrinted, "on_train_batch_end"),
    (nonzero, DynamicShape, "mask"),
    (masked, DynamicShape, "mask"),
    (selected, DynamicShape, "mask"),
    (unique, DynamicShape, "mask"),
    (below_functions, DynamicShape, "mask"),
    (of_weight, HostRead, "on_train_batch_end"),
    (in_lambda, HostRead, "on_train_batch_end"),
    (foreign, UnsupportedState, "register_buffer"),
    (foreign_constant, UnsupportedState, "register_buffer"),
]


def line_of(body: Any) -> int:
    """The line marked ``# here``."""
    lines, first = inspect.getsourcelines(body)
    return first + next(i for i, line in enumerate(lines) if "# here" in line)


@pytest.mark.parametrize(
    ("body", "error", "remedy"), MISUSES, ids=lambda v: getattr(v, "__name__", "")
)
def test_misuse_names_the_user_s_line_and_the_remedy(body: Any, error: Any, remedy: str) -> None:
    with pytest.raises(TraceError) as raised:
        fit(lambda: Step(body), lambda: (loader(),), static=True)
    assert type(raised.value) is error
    assert raised.value.line is not None
    assert Path(raised.value.line.file) == Path(__file__)
    assert raised.value.line.line == line_of(body)
    text = str(raised.value)
    assert remedy in text.partition("Remedy: ")[2]
    assert (
        inspect.getsource(body).splitlines()[line_of(body) - body.__code__.co_firstlineno].strip()
        in text
    )
    assert len(text.splitlines()) <= 12
    assert GLOBAL.tolist() == [0.0] * 4


def test_a_message_reads_like_this() -> None:
    with pytest.raises(HostRead) as raised:
        fit(lambda: Step(item), lambda: (loader(),), static=True)
    lines = str(raised.value).splitlines()
    assert lines[0] == (
        "A tensor computed in the step (float32[]) was read by .item(), but it has no value while"
        " the step is traced."
    )
    assert lines[1].endswith(f"test_tracing.py:{line_of(item)} in item")
    assert lines[2].strip() == "return x.sum() * x.max().item()  # here"
    assert lines[3].startswith("  Remedy: return it from the step or self.log() it")


def test_state_and_batch_go_by_their_names() -> None:
    def reads(x: Tensor, module: Any) -> Tensor:
        return x.sum() * module.net.bias.numpy()[0]

    with pytest.raises(HostRead, match=r"^self\.net\.bias was read by \.numpy\(\)"):
        fit(lambda: Step(reads), lambda: (loader(),), static=True)


class Twin(Step):
    """Each misuse put right, as its remedy says."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = self.net(batch[0])
        loss = torch.where(x.mean() > 0, x.sum(), -x.sum())
        loss = loss + torch.where(x > 0, x, 0).sum() + torch.maximum(x[0, 0], x[0, 1])
        return {"loss": loss, "largest": x.detach().max()}


def test_the_remedies_work() -> None:
    run = fit(lambda: Twin(None), lambda: (loader(),), static=True, limit_train_batches=3)
    assert all(isinstance(output["largest"].item(), float) for output in run.outputs)


def test_an_exception_of_the_user_s_own_comes_unchanged() -> None:
    error = KeyError("mine")

    def raises(x: Tensor, _: Any) -> Tensor:
        raise error

    with pytest.raises(KeyError) as raised:
        fit(lambda: Step(raises), lambda: (loader(),), static=True)
    assert raised.value is error


def test_a_step_without_loss_is_an_error() -> None:
    with pytest.raises(NoLoss, match="returned None"):
        fit(lambda: Step(lambda x, m: None), lambda: (loader(),), static=True)


def test_a_wrong_log_call_is_lightning_s_error_before_any_step() -> None:
    def vector(x: Tensor, module: Any) -> Tensor:
        module.log("x", x)
        return x.sum()

    module = Step(vector)
    weight = module.net.weight.detach().clone()
    trainer = fulgurite.Trainer(backend=csx(), max_epochs=1, **QUIET)
    with pytest.raises(ValueError, match="must have a single element"):
        trainer.fit(module, loader())
    assert torch.equal(module.net.weight, weight)


def test_constants_keep_their_value() -> None:
    def looks(x: Tensor, _: Any) -> Tensor:
        mask = torch.ones(4, 4).triu()
        mask[0, 0] = 2
        assert mask.sum().item() == 11
        if (mask == torch.ones(4, 4).triu()).all():
            raise AssertionError
        return (x @ mask).sum()

    ours = fit(lambda: Step(looks), lambda: (loader(),), static=True, limit_train_batches=2)
    stock = fit(lambda: Step(looks), lambda: (loader(),), static=False, limit_train_batches=2)
    assert ours.losses == pytest.approx(stock.losses, rel=1e-5)


def test_a_mask_that_follows_from_constants_may_choose_rows_and_elements() -> None:
    def chooses(x: Tensor, _: Any) -> Tensor:
        own = torch.eye(len(x), dtype=torch.bool)
        similarity = (x @ x.T).masked_fill_(own, -9e15)  # reads the mask, and writes another
        positive = similarity[own.roll(1, 0)]
        return similarity[:, ~own[0]].logsumexp(1).mean() - positive.mean() + x[own[2]].sum()

    ours = fit(lambda: Step(chooses), lambda: (loader(),), static=True, limit_train_batches=3)
    stock = fit(lambda: Step(chooses), lambda: (loader(),), static=False, limit_train_batches=3)
    assert ours.losses == pytest.approx(stock.losses, rel=1e-5)


def test_torch_tensor_of_traced_tensors_equals_stock() -> None:
    def collects(x: Tensor, _: Any) -> Tensor:
        y = x.detach()
        scale = torch.tensor([[y.min(), y.max()], [1, y.sum()]], dtype=torch.float64)
        assert not scale.requires_grad
        return x.sum() * scale.sum().sigmoid()

    ours = fit(lambda: Step(collects), lambda: (loader(),), static=True, limit_train_batches=3)
    stock = fit(lambda: Step(collects), lambda: (loader(),), static=False, limit_train_batches=3)
    assert ours.losses == pytest.approx(stock.losses, rel=1e-5)


def test_a_constant_mixed_with_data_has_no_value() -> None:
    def looks(x: Tensor, _: Any) -> Tensor:
        sums = torch.zeros(4)
        view = sums[:2]
        sums.add_(x.detach().sum(0))
        return x.sum() * view[0].item()

    with pytest.raises(HostRead):
        fit(lambda: Step(looks), lambda: (loader(),), static=True)


def test_every_operation_carries_a_line_of_the_user_s() -> None:
    run = fit(lambda: Classifier(mlp()), lambda: (loader(),), static=True, limit_train_batches=1)
    [entry] = run.trainer.strategy.programs[0].entries
    functions = set()
    for node in entry.graph.operations():
        file, _, function = node.meta["stack_trace"].partition("\n")[0].split(", ")
        assert file.endswith(('models.py"', 'test_tracing.py"')), node.format_node()
        functions.add((node.target.__name__.split(".")[0], function))
    assert ("addmm", "in training_step") in functions  # forward
    assert ("mm", "in training_step") in functions  # backward
    assert ("sqrt", "in configure_optimizers") in functions  # optimizer
