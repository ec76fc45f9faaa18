"""The workflows of the hosting service are sound, and call what the repository has."""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
ON = True
"""The key ``on``, as YAML 1.1 reads it."""


def workflow(file: Path) -> dict[Any, Any]:
    """What a workflow's file says."""
    read = yaml.safe_load(file.read_text(encoding="utf-8"))
    assert isinstance(read, dict)
    return read


def steps(file: Path) -> list[dict[str, Any]]:
    """The steps of all jobs of a workflow."""
    return [step for job in workflow(file)["jobs"].values() for step in job["steps"]]


def commands() -> list[str]:
    """Every line that a workflow runs."""
    found = [step["run"] for file in FILES for step in steps(file) if "run" in step]
    return [line for text in found for line in text.splitlines()]


def test_changes_are_tried_by_the_script_of_ci_and_all_tests_run_by_night() -> None:
    by_name = {file.stem: workflow(file) for file in FILES}
    assert {*by_name["ci"][ON]} == {"push", "pull_request"}
    assert {*by_name["night"][ON]} == {"schedule", "workflow_dispatch"}
    assert [step["run"] for step in steps(FILES[0]) if "run" in step] == [".ci/run"]
    assert {"make test-all", "make smoke"} <= {*commands()}


@pytest.mark.parametrize("line", commands())
def test_a_command_of_a_workflow_exists(line: str) -> None:
    program, *arguments = line.split()
    if program == "make":
        makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
        for target in arguments:
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), line
    else:
        assert os.access(ROOT / program, os.X_OK), line


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_workflow_may_only_read_and_says_what_each_step_is(file: Path) -> None:
    assert workflow(file)["permissions"] == {"contents": "read"}
    for job in workflow(file)["jobs"].values():
        assert job["runs-on"] == "ubuntu-latest"
    for step in steps(file):
        assert ("uses" in step) != ("run" in step), step
        assert re.fullmatch(r"actions/[\w-]+@v\d+", step.get("uses", "actions/a@v1")), step


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_workflow_has_a_python_that_the_package_takes(file: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found = [step["with"] for step in steps(file) if "setup-python" in step.get("uses", "")]
    assert len(found) == len(workflow(file)["jobs"])
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for given in found:
        assert given["python-version"] in SpecifierSet(project["requires-python"])
        assert f"PYTHON ?= python{given['python-version']}\n" in makefile
