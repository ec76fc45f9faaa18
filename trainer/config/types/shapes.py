"""What may stand where in a parameter file: the few kinds of value that one is made of.

``shape.check(value, path, report)`` judges a value and returns it as the later rooms want it: plain
values of their type, sections as their dataclasses, classes as calls to be made. What is wrong goes
to the report; then what is returned is not used. ``shape.described(schemas)`` is the same as a JSON
Schema.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from fulgurite.config.document.problems import Path, Problem, choices, is_misspelt, shown
from fulgurite.config.types.classes import CATEGORIES, Classes, Named, named
from fulgurite.config.types.constructor_checks import constructor_error
from fulgurite.config.types.report import Call, made
from fulgurite.config.types.report import Report as Report
from fulgurite.config.types.signatures import names_of
from fulgurite.config.types.sources import Described
from fulgurite.config.types.values import call_of, check_arguments, check_value


class Shape(Protocol):
    """A kind of value."""

    def check(self, value: Any, path: Path, report: Report) -> Any:
        """The value as the later rooms want it; what is wrong goes to the report."""


@dataclass(frozen=True)
class Value:
    """A plain value of a type, as annotations write it.

    Args:
        kind: the type.
        bounds: the least and the largest number.
    """

    kind: Any
    bounds: tuple[int, int] | None = None

    def check(self, value: Any, path: Path, report: Report) -> Any:
        """The value, of that type."""
        found = check_value(self.kind, value, path, report)
        if self.bounds is not None and isinstance(found, int):
            least, most = self.bounds
            if not least <= found <= most:
                report.problem(path, f"expected {least} to {most}; got {shown(found)}.")
        return found


@dataclass(frozen=True)
class Keys:
    """A mapping with these keys."""

    shapes: Mapping[str, Shape]
    required: tuple[str, ...] = ()

    def check(self, value: Any, path: Path, report: Report) -> dict[str, Any]:
        """Each key that is given, checked."""
        if not is_mapping(value, path, report):
            return {}
        unknown = value.keys() - self.shapes
        for key in self.required:
            if key not in value and not is_misspelt(key, unknown, self.shapes):
                report.problem(path, f"{key}: required, and not given.")
        found = {}
        for key, item in value.items():
            at = (*path, key)
            if key in self.shapes:
                found[key] = self.shapes[key].check(item, at, report)
            elif not report.note_ignored(at):
                report.problem(at, unknown_key(key, path, self.shapes))
        return found


def is_mapping(value: Any, path: Path, report: Report) -> bool:
    """Whether a value is a mapping; it is a problem if not."""
    if isinstance(value, Mapping):
        return True
    report.problem(path, f"expected keys and values; got {shown(value)}.")
    return False


def unknown_key(key: object, path: Path, known: Mapping[str, Any]) -> str:
    """What to say of a key that is not known."""
    where = f" of {path[-1]}" if path and isinstance(path[-1], str) else ""
    return f"no such key{where}.{choices(key, known)}"


@dataclass(frozen=True)
class Section:
    """A mapping with the arguments of a class, a dataclass mostly; it becomes an instance.

    Args:
        of: the class; its path, if it is one of those that take long to import.
    """

    of: type[Any] | str

    def target(self, classes: Classes) -> Any:
        """The class."""
        return classes.library(self.of) if isinstance(self.of, str) else self.of

    def names(self, classes: Classes) -> list[str]:
        """The keys."""
        return names_of(self.target(classes))

    def check(self, value: Any, path: Path, report: Report) -> Any:
        """The instance, or None."""
        if value is None or not is_mapping(value, path, report):
            return None
        target, before = self.target(report.classes), len(report.problems)
        given = {key: item for key, item in value.items() if not report.note_ignored((*path, key))}
        name = str(path[-1]) if path else None
        arguments = check_arguments(target, given, path, report, name=name)
        # one that was read and not imported cannot be made
        if len(report.problems) > before or isinstance(target, Described):
            return None
        try:
            return target(**made(arguments))
        except (ValueError, TypeError) as error:
            report.problem(place_of(str(error), given, path), str(error))
            return None


def place_of(text: str, given: Mapping[str, Any], path: Path) -> Path:
    """The place of the argument that an error names first, if it names one."""
    found = {key: re.search(rf"\b{re.escape(key)}\b", text) for key in given}
    at = {match.start(): key for key, match in found.items() if match}
    if at:
        return (*path, at[min(at)])
    told = [
        key
        for key, value in given.items()
        if re.search(rf"(?<![\w.]){re.escape(str(value))}(?![\w.]\d)", text)
    ]
    return (*path, told[0]) if len(told) == 1 else path


@dataclass(frozen=True)
class OneClass:
    """A class in one of the forms of ``classes``; it becomes a call.

    Args:
        category: of ``classes.CATEGORIES``.
        skip: parameters that a file cannot give.
        key: the word for the class's name in the flat form.
    """

    category: str
    skip: tuple[str, ...] = ()
    key: str = "name"

    def check(self, value: Any, path: Path, report: Report) -> Call | None:
        """The call, or None."""
        found = named(value, path, CATEGORIES[self.category].title, self.key)
        if isinstance(found, Problem):
            report.problems.append(found)
            return None
        return self.called(found, report)

    def called(self, found: Named, report: Report) -> Call | None:
        """The call of a class that was named."""
        before = len(report.problems)
        call = call_of(found, self.category, report, frozenset(self.skip))
        if call is not None and report.classes.imports and len(report.problems) == before:
            wrong = constructor_error(call)
            if wrong:
                at = place_of(wrong, found.arguments, found.arguments_path)
                report.problem(at, wrong)
        return call


@dataclass(frozen=True)
class Several:
    """A list of values of one shape; one alone stands for a list of it.

    What is ignored here, and noted, is left out.
    """

    shape: Shape

    def check(self, value: Any, path: Path, report: Report) -> list[Any]:
        """Each item, checked."""
        if value is None:
            return []
        if isinstance(value, list):
            items = [self.shape.check(item, (*path, i), report) for i, item in enumerate(value)]
        elif isinstance(value, Mapping) and len(value) > 1 and _are_arguments(value):
            text = f"expected a list, each item as '- Name: {{arguments}}'; got {shown(value)}."
            report.problem(path, text)
            return []
        else:
            items = [self.shape.check(value, path, report)]
        return [item for item in items if item is not None]


def _are_arguments(value: Mapping[Any, Any]) -> bool:
    return all(item is None or isinstance(item, Mapping) for item in value.values())
