"""A value against the type that a signature asks for.

Mappings and lists are walked, so that each mistake has its own place; where a class is asked for,
it is named in one of the forms of ``classes``, at any depth, and becomes a ``Call``. What is left,
jsonargparse judges; the code that such a value names is looked at before and after it is imported.
"""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections import abc
from collections.abc import Callable, Hashable, Iterator, Mapping
from functools import partial
from typing import Any

from jsonargparse import ArgumentError, Namespace

from fulgurite.config.document.nodes import plain_scalar
from fulgurite.config.document.problems import Path, Problem, choices, is_misspelt, nearest, shown
from fulgurite.config.types.categories import ANY_CLASS
from fulgurite.config.types.classes import Category, Named, named
from fulgurite.config.types.report import Call, Later, Report, walk
from fulgurite.config.types.signatures import (
    LISTS,
    MAPPINGS,
    SETS,
    alternatives,
    class_of,
    is_class,
    is_collection,
    is_dataclass,
    is_read,
    literals,
    parser_of,
    signature_of,
    type_names,
)

_ANYTHING = (Any, object, inspect.Parameter.empty)
_SCALARS = (int, float, bool, types.NoneType)


def check_value(kind: Any, value: Any, path: Path, report: Report) -> Any:
    """The value as the type has it, with Calls for classes; what is wrong goes to the report."""
    kinds = alternatives(kind)
    if value is None and types.NoneType in kinds:
        return None
    if any(other in _ANYTHING for other in kinds):
        return check_untyped(value, path, report)
    if isinstance(value, (Mapping, list, tuple)):
        return _structure(kinds, value, path, report)
    return _scalar(kinds, value, path, report)


def check_untyped(value: Any, path: Path, report: Report) -> Any:
    """A value of which nothing is known: itself, but for classes by ``class_path`` in it."""
    if isinstance(value, Mapping):
        if "class_path" in value and value.keys() <= {"class_path", "init_args"}:
            return check_class(ANY_CLASS, value, path, report)
        return {key: check_untyped(item, (*path, key), report) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [check_untyped(item, (*path, i), report) for i, item in enumerate(value)]
    return value


def check_class(category: Category, value: Any, path: Path, report: Report) -> Call | None:
    """The Call of a class in one of its forms; None if there is no such class."""
    found = named(value, path, category.title)
    if isinstance(found, Problem):
        report.problems.append(found)
        return None
    return call_of(found, category, report)


def call_of(
    found: Named, category: Category | str, report: Report, skip: frozenset[str] = frozenset()
) -> Call | None:
    """The Call of a class that was named; None if there is no such class.

    Args:
        skip: parameters that a file cannot give.
    """
    try:
        target = report.classes.find(category, found.name)
    except LookupError as error:
        if not report.note_ignored(found.name_path):
            report.problem(found.name_path, str(error))
        return None
    report.names_code(found.name_path, found.name)
    arguments = found.arguments
    if target is None:
        _names_unseen(arguments, found.arguments_path, report)
    else:
        arguments = check_arguments(target, arguments, found.arguments_path, report, skip)
    return Call(path=found.path, name=found.name, target=target, arguments=arguments, skip=skip)


def check_arguments(
    target: Callable[..., Any],
    given: Mapping[Any, Any],
    path: Path,
    report: Report,
    skip: frozenset[str] = frozenset(),
    name: str | None = None,
) -> dict[str, Any]:
    """The arguments of a class or function as its signature has them.

    Args:
        skip: parameters that a file cannot give.
        name: what errors call it; its own name if None.
    """
    signature, found = signature_of(target), dict[str, Any]()
    name = name or signature.name
    known = {key: item for key, item in signature.parameters.items() if key not in skip}
    for key, value in given.items():
        at = (*path, key)
        if isinstance(key, str) and key in known:
            item = known[key]
            # many signatures have ``x: int = None``
            is_default = value is None and item.default is None
            found[key] = None if is_default else check_value(item.kind, value, at, report)
        elif isinstance(key, str) and signature.open_ended and key not in skip:
            found[key] = check_untyped(value, at, report)
        elif not report.note_ignored(at):
            takes = choices(key, known) if known else " It takes no arguments."
            report.problem(at, f"{name} takes no {shown(key)}.{takes}")
    unknown = () if signature.open_ended else given.keys() - known.keys()
    for key, item in known.items():
        if item.required and key not in given and not is_misspelt(key, unknown, known):
            kinds = alternatives(item.kind)
            kind = f" ({type_names(kinds)})" if kinds[0] not in _ANYTHING else ""
            report.problem(path, f"{name} needs {key}{kind}, which is not given.")
    return found


def _structure(kinds: tuple[Any, ...], value: Any, path: Path, report: Report) -> Any:
    """What the first type makes of a mapping or list that finds nothing wrong with it.

    If there is none, what is wrong is what the first of all finds.
    """
    first = None
    for way in _ways(kinds, value, path):
        tried = report.fork()
        made = way(tried)
        if not tried.problems:
            report.merge(tried)
            return made
        first = first or tried
    if first is None:
        report.problem(path, _expected(kinds, value))
    else:
        report.merge(first)
    return None


def _ways(kinds: tuple[Any, ...], value: Any, path: Path) -> Iterator[Callable[[Report], Any]]:
    """What a mapping or list can be taken for, one after the other."""
    is_mapping = isinstance(value, Mapping)
    walked = MAPPINGS if is_mapping else (*LISTS, *SETS)
    others = (*_SCALARS, str) if is_mapping else (*_SCALARS, str, *MAPPINGS)
    if is_mapping:
        classes = tuple(class_of(kind) for kind in kinds if is_class(kind))
        if classes:
            yield partial(_instance, classes, value, path)
        # jsonargparse last: its errors have no places within the value
        kinds = tuple(sorted(kinds, key=lambda one: not (is_collection(one) or is_dataclass(one))))
    for kind in kinds:
        if is_mapping and is_dataclass(kind):
            yield partial(_dataclass, kind, value, path)
        elif class_of(kind) in walked:
            each = _items if is_mapping else partial(_each, class_of(kind))
            yield partial(each, typing.get_args(kind), value, path)
        elif not is_class(kind) and class_of(kind) not in others:
            yield partial(_by_jsonargparse, (kind,), value, path)


def _instance(classes: tuple[type, ...], value: Any, path: Path, report: Report) -> Call | None:
    return check_class(report.classes.category_of(classes), value, path, report)


def _dataclass(kind: Any, value: Mapping[Any, Any], path: Path, report: Report) -> Call | None:
    if "class_path" in value:
        category = Category(title=kind.__name__, bases=(kind,), base_is_choice=True)
        return check_class(category, value, path, report)
    arguments = check_arguments(kind, value, path, report)
    return Call(path=path, name=kind.__name__, target=kind, arguments=arguments)


def _items(kinds: tuple[Any, ...], value: Mapping[Any, Any], path: Path, report: Report) -> Any:
    key_kind, item_kind = kinds or (Any, Any)
    found = {}
    for key, item in value.items():
        at = (*path, key)
        # YAML has made a number of it: ``0: first``
        if key_kind is str and isinstance(key, int):
            key = str(key)
        found[check_value(key_kind, key, at, report)] = check_value(item_kind, item, at, report)
    return found


def _each(origin: Any, kinds: tuple[Any, ...], value: Any, path: Path, report: Report) -> Any:
    fixed = origin is tuple and kinds and kinds[-1] is not Ellipsis
    if fixed and len(kinds) != len(value):
        report.problem(path, f"expected a list of {len(kinds)}; got {len(value)} items.")
        return None
    wanted = kinds if fixed else [kinds[0] if kinds else Any] * len(value)
    items = [check_value(wanted[i], item, (*path, i), report) for i, item in enumerate(value)]
    if origin in SETS:
        return set(items) if all(isinstance(one, Hashable) for one in items) else None
    return tuple(items) if origin is tuple else items


def _scalar(kinds: tuple[Any, ...], value: Any, path: Path, report: Report) -> Any:
    if isinstance(value, str) and str in kinds:
        return value  # jsonargparse would take "null" and "#" for None
    if isinstance(value, str):
        value = _unquoted(kinds, value)
    # jsonargparse would take "yes" for true, and what is in quotes for YAML
    impossible = _SCALARS if isinstance(value, str) else (types.NoneType,)
    plain = tuple(
        kind
        for kind in kinds
        if not is_class(kind) and not is_collection(kind) and kind not in impossible
    )
    plain = () if value is None else plain
    classes = tuple(class_of(kind) for kind in kinds if is_class(kind))
    tried = report.fork()
    found = _by_jsonargparse(plain, value, path, tried) if plain else None
    if plain and not tried.problems:
        report.merge(tried)
        return found
    # another type may take what is not of these, but none may take code that has no place here
    if any(not problem.text.startswith("expected ") for problem in tried.problems):
        report.merge(tried)
        return None
    if classes and isinstance(value, classes):
        return value  # an object, of a dict that somebody checks
    tensor = report.classes.library("torch.Tensor") if classes else None
    named = tuple(one for one in classes if one is not tensor)  # no file names a tensor
    if named and isinstance(value, str):
        return _instance(named, value, path, report)
    kinds = tuple(kind for kind in kinds if kind is not tensor) or kinds
    report.problem(path, _expected(kinds, value))
    return None


def _unquoted(kinds: tuple[Any, ...], value: str) -> Any:
    """A number in quotes where only a number can be meant."""
    number = plain_scalar(value)
    if isinstance(number, bool) or number is None:
        return value
    return number if any(kind in (int, float) for kind in kinds) else value


def _by_jsonargparse(kinds: tuple[Any, ...], value: Any, path: Path, report: Report) -> Any:
    """What jsonargparse makes of a value, or one line of what it complains about."""
    is_code = not isinstance(value, bool) and any(
        class_of(kind) in (abc.Callable, type) for kind in kinds
    )
    named = _class_paths(value, path)
    if is_code and isinstance(value, str):
        named.append((path, value))
    for at, name in named:
        report.names_code(at, name)
    # judged by their names, for jsonargparse imports what they name
    wrong = next(filter(None, (report.classes.not_allowed(name) for _, name in named)), "")
    if wrong:
        report.problem(path, wrong)
        return None
    if (is_code or named or any(map(is_read, kinds))) and not report.classes.imports:
        return value
    # a path may name the function itself, where one that makes a tensor is asked for
    is_function = isinstance(value, str) and any(class_of(one) is abc.Callable for one in kinds)
    parser = parser_of((*kinds, *((abc.Callable,) if is_function else ())))
    try:
        parsed = parser.parse_object({"value": value})
    except (ArgumentError, OverflowError, RecursionError):
        report.problem(path, _expected(kinds, value))
        return None
    wrong = _wrong_objects(parsed.value, report)
    if wrong:
        report.problem(path, wrong)
        return None
    return Later(parser, parsed) if isinstance(parsed.value, Namespace) else parsed.value


def _class_paths(value: Any, path: Path) -> list[tuple[Path, str]]:
    """What stands under ``class_path`` in a value, at any depth."""
    return [
        (at, one)
        for at, one in walk(value, path)
        if at != path and at[-1] == "class_path" and isinstance(one, str)
    ]


def _wrong_objects(parsed: Any, report: Report) -> str:
    """What is wrong with the classes and functions that jsonargparse found in a value."""
    try:
        for at, one in walk(parsed, ()):
            is_path = at[-1:] == ("class_path",) and isinstance(one, str)
            target = report.classes.imported(one) if is_path else one
            if why := report.classes.refusal(target, ANY_CLASS):
                return f"{getattr(target, '__name__', target)} {why}"
    except LookupError as error:  # a path that jsonargparse takes and a file cannot have
        return str(error)
    return ""


def _names_unseen(arguments: Any, path: Path, report: Report) -> None:
    """Remember what arguments name of a class or function that is not imported.

    What it takes is not known. So a path may be one, or a text that looks like one.
    """
    for at, name in _class_paths(arguments, path):
        report.names_code(at, name)
        if wrong := report.classes.not_allowed(name):
            report.problem(at, wrong)
    for at, value in walk(arguments, path):
        inside = at[len(path) :]
        for text in (*inside[-1:], value) if "class_path" not in inside else ():
            if isinstance(text, str) and re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", text):
                report.imports.append(Problem(at, f"imports {text}, if that is taken for a path"))


def _expected(kinds: tuple[Any, ...], value: Any) -> str:
    """What was expected, what was given, and what to write instead where that is plain."""
    return f"expected {type_names(kinds)}; got {shown(value)}.{_hint(kinds, value)}"


def _hint(kinds: tuple[Any, ...], value: Any) -> str:
    """What to write instead, where that is plain."""
    word = value.lower() if isinstance(value, str) else value
    booleans = ("yes", "no", "on", "off", "y", "n", "true", "false", 0, 1)
    if bool in kinds and word in booleans:
        return " Write true or false."
    if isinstance(value, float) and value.is_integer() and int in kinds:
        return f" Write {int(value)}." if abs(value) < 1e15 else ""
    if word in ("nan", "inf", "-inf", "infinity") and float in kinds:
        return f" Write {word[: word.index('n') if word == 'nan' else -3]}.{word[-3:]}."
    if word in ("none", "nil") and types.NoneType in kinds:
        return " Write null."
    return nearest(value, literals(kinds)) if isinstance(value, str) else ""
