"""An LSTM's layers, each one operation: as torch's own to the bit, and written out."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import assert_same_run, both, fit
from idioms.layers import Sequences
from models import loader
from torch import Tensor, nn

from fulgurite.backends.csx.graph.lstm import LAYER, LAYER_BACKWARD, WRITTEN_OUT, lstm
from fulgurite.backends.csx.hyperparams.torch_optim import without_mkldnn

STEPS, ROWS, INPUTS, HIDDEN = 5, 3, 2, 4

KINDS: dict[str, dict[str, Any]] = {
    "one layer": {},
    "both directions": {"bidirectional": True, "num_layers": 2},
    "dropout": {"num_layers": 3, "dropout": 0.5},
    "no biases": {"bias": False, "batch_first": True},
}


def results_of(layer: nn.LSTM, run: Callable[..., Any], *, twice: bool = False) -> list[Tensor]:
    """What a layer gives, and the gradients of all that it takes."""
    torch.manual_seed(1)
    directions = 1 + layer.bidirectional
    given = [
        torch.randn(STEPS, ROWS, INPUTS),
        *torch.randn(2, directions * layer.num_layers, ROWS, HIDDEN),
    ]
    if layer.batch_first:
        given[0] = torch.randn(ROWS, STEPS, INPUTS)
    x, h, c = (one.requires_grad_() for one in given)
    weights = layer._flat_weights
    flags = layer.bias, layer.num_layers, layer.dropout, True, layer.bidirectional
    results = run(x, (h, c), weights, *flags, layer.batch_first)
    loss = sum((one * torch.randn_like(one)).sum() for one in results)
    leaves = [x, h, c, *weights]
    gradients = torch.autograd.grad(loss, leaves, create_graph=twice)
    if twice:
        gradients = torch.autograd.grad(sum(one.square().sum() for one in gradients), leaves)
    return [*results, *gradients]


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_it_is_torchs_to_the_bit(kind: dict[str, Any]) -> None:
    layer = nn.LSTM(INPUTS, HIDDEN, **kind)
    found, right = results_of(layer, lstm), results_of(layer, torch.lstm)
    for one, other in zip(found, right, strict=True):
        assert torch.equal(one, other)


def test_its_second_derivatives_are_torchs() -> None:
    layer = nn.LSTM(INPUTS, HIDDEN, num_layers=2)
    found = results_of(layer, lstm, twice=True)
    with without_mkldnn():
        right = results_of(layer, torch.lstm, twice=True)
    torch.testing.assert_close(found, right)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("asked", [(0, 1, 2), (0,), (1,), (2,)])
def test_written_out_it_is_the_same(reverse: bool, biases: bool, asked: tuple[int, ...]) -> None:
    weights = [torch.randn(4 * HIDDEN, n) for n in (INPUTS, HIDDEN)]
    added = [torch.randn(4 * HIDDEN) if biases else None for _ in range(2)]
    given = [torch.randn(STEPS, ROWS, INPUTS), *weights, *added, *torch.randn(2, ROWS, HIDDEN)]
    right = LAYER(*given, reverse, True)
    found = WRITTEN_OUT[LAYER](*given, reverse, True)
    torch.testing.assert_close(found[:3], tuple(right[:3]))
    to = [torch.randn_like(right[i]) if i in asked else None for i in range(3)]
    torch.testing.assert_close(
        WRITTEN_OUT[LAYER_BACKWARD](*to, *given, *found, reverse),
        tuple(LAYER_BACKWARD(*to, *given, *right, reverse)),
    )


def test_what_is_told_of_it_is_what_it_gives() -> None:
    weights = [torch.randn(4 * HIDDEN, n) for n in (INPUTS, HIDDEN)]
    given = [torch.randn(STEPS, ROWS, INPUTS), *weights, None, None, *torch.randn(2, ROWS, HIDDEN)]
    for keeps in (False, True):
        right = LAYER(*given, False, keeps)
        with torch._subclasses.FakeTensorMode() as mode:
            fakes = [one if one is None else mode.from_tensor(one) for one in given]
            told = LAYER(*fakes, False, keeps)
        for fake, real in zip(told, right, strict=True):
            assert (fake.shape, fake.dtype) == (real.shape, real.dtype)


def test_without_gradients_nothing_is_kept() -> None:
    given = [
        torch.randn(STEPS, ROWS, INPUTS),
        torch.randn(4 * HIDDEN, INPUTS),
        torch.randn(4 * HIDDEN, HIDDEN),
    ]
    assert LAYER(*given, None, None, *torch.randn(2, ROWS, HIDDEN), False, False)[-1].numel() == 0


@pytest.mark.fits
@pytest.mark.numbers
def test_a_fit_has_the_numbers_of_stock_to_the_bit() -> None:
    ours, stock = both(
        lambda: Sequences(nn.LSTM(2, 6, 2, batch_first=True, bidirectional=True), 12),
        lambda: (loader(48),),
        policy="disabled",
    )
    [program] = ours.trainer.strategy.training.executables()
    targets = [node.target for node in program.graph.runs.operations()]
    assert (targets.count(LAYER), targets.count(LAYER_BACKWARD)) == (4, 4)
    assert ours.losses == stock.losses


class Typed(nn.LSTM):
    """Its results, and the types that autocast has them in."""

    def forward(self, *given: Any) -> Any:
        output, (h, c) = super().forward(*given)
        assert {output.dtype, h.dtype, c.dtype} == {torch.get_autocast_dtype("cpu")}
        return output, (h, c)


@pytest.mark.fits
@pytest.mark.numbers
@pytest.mark.compiler
@pytest.mark.parametrize("policy", ["disabled", "default"])
@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_under_autocast_its_results_have_the_16_bit_type(precision: str, policy: str) -> None:
    """oneDNN's own needs a processor that has such numbers."""
    run = functools.partial(
        fit,
        lambda: Sequences(Typed(2, 6, 2, batch_first=True)),
        lambda: (loader(48),),
        precision=precision,
    )
    ours = run(static=True, policy=policy, backend={"audit": False, "background": False})
    assert all(map(math.isfinite, ours.losses))
    if precision == "bf16-mixed" and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        assert ours.losses == pytest.approx(run(static=False).losses, rel=0.02)


class Dropped(nn.Module):
    """An LSTM whose weights of the recurrence lose some of their values in every call."""

    def __init__(self, inner: nn.LSTM) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Any:
        weight = nn.functional.dropout(self.inner.weight_hh_l0, 0.3, self.training)
        return torch.func.functional_call(self.inner, {"weight_hh_l0": weight}, (x,))


OF_THE_STEP: dict[str, Callable[[nn.LSTM], nn.Module]] = {
    "functional_call": Dropped,
    "weight_norm": lambda layer: nn.utils.weight_norm(layer, "weight_hh_l0"),
    "parametrizations": lambda layer: nn.utils.parametrizations.weight_norm(layer, "weight_hh_l0"),
}


@pytest.mark.fits
@pytest.mark.numbers
@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
@pytest.mark.parametrize("norm", OF_THE_STEP.values(), ids=OF_THE_STEP)
def test_weights_that_the_step_makes_are_lists_of_each_call(
    norm: Callable[[nn.LSTM], nn.Module],
) -> None:
    """The layer lists its weights anew then; the next trace listed none, and was another one."""

    class Looks(Sequences):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("loss", nn.functional.cross_entropy(self(batch[0]), batch[1]))

        def on_train_batch_end(self, *_: Any) -> None: ...

    ours, stock = both(
        lambda: Looks(norm(nn.LSTM(2, 6, batch_first=True)), 6),
        lambda: (loader(48), loader(48)),
        max_epochs=3,
        backend={"audit": True},
    )
    assert_same_run(ours, stock)
