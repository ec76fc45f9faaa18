"""What is wrong with a parameter file: all of it at once, each problem with its place.

A *path* is where a value stands in the data, ``("trainer", "init", "callbacks", 0)``; its dotted
key is what people write, ``trainer.init.callbacks.0``; a *place* is where it stands in the text.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

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


def refusal(place: Place, text: str, path: Path = ()) -> ParameterFileError:
    """The error of a file with one problem."""
    return ParameterFileError([(place, Problem(path, text))])


def described(place: Place, problem: Problem) -> str:
    """``file:line:column: dotted.key: what is wrong``, in one line whatever the file holds."""
    key = f" {dotted(problem.path)}:" if problem.path else ""
    return "".join(map(_printable, f"{place}:{key} {problem.text}"))


def _printable(character: str) -> str:
    if character.isprintable():
        return character
    return character.encode("unicode_escape").decode()


def dotted(path: Path) -> str:
    """A path as people write it."""
    return ".".join(str(part) for part in path)


def shown(value: Any) -> str:
    """A value as an error shows it: as YAML writes it, and short, however large or deep it is."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int) and value.bit_length() > 300:
        return "a huge number"
    if isinstance(value, (str, int, float)):
        text = repr(value)
        return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters)"
    if isinstance(value, Mapping):
        keys = ", ".join(str(key)[:30] for key in list(value)[:5])
        return f"a mapping of {keys}{', ...' if len(value) > 5 else ''}" if value else "{}"
    if isinstance(value, (list, tuple)):
        return f"a list of {len(value)}" if value else "[]"
    return f"a {type(value).__name__}"


def listed(names: Iterable[str], last: str = "or") -> str:
    """``a, b or c``."""
    *others, final = names
    return f"{', '.join(others)} {last} {final}" if others else final


def with_article(noun: str) -> str:
    """``an optimizer``, ``a model``."""
    return f"{'an' if noun[:1].lower() in 'aeiou' else 'a'} {noun}"


def nearest(name: object, known: Iterable[str]) -> str:
    """`` Did you mean 'name'?`` for the known name most like it, in any case; else nothing."""
    near = _most_like(name, known)
    return f" Did you mean {near!r}?" if near else ""


def missing(key: str, given: Iterable[str], path: Path) -> Problem:
    """What to say where a key is not among those that are given: one of them may be misspelt."""
    if near := _most_like(key, given, cutoff=0.8):
        return Problem((*path, near), f"no such key. Did you mean {key!r}?")
    return Problem(path, f"{key}: required, and not given.")


def is_misspelt(key: str, unknown: Iterable[object], known: Iterable[str]) -> bool:
    """Whether one of the keys that nobody knows is told to be meant for this one."""
    return any(_most_like(one, known) == key for one in unknown)


def _most_like(name: object, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    by_lower = {other.lower(): other for other in known}
    near = difflib.get_close_matches(str(name).lower(), by_lower, n=1, cutoff=cutoff)
    return by_lower[near[0]] if near else None


def choices(name: object, known: Iterable[str]) -> str:
    """The known name most like it; without one, or if there are few, all of them."""
    names = list(known)
    near = nearest(name, names)
    if not names or (near and len(names) > 8):
        return near
    most = 40
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{near} Known: {', '.join(names[:most])}{more}."
