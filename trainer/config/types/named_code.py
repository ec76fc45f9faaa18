"""Code that values name where no class is asked for.

Paths of functions, ``class_path`` in a value of any kind, and what stands in the arguments of a
class that is not imported.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from jsonargparse import Namespace

from fulgurite.config.document.problems import Path, Problem
from fulgurite.config.types.categories import ANY_CLASS
from fulgurite.config.types.report import Report


def wrong_names(value: Any, is_code: bool, path: Path, report: Report) -> str:
    """What is wrong with the paths in a value, before anything of it is imported; nothing if all
    is well.

    Args:
        is_code: whether the value itself is a path.
    """
    named = [*class_paths(value, path)]
    if is_code and isinstance(value, str):
        named.append((path, value))
    for at, name in named:
        report.names_code(at, name)
    return next(filter(None, (report.classes.not_allowed(name) for _, name in named)), "")


def wrong_objects(parsed: Any, report: Report) -> str:
    """What is wrong with the classes and functions that jsonargparse found in a value."""
    try:
        for target in _objects(parsed, report):
            if why := report.classes.refusal(target, ANY_CLASS):
                return f"{getattr(target, '__name__', target)} {why}"
    except LookupError as error:  # a path that jsonargparse takes and a file cannot have
        return str(error)
    return ""


def names_unseen(arguments: Any, path: Path, report: Report) -> None:
    """Remember what arguments name of a class or function that is not imported.

    What it takes is not known. So a path may be one, or a text that looks like one.
    """
    for at, name in class_paths(arguments, path):
        report.names_code(at, name)
        if wrong := report.classes.not_allowed(name):
            report.problem(at, wrong)
    for at, text in _texts(arguments, path):
        if re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", text):
            report.imports.append(Problem(at, f"imports {text}, if that is taken for a path"))


def _texts(value: Any, path: Path) -> Iterator[tuple[Path, str]]:
    """Strings and keys, but for those of ``class_path``, at any depth."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            if key != "class_path":
                yield (*path, key), str(key)
                yield from _texts(item, (*path, key))
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from _texts(item, (*path, i))
    elif isinstance(value, str):
        yield path, value


def class_paths(value: Any, path: Path) -> Iterator[tuple[Path, str]]:
    """What stands under ``class_path``, at any depth."""
    if isinstance(value, (Mapping, Namespace)):
        for key, item in vars(value).items() if isinstance(value, Namespace) else value.items():
            if key == "class_path" and isinstance(item, str):
                yield (*path, key), item
            else:
                yield from class_paths(item, (*path, key))
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from class_paths(item, (*path, i))


def _objects(parsed: Any, report: Report) -> Iterator[Any]:
    """The classes and functions that jsonargparse found, at any depth."""
    if isinstance(parsed, (Mapping, Namespace)):
        for key, item in vars(parsed).items() if isinstance(parsed, Namespace) else parsed.items():
            is_path = key == "class_path" and isinstance(item, str)
            yield from [report.classes.imported(item)] if is_path else _objects(item, report)
    elif isinstance(parsed, (list, tuple)):
        for item in parsed:
            yield from _objects(item, report)
    else:
        yield parsed
