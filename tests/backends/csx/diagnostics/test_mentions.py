"""Names in a function's source: which are set, which are global variables, and on which line."""

from __future__ import annotations

import linecache
from typing import Any

import pytest

from fulgurite.backends.csx.diagnostics.mentions import Mention, mentions

SOURCE = """\
net = other = items = object()


class Owner:
    def sets(self, flag):
        other.trainer.should_stop = flag
        self.seen += 1
        del (
            self
            .gone
        )

    def reads(self, net):
        if self.trainer.should_stop:
            return net.other, [items for items in self.items], items

    def private(self):
        self.__hidden = getattr(self, "named")

    def inner(self):
        def inside(default=other):
            self.trainer.seen = 1
        return inside, lambda: net


pair = lambda: net, lambda: other.trainer
"""


def made(file: str) -> dict[str, Any]:
    """What the source defines, as if it were from that file."""
    names: dict[str, Any] = {}
    exec(compile(SOURCE, file, "exec"), names)
    return names


@pytest.fixture
def with_source(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """As a notebook's cells are: the source is known, and no file is there."""
    file = "a cell of a notebook"
    lines = SOURCE.splitlines(keepends=True)
    monkeypatch.setitem(linecache.cache, file, (len(SOURCE), None, lines, file))
    return made(file)


def of(function: Any) -> tuple[Mention, ...]:
    """What a function names."""
    return mentions(function.__code__)


def test_attributes_that_are_set_are_told_with_owner_and_line(with_source: dict[str, Any]) -> None:
    found = [one for one in of(with_source["Owner"].sets) if one.is_set]
    assert [(one.owner, one.name, one.line) for one in found] == [
        ("trainer", "should_stop", 6),
        ("self", "seen", 7),
        ("self", "gone", 10),
    ]


def test_an_attribute_that_is_read_is_not_set(with_source: dict[str, Any]) -> None:
    assert not any(one.is_set for one in of(with_source["Owner"].reads))


def test_arguments_and_attributes_are_no_global_variables(with_source: dict[str, Any]) -> None:
    found = {one.name for one in of(with_source["Owner"].reads) if one.is_global}
    assert found == {"items"}  # outside of the comprehension whose variable has that name too


def test_a_private_attribute_has_the_name_that_it_has_at_run_time(
    with_source: dict[str, Any],
) -> None:
    found = {one.name for one in of(with_source["Owner"].private)}
    assert {"_Owner__hidden", "named"} <= found


def test_a_function_inside_has_its_own(with_source: dict[str, Any]) -> None:
    found = of(with_source["Owner"].inner)
    assert {one.name for one in found if one.is_global} == {"other"}
    assert not any(one.is_set for one in found)
    inside, shown = with_source["Owner"]().inner()
    assert [one.name for one in of(inside) if one.is_set] == ["seen"]
    assert [one.name for one in of(shown)] == ["net"]


def test_of_lambdas_in_one_line_none_misses_a_name(with_source: dict[str, Any]) -> None:
    first, second = with_source["pair"]
    assert {one.name for one in of(first) if one.is_global} == {"net"}
    assert {one.name for one in of(second) if one.is_global} == {"other"}


def test_without_a_source_every_name_may_be_anything() -> None:
    found = of(made("there is no such file")["Owner"].sets)
    assert {one.name for one in found} == {"other", "trainer", "should_stop", "seen", "gone"}
    assert all(one.is_set and one.is_global and one.owner is None for one in found)
    assert {one.line for one in found} == {5}


def test_a_file_that_is_no_python_is_no_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(linecache.cache, "page", (4, None, ["def sets(\n"], "page"))
    assert all(one.owner is None for one in of(made("page")["Owner"].sets))
