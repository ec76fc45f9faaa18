"""Every schedule of weight decay is that of the learning rate, for the other number."""

from __future__ import annotations

import inspect
import typing

import pytest
from schedules import CASES, OWN, made, numbers, sgd

from fulgurite.optim import lr_scheduler, scheduler
from fulgurite.optim import weight_decay_scheduler as ours
from fulgurite.optim.scheduler import Scheduler

KINDS = {
    name: kind for name, kind in vars(ours).items() if isinstance(kind, type) and name[-2:] == "WD"
}


@pytest.mark.parametrize("name", CASES)
def test_every_step_equals_the_learning_rates(name: str) -> None:
    spec, optimizer = CASES[name].spec, sgd()
    found = numbers(made("weight_decay", optimizer, spec))
    assert found == numbers(made("lr", sgd(), spec))
    assert optimizer.param_groups[0]["lr"] == OWN


def test_each_generic_class_has_both_twins() -> None:
    generic = {
        kind
        for kind in vars(scheduler).values()
        if isinstance(kind, type) and kind is not Scheduler
    }
    assert {kind.__base__ for kind in KINDS.values()} == generic
    assert len(KINDS) == len(generic) == 19
    rates = {
        base
        for kind in vars(lr_scheduler).values()
        if isinstance(kind, type) and issubclass(kind, Scheduler) and kind.param_group_key == "lr"
        for base in kind.__bases__
        if issubclass(base, Scheduler)
    }
    assert rates - {lr_scheduler.ChainedLR} == generic


@pytest.mark.parametrize("name", KINDS)
def test_arguments_are_those_of_parameter_files(name: str) -> None:
    taken = list(inspect.signature(KINDS[name]).parameters)
    assert "param_group_tags" in taken
    assert not {word for word in taken if "learning_rate" in word or word.endswith("_lr")}
    assert typing.get_type_hints(KINDS[name].__init__).keys() >= set(taken)


def test_biases_keep_their_weight_decay() -> None:
    optimizer = sgd({}, {"weight_decay": 0.0, "tags": "bias"})
    cosine = ours.CosineDecayWD(optimizer, end_val=0.01, total_iters=100, param_group_tags=[None])
    for _ in range(100):
        cosine.step()
    decays = [group["weight_decay"] for group in optimizer.param_groups]
    assert decays == [pytest.approx(0.01), 0.0]


def test_groups_are_scaled_by_adjust_val_alone() -> None:
    optimizer = sgd({"adjust_val": 2.0}, {"adjust_learning_rate": 9.0})
    ours.ScalePerParamWD(optimizer, ours.ConstantWD(optimizer, 0.3))
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.6, 0.3]


def test_both_numbers_of_an_optimizer_are_scheduled_side_by_side() -> None:
    optimizer = sgd()
    rate = lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    decay = ours.StepWD(optimizer, step_size=1, gamma=0.25)
    for step in (rate, decay):
        step.step()
    [group] = optimizer.param_groups
    assert (group["lr"], group["weight_decay"]) == (OWN * 0.5, OWN * 0.25)
    assert (group["initial_lr"], group["initial_weight_decay"]) == (OWN, OWN)
