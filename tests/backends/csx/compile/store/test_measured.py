"""Numbers that a process keeps for later ones; where their file is wrong, there are none."""

from __future__ import annotations

from pathlib import Path

import pytest

from fulgurite.backends.csx.compile.store import measured
from fulgurite.backends.csx.compile.store.measured import measured_before, note_measured


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a user who has none yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "fulgurite/measured.json"


def test_the_latest_values_of_a_name_are_kept(file: Path) -> None:
    assert measured_before("one") == []
    for value in range(1, 13):
        note_measured("one", float(value))
    note_measured("other", 0.5)
    assert measured_before("one") == [float(value) for value in range(4, 13)]
    assert measured_before("other") == [0.5]
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_the_names_that_were_noted_last_are_kept(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measured, "_NAMES", 2)
    for name in ("one", "two", "one", "three"):
        note_measured(name, 1.0)
    assert [len(measured_before(name)) for name in ("one", "two", "three")] == [2, 0, 1]


@pytest.mark.parametrize(
    "text", ["", "{", "[1.0]", '{"one": 1.0}', '{"one": ["2", NaN, -1.0, 0.0]}', "\0"]
)
def test_a_file_that_is_wrong_says_nothing_and_is_written_anew(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True)
    file.write_text(text)
    assert measured_before("one") == []
    note_measured("one", 2.0)
    assert measured_before("one") == [2.0]


def test_a_folder_that_cannot_be_used_keeps_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = tmp_path / "taken"
    taken.write_text("a file")
    monkeypatch.setenv("XDG_CACHE_HOME", str(taken))
    note_measured("one", 1.0)
    assert measured_before("one") == []
