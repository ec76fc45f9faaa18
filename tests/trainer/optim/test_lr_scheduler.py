"""Every schedule of learning rates equals torch's or its formula, on the host and as tensors."""

from __future__ import annotations

import contextlib
import copy
import inspect
import typing
from typing import Any

import numpy
import pytest
import torch
from schedules import CASES, OWN, STEPS, made, numbers, sgd, shrink, squares
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.optim import lr_scheduler as theirs

from fulgurite.backends.program_scheduler import ProgramScheduler
from fulgurite.backends.step_context import running
from fulgurite.optim import lr_scheduler as ours
from fulgurite.optim.scheduler import LinearScheduler, Scheduler

ARGUMENTS = {
    "ConstantLR": "learning_rate total_iters",
    "PolynomialLR": "initial_learning_rate end_learning_rate total_iters power cycle",
    "LinearLR": "initial_learning_rate end_learning_rate total_iters cycle",
    "ExponentialLR": "initial_learning_rate total_iters decay_rate staircase",
    "InverseExponentialTimeDecayLR": (
        "initial_learning_rate step_exponent total_iters decay_rate staircase"
    ),
    "InverseSquareRootDecayLR": "initial_learning_rate scale warmup_steps",
    "CosineDecayLR": "initial_learning_rate end_learning_rate total_iters",
    "SequentialLR": "schedulers milestones last_epoch",
    "PiecewiseConstantLR": "learning_rates milestones",
    "MultiStepLR": "initial_learning_rate gamma milestones",
    "StepLR": "initial_learning_rate step_size gamma",
    "CosineAnnealingLR": "initial_learning_rate T_max eta_min",
    "LambdaLR": "initial_learning_rate lr_lambda",
    "CosineAnnealingWarmRestarts": "initial_learning_rate T_0 T_mult eta_min",
    "MultiplicativeLR": "initial_learning_rate coefficient",
    "ChainedLR": "schedulers",
    "ChainedScheduler": "schedulers",
    "CyclicLR": "base_lr max_lr step_size_up step_size_down mode gamma scale_mode",
    "OneCycleLR": (
        "initial_learning_rate max_lr total_steps pct_start final_div_factor three_phase"
        " anneal_strategy"
    ),
    "ScalePerParamLR": "scheduler",
}
"""What parameter files may give, in this order; then param_group_tags."""


class Placed(list[Tensor]):
    """Stands for a trace: schedulers compute with tensors, and these are kept."""

    in_double = contextlib.nullcontext

    def count(self, count: Tensor) -> Tensor:
        return count.to(torch.float64)

    def stepped(self, scheduler: ProgramScheduler) -> None:
        pass

    def place(self, scheduler: ProgramScheduler, group: int, number: Tensor) -> None:
        self.append(number)


def as_a_program(scheduler: Scheduler) -> list[float]:
    """The numbers of each step, from tensors as a traced step computes them."""
    placed = Placed()
    with running(schedules=placed):
        scheduler.show()
        for _ in range(STEPS - 1):
            scheduler.step()
    assert {(number.dtype, number.shape) for number in placed} == {(torch.float64, ())}
    return torch.stack(placed).tolist()


@pytest.mark.parametrize("name", CASES)
def test_every_step_equals_torch_or_the_formula(name: str) -> None:
    case = CASES[name]
    host = numbers(made("lr", sgd(), case.spec))
    numpy.testing.assert_allclose(host, case.expected(), rtol=1e-6, atol=1e-16)
    program = as_a_program(made("lr", sgd(), case.spec))
    numpy.testing.assert_allclose(program, host, rtol=1e-12, atol=1e-16)


@pytest.mark.parametrize("name", CASES)
def test_a_graph_traced_at_one_step_has_the_numbers_of_all(name: str) -> None:
    scheduler = made("lr", sgd(), CASES[name].spec)

    def computed(count: Tensor) -> Tensor:
        scheduler.advance(count)
        return torch.as_tensor(scheduler.value(count, 0), dtype=torch.float64)

    counts = [torch.tensor(float(n), dtype=torch.float64) for n in (0, 1, 50, 99, 100, 101, 999)]
    with torch.no_grad():
        graph = make_fx(computed)(counts[2])  # raises where a number is read
        found = [float(graph(count)) for count in counts] if len(scheduler.resident) == 1 else []
    metas = [node.meta["tensor_meta"] for node in graph.graph.nodes if "tensor_meta" in node.meta]
    assert {meta.dtype for meta in metas} <= {torch.float64, torch.bool}
    for count, number in zip(counts, found, strict=False):
        assert number == pytest.approx(scheduler.value(int(count), 0), rel=1e-12, abs=1e-16)


def test_every_class_is_among_the_cases() -> None:
    tested = {type(made("lr", sgd(), case.spec)).__name__ for case in CASES.values()}
    assert tested | {"ChainedLR"} == set(ARGUMENTS)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_have_the_names_order_and_types_of_parameter_files(name: str) -> None:
    kind = getattr(ours, name)
    taken = [word for word in inspect.signature(kind).parameters if word != "optimizer"]
    expected = [*ARGUMENTS[name].split(), "param_group_tags"]
    assert [
        word for word in taken if word not in ("lr_lambda", "scale_fn") or word in expected
    ] == (expected)
    assert typing.get_type_hints(kind.__init__).keys() >= set(taken)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_are_those_of_the_generic_class_under_other_names(name: str) -> None:
    def arguments(target: Any) -> list[tuple[str, Any, Any]]:
        words = inspect.signature(target).parameters.values()
        return [(ours._GENERIC_NAMES.get(w.name, w.name), w.kind, w.default) for w in words]

    kind = getattr(ours, name)
    [generic, *_] = [one for one in kind.__mro__ if ".optim.scheduler." in one.__module__]
    assert arguments(kind) == arguments(generic)


def test_far_counts_equal_those_of_pythons_integers() -> None:
    scheduler = made("lr", sgd(), ("CosineAnnealingWarmRestarts", {"T_0": 3, "T_mult": 2}))
    for restarts in range(1, 28):
        count = 3 * (2**restarts - 1)
        for at, expected in ((count - 1, 0.0), (count, OWN), (count + 1, OWN)):
            tensor = scheduler.value(torch.tensor(float(at), dtype=torch.float64), 0)
            assert float(tensor) == pytest.approx(scheduler.value(at, 0), rel=1e-9, abs=1e-16)
            if restarts > 5:
                assert float(tensor) == pytest.approx(expected, abs=OWN / 100)


def test_an_initial_number_left_out_is_the_groups_own_whatever_was_made_before() -> None:
    optimizer = sgd({"lr": 0.5}, {"lr": 0.2})
    warm_up = ours.LinearLR(optimizer, 0.0, end_learning_rate=1.0, total_iters=10)
    assert [group["lr"] for group in optimizer.param_groups] == [0.0, 0.0]
    cosine = ours.CosineAnnealingLR(optimizer, T_max=100)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.2]
    scheduler = ours.SequentialLR(optimizer, [warm_up, cosine])
    assert scheduler.get_last_lr() == [0.0, 0.0]
    assert [scheduler.value(10, group) for group in (0, 1)] == [0.5, 0.2]


def test_only_groups_with_a_tag_are_set() -> None:
    groups = [{"tags": {"head", "new"}}, {"tags": ["body"]}, {}]
    shrinking: dict[str, Any] = {"total_iters": 1, "decay_rate": 0.5}
    for tags, expected in {
        "head": [0.05, 0.1, 0.1],
        ("head", "body"): [0.05, 0.05, 0.1],
        (None,): [0.1, 0.1, 0.05],
        None: [0.05, 0.05, 0.05],
    }.items():
        optimizer = sgd(*groups)
        ours.ExponentialLR(optimizer, param_group_tags=tags, **shrinking).step()
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx(expected)


def test_schedulers_of_different_tags_share_an_optimizer() -> None:
    optimizer = sgd({"tags": "head"}, {"tags": "body"})
    head = ours.StepLR(optimizer, 1.0, step_size=1, gamma=0.5, param_group_tags="head")
    body = ours.ConstantLR(optimizer, 0.3, param_group_tags="body")
    for scheduler in (head, body):
        scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.3]


@pytest.mark.parametrize("kind", ["LambdaLR", "MultiplicativeLR"])
def test_a_list_of_functions_has_one_for_each_group(kind: str) -> None:
    optimizer, stock = sgd({"lr": 0.5}, {"lr": 0.2}), sgd({"lr": 0.5}, {"lr": 0.2})
    one = getattr(ours, kind)(optimizer, lr_lambda=[squares, shrink])
    other = getattr(theirs, kind)(stock, lr_lambda=[squares, shrink])
    stock.step()
    for _ in range(5):
        one.step()
        other.step()
        assert one.get_last_lr() == pytest.approx(other.get_last_lr(), rel=1e-12)


def test_a_function_gets_a_float64_tensor_on_the_host_too() -> None:
    seen: list[tuple[torch.dtype, tuple[int, ...]]] = []

    def half(count: Tensor) -> float:
        seen.append((count.dtype, tuple(count.shape)))
        return 0.5

    ours.LambdaLR(sgd(), lr_lambda=half).step()
    ours.MultiplicativeLR(sgd(), lr_lambda=half).step()
    assert set(seen) == {(torch.float64, ())}


def test_groups_are_scaled_by_their_own_factor() -> None:
    groups = [{"adjust_learning_rate": 0.5}, {"adjust_val": 2.0}, {}]
    optimizer = sgd(*groups, {"adjust_learning_rate": 0.1, "adjust_val": 9.0})
    inner = ours.StepLR(optimizer, 1.0, step_size=1, gamma=0.5)
    scheduler = ours.ScalePerParamLR(optimizer, inner)
    scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 1.0, 0.5, 0.05]


def test_a_learning_rate_that_is_a_tensor_stays_the_same_tensor() -> None:
    optimizer = sgd(lr=torch.tensor(0.1))
    rate = optimizer.param_groups[0]["lr"]
    ours.StepLR(optimizer, step_size=1, gamma=0.5).step()
    assert optimizer.param_groups[0]["lr"] is rate
    assert float(rate) == pytest.approx(0.05)


def test_past_its_end_one_cycle_stays_where_it_arrived() -> None:
    scheduler = ours.OneCycleLR(sgd(), 0.1, 1.0, total_steps=10)
    assert scheduler.value(9, 0) == scheduler.value(10, 0) == scheduler.value(10**6, 0)
    assert scheduler.value(9, 0) == pytest.approx(1e-5)


def test_what_grows_without_bound_is_infinite_not_an_error() -> None:
    scheduler = ours.ExponentialLR(sgd(), total_iters=1, decay_rate=10.0)
    count = torch.tensor(1e4, dtype=torch.float64)
    assert scheduler.value(10_000, 0) == float("inf") == float(scheduler.value(count, 0))


@pytest.mark.parametrize("name", ["warm-up, then cosine", "a row in a row", "chain of products"])
def test_a_state_continues_where_it_was_saved(name: str) -> None:
    spec = CASES[name].spec
    first = made("lr", sgd(), spec)
    for _ in range(350):
        first.step()
    state = copy.deepcopy(first.state_dict())
    second = made("lr", sgd(), spec)
    second.load_state_dict(state)
    assert second.get_last_lr() == pytest.approx(first.get_last_lr(), rel=1e-12)
    assert second.state_dict() == state
    for scheduler in (first, second):
        scheduler.step()
    assert second.get_last_lr() == pytest.approx(first.get_last_lr(), rel=1e-12)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.torch])
def test_a_state_of_torchs_scheduler_is_understood(name: str) -> None:
    case, optimizer = CASES[name], sgd()
    assert case.torch is not None
    stock = case.torch(optimizer)
    optimizer.step()
    for _ in range(130):
        stock.step()
    scheduler = made("lr", sgd(), case.spec)
    scheduler.load_state_dict(stock.state_dict())
    assert scheduler.last_epoch == 130
    rates = [group["lr"] for group in optimizer.param_groups]
    assert scheduler.get_last_lr() == pytest.approx(rates, rel=1e-6)


def test_a_state_brings_the_numbers_it_began_from_as_torchs_does() -> None:
    """The code has another learning rate by now; torch's state goes on from the saved one."""
    for kind, other in ((ours, theirs), (theirs, ours), (ours, ours)):
        saved = kind.LambdaLR(sgd(lr=0.1), lr_lambda=lambda t: 0.9**t)
        for _ in range(3):
            saved.optimizer.step()
            saved.step()
        new = other.LambdaLR(sgd(lr=0.2), lr_lambda=lambda t: 0.9**t)
        new.load_state_dict({**saved.state_dict(), "lr_lambdas": [None]})
        new.optimizer.step()
        new.step()
        assert new.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.9**4)


def test_a_state_reaches_the_parts_of_a_chain() -> None:
    def chain(lr: float) -> Scheduler:
        optimizer = sgd(lr=lr)
        parts = [ours.StepLR(optimizer, step_size=5), ours.LambdaLR(optimizer, lr_lambda=shrink)]
        return ours.ChainedScheduler(parts)

    saved, new = chain(0.1), chain(0.2)
    for _ in range(7):
        saved.step()
    new.load_state_dict(saved.state_dict())
    assert new.get_last_lr() == saved.get_last_lr()


def test_torchs_sequence_of_ours_is_refused_with_the_remedy() -> None:
    optimizer = sgd(lr=0.1)
    parts = [ours.StepLR(optimizer, step_size=5), ours.StepLR(optimizer, step_size=9)]
    with pytest.raises(AttributeError, match=r"use those of fulgurite\.optim\.lr_scheduler"):
        theirs.SequentialLR(optimizer, parts, milestones=[10])


class Own(Scheduler):
    """A formula of one's own, which an attribute changes and Python decides."""

    param_group_key = "lr"
    factor = 1.0

    def value(self, count: Any, group: int) -> Any:
        return self.factor * (0.1 if count < 2 else 0.2)


def test_a_formula_of_ones_own_is_asked_on_every_step() -> None:
    scheduler = Own(sgd(lr=1.0))
    found = []
    for step in range(4):
        scheduler.factor = 1.0 + step
        scheduler.step()
        found += scheduler.get_last_lr()
    assert found == pytest.approx([0.1, 0.4, 0.6, 0.8])


def test_a_sequence_can_begin_late() -> None:
    optimizer = sgd()
    schedulers = [
        made("lr", optimizer, spec) for spec in CASES["a row in a row"].spec[1]["schedulers"]
    ]
    late = ours.SequentialLR(optimizer, schedulers, last_epoch=499)
    formula = CASES["a row in a row"].formula
    assert formula is not None
    assert late.last_epoch == 500
    assert late.get_last_lr() == pytest.approx([formula(500)])


def test_products_of_inner_schedulers_are_state_of_the_outer_one() -> None:
    scheduler = made("lr", sgd(), CASES["a row in a row"].spec)
    assert list(scheduler.resident) == ["count", "1.1.product0"]
    assert isinstance(scheduler, ours.SequentialLR)
    inner = scheduler.schedulers[1]
    assert scheduler.resident["1.1.product0"] is inner.resident["1.product0"]


def given(optimizer: Any = None, **_: Any) -> list[Any]:
    """Two schedulers to combine."""
    optimizer = optimizer or sgd()
    return [
        ours.ConstantLR(optimizer, 0.1, total_iters=5),
        ours.StepLR(optimizer, step_size=3),
    ]


WRONG: dict[str, tuple[Any, str]] = {
    "no steps": (
        lambda o: ours.LinearLR(o, end_learning_rate=0.0, total_iters=0),
        r"LinearLR needs a positive whole number of steps as total_iters; got total_iters=0",
    ),
    "half a step": (lambda o: ours.StepLR(o, step_size=1.5), "step_size=1.5"),
    "a text": (lambda o: ours.CosineAnnealingLR(o, T_max="10"), "T_max='10'"),
    "power": (
        lambda o: ours.PolynomialLR(o, end_learning_rate=0.0, total_iters=5, power=0),
        "a positive power; got power=0",
    ),
    "decay rate": (lambda o: ours.ExponentialLR(o, total_iters=5, decay_rate=-1.0), "decay_rate"),
    "inverse decay rate": (
        lambda o: ours.InverseExponentialTimeDecayLR(
            o, step_exponent=1, total_iters=5, decay_rate=-1.0
        ),
        "decay_rate=-1.0",
    ),
    "exponent": (
        lambda o: ours.InverseExponentialTimeDecayLR(
            o, step_exponent=0, total_iters=5, decay_rate=1.0
        ),
        "step_exponent=0",
    ),
    "warm-up": (lambda o: ours.InverseSquareRootDecayLR(o, warmup_steps=0), "warmup_steps=0"),
    "milestones fall": (lambda o: ours.MultiStepLR(o, milestones=[5, 3]), r"increase.*\[5, 3\]"),
    "milestones repeat": (lambda o: ours.MultiStepLR(o, milestones=[3, 3]), "increase"),
    "milestones are no counts": (lambda o: ours.MultiStepLR(o, milestones=[0.5]), r"\[0.5\]"),
    "numbers": (
        lambda o: ours.PiecewiseConstantLR(o, [0.1, 0.2], [3, 5]),
        "one number more than milestones",
    ),
    "T_0": (lambda o: ours.CosineAnnealingWarmRestarts(o, T_0=-1), "T_0=-1"),
    "T_mult": (lambda o: ours.CosineAnnealingWarmRestarts(o, T_0=3, T_mult=1.5), "T_mult=1.5"),
    "mode": (lambda o: ours.CyclicLR(o, 0.1, 1.0, mode="saw"), "triangular2.*mode='saw'"),
    "scale mode": (lambda o: ours.CyclicLR(o, 0.1, 1.0, scale_mode="epoch"), "'epoch'"),
    "step_size_down": (lambda o: ours.CyclicLR(o, 0.1, 1.0, 5, 0), "step_size_down=0"),
    "pct_start": (lambda o: ours.OneCycleLR(o, 0.1, 1.0, pct_start=1.5), "between 0 and 1.*1.5"),
    "strategy": (lambda o: ours.OneCycleLR(o, 0.1, 1.0, anneal_strategy="sin"), "'sin'"),
    "no third phase": (
        lambda o: ours.OneCycleLR(o, 0.1, 1.0, pct_start=0.6, three_phase=True),
        "steps in each of its phases",
    ),
    "no rise": (lambda o: ours.OneCycleLR(o, 0.1, 1.0, total_steps=3), "steps in each"),
    "functions": (lambda o: ours.LambdaLR(o, lr_lambda=[squares] * 2), "1 param groups"),
    "no function": (lambda o: ours.LambdaLR(o, lr_lambda=0.5), "a function"),
    "neither": (lambda o: ours.MultiplicativeLR(o), "either a coefficient or a function"),
    "both": (lambda o: ours.MultiplicativeLR(o, coefficient=1.0, lr_lambda=squares), "either"),
    "no number": (lambda o: ours.LambdaLR(o, lr_lambda=lambda t: None), "got None from .*step 0"),
    "several numbers": (
        lambda o: ours.LambdaLR(o, lr_lambda=lambda t: t + torch.ones(2)),
        "a tensor without dimensions; got tensor",
    ),
    "infinite at the first step": (
        lambda o: ours.LambdaLR(o, lr_lambda=lambda t: t**-0.5),
        r"param_groups\[0\]\['lr'\] = inf for step 0.*\(t \+ 1\) \*\* -0.5",
    ),
    "torch's order": (lambda o: ours.StepLR(o, [30], step_size=1), "by its name"),
    "no schedulers": (lambda o: ours.SequentialLR(o, []), "at least one"),
    "nothing to chain": (lambda o: ours.ChainedScheduler([]), "at least one"),
    "milestones of a sequence": (
        lambda o: ours.SequentialLR(o, given(o), [3, 2]),
        "SequentialLR needs milestones that are counts of steps and increase",
    ),
    "too many milestones": (
        lambda o: ours.SequentialLR(o, given(o), [2, 3]),
        r"one milestone fewer than schedulers; got schedulers=2, milestones=\[2, 3\]",
    ),
    "no end": (
        lambda o: ours.SequentialLR(o, given(o)[::-1]),
        r"schedulers\[0\] \(StepLR\) does not say when it ends. Give milestones",
    ),
    "another optimizer": (
        lambda o: ours.SequentialLR(o, [*given(o), *given(sgd())], [1, 2, 3]),
        r"schedulers\[2\] \(ConstantLR\) is another",
    ),
    "another key": (
        lambda o: ours.ChainedScheduler(
            [*given(o), made("weight_decay", o, ("Constant", {"val": 1}))]
        ),
        r"sets 'lr', but schedulers\[2\] \(ConstantWD\) sets 'weight_decay'",
    ),
    "torch's": (
        lambda o: ours.SequentialLR(o, [theirs.StepLR(o, 3)]),
        r"schedulers\[0\] of torch.optim.lr_scheduler.StepLR.*from fulgurite.optim.lr_scheduler"
        r" import StepLR; .* torch.optim.lr_scheduler.SequentialLR",
    ),
    "another's groups": (
        lambda o: ours.SequentialLR(
            tagged := sgd({"tags": "a"}, {}), given(tagged), param_group_tags="a"
        ),
        "give all the same param_group_tags",
    ),
    "another's groups in a chain": (
        lambda o: ours.ChainedScheduler(
            [
                ours.StepLR(tagged := sgd({"tags": "a"}, {}), step_size=3, param_group_tags="a"),
                ours.StepLR(tagged, step_size=5, param_group_tags="a"),
            ]
        ),
        r"same param_group_tags; got groups=\(0, 1\), schedulers\[0\].groups=\(0,\)",
    ),
    "zero in a chain": (
        lambda o: ours.ChainedScheduler(
            [*given(o), ours.LinearLR(o, 0.0, end_learning_rate=1.0, total_iters=3)]
        ),
        r"schedulers\[2\] \(LinearLR\) begins at=\[0.0\]",
    ),
    "the same twice": (
        lambda o: ours.ChainedScheduler([ours.StepLR(o, step_size=3)] * 2),
        r"schedulers\[1\] \(StepLR\), which is already part of ChainedScheduler",
    ),
    "no key": (
        lambda o: LinearScheduler(o, end_val=0.0, total_iters=3),
        'param_group_key = "momentum"',
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_errors_that_say_what_was_given(name: str) -> None:
    make, match = WRONG[name]
    with pytest.raises((ValueError, TypeError), match=match):
        make(sgd())


def test_any_other_number_can_be_scheduled() -> None:
    class LinearMomentum(LinearScheduler):
        param_group_key = "momentum"

    optimizer = sgd(momentum=0.5)
    LinearMomentum(optimizer, end_val=0.9, total_iters=4).step()
    assert optimizer.param_groups[0]["momentum"] == pytest.approx(0.6)
