"""Old parameter files become new ones that train the same."""

from __future__ import annotations

import copy
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

import fulgurite.optim
from fulgurite.config.legacy import Converted, convert, is_legacy
from fulgurite.config.legacy_optimizer import OLD_DEFAULTS
from fulgurite.config.legacy_schedules import NAMES
from fulgurite.config.legacy_table import ROWS, WITHOUT_MEANING, Row
from fulgurite.config.reading import parse, read
from fulgurite.config.written import written
from fulgurite.optim import lr_scheduler

SGD = {"optimizer_type": "SGD", "learning_rate": 0.1}


def old_file(**sections: Any) -> dict[str, Any]:
    """An old file with some sections."""
    return {"model": {"name": "Net"}, **sections}


def init_of(converted: Converted) -> dict[str, Any]:
    """``trainer.init`` of a file without mistakes."""
    assert not converted.problems
    init: dict[str, Any] = converted.params["trainer"]["init"]
    return init


def test_a_whole_file_becomes_the_new_form() -> None:
    converted = convert(yaml.safe_load(OLD))
    assert converted.problems == ()
    assert converted.params == yaml.safe_load(NEW)


OLD = """
train_input: {data_processor: my.data.Train, batch_size: 8, micro_batch_size: 4}
eval_input: {data_processor: my.data.Val, batch_size: 8}
model: {name: my.model.Net, hidden: 32, mixed_precision: True, fp16_type: cbfloat16}
optimizer:
  optimizer_type: AdamW
  betas: [0.9, 0.95]
  correct_bias: True
  learning_rate:
    - {scheduler: Linear, initial_learning_rate: 0.0, end_learning_rate: 0.01, total_iters: 10}
    - {scheduler: CosineDecay, initial_learning_rate: 0.01, end_learning_rate: 0.0, steps: 90}
  loss_scaling_factor: dynamic
  max_gradient_norm: 1.0
  log_summaries: True
runconfig:
  target_device: CSX
  num_csx: 1
  num_wgt_servers: 24
  max_steps: 100
  eval_frequency: 50
  eval_steps: 5
  checkpoint_steps: 50
  checkpoint_path: start.ckpt
  max_checkpoints: 2
  log_steps: 10
  seed: 1
  retrace_every_iteration: True
"""

NEW = """
trainer:
  init:
    backend: {backend_type: CSX, retrace_every_iteration: true}
    seed: 1
    model: {name: my.model.Net, hidden: 32}
    optimizer:
      AdamW: {betas: [0.9, 0.95], correct_bias: true, eps: 1.0e-06, weight_decay: 0.0}
    schedulers:
      - SequentialLR:
          schedulers:
            - LinearLR: {initial_learning_rate: 0.0, end_learning_rate: 0.01, total_iters: 10}
            - CosineDecayLR: {initial_learning_rate: 0.01, end_learning_rate: 0.0, total_iters: 90}
    precision:
      enabled: true
      fp16_type: cbfloat16
      loss_scaling_factor: dynamic
      max_gradient_norm: 1.0
      log_loss_scale: true
    loop: {max_steps: 100, eval_frequency: 50, eval_steps: 5}
    checkpoint: {steps: 50}
    logging: {log_steps: 10}
    callbacks:
      - KeepNCheckpoints: {n: 2}
      - ComputeNorm: {}
      - ScopedTrainFlags: {csx.performance.micro_batch_size: 4}
  fit:
    train_dataloader: {data_processor: my.data.Train, batch_size: 8}
    val_dataloader: {data_processor: my.data.Val, batch_size: 8}
    ckpt_path: start.ckpt
  validate:
    val_dataloader: {data_processor: my.data.Val, batch_size: 8}
    ckpt_path: start.ckpt
  validate_all:
    val_dataloaders: {data_processor: my.data.Val, batch_size: 8}
    ckpt_paths: start.ckpt
"""


VALUES: dict[str, Any] = {
    "runconfig.target_device": "CSX",
    "runconfig.compile_only": True,
    "runconfig.validate_only": True,
    "runconfig.retrace_every_iteration": True,
    "runconfig.num_csx": 2,
    "runconfig.log_input_summaries": True,
    "runconfig.check_loss_values": True,
    "optimizer.log_summaries": True,
    "optimizer.loss_scaling_factor": "dynamic",
    "model.mixed_precision": True,
    "model.use_bfloat16": True,
}
"""A value for each key whose meaning depends on it; any other will do for the others."""

ON_CPU = ("optimizer.grad_accum_steps",)

BECOMES: dict[tuple[str, str], Any] = {
    ("runconfig.log_input_summaries", "LogInputSummaries"): {},
    ("runconfig.check_loss_values", "CheckLoss"): {},
    ("optimizer.log_summaries", "ComputeNorm"): {},
    ("model.use_bfloat16", "fp16_type"): "bfloat16",
}
"""What the last part of the new key gets, where it is not the value itself."""


def file_with(row: Row, value: Any) -> dict[str, Any]:
    """A file in which one key, and what it needs, is given."""
    params = old_file(
        optimizer=dict(SGD),
        train_input={"data_processor": "my.data.Train"},
        eval_input={"data_processor": "my.data.Val"},
        runconfig={"target_device": "CPU" if row.old in ON_CPU else "CSX"},
    )
    if "_loss_scale" in row.old:
        params["optimizer"]["loss_scaling_factor"] = "dynamic"
    *above, key = row.old_path
    found = params
    for part in above:
        found = found.setdefault(part, {})
    found[key] = value
    return params


def at(params: Any, path: tuple[str | int, ...]) -> Any:
    """The value at a path; callbacks and loggers are found by name."""
    for part in path:
        if isinstance(params, list) and not isinstance(part, int):
            params = next(item for item in params if part in item)
        params = params[part]
    return params


KEPT = [row for row in ROWS if row.harmless is None and not row.without_effect]
DROPPED = [row for row in ROWS if row.without_effect and row.harmless is None]
REFUSED = [row for row in ROWS if row.harmless is not None]


@pytest.mark.parametrize("row", KEPT, ids=lambda row: row.old)
def test_the_value_of_an_old_key_stands_at_the_new_one(row: Row) -> None:
    value = VALUES.get(row.old, 7)
    converted = convert(file_with(row, value))
    assert not converted.problems
    for path in row.new_paths:
        if row.old == "runconfig.target_device":
            path = ("trainer", "init", "device")
        expected = BECOMES.get((row.old, str(path[-1])), value)
        assert at(converted.params, path) == expected


@pytest.mark.parametrize("row", DROPPED, ids=lambda row: row.old)
def test_an_old_key_without_a_counterpart_is_noted_and_nowhere(row: Row) -> None:
    converted = convert(file_with(row, "its value"))
    [note] = [note for note in converted.notes if note.path == row.old_path]
    assert note.text == row.without_effect
    assert "its value" not in str(converted.params)


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: row.old)
def test_what_would_change_numbers_is_refused_unless_it_says_nothing(row: Row) -> None:
    assert row.harmless is not None
    [problem] = convert(file_with(row, {"some": "thing"})).problems
    assert problem.path == row.old_path
    for value in row.harmless:
        assert not convert(file_with(row, value)).problems


@pytest.mark.parametrize("section", WITHOUT_MEANING)
def test_a_section_without_a_counterpart_is_noted(section: str) -> None:
    converted = convert(old_file(**{section: "words"}))
    assert [note.path for note in converted.notes] == [(section,)]


def test_false_takes_a_default_callback_away_and_leaves_others_out() -> None:
    params = old_file(
        optimizer={**SGD, "log_summaries": False},
        runconfig={"check_loss_values": False, "log_input_summaries": False},
    )
    assert init_of(convert(params))["callbacks"] == [{"CheckLoss": None}]


def test_null_means_that_a_key_is_not_given() -> None:
    nulls = {"max_steps": None, "checkpoint_path": None, "max_checkpoints": None, "seed": None}
    converted = convert(old_file(runconfig={"log_steps": 3, **nulls}))
    assert init_of(converted) == {"model": {"name": "Net"}, "logging": {"log_steps": 3}}
    off = convert(old_file(runconfig={"autoload_last_checkpoint": None}))
    assert init_of(off)["checkpoint"] == {"autoload_last_checkpoint": False}


def test_all_unknown_keys_are_named_at_once_with_the_nearest_ones() -> None:
    problems = convert(
        {
            "modle": {},
            "runconfig": {"max_step": 3, "colour": "red"},
            "wandb": {"projct": "p"},
            "optimizer": {**SGD, "max_gradient_nrom": 1.0},
        }
    ).problems
    assert {p.path: p.text for p in problems} == {
        ("modle",): "no such section. Did you mean 'model'? An old file has: runconfig, model,"
        " optimizer, train_input, eval_input, sparsity, wandb, imports.",
        ("runconfig", "max_step"): "no such key. Did you mean 'max_steps'?",
        ("runconfig", "colour"): "no such key.",
        ("wandb", "projct"): "no such key. Did you mean 'project'?",
        ("optimizer", "max_gradient_nrom"): "no such key. Did you mean 'max_gradient_norm'?",
    }


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


def test_two_keys_of_one_meaning_are_refused() -> None:
    model = {"name": "Net", "mixed_precision": True, "precision_opt_level": 1}
    [problem] = convert({"model": model, "runconfig": {"precision_opt_level": 0}}).problems
    assert problem.path == ("model", "precision_opt_level")
    assert problem.text == (
        "means the same as runconfig.precision_opt_level, which is given too. Give one."
    )


def test_a_file_is_old_if_it_has_old_sections_and_no_trainer() -> None:
    assert is_legacy({"runconfig": {}})
    assert not is_legacy({"trainer": {}, "runconfig": {}})
    assert not is_legacy({"trainr": {}})


def test_each_new_key_has_the_old_key_that_it_came_from() -> None:
    converted = convert(yaml.safe_load(OLD))
    init = ("trainer", "init")
    schedule = (*init, "schedulers", 0, "SequentialLR", "schedulers", 1, "CosineDecayLR")
    expected: dict[tuple[str | int, ...], tuple[str | int, ...]] = {
        (*init, "loop", "max_steps"): ("runconfig", "max_steps"),
        (*init, "model", "hidden"): ("model", "hidden"),
        (*init, "optimizer", "AdamW", "betas", 1): ("optimizer", "betas", 1),
        (*init, "optimizer", "AdamW", "eps"): ("optimizer", "optimizer_type"),
        (*schedule, "total_iters"): ("optimizer", "learning_rate", 1, "steps"),
        schedule: ("optimizer", "learning_rate", 1, "scheduler"),
        (*init, "callbacks", 0): ("runconfig", "max_checkpoints"),
        (*init, "callbacks", 0, "KeepNCheckpoints", "n"): ("runconfig", "max_checkpoints"),
        ("trainer", "validate", "val_dataloader", "batch_size"): ("eval_input", "batch_size"),
    }
    assert {path: converted.origins[path] for path in expected} == expected


def test_every_new_key_has_an_origin_in_the_old_file() -> None:
    old = yaml.safe_load(OLD)
    converted = convert(old)

    def paths(value: Any, path: tuple[str | int, ...]) -> Any:
        yield path
        items = value.items() if isinstance(value, dict) else ()
        for key, item in enumerate(value) if isinstance(value, list) else items:
            yield from paths(item, (*path, key))

    for path in paths(converted.params["trainer"], ("trainer",)):
        assert at(old, converted.origins[path]) is not None


def test_the_old_file_stays_as_it_is() -> None:
    old = yaml.safe_load(OLD)
    before = copy.deepcopy(old)
    convert(old)
    assert old == before


def test_options_that_say_nothing_leave_a_plain_device() -> None:
    options = {"compile_only": False, "validate_only": False, "num_csx": 1}
    init = init_of(convert(old_file(runconfig={"target_device": "CSX", **options})))
    assert init == {"device": "CSX", "model": {"name": "Net"}}


def test_options_of_csx_are_noted_on_another_device() -> None:
    converted = convert(old_file(runconfig={"target_device": "CPU", "compile_only": True}))
    assert init_of(converted)["device"] == "CPU"
    [note] = converted.notes
    assert note.path == ("runconfig", "compile_only")


def test_options_without_a_device_are_those_of_csx() -> None:
    converted = convert(old_file(runconfig={"num_csx": 2}))
    assert init_of(converted)["backend"] == {
        "backend_type": "CSX",
        "cluster_config": {"num_csx": 2},
    }
    assert "is therefore used" in converted.notes[0].text


@pytest.mark.parametrize(("device", "kept"), [("CSX", {}), ("CPU", {"grad_accum_steps": 4})])
def test_accumulation_stays_where_it_had_an_effect(device: str, kept: dict[str, int]) -> None:
    params = old_file(runconfig={"target_device": device}, optimizer={**SGD, "grad_accum_steps": 4})
    converted = convert(params)
    assert init_of(converted).get("loop", {}) == kept
    assert bool(converted.notes) == (device == "CSX")


@pytest.mark.parametrize(
    ("device", "model", "optimizer", "expected"),
    [
        # mixed precision was off unless asked for, and is on in a new file that does not say
        ("CSX", {}, {"max_gradient_norm": 1.0}, {"max_gradient_norm": 1.0, "enabled": False}),
        # and it was float16, where it is bfloat16 now
        ("CSX", {"mixed_precision": True}, {}, {"enabled": True, "fp16_type": "float16"}),
        (
            "CSX",
            {"mixed_precision": True, "fp16_type": "bfloat16"},
            {"loss_scaling_factor": "dynamic", "initial_loss_scale": 8.0},
            {"enabled": True, "fp16_type": "bfloat16", "loss_scaling_factor": 1.0},
        ),
        (
            "CPU",
            {"mixed_precision": True, "fp16_type": "cbfloat16"},
            {"loss_scaling_factor": "dynamic"},
            {"enabled": True, "fp16_type": "bfloat16", "loss_scaling_factor": 1.0},
        ),
        (
            "GPU",
            {"mixed_precision": True, "fp16_type": "float16"},
            {"loss_scaling_factor": 128.0, "max_loss_scale": 8.0},
            {"enabled": True, "fp16_type": "float16", "loss_scaling_factor": 128.0},
        ),
        ("CSX", {"use_bfloat16": False}, {}, {"enabled": False}),
    ],
)
def test_precision_is_what_it_was(
    device: str, model: dict[str, Any], optimizer: dict[str, Any], expected: dict[str, Any]
) -> None:
    params = {
        "model": {"name": "Net", **model},
        "optimizer": {**SGD, **optimizer},
        "runconfig": {"target_device": device},
    }
    init = init_of(convert(params))
    assert init["precision"] == expected
    fulgurite.MixedPrecision(**init["precision"])


def test_without_a_word_on_precision_there_is_none() -> None:
    assert "precision" not in init_of(convert(old_file(optimizer=SGD)))


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
    assert optimizer_of(adam) == {"Lion": {"betas": [0.8, 0.99], "weight_decay": 0.001}}
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
        if inspect.isclass(kind) and kind.__module__ == lr_scheduler.__name__
    }
    assert set(NAMES.values()) == ours - combined


def test_a_file_is_written_with_comments_where_keys_would_be() -> None:
    params = {
        "runconfig": {
            "max_steps": 5,
            "mgmt_address": "10.0.0.1",
            "job_labels": ["a"],
            "check_loss_values": False,
        },
        "model": {"class_path": "my.Net"},
        "optimizer": {**SGD, "max_gradient_norm": 1.0, "max_loss_scale": 8.0},
        "eval_input": {"data_processor": "my.data.val", "sizes": {"a": {"b": [1, 2]}}},
    }
    assert written(convert(params)) == TEXT


TEXT = """\
trainer:
  init:
    # runconfig.mgmt_address ("10.0.0.1"): says where a cluster is managed; programs run on this
    #   machine
    # runconfig.job_labels ([a]): is for a cluster's queue; nothing is queued here
    model: {class_path: my.Net}
    optimizer:
      SGD: {lr: 0.1}
    precision:
      # optimizer.max_loss_scale (8.0): had no effect: the loss scale is not dynamic
      max_gradient_norm: 1.0
      enabled: false
    loop: {max_steps: 5}
    callbacks:
      - CheckLoss: null
  validate:
    val_dataloader:
      data_processor: my.data.val
      sizes:
        a: {b: [1, 2]}
  validate_all:
    val_dataloaders:
      data_processor: my.data.val
      sizes:
        a: {b: [1, 2]}
"""


def test_the_loader_of_validation_is_written_once() -> None:
    data = {"data_processor": "my.data.val"}
    text = written(convert(old_file(train_input=data, eval_input=data)))
    assert text.endswith(
        "  fit:\n"
        "    train_dataloader: {data_processor: my.data.val}\n"
        "    val_dataloader: &val_dataloader {data_processor: my.data.val}\n"
        "  validate:\n"
        "    val_dataloader: *val_dataloader\n"
        "  validate_all:\n"
        "    val_dataloaders: *val_dataloader\n"
    )


scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(codec="utf-8"), max_size=12)
    | st.sampled_from(
        ["yes", "1e-5", "0x1f", "12:30", "2001-01-01", "<<", "=", "~", "- a", "#", "a: b"]
    )
)
keys = st.text("abc_.: #-5", min_size=1, max_size=6) | st.integers(0, 9)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=8,
)
table_sections = {
    section: st.dictionaries(
        st.sampled_from([r.old_path[1] for r in ROWS if r.old_path[0] == section]),
        values,
        max_size=6,
    )
    for section in ("runconfig", "optimizer", "wandb")
}
old_files = st.fixed_dictionaries(
    {
        "model": st.dictionaries(keys, values, max_size=4),
        "optimizer": table_sections["optimizer"].map(lambda given: {**SGD, **given}),
    },
    optional={
        "runconfig": table_sections["runconfig"],
        "wandb": table_sections["wandb"],
        "train_input": st.dictionaries(keys, values, max_size=4),
        "eval_input": st.dictionaries(keys, values, max_size=4),
        "sparsity": values,
    },
)


@given(old_files)
@settings(max_examples=150, deadline=None)
def test_what_is_written_reads_as_what_was_converted(old: dict[str, Any]) -> None:
    converted = convert(old)
    text = written(converted)
    assert typed(parse(text, "<text>").data) == typed(converted.params)
    assert typed(yaml.safe_load(text)) == typed(converted.params)


def typed(value: Any) -> Any:
    """A value that equals another only if all types are the same."""
    if isinstance(value, dict):
        return {(type(key), key): typed(item) for key, item in value.items()}
    if isinstance(value, list):
        return [typed(item) for item in value]
    return type(value), value


def test_the_old_example_converts_without_a_note() -> None:
    file = Path(__file__).parents[2] / "examples" / "digits_legacy.yaml"
    converted = convert(read(file).data)
    assert (converted.problems, converted.notes) == ((), ())
