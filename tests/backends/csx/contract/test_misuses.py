"""Each row of the table of misuses: its error, the user's line, the text; corrected, it runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from document_errors import DOCS, PAGES, causes, index, message, name_of, ours
from misuses.program import OTHER_ROOMS, WITHOUT_PROGRAM, Misuse, Outcome, run
from misuses.table import TABLE

from fulgurite.backends.csx.contract import rules
from fulgurite.backends.csx.contract.frozen_reads import FrozenValueWarning
from fulgurite.backends.csx.contract.rules import RULES
from fulgurite.backends.csx.diagnostics import trace_errors as errors

ROWS = [row for rows in TABLE.values() for row in rows]
CORE = {"global_view", "scheduled"}
"""Rows that no other test of ``make test`` stands for."""
CSX = Path(rules.__file__).parents[1]


def check_kind_and_line(row: Misuse, outcome: Outcome) -> None:
    if row.warns:
        assert outcome.error is None
        messages = [w for w in outcome.warnings if w.category is FrozenValueWarning]
        assert [w.lineno for w in messages] == [outcome.marked]
        assert Path(messages[0].filename) == outcome.file
        return
    error = outcome.error
    if type(error) is not getattr(errors, row.error):
        raise AssertionError(f"no {row.error}") from error
    assert isinstance(error, errors.TraceError)
    if row.rule in RULES:
        text = re.sub(r"\\\{[^{}]*\}", ".*", re.escape(RULES[row.rule].text))
        assert re.fullmatch(text, error.what), f"not the text of rule {row.rule}"
    if outcome.marked:
        assert error.line is not None
        assert (Path(error.line.file), error.line.line) == (outcome.file, outcome.marked)


def test_every_rule_has_a_program_or_the_table_says_why_not() -> None:
    tried = {row.rule for row in ROWS}
    assert tried | {*WITHOUT_PROGRAM} == {*RULES, *OTHER_ROOMS}
    assert tried & {*WITHOUT_PROGRAM} == set()


def test_every_error_has_a_page_that_says_its_cause() -> None:
    kinds = {name for name, one in vars(errors).items() if isinstance(one, type)}
    steps = {name for name in kinds if issubclass(getattr(errors, name), errors.TraceError)}
    assert causes().keys() == steps - {"TraceError"} | {FrozenValueWarning.__name__}
    for name, text in causes().items():
        page = (PAGES / f"{name}.md").read_text(encoding="utf-8")
        assert page.startswith(f"# {name}\n\n{text}\n"), (
            "run: python tests/tools/document_errors.py"
        )
        assert "**On a wafer**" in text
    assert (DOCS / "errors.md").read_text(encoding="utf-8") == index()


@pytest.mark.parametrize(("error", "room"), OTHER_ROOMS.values(), ids=OTHER_ROOMS)
def test_a_room_that_the_table_names_knows_the_error(error: str, room: str) -> None:
    assert any(error in path.read_text(encoding="utf-8") for path in (CSX / room).glob("*.py"))


@pytest.mark.fits
@pytest.mark.parametrize(
    "row",
    [pytest.param(row, marks=[pytest.mark.core] * (row.name in CORE)) for row in ROWS],
    ids=[row.name for row in ROWS],
)
def test_a_misuse_is_named_with_its_line_and_remedy(row: Misuse, tmp_path: Path) -> None:
    outcome = run(row.bad, tmp_path)
    check_kind_and_line(row, outcome)
    text = message(row, outcome)
    assert len(text.splitlines()) <= 12
    assert "site-packages" not in text
    assert "model.py" in text
    assert ("Use " if row.warns else "Remedy: ") in text
    page = (PAGES / f"{name_of(row)}.md").read_text(encoding="utf-8")
    assert ours(row, outcome) in page, "run: python tests/tools/document_errors.py"


@pytest.mark.numbers
@pytest.mark.parametrize("row", [row for row in ROWS if row.good], ids=lambda row: row.name)
def test_its_corrected_form_runs_as_in_stock(row: Misuse, tmp_path: Path) -> None:
    assert row.good is not None
    ours = run(row.good, tmp_path)
    assert ours.error is None
    assert ours.warnings == []
    if row.same:
        stock = run(row.good, tmp_path, static=False)
        assert ours.losses == pytest.approx(stock.losses, rel=1e-5)
    assert len(ours.losses) == 4
