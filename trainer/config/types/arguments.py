"""A class's arguments against its signature: all that is wrong with them, or a Call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from fulgurite.config.document.problems import Path, Problem
from fulgurite.config.types.calls import Call as Call
from fulgurite.config.types.classes import Classes
from fulgurite.config.types.report import Report
from fulgurite.config.types.signatures import signature_of
from fulgurite.config.types.values import taken


def names_of(target: Callable[..., Any], skip: Iterable[str] = ()) -> list[str]:
    """The arguments that a file can give."""
    return [name for name in signature_of(target).parameters if name not in skip]


def check_arguments(
    target: Callable[..., Any], given: Mapping[Any, Any], path: Path, skip: Iterable[str] = ()
) -> list[Problem]:
    """All that is wrong with the arguments of a class or function."""
    report = Report(Classes())
    taken(target, given, path, report, frozenset(skip))
    return report.problems
