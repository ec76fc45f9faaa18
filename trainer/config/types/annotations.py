"""A type annotation taken apart: its alternatives, what each of them is, and its name in errors."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
import typing
from collections import abc
from typing import Any, Literal, Union

from jsonargparse import ArgumentParser

from fulgurite.config.document.problems import listed, shown
from fulgurite.config.types.sources import Described

LISTS = (list, abc.Sequence, abc.MutableSequence, abc.Iterable, abc.Collection, tuple)
SETS = (set, frozenset, abc.Set, abc.MutableSet)
MAPPINGS = (dict, abc.Mapping, abc.MutableMapping)
_NAMES: dict[Any, str] = {types.NoneType: "null", Any: "anything", str: "str"}


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


def class_of(kind: Any) -> Any:
    """The class of a type, without its parameters."""
    return typing.get_origin(kind) or kind


def is_dataclass(kind: Any) -> bool:
    """Whether a type is a dataclass."""
    return inspect.isclass(kind) and dataclasses.is_dataclass(kind)


def is_collection(kind: Any) -> bool:
    """Whether a type is one of lists, sets or mappings."""
    return (typing.get_origin(kind) or kind) in (*LISTS, *SETS, *MAPPINGS)


def is_class(kind: Any) -> bool:
    """Whether a type asks for an instance of a class that a file can name."""
    kind = class_of(kind)
    if not inspect.isclass(kind) or kind.__module__ == "builtins" or is_dataclass(kind):
        return False
    if getattr(kind, "_is_protocol", False):
        return False
    return isinstance(kind, Described) or _takes_instances(kind)  # type: ignore[arg-type]


def is_read(kind: Any) -> bool:
    """Whether a type has a class in it that was not imported, which jsonargparse would import."""
    return isinstance(kind, Described) or any(map(is_read, typing.get_args(kind)))


@functools.lru_cache(maxsize=1000)
def _takes_instances(kind: Any) -> bool:
    """Whether jsonargparse too would make an instance of a class: it offers help on it."""
    return any(action.dest == "value.help" for action in _new_parser((kind,))._actions)


def parser_of(kinds: tuple[Any, ...]) -> ArgumentParser:
    """A parser of jsonargparse's with one argument, ``value``, of any of the types."""
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


def type_names(kinds: tuple[Any, ...]) -> str:
    """Types as an error names them."""
    names = []
    for kind in kinds:
        args = typing.get_args(kind)
        if typing.get_origin(kind) is Literal:
            names += [shown(arg) for arg in args]
        elif is_collection(kind) and not args:
            names.append("mapping" if class_of(kind) in MAPPINGS else "list")
        elif is_collection(kind):
            items = type_names(alternatives(args[-1] if args[-1] is not Ellipsis else args[0]))
            what = "a mapping to" if class_of(kind) in MAPPINGS else "a list of"
            names.append(f"{what} {items}")
        elif class_of(kind) is abc.Callable:
            names.append("the path of a function")
        else:
            names.append(str(_NAMES.get(kind) or getattr(kind, "__name__", kind)))
    return listed(dict.fromkeys(names))


def literals(kinds: tuple[Any, ...]) -> list[str]:
    """The strings that the Literals among types allow."""
    args = [typing.get_args(kind) for kind in kinds if typing.get_origin(kind) is Literal]
    return [arg for one in args for arg in one if isinstance(arg, str)]
