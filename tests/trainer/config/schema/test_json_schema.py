"""The JSON Schema: valid itself, takes what loads, and catches what it can."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fulgurite.config.document.problems import ParameterFileError
from fulgurite.config.document.reading import read
from fulgurite.config.schema.json_schema import schema
from fulgurite.config.types.classes import Classes

jsonschema = pytest.importorskip("jsonschema", reason="jsonschema judges the schema")

HERE = Path(__file__).parent
VALID = [HERE / "valid" / "everything.yaml", HERE / "valid" / "phases.yaml"]
VALID += [HERE.parents[3] / "examples" / "digits.yaml"]


@pytest.fixture(scope="module")
def validator() -> Any:
    made = schema()
    jsonschema.Draft202012Validator.check_schema(made)
    return jsonschema.Draft202012Validator(made)


@pytest.mark.parametrize("file", VALID, ids=lambda file: file.stem)
def test_what_loads_is_valid(file: Path, validator: Any) -> None:
    assert [error.message for error in validator.iter_errors(read(file).data)] == []


CAUGHT = (
    *("arguments_as_a_list", "arguments_beside_class_path", "callback_argument_missing"),
    *("callback_misspelt", "callbacks_as_a_mapping", "device_and_backend", "device_unknown"),
    *("key_in_capitals", "key_misspelt", "key_of_init_under_trainer", "key_of_loop_in_init"),
    *("key_of_loop_misspelt", "key_of_trainer_at_the_top", "keys_all_wrong"),
    *("no_init", "no_loader", "no_model", "no_trainer", "optimizer_argument_misspelt"),
    *("optimizer_arguments_not_indented", "optimizer_is_a_base_class", "optimizer_misspelt"),
    *("optimizer_twice", "scheduler_within_a_scheduler", "section_is_a_list", "yes_for_true"),
    *("scheduler_without_a_required_argument", "section_is_a_number", "word_for_a_number"),
)


@pytest.mark.parametrize("name", CAUGHT)
def test_mistakes_of_keys_names_and_types_are_invalid(name: str, validator: Any) -> None:
    assert list(validator.iter_errors(read(HERE / "broken" / f"{name}.yaml").data))


def test_every_broken_file_that_is_invalid_is_in_the_list_above(validator: Any) -> None:
    found = set()
    for file in (HERE / "broken").glob("*.yaml"):
        try:
            data = read(file).data
        except ParameterFileError:
            continue
        if not validator.is_valid(data):
            found.add(file.stem)
    assert found >= set(CAUGHT)


def test_an_editor_sees_names_defaults_and_texts() -> None:
    definitions = schema()["$defs"]
    names = definitions["optimizer"]["then"]["anyOf"][0]["enum"]
    assert set(Classes().short_names(Classes().category("optimizer"))) <= set(names)
    lr = definitions["optimizer.SGD"]["properties"]["lr"]
    assert lr["default"] == 0.001
    assert "learning rate" in lr["description"]
    assert definitions["optimizer.SGD"]["additionalProperties"] is False
