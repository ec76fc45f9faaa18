"""What is wrong with a parameter file: all of it at once, each problem with its place.

A *path* is where a value stands in the data, ``("trainer", "init", "callbacks", 0)``; its dotted
key is what people write, ``trainer.init.callbacks.0``; a *place* is where it stands in the text.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass

Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """A line and a column of a text, both from 1; or what else a value came from."""

    source: str
    line: int | None = None
    column: int | None = None

    def __str__(self) -> str:
        return ":".join(str(part) for part in (self.source, self.line, self.column) if part)


@dataclass(frozen=True, slots=True)
class Problem:
    """One mistake, or one thing to know: where it is in the data, and what."""

    path: Path
    text: str


class ParameterFileError(ValueError):
    """A parameter file that cannot be used. Its text has a line for each problem.

    Args:
        problems: what is wrong, with the place of each.
    """

    def __init__(self, problems: Iterable[tuple[Place, Problem]]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(described(*problem) for problem in self.problems))


def described(place: Place, problem: Problem) -> str:
    """``file:line:column: dotted.key: what is wrong``."""
    key = f" {dotted(problem.path)}:" if problem.path else ""
    return f"{place}:{key} {problem.text}"


def dotted(path: Path) -> str:
    """A path as people write it."""
    return ".".join(str(part) for part in path)


def nearest(name: object, known: Iterable[str]) -> str:
    """`` Did you mean 'name'?`` for the known name most like it, in any case; else nothing."""
    by_lower = {other.lower(): other for other in known}
    near = difflib.get_close_matches(str(name).lower(), by_lower, n=1, cutoff=0.6)
    return f" Did you mean {by_lower[near[0]]!r}?" if near else ""
