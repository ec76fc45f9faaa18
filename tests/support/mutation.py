"""Mutants: small changes of the product that its tests must find, and copies of it to make them in.

``tests/tools/mutants.toml`` has them, a table each. A mutant's *site* is the statement that it
changes. ``tests/tools/mutants.py`` makes one mutant after the other in a *copy*: a folder with the
files of this checkout, and with the package as a wheel would install it.
"""

from __future__ import annotations

import ast
import itertools
import os
import shutil
import subprocess
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "tests" / "tools" / "mutants.toml"
BESIDE = ("reached.py", "reached_plugin.py")  # modules for the processes of the tests

PACKAGES = {"trainer": "", "loops": "loops", "callbacks": "callbacks", "backends": "backends"}
"""The folders of the product, and where each lies in the package."""

_BEGINS_NOTHING = ("elif ", "elif(")  # a statement of its own to ast, and to the text none


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One small change of the product.

    Args:
        name: how the tool and the table call it.
        file: which it changes, from the root of the checkout.
        old: text of that file, which is there once.
        new: what stands there instead.
        breaks: what goes wrong for users, as a sentence without its full stop.
        within: a function or class (``Class.method``) in which ``old`` is looked for; empty: all.
    """

    name: str
    file: str
    old: str
    new: str
    breaks: str
    within: str = ""

    def at(self, source: str) -> int:
        """Where in the file's text the site begins.

        Raises:
            ValueError: the text is not there exactly once.
        """
        begin, end = _span(source, self.within) if self.within else (0, len(source))
        found = source.count(self.old, begin, end)
        if found != 1:
            where = f"{self.within} of {self.file}" if self.within else self.file
            raise ValueError(f"{self.name}: its old text is {found} times in {where}, not once")
        return source.index(self.old, begin, end)

    def mutated(self, source: str) -> str:
        """The file's text with the change."""
        at = self.at(source)
        return source[:at] + self.new + source[at + len(self.old) :]


def mutants() -> list[Mutant]:
    """All of them, in the order of the table."""
    rows = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    return [Mutant(name=name, **row) for name, row in rows.items()]


def _span(source: str, name: str) -> tuple[int, int]:
    """Where a function or class begins and ends in a text."""
    found: ast.AST = ast.parse(source)
    for part in name.split("."):
        body: list[ast.stmt] = getattr(found, "body", [])
        inside = [one for one in body if getattr(one, "name", None) == part]
        if len(inside) != 1:
            raise ValueError(f"there are {len(inside)} definitions of {name}, not one")
        [found] = inside
    assert isinstance(found, ast.stmt)
    starts = [0, *itertools.accumulate(len(line) for line in source.splitlines(keepends=True))]
    assert found.end_lineno is not None
    return starts[found.lineno - 1], starts[found.end_lineno]


def _statements(node: ast.AST, line: int, inside: bool = False) -> Iterator[ast.stmt]:
    """The statements of functions that have a line in them, the outermost first."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            assert child.end_lineno is not None
            if not _first_line(child) <= line <= child.end_lineno:
                continue
            if inside:
                yield child
        is_function = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef))
        yield from _statements(child, line, inside or is_function)


def _first_line(statement: ast.stmt) -> int:
    decorators = getattr(statement, "decorator_list", [])
    return min([statement.lineno, *(one.lineno for one in decorators)])


def place_before(source: str, at: int) -> int | None:
    """The line, counted from 0, before which a statement runs whenever the one at a place does.

    None where that is in no function: it runs when the module is imported.
    """
    lines, line = source.splitlines(), source.count("\n", 0, at) + 1
    stripped = source[at:].lstrip()
    line += source.count(
        "\n", at, len(source) - len(stripped)
    )  # a site may begin with a line's end
    for statement in reversed([*_statements(ast.parse(source), line)]):
        first = _first_line(statement) - 1
        text = lines[first].lstrip()
        alone = len(lines[first]) - len(text) == statement.col_offset or text.startswith("@")
        if alone and not text.startswith(_BEGINS_NOTHING):
            return first
    return None


def instrumented(source: str, sites: Iterable[Mutant]) -> tuple[str, list[str]]:
    """A text in which each site says that it was reached, and the names of those that cannot."""
    lines, silent = source.splitlines(keepends=True), []
    before: dict[int, str] = {}
    for one in sites:
        line = place_before(source, one.at(source))
        if line is None:
            silent.append(one.name)
            continue
        indent = lines[line][: len(lines[line]) - len(lines[line].lstrip())]
        call = f'{indent}__import__("reached").reached({one.name!r})\n'
        before[line] = before.get(line, "") + call
    text = "".join(before.get(i, "") + line for i, line in enumerate(lines))
    ast.parse(text)
    return text, silent


@dataclass(slots=True)
class Copy:
    """The files of this checkout once more, and the package of them as if it were installed.

    ``checkout`` and ``installed`` share each file of the product: to change one changes both.

    Args:
        folder: where; what is there is removed.
    """

    folder: Path
    _changed: set[str] = field(default_factory=set, init=False)

    def __post_init__(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        for name in filter(None, listed.stdout.split("\0")):
            if (ROOT / name).is_file():
                (self.checkout / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.checkout / name)
        for room, package in PACKAGES.items():
            for path in (self.checkout / room).rglob("*"):
                link = (
                    self.installed / "fulgurite" / package / path.relative_to(self.checkout / room)
                )
                if path.is_file():
                    link.parent.mkdir(parents=True, exist_ok=True)
                    os.link(path, link)
        for module in BESIDE:
            shutil.copy2(Path(__file__).with_name(module), self.installed)

    @property
    def checkout(self) -> Path:
        """The files of this checkout."""
        return self.folder / "checkout"

    @property
    def installed(self) -> Path:
        """A folder for ``PYTHONPATH``: with the package, and with ``reached``."""
        return self.folder / "installed"

    def variables(self) -> dict[str, str]:
        """The environment of a process that is to import the copy."""
        before = os.environ.get("PYTHONPATH")
        path = os.pathsep.join([str(self.installed), *([before] if before else [])])
        return {**os.environ, "PYTHONPATH": path}

    def change(self, file: str, text: str) -> None:
        """Let a file have another text."""
        path = self.checkout / file
        path.write_text(text, encoding="utf-8")
        # Python takes the compiled file of a source of the same second and size for its own
        stamp = 10**9 + next(_stamps)
        os.utime(path, (stamp, stamp))
        self._changed.add(file)

    def restore(self) -> None:
        """Let all files be as they are in the checkout."""
        for file in self._changed:
            self.change(file, (ROOT / file).read_text(encoding="utf-8"))
        self._changed.clear()


_stamps = itertools.count()
