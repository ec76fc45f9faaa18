"""What a check makes of a file: what is wrong with it, and calls in place of objects."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from fulgurite.config.document.ignored import note_for
from fulgurite.config.document.problems import Path, Problem
from fulgurite.config.types.classes import Classes


@dataclass
class Report:
    """What a check found so far.

    Args:
        classes: where names are looked up.
        problems: mistakes.
        notes: what the file says that has no effect here.
        imports: what a run of it imports: modules, classes and functions by their paths.
    """

    classes: Classes
    problems: list[Problem] = field(default_factory=list)
    notes: list[Problem] = field(default_factory=list)
    imports: list[Problem] = field(default_factory=list)

    def problem(self, path: Path, text: str) -> None:
        """Add a mistake."""
        self.problems.append(Problem(path, text))

    def note_ignored(self, path: Path) -> bool:
        """Note a key that is ignored here; returns whether it is one."""
        note = note_for(path)
        if note is not None:
            self.notes.append(Problem(path, note))
        return note is not None

    def fork(self) -> Report:
        """An empty report of the same file, for one of several ways to read a value."""
        return replace(self, problems=[], notes=[], imports=[])

    def merge(self, other: Report) -> None:
        """Add what another report has found."""
        self.problems += other.problems
        self.notes += other.notes
        self.imports += other.imports

    def names_code(self, path: Path, name: str) -> None:
        """Remember that a name in the file is imported when it runs."""
        if "." in name:
            self.imports.append(Problem(path, f"imports {name}"))


@dataclass(frozen=True, kw_only=True)
class Call:
    """A class or function with checked arguments, to be called later.

    Args:
        path: where it stands.
        name: as the file has it.
        target: the class or function; None where it is only named.
        arguments: those that were given, of the type that the signature asks for; where it asks
            for objects, Calls.
        skip: parameters that a file cannot give.
        nested: arguments that are calls to be made with more than a file has, or lists of them.
    """

    path: Path
    name: str
    target: Callable[..., Any] | None
    arguments: dict[str, Any]
    skip: frozenset[str] = frozenset()
    nested: dict[str, Any] = field(default_factory=dict)

    def __call__(self, *first: Any, **more: Any) -> Any:
        """Call it, with arguments that a file cannot have in front."""
        assert self.target is not None
        return self.target(*first, **self.made(), **more)

    def made(self) -> dict[str, Any]:
        """The arguments that were given, objects among them made."""
        return {name: made(value) for name, value in self.arguments.items()}


@dataclass(frozen=True)
class Later:
    """An object that jsonargparse describes, to be made later."""

    parser: ArgumentParser
    parsed: Namespace

    def __call__(self) -> Any:
        """Make it."""
        return self.parser.instantiate(self.parsed).value


def made(value: Any) -> Any:
    """A value with each Call in it made; lists and mappings are new ones each time."""
    if isinstance(value, (Call, Later)):
        return value()
    if isinstance(value, (list, tuple)):
        return type(value)(made(item) for item in value)
    if isinstance(value, dict):
        return {key: made(item) for key, item in value.items()}
    return value


def walk(value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    """Each value in a value, itself first, and where it stands."""
    yield path, value
    inner = vars(value) if isinstance(value, Namespace) else value
    several = enumerate(inner) if isinstance(inner, (list, tuple)) else ()
    for key, item in inner.items() if isinstance(inner, Mapping) else several:
        yield from walk(item, (*path, key))
