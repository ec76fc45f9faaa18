"""YAML as files have it: values, places, what is refused, overrides, the environment."""

from __future__ import annotations

import inspect
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fulgurite.config.document.nodes import MOST_LEVELS, plain_scalar
from fulgurite.config.document.problems import ParameterFileError, Place, shown
from fulgurite.config.document.reading import (
    MOST_BYTES,
    parse,
    read,
    with_environment,
    with_overrides,
)


def refusal(text: str) -> str:
    with pytest.raises(ParameterFileError) as caught:
        parse(text, "f")
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(("1e-3", 0.001), ("1.e-3", 0.001), (".5", 0.5), ("1e3", 1000.0), ("-2", -2), ("+2", 2)),
        *(("1_000", 1000), ("0x10", 16), ("0o17", 15), ("0b11", 3), ("0", 0), ("-0", 0)),
        *(("true", True), ("FALSE", False), ("null", None), ("~", None), ("", None)),
        *(("yes", "yes"), ("off", "off"), ("NaN", "NaN"), ("2026-01-01", "2026-01-01")),
        *(("12:30:45", "12:30:45"), ("1.2.3", "1.2.3"), ("0b", "0b"), ("'3'", "3")),
        *(("!!str 3", "3"), ("!!float 3", 3.0), (".inf", math.inf), ("-.Inf", -math.inf)),
        *((r"C:\runs\new", r"C:\runs\new"), ("[a, {b: 1}]", ["a", {"b": 1}])),
    ],
)
def test_a_value_is_what_yaml_1_2_says(text: str, value: Any) -> None:
    found = parse(f"a: {text}", "f").data["a"]
    assert found == value
    assert type(found) is type(value)


def test_nan_is_a_number() -> None:
    assert math.isnan(parse("a: .nan", "f").data["a"])


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a: 007", "f:1:4: a: has a leading zero"),
        ("a: 0x" + "f" * 5000, "f:1:4: a: is a number of 5002 digits"),
        ("a: 1e999", "f:1:4: a: is too large for a number: '1e999'. Infinity is .inf."),
        ("a: !!int b", "f:1:4: a: expected a whole number; got 'b'."),
        ("a: !!bool yes", "f:1:4: a: expected true or false; got 'yes'."),
        ("a: !mine b", "f:1:4: a: has the tag !mine"),
        ("a: !!set {b}", "f:1:4: a: has the tag !!set"),
        ("a: <<", "f:1:4: a: << stands for no value"),
        ("{[1]: 2}", "f:1:2: ?: a key must be a word; got a list or mapping."),
        ("? \n: 1", "a key must be a word; got nothing"),
        ("null: 1", "a key must be a word; got null"),
        ("1.5: 1", "a key must be a word; got 1.5"),
        ("<<: {a: 1}\n<<: {b: 1}", "f:2:1: <<: is given twice, first at line 1."),
        ("", "f: is empty."),
        ("# nothing\n", "f: is empty."),
        ("a: \x00", "f:1:4: is not text: it holds the character '\\x00'"),
        ("a: [1\nb: 2\n", "f:2:2: is not YAML: expected ',' or ']'"),
        ("a: 'b\n\n", "f:1:4: is not YAML: found unexpected end of stream."),
    ],
)
def test_what_is_refused_has_a_place_and_a_remedy(text: str, told: str) -> None:
    assert told in refusal(text)


@pytest.mark.parametrize("begin", ["[", "{a: ", "- ", "? "])
@pytest.mark.parametrize("limit", [1000, 100_000])
def test_depth_is_refused_whatever_pythons_limit_is(begin: str, limit: int) -> None:
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(limit)
    try:
        assert f"deeper than {MOST_LEVELS} levels" in refusal(begin * 100_000)
    finally:
        sys.setrecursionlimit(before)


def test_no_frames_left_is_a_refusal_too() -> None:
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack()) + 100)
    try:
        parse("[" * 45 + "]" * 45, "f")
    except ParameterFileError as error:
        told = str(error)
    finally:
        sys.setrecursionlimit(before)
    assert "recursion limit" in told


@pytest.mark.parametrize(
    "text",
    [
        "a: &a [1,1,1,1,1,1,1,1,1]\n"
        + "".join(
            f"{k}: &{k} [{','.join([f'*{j}'] * 9)}]\n"
            for j, k in zip("abcdefg", "bcdefgh", strict=True)
        ),
        "a: &a {x: 1}\n"
        + "".join(f"k{i}: {{<<: [{','.join(['*a'] * 200)}]}}\n" for i in range(200)),
        "a: [" + "1, " * 30_000 + "]",
        "".join(f"k{i}: {i}\n" for i in range(30_000)),
    ],
    ids=["aliases", "merges", "list", "mapping"],
)
def test_no_file_takes_long(text: str) -> None:
    begin = time.perf_counter()
    assert "stands for more than" in refusal(text)
    assert time.perf_counter() - begin < 60  # 3 s on a quiet machine; it would be hours


def test_aliases_to_themselves_are_refused() -> None:
    assert "contains itself" in refusal("a: &a\n  b: *a\n")
    assert "contains itself" in refusal("a: &a {<<: *a}\n")


def test_merges_are_overridden_by_own_keys_and_by_earlier_ones() -> None:
    text = "a: &a {x: 1, y: 1}\nb: &b {y: 2, z: 2}\nc: {<<: [*a, *b], z: 3, w: 3}\n"
    document = parse(text, "f")
    assert document.data["c"] == {"z": 3, "w": 3, "x": 1, "y": 1}
    assert document.place(("c", "z")) == Place("f", 3, 19)
    assert document.place(("c", "y")) == Place("f", 1, 14)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_files_of_other_editors_are_read(tmp_path: Path, encoding: str, newline: str) -> None:
    file = tmp_path / "a.yaml"
    file.write_bytes(f"a: ü{newline}b: 1{newline}".encode(encoding))
    document = read(file)
    assert document.data == {"a": "ü", "b": 1}
    assert document.place(("b",)).line == 2


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"a: 1\nb: \xff\n", "is not UTF-8 text: byte 0xff in line 2. Save it as UTF-8."),
        (b"x" * (MOST_BYTES + 1), "more than 500000 bytes"),
        (b"PK\x03\x04binary\x00\x00", "is not text"),
    ],
)
def test_what_is_no_text_is_said_so(tmp_path: Path, content: bytes, told: str) -> None:
    file = tmp_path / "a.yaml"
    file.write_bytes(content)
    with pytest.raises(ParameterFileError, match=told):
        read(file)


def test_what_is_no_file_is_said_so(tmp_path: Path) -> None:
    (tmp_path / "digits.yaml").touch()
    with pytest.raises(ParameterFileError, match=r"Is a directory\.$"):
        read(tmp_path)
    with pytest.raises(ParameterFileError, match=r"No such file.*Did you mean 'digits.yaml'\?"):
        read(tmp_path / "digit.yaml")
    with pytest.raises(ParameterFileError, match="null byte"):
        read("a\x00b")


def test_a_dict_is_copied_and_judged_as_a_file() -> None:
    given: dict[Any, Any] = {"a": [{"b": 1}]}
    document = with_overrides(read(given), {"a.0.b": 2})
    assert (given, document.data) == ({"a": [{"b": 1}]}, {"a": [{"b": 2}]})
    given["self"] = given
    with pytest.raises(ParameterFileError, match="levels"):
        read(given)
    with pytest.raises(ParameterFileError, match=r"<dict>: a: a key must be a word"):
        read({"a": {None: 1}})


@pytest.mark.parametrize(
    ("key", "changed"),
    [
        ("a.b", {"a": {"b": 9}, "l": [1, {"c": 2}], "x.y": {"z": 3}}),
        ("l.1.c", {"a": {"b": 1}, "l": [1, {"c": 9}], "x.y": {"z": 3}}),
        ("l.0", {"a": {"b": 1}, "l": [9, {"c": 2}], "x.y": {"z": 3}}),
        ("x.y.z", {"a": {"b": 1}, "l": [1, {"c": 2}], "x.y": {"z": 9}}),
        ("n.m", {"a": {"b": 1}, "l": [1, {"c": 2}], "x.y": {"z": 3}, "n": {"m": 9}}),
        ('n."m.k"', {"a": {"b": 1}, "l": [1, {"c": 2}], "x.y": {"z": 3}, "n": {"m.k": 9}}),
        ("a.0", {"a": {"b": 1, "0": 9}, "l": [1, {"c": 2}], "x.y": {"z": 3}}),
    ],
)
def test_an_override_sets_one_key(key: str, changed: Any) -> None:
    document = parse("a: {b: 1}\nl: [1, {c: 2}]\nx.y: {z: 3}\n", "f")
    assert with_overrides(document, {key: 9}).data == changed


@pytest.mark.parametrize(
    ("key", "told"),
    [
        ("l.2", "l.2: l is a list of 2: items 0 to 1; got '2'."),
        ("l.first", "l is a list of 2: items 0 to 1; got 'first'."),
        ("a.b.c", "a.b is 1, which has no keys."),
        ("", "expected a dotted key"),
        ("a..b", "expected a dotted key"),
        (".a", "expected a dotted key"),
        ("a.", "expected a dotted key"),
        ('a."b', "expected a dotted key"),
    ],
)
def test_an_override_that_leads_nowhere_is_refused(key: str, told: str) -> None:
    document = parse("a: {b: 1}\nl: [1, {c: 2}]\n", "f")
    with pytest.raises(ParameterFileError) as caught:
        with_overrides(document, {key: 9})
    assert str(caught.value).startswith("override:")
    assert f"(set as {key!r})" in str(caught.value)
    assert told in str(caught.value)


def test_the_environment_is_put_in_where_a_file_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FULGURITE_LR", "1e-3")
    document = parse("a: ${FULGURITE_LR}\nb: x${FULGURITE_LR}\nc: $${x}\nd: '$ ${ $x'\n", "f")
    data = with_environment(document).data
    assert data == {"a": 0.001, "b": "x1e-3", "c": "${x}", "d": "$ ${ $x"}


def test_words_are_told_from_numbers() -> None:
    assert [plain_scalar(text) for text in ("1", "1e1", "x", "007")] == [1, 10.0, "x", "007"]


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (None, "null"),
        (True, "true"),
        pytest.param(10**5000, "a huge number", id="huge"),
        ("x" * 500, "'" + "x" * 59 + "... (502 characters)"),
        ({"a": 1, "b": 2}, "a mapping of a, b"),
        ({}, "{}"),
        ([1, 2], "a list of 2"),
        (object, "a type"),
    ],
)
def test_values_are_shown_short(value: Any, told: str) -> None:
    assert shown(value) == told


def test_a_pipe_is_an_error_and_no_wait(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "params.yaml")
    with pytest.raises(ParameterFileError, match="it is a pipe or a device, no file"):
        read(tmp_path / "params.yaml")
