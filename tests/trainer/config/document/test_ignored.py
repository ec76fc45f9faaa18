"""Keys that are ignored here: each has its note, and nothing else has one."""

from __future__ import annotations

import document_parameter_files as document
import pytest

from fulgurite.config.document.ignored import IGNORED_KEYS, note_for
from fulgurite.config.document.problems import Path
from fulgurite.config.schema.schema import INIT

CLUSTER: Path = ("trainer", "init", "backend", "cluster_config")


@pytest.mark.parametrize("key", IGNORED_KEYS)
def test_an_ignored_key_has_its_note(key: str) -> None:
    path = tuple(key.replace("*", "anything").split("."))
    assert note_for(path) == IGNORED_KEYS[key]


def test_a_key_may_stand_in_one_of_several_trainers() -> None:
    note = note_for((*CLUSTER, "job_labels"))
    assert note == "is for a cluster's queue; nothing is queued here"
    assert note_for(("trainer", 1, *CLUSTER[1:], "job_labels")) == note
    assert note_for(("trainer", 1, "trainer", *CLUSTER[1:], "job_labels")) == note


def test_a_class_may_be_written_in_any_case_and_stand_anywhere_in_its_list() -> None:
    assert note_for(("trainer", "init", "loggers", 2, "telemetrylogger"))
    assert note_for(("trainer", "init", "callbacks", 0, "DUMPAVAILABLETENSORNAMES"))


def test_no_other_key_has_a_note() -> None:
    for path in (
        (*CLUSTER, "num_csx"),
        (*CLUSTER, "Job_Labels"),
        (*CLUSTER, "job_labels", "more"),
        ("trainer", "init", "callbacks", 0, "Lora"),
        ("trainer", "init", "callbacks", 0, "WeightCompression"),
        ("trainer", "init", "callbacks", 0, "SkipSamples"),
        ("trainer", "fit", "train_dataloader", "job_labels"),
    ):
        assert note_for(path) is None


def test_no_key_that_has_a_meaning_has_a_note() -> None:
    assert not [key for key in INIT if note_for(("trainer", "init", key))]


def test_the_documentation_has_the_tables_as_they_are() -> None:
    text = document.PAGE.read_text()
    assert document.with_tables(text) == text, "run python tests/tools/document_parameter_files.py"
