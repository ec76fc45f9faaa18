"""The mutants of tests/tools/mutants.toml can be made; tests/tools/mutants.py tries them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from mutants import BEGIN, END, PAGE, Reach, first_of, ordered
from mutation import PACKAGES, ROOT, Mutant, instrumented, mutants, place_before

MUTANTS = mutants()
LEAST = 60

ROOMS = {
    *("loops", "callbacks", "backends", "backends/checkpoints", "trainer", "trainer/commands"),
    *("trainer/nn", "trainer/optim", "trainer/runners"),
    *(f"trainer/config/{room}" for room in ("document", "types", "legacy", "schema", "run")),
    *(
        f"backends/csx/{room}"
        for room in (
            *("diagnostics", "graph", "compile", "costs", "state", "hyperparams", "contract"),
            *("capture", "program", "plugins"),
        )
    ),
}

SOURCE = '''
"""Text."""

LIMIT = 3


class Room:
    @property
    def size(self):
        """Text."""
        if self.a:
            return 1
        elif self.b:
            return 2
        return [
            3,
        ]


def size():
    return 1
'''


def text_of(mutant: Mutant) -> str:
    return (ROOT / mutant.file).read_text(encoding="utf-8")


def mutant(old: str, new: str = "", within: str = "") -> Mutant:
    return Mutant(name="one", file="x.py", old=old, new=new, breaks="it", within=within)


@pytest.mark.parametrize("one", MUTANTS, ids=lambda one: one.name)
def test_a_mutant_changes_one_place_of_a_file_and_can_be_parsed(one: Mutant) -> None:
    before, after = text_of(one), one.mutated(text_of(one))
    assert ast.dump(ast.parse(before)) != ast.dump(ast.parse(after))


def test_there_are_enough_and_each_is_another() -> None:
    assert len(MUTANTS) >= LEAST
    assert len({(one.file, one.old, one.within) for one in MUTANTS}) == len(MUTANTS)
    assert {one.file.partition("/")[0] for one in MUTANTS} == {*PACKAGES}
    assert [one.name for one in MUTANTS if one.breaks.endswith(".") or "|" in one.breaks] == []


def test_each_room_has_one() -> None:
    folders = ([str(folder) for folder in Path(one.file).parents] for one in MUTANTS)
    assert {next(one for one in above if one in ROOMS) for above in folders} == ROOMS


def test_each_file_with_mutants_can_say_who_reaches_them() -> None:
    for file in {one.file for one in MUTANTS}:
        here = [one for one in MUTANTS if one.file == file]
        text, silent = instrumented(text_of(here[0]), here)
        assert text.count("""__import__("reached")""") == len(here) - len(silent)


def test_a_text_that_is_there_twice_is_no_mutant_unless_one_function_has_it_once() -> None:
    with pytest.raises(ValueError, match=r"2 times in x\.py, not once"):
        mutant("return 1").at(SOURCE)
    assert mutant("return 1", "return 0", within="size").mutated(SOURCE).endswith("return 0\n")
    with pytest.raises(ValueError, match=r"0 times in size of x\.py"):
        mutant("return 2", within="size").at(SOURCE)


@pytest.mark.parametrize(
    ("old", "line"),
    [
        ("LIMIT = 3", None),  # runs when the module is imported
        ("self.a", "        if self.a:"),
        ("self.b", "        if self.a:"),  # before an elif nothing can stand
        ("return 2", "            return 2"),
        ("\n            return 2", "            return 2"),
        ("            3,", "        return ["),
    ],
)
def test_a_site_is_noted_before_the_statement_that_it_is_in(old: str, line: str | None) -> None:
    found = place_before(SOURCE, mutant(old).at(SOURCE))
    assert (None if found is None else SOURCE.splitlines()[found]) == line


def test_the_nearest_and_cheapest_tests_come_first() -> None:
    near, far = "tests/loops/test_lean.py", "tests/trainer/test_cli.py"
    seconds = {f"{far}::a": 0.01, f"{far}::b": 0.02, f"{near}::c": 0.1, f"{near}::d": 30.0}
    reach = Reach(seconds=seconds, by={"one": [f"{near}::d", f"{far}::a", f"{far}::b"]})
    one = Mutant(name="one", file="loops/lean.py", old="", new="", breaks="")
    tests = ordered(one, reach, {f"{far}::b"})
    assert tests == [f"{near}::c", f"{far}::a", f"{near}::d"]  # c: it may have been too early
    assert first_of(tests, 0.1, reach) == tests[:1]
    assert first_of(tests, 60.0, reach) == tests


def test_the_table_has_no_others() -> None:
    page = PAGE.read_text(encoding="utf-8")
    table = page[page.index(BEGIN) : page.index(END)]
    rows = [line for line in table.splitlines() if line.startswith("| ")]
    _, *named = [row.removeprefix("| ").partition(" |")[0] for row in rows]
    assert named
    assert {*named} <= {one.name for one in MUTANTS}
