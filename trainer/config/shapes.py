"""What may stand where in a parameter file: the few kinds of value that one is made of.

``shape.check(value, path, report)`` judges a value and returns it as the later rooms want it: plain
values of their type, sections as their dataclasses, classes as calls to be made. What is wrong goes
to the report; then what is returned is not used.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from fulgurite.config.arguments import Call, check_arguments, parser_of
from fulgurite.config.classes import Classes, Named, imported, named
from fulgurite.config.known import note_for
from fulgurite.config.problems import Path, Problem, nearest


@dataclass
class Report:
    """What a check found so far.

    Args:
        classes: where names are looked up.
        problems: mistakes.
        notes: what the file says that has no effect here.
    """

    classes: Classes
    problems: list[Problem] = field(default_factory=list)
    notes: list[Problem] = field(default_factory=list)

    def problem(self, path: Path, text: str) -> None:
        """Take down a mistake."""
        self.problems.append(Problem(path, text))

    def noted(self, path: Path) -> bool:
        """Whether a key is one that has no meaning here; it is noted then."""
        note = note_for(path)
        if note is not None:
            self.notes.append(Problem(path, note))
        return note is not None


class Shape(Protocol):
    """A kind of value."""

    def check(self, value: Any, path: Path, report: Report) -> Any:
        """The value as the later rooms want it; what is wrong goes to the report."""


@dataclass(frozen=True)
class Value:
    """A plain value of a type, as annotations write it."""

    kind: Any

    def check(self, value: Any, path: Path, report: Report) -> Any:
        """The value, of that type."""
        target = _taker(self.kind)
        wrong = check_arguments(target, {"value": value}, path)
        report.problems += [Problem(path, problem.text) for problem in wrong]
        return None if wrong else parser_of(target).parse_object({"value": value}).value


@functools.cache
def _taker(kind: Any) -> Callable[..., Any]:
    def takes(value: Any = None) -> None: ...

    takes.__annotations__["value"] = kind
    return takes


@dataclass(frozen=True)
class Keys:
    """A mapping with these keys."""

    shapes: Mapping[str, Shape]
    required: tuple[str, ...] = ()

    def check(self, value: Any, path: Path, report: Report) -> dict[str, Any]:
        """Each key that is given, checked."""
        if not is_mapping(value, path, report):
            return {}
        for key in self.required:
            if key not in value:
                report.problem(path, f"{key}: required, and not given.")
        found = {}
        for key, item in value.items():
            at = (*path, key)
            if key in self.shapes:
                found[key] = self.shapes[key].check(item, at, report)
            elif not report.noted(at):
                report.problem(at, unknown_key(key, path, self.shapes))
        return found


def is_mapping(value: Any, path: Path, report: Report) -> bool:
    """Whether a value is a mapping; it is a problem if not."""
    if isinstance(value, Mapping):
        return True
    report.problem(path, f"expected keys and values; got {value!r}.")
    return False


def unknown_key(key: object, path: Path, known: Mapping[str, Any]) -> str:
    """What to say of a key that is not known."""
    where = str(path[-1]) if path else "The file"
    return f"no such key.{nearest(key, known)} {where} takes {', '.join(known)}."


@dataclass(frozen=True)
class Section:
    """A mapping of a dataclass's fields; it becomes one.

    Args:
        target: import path of the dataclass.
    """

    target: str

    def check(self, value: Any, path: Path, report: Report) -> Any:
        """The dataclass, or None."""
        if value is None or not is_mapping(value, path, report):
            return None
        target = imported(self.target)
        given = {key: item for key, item in value.items() if not report.noted((*path, key))}
        wrong = check_arguments(target, given, path)
        report.problems += wrong
        if wrong:
            return None
        try:
            return Call(path=path, name=target.__name__, target=target, arguments=given)()
        except ValueError as error:
            report.problem(path, str(error))
            return None


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
        found = named(value, path, self.category, self.key)
        if isinstance(found, Problem):
            report.problems.append(found)
            return None
        return self.called(found, report)

    def called(self, found: Named, report: Report) -> Call | None:
        """The call of a class that was named."""
        try:
            target = report.classes.find(self.category, found.name)
        except LookupError as error:
            if not report.noted(found.name_path):
                report.problem(found.name_path, str(error))
            return None
        skip = frozenset(self.skip)
        if target is not None:
            wrong = check_arguments(target, found.arguments, found.arguments_path, skip)
            report.problems += wrong
        return Call(
            path=found.path, name=found.name, target=target, arguments=found.arguments, skip=skip
        )


@dataclass(frozen=True)
class Several:
    """A list of values of one shape; one alone stands for a list of it."""

    shape: Shape

    def check(self, value: Any, path: Path, report: Report) -> list[Any]:
        """Each item, checked."""
        if value is None:
            return []
        if not isinstance(value, list):
            return [self.shape.check(value, path, report)]
        return [self.shape.check(item, (*path, i), report) for i, item in enumerate(value)]
