"""Old parameter files become new ones that train the same."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml
from old_files import OLD, SGD, init_of, old_file

import fulgurite
from fulgurite.config.document.problems import ParameterFileError
from fulgurite.config.document.reading import read
from fulgurite.config.legacy.converting import convert, is_legacy
from fulgurite.config.legacy.old_keys import ROWS, WITHOUT_MEANING, Row
from fulgurite.config.schema.checking import check


def test_a_whole_file_becomes_the_new_form() -> None:
    converted = convert(yaml.safe_load(OLD))
    assert converted.problems == ()
    assert converted.params == yaml.safe_load(NEW)


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


def test_mistakes_in_the_new_form_are_told_at_the_lines_of_the_old_file(tmp_path: Path) -> None:
    file = tmp_path / "old.yaml"
    file.write_text(
        "model: {name: my.Net}\n"
        "optimizer:\n"
        "  optimizer_type: SGD\n"
        "  learning_rate:\n"
        "    - {scheduler: Constant, learning_rate: 0.1, total_itres: 3}\n"
        "runconfig:\n"
        "  target_device: TPU\n"
    )
    with pytest.raises(ParameterFileError) as caught:
        check(file, imports=False)
    assert [(place.line, place.column) for place, _ in caught.value.problems] == [(5, 49), (7, 3)]


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


@pytest.mark.parametrize("name", ["digits_legacy", "gpt_legacy"])
def test_the_old_examples_convert_without_a_note(name: str) -> None:
    file = Path(__file__).parents[4] / "examples" / f"{name}.yaml"
    converted = convert(read(file).data)
    assert (converted.problems, converted.notes) == ((), ())
