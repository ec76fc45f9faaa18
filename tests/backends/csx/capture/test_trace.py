"""Misuse of tensors in a traced step: which error, which line of the user's, which remedy."""

from __future__ import annotations

import inspect
import io
import threading
import traceback
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from harness import QUIET, csx, fit
from models import Classifier, loader, mlp
from torch import Tensor, nn

import fulgurite
from fulgurite.backends.csx.diagnostics import user_lines
from fulgurite.backends.csx.diagnostics.trace_errors import (
    DynamicShape,
    HostRead,
    LeakedTensor,
    NoLoss,
    UnsupportedState,
)


class Step(pl.LightningModule):
    """Runs ``body(x, module)`` in its training step; the misuse is on the body's own line."""

    def __init__(self, body: Any) -> None:
        super().__init__()
        self.net, self.body = nn.Linear(8, 4), body

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.body(self.net(batch[0]), self)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Returnless(Step):
    """Forgets to return its loss."""

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        self.log("loss", self.net(batch[0]).square().mean())


def line_of(body: Any) -> int:
    """The line marked ``# here``."""
    lines, first = inspect.getsourcelines(body)
    return first + next(i for i, line in enumerate(lines) if "# here" in line)


def item(x: Tensor, _: Any) -> Tensor:
    return x.sum() * x.max().item()  # here


@pytest.mark.fits
def test_a_message_reads_like_this() -> None:
    with pytest.raises(HostRead) as raised:
        fit(lambda: Step(item), lambda: (loader(),), static=True)
    lines = str(raised.value).splitlines()
    here = f"test_trace.py:{line_of(item)}"
    assert lines[0] == (
        f"The result of max, {here} (float32[]) was read by .item(), but it has no value while the"
        " step is traced."
    )
    assert lines[1].endswith(f"{here} in item")
    assert lines[2].strip() == "return x.sum() * x.max().item()  # here"
    assert lines[3] == (
        '  Remedy: leave it a tensor: x.detach() in a computation, self.log("name", x); to look at'
        " it:"
    )


@pytest.mark.fits
def test_what_torch_functions_do_not_see_is_a_trace_error_too() -> None:
    def below(x: Tensor, _: Any) -> Tensor:
        with torch._C.DisableTorchFunction():
            return torch.ops.aten.nonzero.default(x).float().sum()  # here

    with pytest.raises(DynamicShape) as raised:
        fit(lambda: Step(below), lambda: (loader(),), static=True)
    assert raised.value.line is not None
    assert raised.value.line.line == line_of(below)


@pytest.mark.fits
def test_the_result_of_a_layer_goes_by_the_users_line() -> None:
    def reads(x: Tensor, _: Any) -> Tensor:
        normal = nn.LayerNorm(4)(x)  # here
        return normal.sum() * normal[0, 0].exp().item() + float(normal)

    def reads_layer(x: Tensor, _: Any) -> Tensor:
        normal = nn.functional.layer_norm(x, (4,))  # here
        return x.sum() * float(normal)

    with pytest.raises(HostRead, match=rf"^The result of layer_norm, .*:{line_of(reads_layer)} "):
        fit(lambda: Step(reads_layer), lambda: (loader(),), static=True)
    with pytest.raises(HostRead, match=r"^The result of exp, "):
        fit(lambda: Step(reads), lambda: (loader(),), static=True)


@pytest.mark.fits
def test_what_a_thread_computes_is_refused() -> None:
    def threads(x: Tensor, _: Any) -> Tensor:
        sums: list[Tensor] = []
        thread = threading.Thread(target=lambda: sums.append(x.sum()))
        thread.start()
        thread.join()
        return x.mean() + sums[0] * 2  # here

    with pytest.raises(UnsupportedState, match="another thread") as raised:
        fit(lambda: Step(threads), lambda: (loader(),), static=True)
    assert raised.value.line is not None
    assert raised.value.line.line == line_of(threads)


@pytest.mark.numbers
def test_an_element_is_chosen_and_set_by_a_tensor_as_in_stock() -> None:
    def chooses(x: Tensor, _: Any) -> Tensor:
        row, column = x[:, 0].argmax(), x[0].argmin()
        weights = torch.zeros(16, 4)
        weights[row] = x[0].detach()
        weights[:, column] = 3
        weights[row, column] += 1
        return (x * weights).sum() + x[row].sum() + x[row, column] + x[-column - 1].mean()

    ours = fit(lambda: Step(chooses), lambda: (loader(),), static=True, limit_train_batches=3)
    stock = fit(lambda: Step(chooses), lambda: (loader(),), static=False, limit_train_batches=3)
    assert ours.losses == pytest.approx(stock.losses, rel=1e-5)


@pytest.mark.numbers
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning")  # torch's own
def test_a_function_compiled_by_torch_is_traced_as_it_is_written() -> None:
    def compiled(x: Tensor, _: Any) -> Tensor:
        return torch.compile(lambda a: a.square().sum())(x)

    ours = fit(lambda: Step(compiled), lambda: (loader(),), static=True, limit_train_batches=2)
    plain = fit(
        lambda: Step(lambda x, _: x.square().sum()),
        lambda: (loader(),),
        static=False,
        limit_train_batches=2,
    )
    assert ours.losses == pytest.approx(plain.losses, rel=1e-5)


@pytest.mark.fits
@pytest.mark.parametrize("use", [lambda t: t + 1, str, lambda t: t.shape, torch.save, float])
def test_a_leaked_tensor_raises_however_it_is_used(use: Any) -> None:
    kept: list[Tensor] = []

    def leaks(x: Tensor, _: Any) -> Tensor:
        kept.append(x.exp())  # here
        return x.sum()

    with pytest.warns(UserWarning, match="The result of exp, .* kept in the variable kept of"):
        fit(lambda: Step(leaks), lambda: (loader(),), static=True, limit_train_batches=2)
    assert len(kept) == 1
    with pytest.raises(LeakedTensor, match=r"^The result of exp, ") as raised:
        use(*kept, io.BytesIO()) if use is torch.save else use(*kept)
    assert raised.value.line is not None
    assert raised.value.line.line == line_of(leaks)


@pytest.mark.numbers
def test_a_batch_kept_elsewhere_is_a_leaked_tensor_and_the_program_runs() -> None:
    kept: list[Any] = []

    class Keeps(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            kept.append(batch)
            return super().training_step(batch, batch_idx)

    ours = fit(lambda: Keeps(mlp()), lambda: (loader(),), static=True, limit_train_batches=3)
    stock = fit(lambda: Classifier(mlp()), lambda: (loader(),), static=False, limit_train_batches=3)
    assert ours.losses == pytest.approx(stock.losses, rel=1e-5)
    with pytest.raises(LeakedTensor, match=r"^batch\[0\] was used"):
        kept[0][0].sum()


@pytest.mark.fits
def test_an_error_comes_with_the_frames_of_the_user_alone() -> None:
    with pytest.raises(HostRead) as raised:
        fit(lambda: Step(item), lambda: (loader(),), static=True)
    files = [frame.filename for frame in traceback.extract_tb(raised.value.__traceback__)]
    assert [Path(file).name for file in files] == [
        "test_trace.py",  # this test
        "harness.py",  # calls fit
        "test_trace.py",  # training_step
        "test_trace.py",  # item
    ]


@pytest.mark.fits
def test_state_and_batch_go_by_their_names() -> None:
    def reads(x: Tensor, module: Any) -> Tensor:
        return x.sum() * module.net.bias.numpy()[0]

    with pytest.raises(HostRead, match=r"^self\.net\.bias was read by \.numpy\(\)"):
        fit(lambda: Step(reads), lambda: (loader(),), static=True)


@pytest.mark.fits
def test_an_exception_of_the_user_s_own_comes_unchanged() -> None:
    error = KeyError("mine")

    def raises(x: Tensor, _: Any) -> Tensor:
        raise error

    with pytest.raises(KeyError) as raised:
        fit(lambda: Step(raises), lambda: (loader(),), static=True)
    assert raised.value is error


@pytest.mark.fits
def test_a_step_without_loss_is_an_error() -> None:
    with pytest.raises(NoLoss, match="returned None, and does so on every batch"):
        fit(lambda: Returnless(None), lambda: (loader(),), static=True)


@pytest.mark.fits
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


@pytest.mark.numbers
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


@pytest.mark.numbers
def test_a_mask_that_follows_from_constants_may_choose_rows_and_elements() -> None:
    def chooses(x: Tensor, _: Any) -> Tensor:
        own = torch.eye(len(x), dtype=torch.bool)
        similarity = (x @ x.T).masked_fill_(own, -9e15)  # reads the mask, and writes another
        positive = similarity[own.roll(1, 0)]
        return similarity[:, ~own[0]].logsumexp(1).mean() - positive.mean() + x[own[2]].sum()

    ours = fit(lambda: Step(chooses), lambda: (loader(),), static=True, limit_train_batches=3)
    stock = fit(lambda: Step(chooses), lambda: (loader(),), static=False, limit_train_batches=3)
    assert ours.losses == pytest.approx(stock.losses, rel=1e-5)


@pytest.mark.numbers
def test_torch_tensor_of_traced_tensors_equals_stock() -> None:
    def collects(x: Tensor, _: Any) -> Tensor:
        y = x.detach()
        scale = torch.tensor([[y.min(), y.max()], [1, y.sum()]], dtype=torch.bfloat16)
        assert not scale.requires_grad
        return x.sum() * scale.sum().sigmoid()

    ours = fit(lambda: Step(collects), lambda: (loader(),), static=True, limit_train_batches=3)
    stock = fit(lambda: Step(collects), lambda: (loader(),), static=False, limit_train_batches=3)
    assert ours.losses == pytest.approx(stock.losses, rel=1e-5)


@pytest.mark.fits
def test_a_constant_mixed_with_data_has_no_value() -> None:
    def looks(x: Tensor, _: Any) -> Tensor:
        sums = torch.zeros(4)
        view = sums[:2]
        sums.add_(x.detach().sum(0))
        return x.sum() * view[0].item()

    with pytest.raises(HostRead):
        fit(lambda: Step(looks), lambda: (loader(),), static=True)


@pytest.mark.fits
def test_every_operation_carries_a_line_of_the_user_s() -> None:
    run = fit(lambda: Classifier(mlp()), lambda: (loader(),), static=True, limit_train_batches=1)
    [entry] = run.trainer.strategy.programs[0].entries
    functions = set()
    for node in entry.graph.operations():
        file, _, function = node.meta["stack_trace"].partition("\n")[0].split(", ")
        assert file.endswith(('models.py"', 'test_trace.py"')), node.format_node()
        functions.add((node.target.__name__.split(".")[0], function))
    assert ("addmm", "in training_step") in functions  # forward
    assert ("mm", "in training_step") in functions  # backward
    assert ("sqrt", "in configure_optimizers") in functions  # optimizer


@pytest.mark.fits
def test_what_a_hook_of_the_backward_pass_computes_carries_the_hook_s_line() -> None:
    def squashed(gradient: Tensor) -> Tensor:
        return gradient.tanh()  # here

    def body(x: Tensor, module: Any) -> Tensor:
        hidden = x.sin()
        hidden.register_hook(squashed)
        return hidden.square().mean()

    run = fit(lambda: Step(body), lambda: (loader(),), static=True, limit_train_batches=1)
    [entry] = run.trainer.strategy.programs[0].entries
    nodes = {node.target.__name__.split(".")[0]: node for node in entry.graph.operations()}
    line, forward = (user_lines.line_of(nodes[name]) for name in ("tanh", "sin"))
    assert line == user_lines.UserLine(__file__, line_of(squashed), "squashed")
    assert forward is not None
    assert forward.function == "body"
