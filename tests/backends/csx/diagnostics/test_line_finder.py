"""The line after which something is another: in a function, and in one that it calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from fulgurite.backends.csx.diagnostics.line_finder import LineFinder

NAMES = ("count", "mode", "seen")


class Module:
    """Its step changes what the test looks at."""

    def __init__(self) -> None:
        self.count, self.mode, self.seen = 0, "a", 0

    def step(self) -> int:
        before = self.count
        self.count += 1  # count
        self.helper(before)
        return self.seen + self.count

    def helper(self, before: int) -> None:
        if before == 0:
            self.mode = "b"  # mode
        for _ in range(2):
            self.seen += 1  # seen


@pytest.fixture
def module() -> Module:
    return Module()


def changes(module: Module) -> Callable[[], Iterator[SimpleNamespace]]:
    """What is not as it is now."""
    before = dict(vars(module))

    def found() -> Iterator[SimpleNamespace]:
        for name, value in before.items():
            if vars(module)[name] != value:
                yield SimpleNamespace(name=name)

    return found


@pytest.mark.parametrize("name", NAMES)
def test_it_is_the_line_that_changed_it_and_no_later_one(module: Module, name: str) -> None:
    finder = LineFinder()
    with finder.watching(changes(module)):
        module.step()
    line = finder.found[name]
    assert line.file == __file__
    with open(__file__, encoding="utf-8") as file:
        assert file.readlines()[line.line - 1].rstrip().endswith(f"# {name}")
    assert line.function == ("step" if name == "count" else "helper")
