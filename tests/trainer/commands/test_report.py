"""``fulgurite report`` and ``fulgurite diff``: what is printed, which status they end with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from reports import accumulated, full

from fulgurite import cli

pytestmark = pytest.mark.fits


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a report."""
    folder = tmp_path / "artifacts"
    folder.mkdir()
    (folder / "report.json").write_text(json.dumps(accumulated()))
    return folder


def test_report_prints_a_table(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", str(folder)]) == 0
    printed = capsys.readouterr()
    assert "training program, " in printed.out
    assert "makers: library" in printed.out
    assert printed.err == ""


def test_diff_of_two_folders_or_files(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = folder / "other.json"
    other.write_text(json.dumps(full(accumulated())))
    assert cli.main(["diff", str(folder), str(folder / "report.json")]) == 0
    assert capsys.readouterr().out == "equal: 2 programs, validation, training\n"
    assert cli.main(["diff", str(folder), str(other)]) == 0
    assert "kernel_012345 (generated, CrossEntropyLoss forward" in capsys.readouterr().out


@pytest.mark.parametrize("command", [["report"], ["diff", "report.json"]])
@pytest.mark.parametrize("text", [None, "{", '{"format": 3}', '{"format": 1}'])
def test_what_cannot_be_read_is_one_line_and_status_1(
    command: list[str],
    text: str | None,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(folder)
    if text is not None:
        Path("wrong.json").write_text(text)
    assert cli.main([*command, "wrong.json"]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert len(printed.err.splitlines()) == 1
    assert printed.err.startswith("wrong.json: ")
    assert "artifact_dir" in printed.err


def test_the_commands_are_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--help"])
    assert ended.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "report what a run's programs are made of and what they cost" in text
    assert "diff what a change did to graph, kernels and cost" in text
    for wrong in (["report"], ["diff", "A"]):
        with pytest.raises(SystemExit) as ended:
            cli.main(wrong)
        assert ended.value.code == 2
