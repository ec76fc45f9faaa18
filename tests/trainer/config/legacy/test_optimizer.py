"""Old optimizers and schedules have the numbers that they had."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from old_files import SGD, init_of, old_file

import fulgurite.optim
from fulgurite.config.legacy.converting import convert
from fulgurite.config.legacy.old_optimizers import NAMES, NO_DECAY, OLD_DEFAULTS
from fulgurite.optim import lr_scheduler


def optimizer_of(optimizer: dict[str, Any]) -> dict[str, Any]:
    """The new form of an old optimizer."""
    found: dict[str, Any] = init_of(convert(old_file(optimizer=optimizer)))["optimizer"]
    return found


def test_a_number_is_the_optimizers_learning_rate() -> None:
    assert optimizer_of({**SGD, "learning_rate": "1e-2"}) == {"SGD": {"lr": 0.01}}


@pytest.mark.parametrize("name", OLD_DEFAULTS)
def test_a_default_that_was_another_is_written_out(name: str) -> None:
    [(_, arguments)] = optimizer_of({"optimizer_type": name, "learning_rate": 0.1}).items()
    assert arguments == {"lr": 0.1, **OLD_DEFAULTS[name]}
    kinds = {k.lower(): v for home in (torch.optim, fulgurite.optim) for k, v in vars(home).items()}
    defaults = inspect.signature(kinds[name]).parameters
    for key, value in OLD_DEFAULTS[name].items():
        assert defaults[key].default != value
        assert optimizer_of({"optimizer_type": name, key: 0.5})[name][key] == 0.5


def test_arguments_of_the_first_generation_have_their_names_of_today() -> None:
    adam = {"optimizer_type": "Lion", "beta1": 0.8, "weight_decay_rate": "1e-3"}
    lion = {"betas": [0.8, 0.99], "weight_decay": 0.001, "params": [NO_DECAY]}
    assert optimizer_of(adam) == {"Lion": lion}
    rprop = {"optimizer_type": "Rprop", "eta2": 1.1, "step_size_min": 1e-5}
    assert optimizer_of(rprop) == {"Rprop": {"etas": [0.5, 1.1], "step_sizes": [1e-5, 50.0]}}


def test_adafactor_is_torchs() -> None:
    old = {
        "optimizer_type": "AdaFactor",
        "learning_rate": 0.1,
        "clip_threshold": 2.0,
        "decay_rate": -0.5,
        "scale_parameter": True,
        "beta1": None,
    }
    converted = convert(old_file(optimizer=old))
    arguments = init_of(converted)["optimizer"]["AdaFactor"]
    assert arguments == {"lr": 0.1, "d": 2.0, "beta2_decay": -0.5, "eps": [1e-15, 0.001]}
    fulgurite.optim.Adafactor([torch.nn.Parameter(torch.ones(2))], **arguments)
    assert "1 / sqrt(step)" in converted.notes[0].text


def rates(schedulers: list[dict[str, Any]], steps: int) -> list[float]:
    """The learning rates that the schedulers of a file give."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(()))], lr=0.1)

    def made(one: dict[str, Any]) -> Any:
        [(name, arguments)] = one.items()
        arguments = dict(arguments)
        if "scheduler" in arguments:
            return lr_scheduler.ScalePerParamLR(optimizer, made(arguments["scheduler"]))
        if "schedulers" in arguments:
            inner = [made(item) for item in arguments["schedulers"]]
            if name == "ChainedScheduler":
                return lr_scheduler.ChainedScheduler(inner)
            return lr_scheduler.SequentialLR(optimizer, inner)
        return getattr(lr_scheduler, name)(optimizer, **arguments)

    [scheduler] = [made(one) for one in schedulers]
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def line(start: float, end: float, steps: int) -> list[float]:
    """Points of a straight line, without its end."""
    return [start + (end - start) * t / steps for t in range(steps)]


@pytest.mark.parametrize(
    ("learning_rate", "expected"),
    [
        ([{"scheduler": "Constant", "learning_rate": 0.3}], [0.3] * 10),
        (
            {
                "scheduler": "Linear",
                "initial_learning_rate": 1.0,
                "end_learning_rate": 0.0,
                "total_iters": 5,
                "cycle": True,
                "alpha": 0.1,
            },
            [*line(1.0, 0.0, 5), *[0.0] * 5],
        ),
        (
            [
                {
                    "scheduler": "linearLR",
                    "learning_rate": 0,
                    "end_learning_rate": "1e-1",
                    "steps": 5,
                },
                {
                    "scheduler": "Polynomial",
                    "initial_learning_rate": 0.1,
                    "end_learning_rate": 0.0,
                    "decay_steps": 4,
                    "main_scheduler": "sequential",
                },
            ],
            [*line(0.0, 0.1, 5), *line(0.1, 0.0, 4), 0.0],
        ),
        (
            {
                "scheduler": "PiecewiseConstant",
                "initial_learning_rate": 9.0,
                "boundaries": [3],
                "values": [0.5, 0.1],
            },
            [0.5] * 3 + [0.1] * 7,
        ),
        (
            {"scheduler": "Exponential", "initial_learning_rate": 1.0, "gamma": 0.5},
            [0.5**t for t in range(10)],
        ),
        (
            {"scheduler": "Step", "initial_learning_rate": 1.0, "decay_rate": 0.1, "step_size": 5},
            [1.0] * 5 + [0.1] * 5,
        ),
        (
            {"scheduler": "InverseSquareRootDecay", "warmup_steps": 4},
            [0.5] * 5 + [t**-0.5 for t in range(5, 10)],
        ),
        (
            [
                {
                    "scheduler": "Exponential",
                    "initial_learning_rate": 0.2,
                    "decay_rate": 0.9,
                    "main_scheduler": "chained",
                },
                {"scheduler": "Step", "initial_learning_rate": 1.0, "gamma": 0.1, "step_size": 5},
            ],
            [0.2 * 0.9**t * (0.1 if t >= 5 else 1.0) for t in range(10)],
        ),
        (
            {"scheduler": "Cyclic", "initial_learning_rate": 0, "max_lr": 1.0, "step_size_up": 5},
            [*line(0.0, 1.0, 5), *line(1.0, 0.0, 5)],
        ),
    ],
    ids=lambda value: (
        (value if isinstance(value, dict) else value[0]).get("scheduler")
        if isinstance(value, dict) or isinstance(value[0], dict)
        else ""
    ),
)
def test_a_schedule_has_the_numbers_that_it_had(learning_rate: Any, expected: list[float]) -> None:
    init = init_of(convert(old_file(optimizer={**SGD, "learning_rate": learning_rate})))
    assert rates(init["schedulers"], 10) == pytest.approx(expected)
    assert "lr" not in init["optimizer"]["SGD"]


def test_warm_restarts_restart_which_is_noted() -> None:
    old = {"scheduler": "CosineAnnealingWarmRestarts", "initial_learning_rate": 1.0, "t_0": 4}
    converted = convert(old_file(optimizer={**SGD, "learning_rate": [old]}))
    found = rates(init_of(converted)["schedulers"], 8)
    assert found[4:] == pytest.approx(found[:4])
    [note] = converted.notes
    assert note.path == ("optimizer", "learning_rate", 0, "scheduler")


def test_factors_of_param_groups_scale_constants_and_schedules() -> None:
    scaled = {**SGD, "adjust_learning_rate": {"decoder_kernel": 0.5}}
    init = init_of(convert(old_file(optimizer=scaled)))
    constant = {"ConstantLR": {"learning_rate": 0.1}}
    assert init["schedulers"] == [{"ScalePerParamLR": {"scheduler": constant}}]
    assert init["optimizer"]["SGD"]["adjust_learning_rate"] == {"decoder_kernel": 0.5}
    assert rates(init["schedulers"], 2) == [0.1, 0.1]


def test_every_schedule_is_a_class_here() -> None:
    combined = {"SequentialLR", "ChainedLR", "ChainedScheduler", "ScalePerParamLR"}
    ours = {
        name
        for name, kind in vars(lr_scheduler).items()
        if inspect.isclass(kind)
        and kind.__module__ == lr_scheduler.__name__
        and not name.startswith("_")
    }
    assert set(NAMES.values()) == ours - combined


@pytest.mark.parametrize(
    ("optimizer", "path", "text"),
    [
        ({"momentum": 0.9}, ("optimizer_type",), "expected the name of an optimizer"),
        ({**SGD, "learning_rate": "fast"}, ("learning_rate",), "expected a number, a schedule"),
        ({**SGD, "learning_rate": [3]}, ("learning_rate", 0), "expected a schedule"),
        (
            {**SGD, "learning_rate": {"scheduler": "Cosin"}},
            ("learning_rate", "scheduler"),
            "no schedule is named 'Cosin'.",
        ),
        (
            {**SGD, "weight_decay": 0.1, "weight_decay_rate": 0.1},
            ("weight_decay_rate",),
            "is weight_decay, which is given too",
        ),
        (
            {"optimizer_type": "AdaFactor", "learning_rate": 0.1, "relative_step": True},
            ("relative_step",),
            "has no such choice",
        ),
        (
            {
                **SGD,
                "disable_lr_steps_reset": True,
                "learning_rate": [
                    {"scheduler": "Constant", "learning_rate": 0.1, "steps": 5},
                    {"scheduler": "Constant", "learning_rate": 0.2},
                ],
            },
            ("disable_lr_steps_reset",),
            "count from the first step of all",
        ),
        (
            {
                **SGD,
                "learning_rate": [
                    {"scheduler": "Constant", "learning_rate": 0.1, "main_scheduler": "chained"},
                    {"scheduler": "Step", "learning_rate": 0.2, "main_scheduler": "sequential"},
                ],
            },
            ("learning_rate", 1, "main_scheduler"),
            "differs from the other schedules'",
        ),
    ],
    ids=lambda value: ".".join(map(str, value)) if isinstance(value, tuple) else "",
)
def test_a_mistake_in_optimizer_is_named(
    optimizer: dict[str, Any], path: tuple[str | int, ...], text: str
) -> None:
    [problem] = convert(old_file(optimizer=optimizer)).problems
    assert problem.path == ("optimizer", *path)
    assert text in problem.text
