"""A file against the tables: a plan of what to build, or all its mistakes. Nothing is built."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from fulgurite.config.document.problems import Path, Problem, nearest, shown
from fulgurite.config.document.reading import Document, read, with_environment, with_overrides
from fulgurite.config.legacy.converting import convert, is_legacy
from fulgurite.config.schema.schema import INIT, TOP, TRAINER, Init
from fulgurite.config.types.classes import Classes, module_of
from fulgurite.config.types.makes import PYTHONS, is_pythons
from fulgurite.config.types.shapes import Report


@dataclass(frozen=True, kw_only=True)
class Phase:
    """One trainer of a file, checked.

    Args:
        path: where it stands.
        init: what ``init`` says.
        stages: what ``fit``, ``validate``, ``validate_all``, ``test`` and ``predict`` say, key by
            key as their shapes made it.
    """

    path: Path
    init: Init
    stages: dict[str, dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A checked file: its trainers in order, and what it says that has no effect here.

    Args:
        imports: what a run of it imports, each where the file names it.
    """

    document: Document
    phases: tuple[Phase, ...]
    notes: tuple[Problem, ...]
    imports: tuple[Problem, ...] = ()


def check(
    file: str | os.PathLike[str] | Mapping[str, Any],
    overrides: Mapping[str, Any] | None = None,
    *,
    imports: bool = True,
) -> Plan:
    """Check a parameter file.

    Args:
        file: its path, or a dict of what it says.
        overrides: dotted keys and the values that they get.
        imports: whether what the file names is imported; else classes of the user's are only named,
            and libraries read from their source, which takes less than a second.

    Raises:
        ParameterFileError: with all mistakes.
    """
    return check_document(opened(file, overrides), imports=imports)


def opened(
    file: str | os.PathLike[str] | Mapping[str, Any], overrides: Mapping[str, Any] | None = None
) -> Document:
    """Read a parameter file, with the environment's values and overrides in it.

    A file of the old form comes in the new one, with the mistakes that its conversion found;
    overrides may name keys of either. Which variables the environment does not have is told by
    ``check_document``.

    Raises:
        ParameterFileError: it cannot be read, or a key cannot be set.
    """
    document, overrides = with_environment(read(file)), overrides or {}
    if not isinstance(document.data, Mapping) or not is_legacy(document.data):
        return with_overrides(document, overrides)
    of_new = {key: value for key, value in overrides.items() if key.partition(".")[0] in TOP}
    of_old = {key: value for key, value in overrides.items() if key not in of_new}
    return with_overrides(_converted(with_overrides(document, of_old)), of_new)


def _converted(document: Document) -> Document:
    """A document of the old form in the new one; its places stay those of the old keys."""
    new = convert(document.data)
    notes = tuple(Problem(note.path, note.text) for note in new.notes)
    made = replace(document, data=new.params, origins=new.origins, notes=notes)
    return replace(made, problems=new.problems)


def check_document(document: Document, *, imports: bool = True) -> Plan:
    """Check a file that was read; the same errors as ``check``."""
    folder = _folder_of(document)
    report = Report(Classes(imports=imports, folder=folder))
    if imports and folder is not None and folder not in sys.path:
        sys.path.insert(0, folder)  # a file names modules beside it, as a script there could
    if not isinstance(document.data, Mapping):
        text = f"expected keys and values (trainer: ...); got {shown(document.data)}."
        document.refuse(document.variables.with_missing([Problem((), text)]))
    for key in document.data:
        if key not in TOP and not report.note_ignored((key,)):
            report.problem((key,), _unknown_top(key))
    report.classes = _with_imports(document, report)
    phases = []
    for path, value in trainers(document):
        found = TRAINER.check(value, path, report)
        phases.append(Phase(path=path, init=found.pop("init", None), stages=found))
    if not phases:
        report.problem((), "trainer: required, and not given.")
    problems = [*document.problems, *_others(report.problems, document)]
    document.refuse(document.variables.with_missing(problems))
    notes, named = (*document.notes, *report.notes), tuple(report.imports)
    return Plan(document=document, phases=tuple(phases), notes=notes, imports=named)


def _others(problems: list[Problem], document: Document) -> list[Problem]:
    """Problems of the new form that no mistake in an old key led to, there or further inside."""
    old = [problem.path for problem in document.problems]
    origins = [(one, document.origin(one.path)) for one in problems]
    return [one for one, at in origins if not any(path[: len(at)] == at for path in old)]


def _unknown_top(key: object) -> str:
    if key in TRAINER.shapes:
        return "no such key here: it belongs under trainer:."
    if key in INIT:
        return "no such key here: it belongs under trainer: init:."
    return f"no such key.{nearest(key, TOP)} A file has: {', '.join(TOP)}."


def _folder_of(document: Document) -> str | None:
    source = os.path.abspath(document.source)
    return os.path.dirname(source) if os.path.exists(source) else None


def _with_imports(document: Document, report: Report) -> Classes:
    """Where names are looked up, the modules under ``imports`` among it."""
    names, modules = document.data.get("imports"), []
    names = [] if names is None else [names] if isinstance(names, str) else names
    if not isinstance(names, list):
        report.problem(("imports",), f"expected a list of modules; got {shown(names)}.")
        return report.classes
    for i, name in enumerate(names):
        if not isinstance(name, str) or not all(map(str.isidentifier, name.split("."))):
            text = f"expected the name of a module, as my.module; got {shown(name)}."
            report.problem(("imports", i), text)
            continue
        if is_pythons(name, report.classes.folder):
            report.problem(("imports", i), f"{name} {PYTHONS}")
            continue
        report.imports.append(Problem(("imports", i), f"imports {name}"))
        if report.classes.imports:
            try:
                modules.append(module_of(name))
            except ImportError as error:
                near = report.classes.missing(name)
                report.problem(("imports", i), f"cannot be imported: {error}.{near}")
    packages = frozenset(name.partition(".")[0] for name in names if isinstance(name, str))
    return replace(report.classes, modules=tuple(modules), packages=packages)


def trainers(document: Document) -> list[tuple[Path, Any]]:
    """Each trainer of the file and where it stands."""
    found = document.data.get("trainer") if isinstance(document.data, Mapping) else None
    if found is None:
        return []
    if not isinstance(found, list):
        return [(("trainer",), found)]
    phases: list[tuple[Path, Any]] = []
    for i, item in enumerate(found):
        inner = isinstance(item, Mapping) and list(item) == ["trainer"]
        path: Path = ("trainer", i, "trainer") if inner else ("trainer", i)
        phases.append((path, item["trainer"] if inner else item))
    return phases
