"""The workflows of the hosting service are sound, and call what the repository has."""

from __future__ import annotations

import os
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import everything
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


def pythons(job: dict[str, Any]) -> list[str]:
    """The versions of Python that a job runs with."""
    [given] = [step["with"] for step in job["steps"] if "setup-python" in step.get("uses", "")]
    if given["python-version"] == "${{ matrix.python }}":
        return list(job["strategy"]["matrix"]["python"])
    return [given["python-version"]]


def supported() -> list[str]:
    """The versions of Python that the package takes, the oldest first."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    limits = SpecifierSet(project["requires-python"])
    return [f"3.{minor}" for minor in range(30) if f"3.{minor}" in limits]


def test_changes_are_tried_with_the_oldest_python_and_each_has_its_night() -> None:
    by_name = {file.stem: workflow(file)["jobs"] for file in FILES}
    assert pythons(by_name["ci"]["run"]) == supported()[:1]
    assert f"python{supported()[0]}}}" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    night = {version for job in by_name["night"].values() for version in pythons(job)}
    assert sorted(night) == supported()


def test_the_makefile_and_the_classifiers_have_the_pythons_that_the_package_takes() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    names = [f"python{version}" for version in reversed(supported())]
    assert f"PYTHONS := python3 {' '.join(names)}\n" in makefile
    oldest, newest = supported()[0], supported()[-1]
    limits = f"({oldest}) <= sys.version_info < (3.{int(newest.partition('.')[2]) + 1})"
    assert limits.replace("3.", "3, ") in makefile
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = [one.rpartition(" ")[2] for one in project["classifiers"] if ":: Python :: " in one]
    assert named == supported()


@pytest.mark.process
def test_every_test_finds_the_other_pythons_that_there_are_and_no_shim() -> None:
    own = everything.version_of(sys.executable)
    assert own == f"3.{sys.version_info.minor}"
    assert everything.other_pythons([sys.executable, "/bin/false", "no-such-python"]) == {}
    assert own not in everything.other_pythons(None)
