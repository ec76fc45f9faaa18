"""Tensors where torch takes only numbers: the right one is named, the remedy computes the same."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from harness import assert_close, csx
from torch import nn
from torch.nn import functional as F

import fulgurite
from fulgurite.backends.csx.contract.rules import ANY, MULTIPLIED_OUT, SIZED
from fulgurite.backends.csx.diagnostics.trace_errors import (
    ConditionalOnTensor,
    DynamicShape,
    ScalarArgument,
    TraceError,
)

_FILE = """\
import math

import torch
from torch import nn
from torch.nn import functional as F

net = nn.Linear(8, 8)
net.scale = nn.Parameter(torch.tensor(0.5))


def step(x, y, w):
    scale = net(x).mean().abs().sigmoid(){detached}
    count = w.sum() % 3
    return {call}
"""

# a call, the argument to be named, and the name of its row in the table
FLOATS = [
    ("torch.add(x, y, alpha={})", "alpha", "add.alpha"),
    ("x.sub(y, alpha={})", "alpha", "sub.alpha"),
    ("torch.rsub(x, y, alpha={})", "alpha", "rsub.alpha"),
    ("torch.addcmul(x, y, y, value={})", "value", "addcmul.value"),
    ("torch.addcdiv(x, y, y.abs() + 1, value={})", "value", "addcdiv.value"),
    ("torch.addmm(x[:, :4], x, x.T, alpha={})", "alpha", "addmm.alpha"),
    ("torch.addmm(x[:, :4], x, x.T, beta={})", "beta", "addmm.beta"),
    ("torch.addmv(x[:, 0], x, y[0], alpha={})", "alpha", "addmv.alpha"),
    ("torch.baddbmm(x[None, :, :4], x[None], x.T[None], beta={})", "beta", "baddbmm.beta"),
    ("x.index_add(0, w, y, alpha={})", "alpha", "index_add.alpha"),
    ("torch.full((3,), {})", "fill_value", "full"),
    ("torch.full((3,), fill_value={})", "fill_value", "full"),
    ("torch.full_like(x, {})", "fill_value", "full_like"),
    ("x.new_full((3,), {})", "fill_value", "new_full"),
    ("F.pad(x, (1, 0), value={})", "value", "pad.value"),
    ("x.clamp(-1.0, {})", "max", "clamp"),
    ("torch.nan_to_num(x, nan={})", "nan", "nan_to_num.nan"),
    ("torch.isclose(x, y, rtol=0.0, atol={})", "atol", "isclose"),
    ("torch.trapezoid(x, dx={})", "dx", "trapezoid.dx"),
    ("F.leaky_relu(x, {})", "negative_slope", "leaky_relu"),
    ("nn.LeakyReLU({})(x)", "negative_slope", "leaky_relu"),
    ("F.elu(x, alpha={})", "alpha", "elu"),
    ("F.celu(x, alpha={})", "alpha", "celu"),
    ("F.hardtanh(x, -1.0, {})", "max_val", "hardtanh"),
    ("F.threshold(x, {}, 0.0)", "threshold", "threshold.threshold"),
    ("F.softplus(x, {})", "beta", "softplus.beta"),
    ("F.hardshrink(x, {})", "lambd", "hardshrink"),
    ("F.softshrink(x, {})", "lambd", "softshrink"),
    ("F.huber_loss(x, y, delta={})", "delta", "huber_loss.delta"),
    ("nn.HuberLoss(delta={})(x, y)", "delta", "huber_loss.delta"),
    ("F.smooth_l1_loss(x, y, beta={})", "beta", "smooth_l1_loss.beta"),
    (
        "F.cross_entropy(x, w, label_smoothing={})",
        "label_smoothing",
        "cross_entropy.label_smoothing",
    ),
    ("F.triplet_margin_loss(x, y, -y, margin={})", "margin", "triplet_margin_loss.margin"),
    ("x.norm({})", "p", "norm.p"),
    ("torch.linalg.vector_norm(x, {})", "ord", "vector_norm.ord"),
    ("F.normalize(x, p={})", "p", "normalize.p"),
    ("F.dropout(x, p={})", "p", "dropout"),
    ("F.dropout(x, {})", "p", "dropout"),
    ("nn.Dropout({})(x)", "p", "dropout"),
    ("F.rrelu(x, 0.1, {}, training=True)", "upper", "rrelu"),
    ("torch.zeros(3).uniform_(0, {})", "to", "uniform"),
    ("torch.zeros(3).normal_(0, {})", "std", "normal"),
    ("torch.normal(0.0, {}, (3,))", "std", "normal"),
    ("F.layer_norm(x, (8,), eps={})", "eps", ANY),
    ("torch.set_grad_enabled({})", "mode", ANY),
    ("nn.init.trunc_normal_(torch.zeros(3), std={})", "std", ANY),
    ("nn.utils.clip_grad_norm_(net.parameters(), {})", "max_norm", "clip_grad_norm.max_norm"),
]
COUNTS = [
    ("x.roll({}, 0)", "shifts", "roll"),
    ("torch.roll(x, shifts=({},), dims=(0,))", "shifts", "roll"),
    ("x.select(0, {})", "index", "select"),
    ("x.narrow(0, {}, 1)", "start", "narrow.start"),
    ("x.kthvalue({} + 1)", "k", "kthvalue"),
    ("x.triu({})", "diagonal", "triu"),
    ("torch.randint(0, {}, (3,))", "high", "randint"),
    ("x.softmax({})", "dim", ANY),
    ("F.cross_entropy(x, w, ignore_index={})", "ignore_index", ANY),
]
SIZES = [
    ("torch.zeros({})", "zeros"),
    ("torch.arange({})", "arange"),
    ("x.topk({})", "topk"),
    ("x.narrow(0, 0, {})", "narrow.length"),
    ("x.reshape({}, -1)", "reshape"),
    ("x.expand({}, 4, 8)", "expand"),
    ("x.repeat({}, 1)", "repeat"),
    ("x.chunk({})", "chunk"),
    ("F.one_hot(w, {})", "one_hot"),
    ("F.pad(x, ({}, 0))", "pad.pad"),
    ("F.interpolate(x[None], scale_factor={})", "interpolate"),
    ("torch.bincount(w, minlength={})", "bincount.minlength"),
    ("x.repeat_interleave({})", "repeat_interleave"),
]
X, Y, W = torch.randn(4, 8), torch.randn(4, 8), torch.tensor([0, 2, 1, 3])


def load(text: str, folder: Path) -> ModuleType:
    file = folder / "scalars.py"
    file.write_text(text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("scalars", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["scalars"] = module
    spec.loader.exec_module(module)
    return module


def error_of(call: str, folder: Path, detached: bool = False) -> TraceError:
    """The error of a call in a step."""
    csx(validate_only=True)
    text = _FILE.format(call=call, detached=".detach()" if detached else "")
    step = load(text, folder).step
    with pytest.raises(TraceError) as caught:
        fulgurite.trace(step)(X, Y, W)
    error = caught.value
    assert error.line is not None
    assert (error.line.line, error.line.file) == (14, str(folder / "scalars.py"))
    assert "FakeTensor" not in str(error)
    return error


@pytest.mark.parametrize("detached", [False, True], ids=["gradient", "detached"])
@pytest.mark.parametrize(("call", "argument", "row"), FLOATS, ids=lambda value: str(value)[:40])
def test_the_tensor_that_should_be_a_number_is_named(
    call: str, argument: str, row: str, detached: bool, tmp_path: Path
) -> None:
    error = error_of(call.format("scale"), tmp_path, detached)
    assert type(error) is ScalarArgument
    name = (
        "`scale`",
        f"The result of {'detach' if detached else 'sigmoid'}, scalars.py:12 (float32[])",
    )
    assert error.what.startswith(name)
    assert f" was given as {argument}= of " in error.what
    assert error.remedy.endswith(MULTIPLIED_OUT.get(row, row))


@pytest.mark.parametrize(("call", "argument", "row"), COUNTS, ids=lambda value: str(value)[:40])
def test_an_integer_that_should_be_pythons_is_named(
    call: str, argument: str, row: str, tmp_path: Path
) -> None:
    error = error_of(call.format("count"), tmp_path)
    assert type(error) is ScalarArgument
    assert error.what.startswith(("The result of remainder, scalars.py:13", "The result of add"))
    assert f" was given as {argument}= of " in error.what
    assert error.remedy.endswith(MULTIPLIED_OUT.get(row, row))


@pytest.mark.parametrize(("call", "row"), SIZES, ids=lambda value: str(value)[:40])
def test_an_integer_that_makes_a_shape_is_named(call: str, row: str, tmp_path: Path) -> None:
    error = error_of(call.format("count"), tmp_path)
    assert type(error) is DynamicShape
    assert " depends on the values of the result of remainder, scalars.py:13" in error.what
    assert error.remedy == SIZED[row]


def test_an_expression_is_named_as_it_is_written(tmp_path: Path) -> None:
    error = error_of("torch.full((3,), scale * 2)", tmp_path)
    assert error.what.startswith("`scale * 2` was given as fill_value= of full()")
    error = error_of("x.clamp(-1.0, net.scale)", tmp_path)
    assert error.what.startswith("`net.scale` was given as max= of clamp()")
    error = error_of("torch.full(\n        (3,), fill_value=net.weight.mean()\n    )", tmp_path)
    assert error.what.startswith("`net.weight.mean()` was given as fill_value= of full()")


def test_a_comparison_in_a_test_of_torchs_is_a_condition_and_no_argument(tmp_path: Path) -> None:
    error = error_of("torch.testing.assert_close(scale, y[0, 0])", tmp_path)
    assert type(error) is ConditionalOnTensor
    assert error.what.startswith("The result of sigmoid, scalars.py:12 (float32[])")
    assert " was compared by torch.testing.assert_close" in error.what
    assert "assert ok" in error.remedy


def test_pythons_own_functions_raise_what_they_raise_of_a_tensor(tmp_path: Path) -> None:
    csx(validate_only=True)
    step = load(_FILE.format(call="round(scale)", detached=""), tmp_path).step
    with pytest.raises(TypeError, match=r"^type Tensor doesn't define __round__ method"):
        fulgurite.trace(step)(X, Y, W)


_GIVEN = {
    "x": X,
    "y": Y,
    "z": torch.linspace(-1, 1, 32).reshape(4, 8).sin(),
    "t": torch.tensor(0.3),
}
_SIGNS, _TARGET = torch.tensor([1.0, -1, 1, -1]), torch.tensor([1, 3, 0, 7])
_CUBE = torch.linspace(-2, 2, 48).reshape(3, 4, 4).sin()
_TWO = torch.tensor(2)
_EDGE = torch.where(X > 0, X, torch.nan)
# the row, the same by torch with a number, and what the names of the remedy stand for
SAME: list[tuple[str, Any, dict[str, Any]]] = [
    ("add.alpha", lambda x, y, t: torch.add(x, y, alpha=t), {}),
    ("sub.alpha", lambda x, y, t: torch.sub(x, y, alpha=t), {}),
    ("subtract.alpha", lambda x, y, t: torch.subtract(x, y, alpha=t), {}),
    ("rsub.alpha", lambda x, y, t: torch.rsub(x, y, alpha=t), {}),
    ("addcmul.value", lambda x, y, z, t: torch.addcmul(x, y, z, value=t), {}),
    ("addcdiv.value", lambda x, y, z, t: torch.addcdiv(x, y, z, value=t), {}),
    ("addmm.alpha", lambda x, y, z, t: torch.addmm(x, y, z, alpha=t), {"y": X[:, :4], "z": Y}),
    ("addmm.beta", lambda x, y, z, t: torch.addmm(x, y, z, beta=t), {"y": X[:, :4], "z": Y}),
    ("addmv.alpha", lambda x, y, z, t: torch.addmv(x, y, z, alpha=t), {"x": X[:, 0], "z": Y[0]}),
    ("addmv.beta", lambda x, y, z, t: torch.addmv(x, y, z, beta=t), {"x": X[:, 0], "z": Y[0]}),
    ("addr.alpha", lambda x, y, z, t: torch.addr(x, y, z, alpha=t), {"y": X[:, 0], "z": Y[0]}),
    ("addr.beta", lambda x, y, z, t: torch.addr(x, y, z, beta=t), {"y": X[:, 0], "z": Y[0]}),
    *[
        (f"{name}.{key}", lambda x, y, z, t, f=f, key=key: f(x, y, z, **{key: t}), more)
        for name, f, more in (
            ("baddbmm", torch.baddbmm, {"x": _CUBE, "y": _CUBE + 1, "z": -_CUBE}),
            ("addbmm", torch.addbmm, {"x": _CUBE[0], "y": _CUBE + 1, "z": -_CUBE}),
        )
        for key in ("alpha", "beta")
    ],
    ("index_add.alpha", lambda x, y, z, t: x.index_add(0, y, z, alpha=t), {"y": W}),
    ("full", lambda shape, t: torch.full(shape, t), {"shape": (3,)}),
    ("full_like", torch.full_like, {}),
    ("new_full", lambda x, shape, t: x.new_full(shape, t), {"shape": (3,)}),
    ("scalar_tensor", lambda t: torch.scalar_tensor(t), {}),
    ("pad.value", lambda x, pad, t: F.pad(x, pad, value=t), {"pad": (1, 2)}),
    ("clamp", lambda x, low, high: x.clamp(low, high), {"low": -0.5, "high": 0.5}),
    ("clip", lambda x, low, high: x.clip(low, high), {"low": -0.5, "high": 0.5}),
    ("nan_to_num.nan", lambda x, t: torch.nan_to_num(x, nan=t), {"x": _EDGE}),
    ("isclose", lambda x, y, t: torch.isclose(x, y, rtol=0.0, atol=t), {}),
    ("logit.eps", lambda x, t: torch.logit(x, eps=t), {"x": X.sigmoid()}),
    ("round.decimals", lambda x, t: torch.round(x, decimals=t), {"t": _TWO}),
    ("gradient.spacing", lambda x, t: torch.gradient(x, spacing=t)[0], {}),
    ("trapezoid.dx", lambda x, t: torch.trapezoid(x, dx=t), {}),
    ("leaky_relu", F.leaky_relu, {}),
    ("elu", F.elu, {}),
    ("celu", F.celu, {}),
    ("hardtanh", lambda x, low, high: F.hardtanh(x, low, high), {"low": -0.5, "high": 0.5}),
    ("threshold.threshold", lambda x, t, value: F.threshold(x, t, value), {"value": 7.0}),
    ("threshold.value", lambda x, threshold, t: F.threshold(x, threshold, t), {"threshold": 0.1}),
    ("softplus.beta", F.softplus, {}),
    ("hardshrink", F.hardshrink, {}),
    ("softshrink", F.softshrink, {}),
    ("huber_loss.delta", lambda x, y, t: F.huber_loss(x, y, delta=t), {}),
    ("smooth_l1_loss.beta", lambda x, y, t: F.smooth_l1_loss(x, y, beta=t), {}),
    (
        "cross_entropy.label_smoothing",
        lambda x, y, t: F.cross_entropy(x, y, label_smoothing=t),
        {"y": _TARGET},
    ),
    (
        "margin_ranking_loss.margin",
        lambda x, y, z, t: F.margin_ranking_loss(x, y, z, margin=t),
        {"x": X[:, 0], "y": X[:, 1], "z": _SIGNS},
    ),
    ("triplet_margin_loss.margin", lambda x, y, z, t: F.triplet_margin_loss(x, y, z, margin=t), {}),
    (
        "hinge_embedding_loss.margin",
        lambda x, y, t: F.hinge_embedding_loss(x, y, margin=t),
        {"x": X[:, 0], "y": _SIGNS},
    ),
    (
        "scaled_dot_product_attention.scale",
        lambda x, y, z, t: F.scaled_dot_product_attention(x, y, z, scale=t),
        {"x": _CUBE, "y": _CUBE + 1, "z": -_CUBE},
    ),
    ("norm.p", lambda x, t: x.norm(t), {}),
    ("normalize.p", F.normalize, {}),
    ("pairwise_distance.p", lambda x, y, t: F.pairwise_distance(x, y, t, eps=0.0), {}),
    ("roll", lambda x, t: x.roll(t, 0), {"t": _TWO}),
    ("narrow.start", lambda x, t, length: x.narrow(0, t, length), {"t": _TWO, "length": 2}),
    ("kthvalue", lambda x, t: x.kthvalue(t).values, {"t": _TWO}),
]


@pytest.mark.parametrize(("row", "function", "given"), SAME, ids=[row for row, *_ in SAME])
def test_the_remedy_computes_the_same(row: str, function: Any, given: dict[str, Any]) -> None:
    names = {**_GIVEN, **given}
    arguments = [names[name] for name in _parameters(function)]
    wanted = function(*[a.item() if a is names["t"] else a for a in arguments])
    assert_close(eval(MULTIPLIED_OUT[row], {"torch": torch, "F": F, **names}), wanted)


def _parameters(function: Any) -> list[str]:
    if function.__name__ == "<lambda>":
        count = function.__code__.co_argcount - len(function.__defaults__ or ())
        return list(function.__code__.co_varnames[:count])
    return ["x", "t"]


@pytest.mark.parametrize("row", ["triu", "tril"])
def test_the_masks_for_triangles_compute_the_same(row: str) -> None:
    i, j = torch.arange(4)[:, None], torch.arange(8)
    form = MULTIPLIED_OUT[row].partition(", of x")[0]
    got = eval(form, {"torch": torch, "x": X, "t": _TWO, "i": i, "j": j})
    assert_close(got, getattr(torch, row)(X, 2))


@pytest.mark.parametrize(
    ("row", "function"), [("dropout", F.dropout), ("dropout2d", F.dropout2d)], ids=["any", "2d"]
)
def test_the_masks_for_dropout_keep_as_many(row: str, function: Any) -> None:
    x, t = torch.ones(200, 50, 2, 2), torch.tensor(0.3)
    got = eval(MULTIPLIED_OUT[row], {"torch": torch, "x": x, "t": t})
    assert got.unique().tolist() == function(x, 0.3).unique().tolist()
    assert got.mean().item() == pytest.approx(1, abs=0.03)


def test_clipping_by_a_tensor_computes_the_same() -> None:
    form = MULTIPLIED_OUT["clip_grad_norm.max_norm"]
    found = []
    for clip in (lambda net: nn.utils.clip_grad_norm_(net.parameters(), 0.3), None):
        torch.manual_seed(0)
        net = nn.Linear(8, 8)
        net(X).sum().backward()
        if clip is None:
            lines = "\n".join(line.strip() for line in form.splitlines())
            exec(lines, {"torch": torch, "self": net, "t": torch.tensor(0.3)})
        else:
            clip(net)
        found.append([p.grad for p in net.parameters()])
    assert_close(*found)


INDICES = ["x[k]", "x[:, k]", "x[0, k]", "x[..., k]", "x[k, 1:3]", "x[None, k, ..., 0]", "x[k, k]"]


@pytest.mark.parametrize("index", INDICES)
def test_an_integer_tensor_in_an_index_is_followed(index: str) -> None:
    csx()
    names: dict[str, Any] = {}
    exec(f"def read(x, k): return {index}", names)
    exec(f"def write(x, k):\n    x = x * 1\n    {index} = 7.0\n    return x", names)
    for function in (names["read"], names["write"]):
        traced = fulgurite.trace(function)
        for k in (1, 3, 0):
            assert_close(traced(X, torch.tensor(k)), function(X, torch.tensor(k)))
