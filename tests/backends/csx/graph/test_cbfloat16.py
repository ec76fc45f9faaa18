"""cbfloat16: rounding to it, and what a run in it computes.

The reference for rounding is a search among all 2^16 numbers of the type, in plain Python. A run is
compared with the same operations done eagerly in float32 and rounded one by one.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from harness import assert_close, fit, make_trainer
from models import Classifier, loader, mlp
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from fulgurite.backends.csx.diagnostics.trace_errors import UnsupportedDtype
from fulgurite.backends.csx.graph.dtypes import Facts, representable, rounded
from fulgurite.backends.csx.plugins.precision_plugins import CSXMixedPrecision

EPS = 2**-9  # between 1 and the next number
IN_CBFLOAT16: dict[str, Any] = {"static": True, "plugins": [CSXMixedPrecision("cbfloat16")]}


def decoded(code: int) -> float:
    """The number of 15 bits, exponent and mantissa; of the code of infinity what would follow."""
    exponent, mantissa = divmod(code, 512)
    if exponent == 0:
        return math.ldexp(mantissa, -39)
    return math.ldexp(512 + mantissa, exponent - 31 - 9)


INFINITY = 63 * 512
NUMBERS = [decoded(code) for code in range(INFINITY + 1)]  # not negative, ascending


def nearest(x: float) -> float:
    """The nearest number to a float, ties to the even code."""
    if math.isnan(x):
        return x
    above = min(bisect.bisect_left(NUMBERS, abs(x)), INFINITY)
    below = max(above - 1, 0)
    up, down = NUMBERS[above] - abs(x), abs(x) - NUMBERS[below]
    code = above if up < down or (up == down and above % 2 == 0) else below
    return math.copysign(math.inf if code == INFINITY else NUMBERS[code], x)


def hard_cases() -> Tensor:
    """All numbers, the midpoints between them, their neighbours in float32; and random bits.

    The midpoint above the largest number, where overflow begins, is among them.
    """
    numbers = torch.tensor(NUMBERS)
    middles = (numbers[1:] + numbers[:-1]) / 2
    assert middles.tolist() == [sum(pair) / 2 for pair in itertools.pairwise(NUMBERS)]
    points = torch.cat([numbers, middles])
    near = [points.nextafter(torch.tensor(x)) for x in (0.0, math.inf)]
    draws = torch.randint(-(2**31), 2**31, (20_000,), generator=torch.Generator().manual_seed(0))
    points = torch.cat([points, *near, torch.tensor([math.inf, 2.0**33, 3e38, 1e-45])])
    return torch.cat([points, -points, draws.to(torch.int32).view(torch.float32)])


def assert_rounded(results: Tensor, given: Tensor) -> None:
    """Each result is the nearest number, of the same sign where it is zero; NaN stays NaN."""
    wanted = torch.tensor([nearest(x) for x in given.tolist()])
    is_nan = wanted.isnan()
    assert results.isnan().equal(is_nan)
    assert results[~is_nan].view(torch.int32).equal(wanted[~is_nan].view(torch.int32))


def test_numbers_of_the_type_stay_as_they_are() -> None:
    numbers = torch.tensor(NUMBERS[:-1])
    assert rounded(numbers).equal(numbers)
    assert rounded(-numbers).equal(-numbers)


def test_rounding_is_to_the_nearest_with_ties_to_even() -> None:
    assert_rounded(rounded(hard_cases()), hard_cases())


def test_overflow_begins_half_a_step_above_the_largest_number() -> None:
    largest = Facts().max
    edge = largest + 2.0**21
    below = math.nextafter(edge, 0)  # of float64: float32's own neighbour is further away
    assert float(rounded(torch.tensor(edge - 2.0**8))) == largest
    assert float(rounded(torch.tensor(edge))) == math.inf
    assert nearest(below) == largest


@pytest.mark.parametrize("bits", [0x7FC00000, 0x7F800001, 0x7FFFFFFF, -1, -(2**23) + 1])
def test_nan_stays_nan_with_its_sign(bits: int) -> None:
    result = rounded(torch.tensor([bits], dtype=torch.int32).view(torch.float32))
    assert result.isnan().all()
    assert bool(result.signbit()) == (bits < 0)


def test_rounding_keeps_shape_and_strides() -> None:
    x = torch.randn(3, 4, 5).permute(2, 0, 1)
    assert rounded(x).stride() == x.stride()
    assert rounded(torch.tensor(0.1)).shape == ()
    assert rounded(torch.zeros(0, 2)).shape == (0, 2)


def test_facts_are_those_of_the_numbers() -> None:
    facts = Facts()
    assert facts.max == -facts.min == NUMBERS[INFINITY - 1]
    assert facts.eps == NUMBERS[31 * 512 + 1] - NUMBERS[31 * 512] == EPS
    assert facts.tiny == facts.smallest_normal == NUMBERS[512]


@pytest.mark.parametrize(
    ("number", "is_one"),
    [(0.5, True), (0.1, False), (1025, False), (math.inf, True), (1e10, False)],
)
def test_which_python_numbers_are_numbers_of_the_type(number: float, is_one: bool) -> None:
    assert representable(number) is is_one


class Function(pl.LightningModule):
    """A predict step that computes a function of the batch in cbfloat16."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def predict_step(self, x: Tensor) -> Any:
        return self.function(x.to(torch.bfloat16))


def computed(function: Callable[[Tensor], Any], x: Tensor, policy: str = "disabled") -> Any:
    """What a program in cbfloat16 computes of ``x``."""
    trainer = make_trainer(True, policy, plugins=[CSXMixedPrecision("cbfloat16")])
    [result] = trainer.predict(Function(function), DataLoader([x], batch_size=None))
    return result


@pytest.mark.compiler
def test_compiled_rounding_is_the_same() -> None:
    """Also where the last numbers do not fill a vector."""
    given = hard_cases()
    given = given[: len(given) // 16 * 16 - 7]
    normal = given.where(
        (given.abs() >= 2.0**-126) | given.isnan(), given * 0
    )  # others are flushed
    assert_rounded(computed(lambda x: x, given, "default"), normal)


X = torch.linspace(-3, 5, 48).view(6, 8) ** 3 / 7

OPERATIONS: dict[str, Callable[[Tensor], Any]] = {
    "a sum with a number": lambda x: x + 0.1,
    "a product": lambda x: x * x,
    "a product in place": lambda x: x.clone().mul_(0.3),
    "a row in place": lambda x: _with_row(x, lambda row: row.add_(0.1)),
    "a matrix product": lambda x: x @ x.T,
    "exp": torch.exp,
    "gelu": F.gelu,
    "softmax": lambda x: x.softmax(1),
    "a sum": lambda x: x.sum(0),
    "a running sum": lambda x: x.cumsum(1),
    "several results": lambda x: torch.var_mean(x, 1),
    "a norm of layers": lambda x: F.layer_norm(x, (8,)),
    "a convolution": lambda x: F.conv1d(x[None], x[:2, None, :3].expand(2, 6, 3)),
    "attention": lambda x: F.scaled_dot_product_attention(*[x.view(1, 2, 6, 4)] * 3),
    "values added to places": lambda x: x.clone().index_put_(
        (torch.tensor([0, 0]),), x[:2], accumulate=True
    ),
    "a number in masked places": lambda x: x.masked_fill(x > 1, 0.1),
    "a number or not": lambda x: torch.where(x > 1, x, 0.1),
    "a number around": lambda x: F.pad(x, (1, 1), value=0.1),
    "a number in a row": lambda x: _with_row(x, lambda row: row.__setitem__(1, 0.1)),
    "a number by a mask": lambda x: _with_row(x, lambda row: row.__setitem__(row > 0, 0.1)),
    "a copy of float32": lambda x: x.clone().copy_(X),
    "lists in place": lambda x: _foreach(x),
    "an infinity replaced": lambda x: torch.nan_to_num(x / 0),
    "a new tensor of a number": lambda x: torch.full_like(x, 0.1),
    "a literal": lambda x: torch.tensor([0.1, 3e9], dtype=x.dtype),
    "a literal of the same type": lambda x: x.new_tensor([[0.1], [0.2]]),
    "a tensor of a list": lambda x: torch.as_tensor([0.1, 0.2], dtype=x.dtype),
    "integers": lambda x: torch.arange(0, 4096, 7).to(x.dtype),
    "more than the largest": lambda x: x * 1e9,
    "subnormal numbers": lambda x: x * 1e-11,
}


def _with_row(x: Tensor, change: Callable[[Tensor], Any]) -> Tensor:
    x = x.clone()
    change(x[2])
    return x


def _foreach(x: Tensor) -> Any:
    parts = [part.clone() for part in x.unbind()]
    torch._foreach_mul_(parts, 0.3)
    return parts


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_result_is_rounded_once(name: str) -> None:
    function, x = OPERATIONS[name], rounded(X)
    wanted = function(x)
    wanted = [rounded(t) for t in ([wanted] if isinstance(wanted, Tensor) else wanted)]
    if name == "an infinity replaced":
        wanted = [wanted[0].clamp(Facts().min, Facts().max)]
    found = computed(function, X)
    found = [found] if isinstance(found, Tensor) else list(found)
    assert {t.dtype for t in found} == {torch.float32}
    assert_close(found, wanted, 0.0)


EXACT: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "a maximum": lambda x: torch.maximum(x, -x),
    "a choice": lambda x: torch.where(x > 0, x, -x),
    "parts": lambda x: torch.cat([*x.unbind()[1:], x[0]]),
    "rows": lambda x: x[torch.tensor([1, 1, 3])],
    "the largest": lambda x: x.topk(2).values,
    "a clamp": lambda x: x.clamp(-0.5, 2),
    "places written": lambda x: x.clone().index_put_((torch.tensor([0]),), x[:1]),
    "a mask": lambda x: x.masked_fill(x > 0, -math.inf),
}
"""Operations that leave the grid to no number."""


@pytest.mark.parametrize("name", EXACT)
def test_an_exact_operation_costs_no_rounding(name: str) -> None:
    trainer = make_trainer(True, plugins=[CSXMixedPrecision("cbfloat16")])
    [result] = trainer.predict(Function(EXACT[name]), DataLoader([X], batch_size=None))
    assert_close(result, EXACT[name](rounded(X)), 0.0)
    assert roundings(trainer) == 1


def roundings(trainer: pl.Trainer) -> int:
    """How many roundings the programs have."""
    nodes = [
        node
        for program in trainer.strategy.programs  # type: ignore[attr-defined]
        for entry in program.entries
        for node in entry.graph.operations()
    ]
    return sum(node.target is torch.ops.fulgurite.cbfloat16.default for node in nodes)


class Plain(pl.LightningModule):
    """8-16-4, a loss that is linear in the outputs, SGD: every operation can be written down."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))

    def training_step(self, batch: Any) -> Tensor:
        x, weights = batch
        return (self.net(x) * weights).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.25)


def slowly_rounded(x: Tensor) -> Tensor:
    """By search among the numbers."""
    return torch.tensor([nearest(v) for v in x.flatten().tolist()]).view(x.shape)


def plain_step(weights: dict[str, Tensor], x: Tensor, of_outputs: Tensor) -> tuple[Tensor, Any]:
    """A step of ``Plain``, forward, backward and update, one operation after another."""
    r = slowly_rounded
    x, g = r(x), r(of_outputs)
    w0, b0, w2, b2 = (r(w) for w in weights.values())
    hidden = r(torch.addmm(b0, x, w0.T)).relu()
    loss = (r(torch.addmm(b2, hidden, w2.T)) * of_outputs).sum()
    of_hidden = torch.where(hidden > 0, r(g @ w2), 0.0)
    gradients = (
        *(r(of_hidden.T @ x), r(of_hidden.sum(0))),
        *(r(g.T @ hidden), r(g.sum(0))),
    )
    updated = [w - 0.25 * g for w, g in zip(weights.values(), gradients, strict=True)]
    return loss, dict(zip(weights, updated, strict=True))


@pytest.mark.fits
def test_a_step_equals_its_operations_rounded_one_by_one_to_the_bit() -> None:
    generator = torch.Generator().manual_seed(5)
    batches = [
        (torch.randn(16, 8, generator=generator), torch.randn(16, 4, generator=generator) / 16)
        for _ in range(3)
    ]
    ours = fit(Plain, lambda: (DataLoader(batches, batch_size=None),), **IN_CBFLOAT16)
    torch.manual_seed(0)
    weights = {name: w.detach() for name, w in Plain().state_dict().items()}
    losses = []
    for x, of_outputs in batches:
        loss, weights = plain_step(weights, x, of_outputs)
        losses.append(float(loss))
    assert_close(dict(ours.module.state_dict()), weights, 0.0)
    assert_close(ours.losses, losses, 0.0)


class Masked(Classifier):
    """Masks by the least number of the type, as attention in libraries does."""

    def __init__(self) -> None:
        super().__init__(mlp())
        self.seen: dict[str, Any] = {}  # a dict: the trace does not see it change

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.net(batch[0])
        self.seen |= {"narrow": torch.finfo(logits.dtype), "wide": torch.finfo(torch.float32)}
        least = torch.tensor(torch.finfo(logits.dtype).min, dtype=logits.dtype)
        masked = torch.where(batch[0] > 0, least, torch.full_like(batch[0], 1, dtype=logits.dtype))
        return F.cross_entropy(logits, batch[1]) + 0 * masked.float().mean()


@pytest.mark.fits
def test_finfo_in_a_step_is_that_of_the_type() -> None:
    ours = fit(Masked, lambda: (loader(),), **IN_CBFLOAT16, limit_train_batches=2)
    narrow, wide = ours.module.seen.values()
    assert (narrow.min, narrow.eps, narrow.bits) == (-4290772992.0, EPS, 16)
    assert wide.max == torch.finfo(torch.float32).max
    assert torch.finfo(torch.bfloat16).eps == 2**-7, "after the trace it is torch's own again"
    assert all(map(math.isfinite, ours.losses)), "the least number became an infinity"


class Noisy(Classifier):
    """Draws in the type of its activations."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.net(batch[0])
        uniform = torch.rand(20_000, dtype=logits.dtype)
        places = torch.empty(20_000, dtype=logits.dtype).uniform_()
        normal = torch.randn_like(logits)
        loss = F.cross_entropy(logits + normal, batch[1])
        return {"loss": loss, "uniform": uniform, "places": places, "normal": normal}


@pytest.mark.core
@pytest.mark.fits
def test_draws_are_those_of_float32_rounded_and_uniform_ones_below_one() -> None:
    made, limit = (lambda: Noisy(mlp(0.5))), {"limit_train_batches": 2}
    ours = fit(made, lambda: (loader(),), **IN_CBFLOAT16, **limit)
    full = fit(made, lambda: (loader(),), static=True, precision="bf16-mixed", **limit)
    for mine, theirs in zip(ours.outputs, full.outputs, strict=True):
        assert float(mine["uniform"].max()) == 1 - EPS / 2
        assert float(mine["places"].max()) == 1 - EPS / 2
        assert rounded(mine["normal"]).equal(mine["normal"])
        assert_close(mine["normal"], theirs["normal"].float(), 2**-7)


def refusal(make: Callable[[], pl.LightningModule], loaders: Callable[[], Any]) -> str:
    """What a run says that cannot be traced."""
    with pytest.raises(UnsupportedDtype) as caught:
        fit(make, loaders, **IN_CBFLOAT16, max_steps=1)
    return str(caught.value)


class WithBuffer(Classifier):
    """Scales its inputs by a bfloat16."""

    def __init__(self) -> None:
        super().__init__(mlp())
        self.register_buffer("scale", torch.ones(8, dtype=torch.bfloat16))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step((batch[0] * self.scale, batch[1]), batch_idx)


@pytest.mark.fits
def test_state_of_another_16_bit_type_is_refused_by_name() -> None:
    text = refusal(WithBuffer, lambda: (loader(),))
    assert "self.scale is bfloat16. In a cbfloat16 run" in text
    assert "test_cbfloat16.py" in text
    assert "Remedy: x.float()" in text


class Given(Classifier):
    """Computes in float32 with whatever it is given."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step((batch[0].float(), batch[1]), batch_idx)


@pytest.mark.fits
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_batch_of_another_16_bit_type_is_refused_by_name(dtype: torch.dtype) -> None:
    batches = [(torch.zeros(4, 8, dtype=dtype), torch.zeros(4, dtype=torch.int64))]
    text = refusal(lambda: Given(mlp()), lambda: (DataLoader(batches, batch_size=None),))
    assert f"batch[0] is {str(dtype)[6:]}. In a cbfloat16 run" in text


class Bits(Classifier):
    """Looks at the bits of its activations."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        bits = self.net(batch[0]).detach().view(torch.int16)
        return super().training_step(batch, batch_idx) + 0 * bits.sum()


@pytest.mark.fits
def test_the_bits_of_a_number_are_refused() -> None:
    assert "A view gave the bits of a cbfloat16" in refusal(
        lambda: Bits(mlp()), lambda: (loader(),)
    )
