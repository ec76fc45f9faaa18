"""The losses of ``fulgurite.nn`` are torch's, and fused they are one kernel each way."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
import warnings
from typing import Any

import pytest
import torch
from harness import assert_same_run, csx, fit
from jsonargparse import ArgumentParser
from loss_cases import (
    CASES,
    FIRST,
    REDUCTIONS,
    Case,
    fused_kernels,
    in_program,
    loads,
    made,
    program,
    regions,
    results,
)
from models import Classifier, loader, mlp
from torch import Tensor, nn

import fulgurite
from fulgurite.config.types.classes import Classes
from fulgurite.config.types.report import Report
from fulgurite.config.types.values import check_value

pytestmark = pytest.mark.filterwarnings("ignore:reduction. 'mean' divides the total loss by both")
"""Of KLDivLoss."""

NAMES = [case.name for case in FIRST]
FUSED = [name for name in NAMES if name != "CosineEmbeddingLoss"]


def assert_equal(losses: Any, wanted: Any, cases: list[Case]) -> None:
    """Values and gradients, to float32's tolerance of torch's own tests."""
    for case, (value, gradients), (right, right_gradients) in zip(
        cases, losses, wanted, strict=True
    ):
        torch.testing.assert_close(value, right, msg=lambda text, case=case: f"{case}: {text}")
        for i, (gradient, one) in enumerate(zip(gradients, right_gradients, strict=True)):
            torch.testing.assert_close(
                gradient, one, msg=lambda text, case=case, i=i: f"{case}, gradient {i}: {text}"
            )


def test_the_losses_are_the_eighteen() -> None:
    assert len(NAMES) == len(set(NAMES)) == 18
    assert {case.name for case in CASES} == {*NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_a_loss_takes_torchs_arguments_and_use_autogen(name: str) -> None:
    ours, torchs = getattr(fulgurite.nn, name), getattr(nn, name)
    assert issubclass(ours, torchs)
    *known, added = inspect.signature(ours).parameters.values()
    wanted = inspect.signature(torchs).parameters.values()
    assert [(p.name, p.kind, p.default) for p in known] == [
        (p.name, p.kind, p.default) for p in wanted
    ]
    assert (added.name, added.kind, added.default) == (
        "use_autogen",
        inspect.Parameter.KEYWORD_ONLY,
        False,
    )


@pytest.mark.parametrize("case", FIRST, ids=str)
def test_a_loss_shows_itself_and_is_kept_as_torchs(case: Case) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of CosineEmbeddingLoss
        [ours] = made(fulgurite.nn, [case], use_autogen=True)
    [torchs] = made(nn, [case])
    assert repr(ours) == repr(torchs)
    assert list(ours.state_dict()) == list(torchs.state_dict())
    for same in (pickle.loads(pickle.dumps(ours)), copy.deepcopy(ours)):
        assert type(same) is type(ours)
        assert vars(same).get("use_autogen") == vars(ours).get("use_autogen")
        for name, value in torchs.state_dict().items():
            assert torch.equal(same.state_dict()[name], value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_eager_values_and_gradients_are_torchs(reduction: str, dtype: torch.dtype) -> None:
    cases = [case for case in CASES if case.name in FUSED]
    inputs = [case.inputs(dtype) for case in cases]
    wanted = results(made(nn, cases, dtype, reduction=reduction), cases, inputs)
    ours = made(fulgurite.nn, cases, dtype, reduction=reduction, use_autogen=True)
    assert_equal(results(ours, cases, inputs), wanted, cases)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_values_and_gradients_in_a_program_are_torchs(reduction: str) -> None:
    csx()
    cases = [case for case in CASES if in_program(case)]
    inputs = [case.inputs(torch.float32) for case in cases]
    wanted = results(made(nn, cases, reduction=reduction), cases, inputs)
    got = program(made(fulgurite.nn, cases, reduction=reduction), cases)(inputs)
    assert_equal(got, wanted, cases)


@pytest.mark.long
@pytest.mark.compiler
def test_each_fused_loss_is_one_kernel_each_way_with_torchs_numbers() -> None:
    csx("default")
    cases = [case for case in FIRST if case.name in FUSED]
    inputs = [case.inputs(torch.float32) for case in cases]
    losses = made(fulgurite.nn, cases, use_autogen=True)
    with loads() as found:
        got = program(losses, cases)(inputs)
    assert_equal(got, results(made(nn, cases), cases, inputs), cases)
    [loaded] = found
    assert loaded.compiled, loaded.how
    assert fused_kernels(loaded) == regions(losses)
    assert len(regions(losses)) == 34


@pytest.mark.compiler
def test_a_class_out_of_range_is_an_error_of_a_fused_loss() -> None:
    csx("default")
    loss = fulgurite.nn.MultiMarginLoss(use_autogen=True)

    @fulgurite.trace
    def step(x: Tensor, y: Tensor) -> Tensor:
        return loss(x, y)

    x, y = torch.randn(3, 4), torch.tensor([0, 3, 1])
    torch.testing.assert_close(step(x, y), nn.MultiMarginLoss()(x, y))
    with pytest.raises(IndexError, match="out of range"):
        step(x, y + 1)


@pytest.mark.parametrize(
    "name",
    [name for name in FUSED if "size_average" in inspect.signature(getattr(nn, name)).parameters],
)
@pytest.mark.filterwarnings("ignore:size_average and reduce args will be deprecated")
def test_arguments_of_old_mean_what_they_do_in_torch(name: str) -> None:
    for given in ({"size_average": False}, {"reduce": False}):
        ours = getattr(fulgurite.nn, name)(**given, use_autogen=True)
        assert ours.reduction == getattr(nn, name)(**given).reduction != "mean"


def test_cosine_embedding_is_not_fused_and_says_so() -> None:
    with pytest.warns(UserWarning, match="it stays on primitive kernels") as told:
        loss = fulgurite.nn.CosineEmbeddingLoss(0.3, use_autogen=True)
    assert [one.filename for one in told] == [__file__]
    x, y, sign = torch.randn(4, 3), torch.randn(4, 3), torch.tensor([1.0, -1, 1, -1])
    assert torch.equal(loss(x, y, sign), nn.CosineEmbeddingLoss(0.3)(x, y, sign))


X, Y = torch.randn(3, 4), torch.tensor([0, 1, 3])
BAD: dict[str, tuple[dict[str, Any], Tensor, Tensor]] = {
    "a class too large": ({}, X, Y + 1),
    "a negative class": ({}, X, Y - 1),
    "classes of int32": ({}, X, Y.int()),
    "classes of floats": ({}, X, Y.float()),
    "too few classes": ({}, X, Y[:2]),
    "classes of two dimensions": ({}, X, Y[:, None]),
    "one row, three classes": ({}, X[0], Y),
    "three dimensions": ({}, X[None], Y),
    "no classes": ({}, X[:, :0], Y),
    "weights of other classes": ({"weight": torch.ones(3)}, X, Y),
    "weights of another type": ({"weight": torch.ones(4).double()}, X, Y),
    "weights that ask for gradients": ({"weight": torch.ones(4, requires_grad=True)}, X, Y),
    "no such reduction": ({"reduction": "max"}, X, Y),
}


@pytest.mark.parametrize(("arguments", "scores", "target"), BAD.values(), ids=BAD)
def test_what_torchs_multi_margin_loss_refuses_the_fused_one_does(
    arguments: dict[str, Any], scores: Tensor, target: Tensor
) -> None:
    with pytest.raises((RuntimeError, ValueError)) as torchs:
        nn.MultiMarginLoss(**arguments)(scores, target)
    with pytest.raises(type(torchs.value)):
        fulgurite.nn.MultiMarginLoss(**arguments, use_autogen=True)(scores, target)


@pytest.mark.parametrize("p", [1, 2])
def test_the_fused_multi_margin_loss_is_torchs_at_the_margin_and_of_no_numbers(p: int) -> None:
    inf, nan = torch.inf, torch.nan
    rows = [[1.0, 0.0, 0.0, 2.0], [nan, 1, 2, 3], [1, nan, inf, 3], [inf, 1, 2, 3], [0, -inf, 1, 1]]
    found = []
    for loss in (
        nn.MultiMarginLoss(p=p, reduction="none"),
        fulgurite.nn.MultiMarginLoss(p=p, reduction="none", use_autogen=True),
    ):
        x = torch.tensor(rows, requires_grad=True)
        value = loss(x, torch.zeros(5, dtype=torch.int64))
        value.sum().backward()
        found.append((value.detach(), x.grad))
    torch.testing.assert_close(found[1], found[0], equal_nan=True)


def test_the_fused_multi_margin_loss_is_of_float32_under_autocast() -> None:
    x, weight = torch.randn(3, 4, dtype=torch.bfloat16), torch.rand(4)
    with torch.autocast("cpu"):
        right = nn.MultiMarginLoss(weight=weight)(x, Y)
        got = fulgurite.nn.MultiMarginLoss(weight=weight, use_autogen=True)(x, Y)
    torch.testing.assert_close(got, right)
    assert got.dtype == torch.float32


def test_the_fused_multi_margin_loss_of_no_rows() -> None:
    def loss(reduction: str) -> Tensor:
        fused = fulgurite.nn.MultiMarginLoss(reduction=reduction, use_autogen=True)
        return fused(X[:0], Y[:0])

    assert loss("none").shape == (0,)
    assert loss("sum") == 0
    assert loss("mean").isnan()  # torch leaves these two unset


def test_a_loss_is_made_by_its_class_path() -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--loss", type=nn.Module)
    given = {"class_path": "fulgurite.nn.HuberLoss", "init_args": {"delta": 2, "use_autogen": True}}
    loss = parser.instantiate(parser.parse_object({"loss": given})).loss
    assert type(loss) is fulgurite.nn.HuberLoss
    assert (loss.delta, loss.use_autogen) == (2.0, True)


def test_a_parameter_file_knows_what_a_loss_takes() -> None:
    def problems(**given: Any) -> list[str]:
        report = Report(Classes())
        path = {"class_path": "fulgurite.nn.HuberLoss", "init_args": given}
        check_value(nn.Module, path, (), report)
        return [problem.text for problem in report.problems]

    assert problems(delta=2.0, use_autogen=True) == []
    [text] = problems(use_autogn=True)
    assert "Did you mean 'use_autogen'?" in text


class Fitted(Classifier):
    """A classifier whose losses are of ``home``, in training and in validation."""

    def __init__(self, home: Any, **given: Any) -> None:
        super().__init__(mlp(0.1))
        self.loss = home.CrossEntropyLoss(label_smoothing=0.1, **given)
        self.margin = home.MultiMarginLoss(**given)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.net(batch[0])
        margin = self.margin(logits, batch[1])
        self.log("margin", margin)
        return self.loss(logits, batch[1]) + margin


@pytest.mark.long
@pytest.mark.numbers
@pytest.mark.compiler
@pytest.mark.parametrize(
    "options",
    [{"accumulate_grad_batches": 2}, {"precision": "bf16-mixed"}],
    ids=["accumulated", "bf16-mixed"],
)
def test_a_fit_with_fused_losses_is_stocks(options: dict[str, Any]) -> None:
    data = functools.partial(loader, 64)
    with loads() as found:
        ours = fit(
            lambda: Fitted(fulgurite.nn, use_autogen=True),
            lambda: (data(),),
            static=True,
            policy="default",
            **options,
        )
    stock = fit(lambda: Fitted(nn), lambda: (data(),), static=False, **options)
    assert_same_run(ours, stock, losses=1e-5 if "precision" not in options else 2e-3, weights=2e-4)
    for loaded in found:
        names = ("CrossEntropyLoss", "MultiMarginLoss")
        wanted = {f"{name} {way}": 1 for name in names for way in ("forward", "backward")}
        assert fused_kernels(loaded) == wanted
