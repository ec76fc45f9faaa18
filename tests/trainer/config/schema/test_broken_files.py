"""Mistakes that people make: each file of ``broken/`` has some, and says in its first lines which.

# line:column dotted.key: the beginning of what is said
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from fulgurite.config.document.problems import ParameterFileError, Place, Problem, dotted
from fulgurite.config.schema.checking import check

FILES = sorted(Path(__file__).with_name("broken").glob("*.yaml"))
EXPECTED = re.compile(r"# (\d+):(\d+) (\S+): (.+)\n")
USERS = {"model", "imports", "train_dataloader"}
BY_CONSTRUCTORS = {
    *("callback_value_unknown", "checkpoint_steps_zero", "flag_unknown", "fraction_above_one"),
    *("optimizer_value_out_of_range", "schedulers_that_set_one_number"),
}
"""Files with a value that only a constructor refuses."""


@pytest.fixture(autouse=True)
def no_trace_of_the_modules_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "nets", raising=False)


def problems_of(file: Path, imports: bool = True) -> list[tuple[Place, Problem]]:
    try:
        check(file, imports=imports)
    except ParameterFileError as error:
        return list(error.problems)
    return []


def test_there_are_many() -> None:
    assert len(FILES) >= 60


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_mistake_is_told_with_line_column_and_key(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "net", raising=False)  # another test may have had one
    expected = EXPECTED.findall(file.read_text())
    with pytest.raises(ParameterFileError) as caught:
        check(file)
    told = [
        (str(place.line), str(place.column), dotted(problem.path) or "-", problem.text)
        for place, problem in caught.value.problems
    ]
    assert [one[:3] for one in told] == [one[:3] for one in expected]
    for (*_, text), (*_, beginning) in zip(told, expected, strict=True):
        assert text.startswith(beginning)
    assert str(caught.value).startswith(f"{file}:{told[0][0]}:{told[0][1]}:")


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_without_imports_a_trainers_mistakes_are_the_same(file: Path) -> None:
    with_imports, without = problems_of(file), problems_of(file, imports=False)
    ours = [one for one in with_imports if not USERS & set(one[1].path)]
    assert [one for one in without if one not in with_imports] == []
    assert [one for one in without if one in ours] == ([] if file.stem in BY_CONSTRUCTORS else ours)
