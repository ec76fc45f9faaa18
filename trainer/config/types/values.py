"""A value against the type that a signature asks for.

Mappings and lists are walked, so that each mistake has its own place; where a class is asked for,
it is named in one of the forms of ``classes``, at any depth, and becomes a ``Call``. What is left,
jsonargparse judges.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
import typing
from collections import abc
from collections.abc import Callable, Mapping
from typing import Any, Literal, Union

from jsonargparse import ArgumentError, ArgumentParser, Namespace
from torch import Tensor

from fulgurite.config.document.nodes import plain_scalar
from fulgurite.config.document.problems import Path, Problem, choices, listed, nearest, shown
from fulgurite.config.types.calls import Call, Later
from fulgurite.config.types.classes import Category, category_of, named
from fulgurite.config.types.report import Report
from fulgurite.config.types.signatures import signature_of

_ANYTHING = (Any, object, inspect.Parameter.empty)
_LISTS = (list, abc.Sequence, abc.MutableSequence, abc.Iterable, abc.Collection, tuple)
_SETS = (set, frozenset, abc.Set, abc.MutableSet)
_MAPPINGS = (dict, abc.Mapping, abc.MutableMapping)
_SCALARS = (int, float, bool, types.NoneType)
_NAMES: dict[Any, str] = {types.NoneType: "null", Any: "anything", str: "str"}


def judged(kind: Any, value: Any, path: Path, report: Report) -> Any:
    """The value as the type has it, with Calls for classes; what is wrong goes to the report."""
    kinds = alternatives(kind)
    if value is None and types.NoneType in kinds:
        return None
    if any(other in _ANYTHING for other in kinds if _hashable(other)):
        return loose(value, path, report)
    if isinstance(value, Mapping):
        return _mapping(kinds, value, path, report)
    if isinstance(value, (list, tuple)):
        return _list(kinds, value, path, report)
    return _scalar(kinds, value, path, report)


def alternatives(kind: Any) -> tuple[Any, ...]:
    """The types that a type is a union of; a name that Python cannot resolve is anything."""
    origin = typing.get_origin(kind)
    if origin in (Union, types.UnionType):
        return tuple(other for part in typing.get_args(kind) for other in alternatives(part))
    if origin is typing.Annotated:
        return alternatives(typing.get_args(kind)[0])
    if isinstance(kind, typing.NewType):
        return alternatives(kind.__supertype__)
    if isinstance(kind, typing.TypeVar):
        return alternatives(kind.__bound__ or Any)
    if isinstance(kind, (str, typing.ForwardRef)):
        return (Any,)
    return (types.NoneType,) if kind is None else (kind,)


def loose(value: Any, path: Path, report: Report) -> Any:
    """A value of which nothing is known: itself, but for classes by ``class_path`` in it."""
    if isinstance(value, Mapping):
        if "class_path" in value and value.keys() <= {"class_path", "init_args"}:
            category = Category(title="class", bases=(object,), functions=True)
            return called(category, value, path, report)
        return {key: loose(item, (*path, key), report) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [loose(item, (*path, i), report) for i, item in enumerate(value)]
    return value


def called(category: Category, value: Any, path: Path, report: Report) -> Call | None:
    """The Call of a class in one of its forms; None if there is something wrong."""
    found = named(value, path, category.title)
    if isinstance(found, Problem):
        report.problems.append(found)
        return None
    try:
        target = report.classes.find(category, found.name)
    except LookupError as error:
        report.problem(found.name_path, str(error))
        return None
    arguments = found.arguments
    if target is not None:
        arguments = taken(target, arguments, found.arguments_path, report)
    return Call(path=path, name=found.name, target=target, arguments=arguments)


def taken(
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
            is_default = value is None and item.default is None
            found[key] = None if is_default else judged(item.kind, value, at, report)
        elif isinstance(key, str) and signature.open_ended and key not in skip:
            found[key] = loose(value, at, report)
        elif not report.noted(at):
            report.problem(at, _unknown(name, key, list(known)))
    for key, item in known.items():
        if item.required and key not in given:
            kinds = alternatives(item.kind)
            kind = f" ({told(kinds)})" if kinds[0] not in _ANYTHING else ""
            report.problem(path, f"{name} needs {key}{kind}, which is not given.")
    return found


def _unknown(name: str, key: object, names: list[str]) -> str:
    takes = choices(key, names) if names else " It takes no arguments."
    return f"{name} takes no {shown(key)}.{takes}"


def _mapping(kinds: tuple[Any, ...], value: Any, path: Path, report: Report) -> Any:
    ways: list[Callable[[Report], Any]] = []
    classes = tuple(class_of(kind) for kind in kinds if is_class(kind))
    if classes:
        ways.append(lambda into: called(category_of(classes), value, path, into))
    # what is told if no way goes is what is wrong with the first: jsonargparse comes last
    for kind in sorted(kinds, key=lambda kind: not (_is_collection(kind) or is_dataclass(kind))):
        if is_dataclass(kind):
            ways.append(functools.partial(_dataclass, kind, value, path))
        elif typing.get_origin(kind) in _MAPPINGS or kind in _MAPPINGS:
            ways.append(functools.partial(_items, typing.get_args(kind), value, path))
        elif not is_class(kind) and kind not in (*_SCALARS, str):
            ways.append(functools.partial(_by_jsonargparse, (kind,), value, path))
    return _first_without_problems(ways, kinds, value, path, report)


def _dataclass(kind: Any, value: Mapping[Any, Any], path: Path, report: Report) -> Call | None:
    if "class_path" in value:
        return called(Category(title=kind.__name__, bases=(kind,)), value, path, report)
    arguments = taken(kind, value, path, report)
    return Call(path=path, name=kind.__name__, target=kind, arguments=arguments)


def _items(kinds: tuple[Any, ...], value: Mapping[Any, Any], path: Path, report: Report) -> Any:
    key_kind, item_kind = kinds or (Any, Any)
    found = {}
    for key, item in value.items():
        at = (*path, key)
        if key_kind is str and isinstance(key, int):
            key = str(key)
        found[judged(key_kind, key, at, report)] = judged(item_kind, item, at, report)
    return found


def _list(kinds: tuple[Any, ...], value: Any, path: Path, report: Report) -> Any:
    ways: list[Callable[[Report], Any]] = []
    for kind in kinds:
        origin = typing.get_origin(kind) or kind
        if origin in (*_LISTS, *_SETS):
            ways.append(functools.partial(_each, origin, typing.get_args(kind), value, path))
        elif not is_class(kind) and origin not in (*_SCALARS, str, *_MAPPINGS):
            ways.append(functools.partial(_by_jsonargparse, (kind,), value, path))
    return _first_without_problems(ways, kinds, value, path, report)


def _each(origin: Any, kinds: tuple[Any, ...], value: Any, path: Path, report: Report) -> Any:
    fixed = origin is tuple and kinds and kinds[-1] is not Ellipsis
    if fixed and len(kinds) != len(value):
        report.problem(path, f"expected a list of {len(kinds)}; got {len(value)} items.")
        return None
    wanted = kinds if fixed else [kinds[0] if kinds else Any] * len(value)
    items = [judged(wanted[i], item, (*path, i), report) for i, item in enumerate(value)]
    if origin in _SETS:
        return set(items) if all(map(_hashable, items)) else None
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
        if not is_class(kind) and not _is_collection(kind) and kind not in impossible
    )
    plain = () if value is None else plain
    classes = tuple(class_of(kind) for kind in kinds if is_class(kind))
    tried = report.apart()
    found = _by_jsonargparse(plain, value, path, tried) if plain else None
    if plain and not tried.problems:
        return found
    if classes and isinstance(value, classes):
        return value
    named = tuple(one for one in classes if one is not Tensor)  # no file names a tensor
    if named and isinstance(value, str):
        return called(category_of(named), value, path, report)
    kinds = tuple(kind for kind in kinds if kind is not Tensor) or kinds
    report.problem(path, f"expected {told(kinds)}; got {shown(value)}.{_hint(kinds, value)}")
    return None


def _unquoted(kinds: tuple[Any, ...], value: str) -> Any:
    """A number in quotes where only a number can be meant."""
    number = plain_scalar(value)
    if isinstance(number, bool) or number is None:
        return value
    return number if any(kind in (int, float) for kind in kinds if _hashable(kind)) else value


def _first_without_problems(
    ways: list[Callable[[Report], Any]],
    kinds: tuple[Any, ...],
    value: Any,
    path: Path,
    report: Report,
) -> Any:
    """What the first way makes that finds nothing wrong; else what the first one finds wrong."""
    if not ways:
        report.problem(path, f"expected {told(kinds)}; got {shown(value)}.")
        return None
    tries = []
    for way in ways:
        tried = report.apart()
        made = way(tried)
        if not tried.problems:
            report.add(tried)
            return made
        tries.append(tried)
    report.add(tries[0])
    return None


def _by_jsonargparse(kinds: tuple[Any, ...], value: Any, path: Path, report: Report) -> Any:
    """What jsonargparse makes of a value, or one line of what it complains about."""
    if not report.classes.imports and any(map(_names_code, kinds)) and not isinstance(value, bool):
        return value
    parser = _parser(kinds)
    try:
        parsed = parser.parse_object({"value": value})
    except (ArgumentError, OverflowError, RecursionError):
        report.problem(path, f"expected {told(kinds)}; got {shown(value)}.{_hint(kinds, value)}")
        return None
    if isinstance(parsed.value, Namespace):
        return Later(parser, parsed)
    return parsed.value


def _parser(kinds: tuple[Any, ...]) -> ArgumentParser:
    try:
        return _cached_parser(kinds)
    except TypeError:  # an Annotated or Literal of something unhashable
        return _new_parser(kinds)


def _new_parser(kinds: tuple[Any, ...]) -> ArgumentParser:
    def takes(value: Any = None) -> None: ...

    takes.__annotations__["value"] = Union[kinds]  # noqa: UP007  (of a tuple)
    parser = ArgumentParser(exit_on_error=False)
    parser.add_function_arguments(takes, None, fail_untyped=False)
    return parser


_cached_parser = functools.lru_cache(maxsize=1000)(_new_parser)


def _hashable(kind: Any) -> bool:
    return isinstance(kind, abc.Hashable)


def _is_collection(kind: Any) -> bool:
    return (typing.get_origin(kind) or kind) in (*_LISTS, *_SETS, *_MAPPINGS)


def is_dataclass(kind: Any) -> bool:
    return inspect.isclass(kind) and dataclasses.is_dataclass(kind)


def _names_code(kind: Any) -> bool:
    """Whether a string of this type names something to import."""
    return (typing.get_origin(kind) or kind) in (abc.Callable, type)


def class_of(kind: Any) -> Any:
    """The class of a type, without its parameters."""
    return typing.get_origin(kind) or kind


@functools.lru_cache(maxsize=1000)
def _takes_instances(kind: Any) -> bool:
    """Whether jsonargparse too would make an instance of a class: it offers help on it."""
    return any(action.dest == "value.help" for action in _new_parser((kind,))._actions)


def is_class(kind: Any) -> bool:
    """Whether a type asks for an instance of a class that a file can name."""
    kind = class_of(kind)
    if not inspect.isclass(kind) or kind.__module__ == "builtins" or is_dataclass(kind):
        return False
    return not getattr(kind, "_is_protocol", False) and _takes_instances(kind)  # type: ignore[arg-type]


def told(kinds: tuple[Any, ...]) -> str:
    """Types as an error names them."""
    names = []
    for kind in kinds:
        args = typing.get_args(kind)
        if typing.get_origin(kind) is Literal:
            names += [shown(arg) for arg in args]
        elif _is_collection(kind) and not args:
            names.append("mapping" if class_of(kind) in _MAPPINGS else "list")
        elif _is_collection(kind):
            items = told(alternatives(args[-1] if args[-1] is not Ellipsis else args[0]))
            what = "a mapping to" if class_of(kind) in _MAPPINGS else "a list of"
            names.append(f"{what} {items}")
        elif class_of(kind) is abc.Callable:
            names.append("the path of a function")
        else:
            names.append(str(_NAMES.get(kind) or getattr(kind, "__name__", kind)))
    return listed(dict.fromkeys(names))


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
    literals = [arg for kind in kinds for arg in _literals(kind)]
    return nearest(value, literals) if isinstance(value, str) else ""


def _literals(kind: Any) -> list[str]:
    args = typing.get_args(kind) if typing.get_origin(kind) is Literal else ()
    return [arg for arg in args if isinstance(arg, str)]
