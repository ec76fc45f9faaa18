"""Shapes: sections, ranges, several of one, and what contradicts in an init."""

from __future__ import annotations

from typing import Any

import pytest

from fulgurite.backends import current_backend
from fulgurite.config.document.problems import ParameterFileError, dotted
from fulgurite.config.schema.checking import check
from fulgurite.config.schema.sections import Loop
from fulgurite.config.types.classes import Classes
from fulgurite.config.types.shapes import Keys, OneClass, Report, Section, Several, Value

LINEAR = {"in_features": 1, "out_features": 1}
MODEL = {"class_path": "torch.nn.Linear", "init_args": LINEAR}
CBFLOAT16 = {"fp16_type": "cbfloat16", "loss_scaling_factor": "dynamic"}


def told(**init: Any) -> list[tuple[str, str]]:
    """What is said of an ``init``; "-" takes a key away."""
    given = {"device": "CSX", "model": MODEL, **init}
    given = {key: value for key, value in given.items() if value != "-"}
    try:
        check({"trainer": {"init": given}})
    except ParameterFileError as error:
        prefix = "trainer.init."
        return [(dotted(p.path).removeprefix(prefix), p.text) for _, p in error.problems]
    return []


def test_a_section_becomes_its_class() -> None:
    report = Report(Classes())
    section = Section(Loop)
    assert section.check({"max_steps": 3}, ("loop",), report) == Loop(max_steps=3)
    assert section.check(None, ("loop",), report) is None
    assert report.problems == []


def test_one_stands_for_a_list_of_one() -> None:
    report = Report(Classes())
    shape = Several(Value(int))
    assert shape.check(3, (), report) == [3]
    assert shape.check([3, 4], (), report) == [3, 4]
    assert shape.check(None, (), report) == []
    assert report.problems == []


def test_several_classes_in_one_mapping_are_told_to_be_a_list() -> None:
    report = Report(Classes())
    Several(OneClass("callback")).check({"Timer": {}, "EarlyStopping": None}, ("c",), report)
    [problem] = report.problems
    assert problem.text.startswith("expected a list, each item as '- Name: {arguments}'")


def test_keys_are_known_and_required() -> None:
    report = Report(Classes())
    assert Keys({"a": Value(int)}, ("a",)).check({"b": 1}, (), report) == {}
    assert [problem.text for problem in report.problems] == [
        "a: required, and not given.",
        "no such key. Known: a.",
    ]


def test_the_least_and_the_largest_number_are_taken() -> None:
    report = Report(Classes())
    shape = Value(int, bounds=(0, 3))
    assert [shape.check(value, (), report) for value in (0, 3)] == [0, 3]
    assert report.problems == []
    for value in (-1, 4):
        shape.check(value, (), report)
    assert [problem.text for problem in report.problems] == [
        "expected 0 to 3; got -1.",
        "expected 0 to 3; got 4.",
    ]


@pytest.mark.parametrize(
    ("init", "key", "text"),
    [
        ({"seed": 2**32}, "seed", "expected 0 to 4294967295; got 4294967296."),
        ({"loop": {"max_steps": 0}}, "loop.max_steps", "max_steps must be a positive integer"),
        ({"loop": {"eval_frequency": -1}}, "loop.eval_frequency", "eval_frequency must be"),
        ({"logging": {"log_steps": 0}}, "logging.log_steps", "log_steps must be"),
        (
            {"precision": {"fp16_type": "float8"}},
            "precision.fp16_type",
            "fp16_type must be one of",
        ),
        ({"precision": "bf16-mix"}, "precision", "expected 32-true, bf16-mixed"),
        ({"precision": []}, "precision", "expected 32-true, bf16-mixed"),
        (
            {"optimizer": {"AdamW": {"betas": [2.0, 0.9]}}},
            "optimizer.AdamW.betas",
            "betas is (2.0, 0.9)",
        ),
        ({"callbacks": [{"Timer": {"duration": "x"}}]}, "callbacks.0.Timer.duration", ""),
        (
            {"device": "-", "backend": {"backend_type": "CSX", "max_programs": 0}},
            "backend.max_programs",
            "max_programs must be 'auto' or a positive integer; got 0.",
        ),
        (
            {"device": "-", "backend": {"backend_type": "CSX", "cluster_config": {"num_csx": 0}}},
            "backend.cluster_config.num_csx",
            "CSConfig.num_csx must be an integer of at least 1; got 0.",
        ),
        (
            {"device": "-", "backend": {"backend_type": "CSX", "max_program": 1}},
            "backend.max_program",
            "CSXBackend takes no 'max_program'. Did you mean 'max_programs'?",
        ),
        ({"device": "-", "backend": {"backend_type": 3}}, "backend.backend_type", "expected one"),
        ({"device": "-", "backend": {}}, "backend.backend_type", "expected one of CSX, CPU, GPU"),
        ({"strategy": "ddp"}, "strategy", "device='CSX' contradicts strategy='ddp'."),
        ({"devices": 0}, "devices", "device='CSX' contradicts devices=0."),
        ({"device": "CPU", "strategy": "csx"}, "strategy", "device='CPU' contradicts"),
        (
            {
                "device": "CPU",
                "precision": CBFLOAT16,
            },
            "precision",
            "cbfloat16 exists on CSX only; got device='CPU'.",
        ),
        ({"profiler": "simpl"}, "profiler", "When passing string value for the `profiler`"),
        ({"overfit_batches": 1.5}, "overfit_batches", "You have passed invalid value 1.5"),
        ({"plugins": [{"class_path": "torch.nn.Linear"}]}, "plugins.0.class_path", "torch.nn.Lin"),
        ({"lop": {}}, "lop", "no such key of init. Did you mean 'loop'?"),
        ({"log_steps": 3}, "log_steps", "no such key of init: it belongs under logging:."),
    ],
)
def test_an_init_is_told_what_is_wrong_where_it_stands(
    init: dict[str, Any], key: str, text: str
) -> None:
    [(path, said)] = told(**init)
    assert path == key
    assert said.startswith(text)


def test_a_file_may_leave_the_device_to_the_command_line() -> None:
    plan = check({"trainer": {"init": {"model": MODEL}}})
    [note] = plan.notes
    assert note.text.startswith("names no device: a run needs device")
    assert plan.phases[0].init.device is None


def test_a_check_claims_no_backend() -> None:
    assert told(device="-", backend={"backend_type": "CSX", "max_programs": 2}) == []
    assert current_backend() is None


def test_what_is_known_and_not_built_checks() -> None:
    assert told(device="-", backend={"backend_type": "CSX", "fabric": "gpu"}) == []


def test_lightnings_classes_are_named_under_their_arguments() -> None:
    assert told(profiler={"SimpleProfiler": {}}, accelerator="auto", logger=False) == []
    assert told(device="CPU", strategy={"SingleDeviceStrategy": {"device": "cpu"}}) == []
