"""What came from the environment is told and written as ``${NAME}``, however a text quotes it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fulgurite.config.document.problems import ParameterFileError, Problem, shown
from fulgurite.config.document.reading import Document, parse, with_environment, with_overrides

VALUES = {
    "PASSWORD": "hunter22!x",
    "TOKEN": "ey" + "J0" * 100,
    "QUOTED": 'it\'s "a" \\ secret',
    "PIN": "12345678",
    "RATE": "1e-3",
    "SHORT": "7",
    "SWITCH": "true",
    "KEY": "{user: someone, key: opensesame}",
    "LINES": '"begin\\nsecret lines\\nend"',
}


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in VALUES.items():
        monkeypatch.setenv(name, value)


def document(text: str) -> Document:
    return with_environment(parse(text, "f"))


@pytest.mark.parametrize("name", [name for name in VALUES if name not in ("SHORT", "SWITCH")])
def test_a_value_is_hidden_in_any_text(name: str) -> None:
    made = document(f"a: ${{{name}}}\n")
    value = made.data["a"]
    leaves = list(value.values()) if isinstance(value, dict) else [value]
    for leaf in leaves:
        for text in (
            str(leaf),
            repr(leaf),
            json.dumps(leaf),
            shown(leaf),
            " ".join(str(leaf).split()),
        ):
            told = made.told(Problem(("a",), f"expected a path; got {text}."))
            assert text.strip("'\"")[:8] not in told
            assert f"${{{name}}}" in told


def test_what_is_no_secret_stays() -> None:
    made = document("a: ${SWITCH}\nb: ${SHORT}\nc: ${PIN}\n")
    text = "write true or false, at least 7 and at most 123456789 or 0.12345678"
    assert made.variables.hidden(text) == text


def test_a_problem_does_not_quote_a_value() -> None:
    made = document("a: 'x://me:${PASSWORD}@host'\n")
    with pytest.raises(ParameterFileError) as caught:
        made.refuse([Problem(("a",), f"expected a number; got {made.data['a']!r}.")])
    assert str(caught.value) == "f:1:1: a: expected a number; got 'x://me:${PASSWORD}@host'."


@pytest.mark.parametrize("value", ["*hunter22", "!hunter22 a", "{hunter22", "a: b: hunter"])
def test_a_value_that_is_not_yaml_is_not_quoted(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PASSWORD", value)
    made = document("a: ${PASSWORD}\n")
    with pytest.raises(ParameterFileError, match="put quotes around it in the variable") as caught:
        made.refuse(made.variables.with_missing(()))
    assert "hunter" not in str(caught.value)


def restored(made: Document, origins: Any = None) -> Any:
    return made.variables.restored(made.data, (), origins or {})


def test_what_is_written_has_the_variables_again_and_reads_the_same() -> None:
    text = "a: ${PASSWORD}\nb: ['x://${PASSWORD}@h', '$$${SHORT}']\nc: ${KEY}\n"
    text += "d: {e: '${RATE}'}\nf: $$g\n"
    made = document(text)
    written = restored(made)
    assert written == parse(text, "f").data
    again = with_environment(Document(source="again", data=written))
    assert again.data == made.data


def test_a_literal_that_is_like_a_value_stays_as_it_is() -> None:
    assert restored(document("a: ${PASSWORD}\nb: hunter22!x\n"))["b"] == "hunter22!x"


def test_an_override_is_written_as_it_was_given() -> None:
    made = with_overrides(
        document("a: ${PASSWORD}\nb: {c: '${PIN}'}\n"), {"a": "$x", "b": {"c": 2}}
    )
    assert restored(made) == {"a": "$$x", "b": {"c": 2}}


def test_an_override_inside_of_a_value_is_not_written() -> None:
    made = with_overrides(document("a: ${KEY}\n"), {"a.user": "me"})
    with pytest.raises(TypeError, match=r"a: a key was set inside of what \$\{KEY\} stands for"):
        restored(made)


def test_variables_are_found_where_a_conversion_put_them() -> None:
    made = document("old: {a: '${PIN}'}\n")
    moved = Document(source="f", data={"new": {"a": 12345678}}, variables=made.variables)
    assert restored(moved, {("new",): ("old",)}) == {"new": {"a": "${PIN}"}}


def test_an_error_and_what_it_came_from_hide_values() -> None:
    variables = document("a: ${PASSWORD}\n").variables
    error = FileNotFoundError(2, "No such file", "/hunter22!x/a")
    error.__cause__ = KeyError("hunter22!x", 3)
    error.add_note("with hunter22!x")
    variables.hide_in(error)
    assert str(error) == "[Errno 2] No such file: '/${PASSWORD}/a'"
    assert error.__notes__ == ["with ${PASSWORD}"]
    assert error.__cause__.args == ("${PASSWORD}", 3)


@pytest.mark.parametrize("around", ["{}x", "k_{}", "n{}"])
def test_a_long_number_is_hidden_inside_a_word(
    around: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LONG", "4815162342")
    made = document("a: ${LONG}\n")
    assert made.variables.hidden(around.format("4815162342")) == around.format("${LONG}")
