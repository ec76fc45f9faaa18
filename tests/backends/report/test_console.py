"""A report on the terminal, and what is said where there is none to read."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from reports import accumulated, full

from fulgurite.backends.report.console import lines
from fulgurite.backends.report.report_file import NoReport, read

pytestmark = pytest.mark.fits


def test_each_entry_point_has_its_costs_makers_and_largest_kernels() -> None:
    text = "\n".join(lines(full(accumulated())))
    training = text[text.index("training program") :]
    assert training.startswith("training program, ")
    for line in (
        "entry point accumulate",
        "entry point step",
        "14.3 kFLOP a step",
        "  makers: library ",
        "  memory: peak ",
        "(parameters 848 B, optimizer 1.67 KiB, activations ",
        "  bound on this machine: memory",
        "  FrozenValueWarning: ",
    ):
        assert line in training, line
    assert re.search(r"net\.3 \(Linear\) +10 +6\.14 kFLOP", training)
    assert re.search(r"^    aten\.\w+\.\w+ +library +\d+ ", training, re.MULTILINE)
    assert "generated 1 (" in training
    assert "... and " in training
    rows = [line for line in text.splitlines() if line.startswith("    ")]
    assert max(map(len, rows)) < 100


def test_a_checked_program_says_that_it_has_no_kernels() -> None:
    report = full(accumulated())
    entry = report["programs"][0]["entries"][0]
    entry |= {"calls": [], "memory": None, "roofline": []}
    assert "  no kernels: it was only checked" in [*lines(report)]


def test_a_folder_and_its_file_are_the_same(tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text(json.dumps(accumulated()))
    assert read(tmp_path) == read(str(tmp_path / "report.json")) == accumulated()


def lacking(*path: Any) -> str:
    """A report without something in it."""
    report = full(accumulated())
    inner: Any = report
    for step in path[:-1]:
        inner = inner[step]
    del inner[path[-1]]
    return json.dumps(report)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "cannot be read (Expecting property name"),
        ("", "cannot be read (Expecting value"),
        ("[]", "is no report of Fulgurite"),
        ('{"runs": []}', "is no report of Fulgurite"),
        ('{"format": 1}', "is of format 1, and this Fulgurite reads format 3"),
        ('{"format": 3}', "is damaged (written is missing)"),
        (("programs",), "is damaged (programs is missing)"),
        (("programs", 0, "entries", 0, "calls", 3, "kernel"), "entries[0].calls[3].kernel is miss"),
        (("programs", 0, "entries", 0, "memory"), "entries[0].memory is missing"),
    ],
)
def test_what_cannot_be_read_is_one_line_that_says_what_to_do(
    text: Any, says: str, tmp_path: Path
) -> None:
    file = tmp_path / "report.json"
    file.write_text(text if isinstance(text, str) else lacking(*text))
    with pytest.raises(NoReport) as error:
        read(tmp_path)
    [line] = str(error.value).splitlines()
    assert line.startswith(str(file))
    assert says in line
    assert "artifact_dir" in line


def test_bytes_that_are_no_text_and_numbers_where_text_belongs(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(NoReport, match="cannot be read"):
        read(tmp_path)
    file.write_text(json.dumps({**accumulated(), "programs": 3}))
    with pytest.raises(NoReport, match=r"programs is no list"):
        read(tmp_path)
    file.write_text(json.dumps({**accumulated(), "written": 3}))
    with pytest.raises(NoReport, match=r"written is no str"):
        read(tmp_path)


def test_a_folder_without_a_report_and_none_at_all(tmp_path: Path) -> None:
    with pytest.raises(NoReport, match=r"no report\.json in this folder; build .*artifact_dir"):
        read(tmp_path)
    with pytest.raises(NoReport, match=r"no such file or folder; give the artifact_dir"):
        read(tmp_path / "nowhere")
