"""What a class or function takes, as jsonargparse reads it from the code, and of which types.

jsonargparse follows ``**kwargs`` through calls and base classes. Where it cannot (they are kept, or
handed to something that it does not find), any further argument passes as it is.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import logging
import textwrap
import types
import typing
from collections import abc
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, Union

from jsonargparse import ArgumentParser

from fulgurite.config.document.problems import listed, shown
from fulgurite.config.types.sources import Described, parameters_of

try:  # private: the public parser hides which arguments are open
    from jsonargparse._parameter_resolvers import get_signature_parameters
except ImportError as error:
    from fulgurite.backends.supported import UnsupportedVersion

    raise UnsupportedVersion("jsonargparse", f"lacks what parameter files need: {error}") from None

LISTS = (list, abc.Sequence, abc.MutableSequence, abc.Iterable, abc.Collection, tuple)
SETS = (set, frozenset, abc.Set, abc.MutableSet)
MAPPINGS = (dict, abc.Mapping, abc.MutableMapping)
_NAMES: dict[Any, str] = {types.NoneType: "null", Any: "anything", str: "str"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameter:
    """A parameter that a file can give.

    Args:
        annotation: its type, or what finds it; ``inspect.Parameter.empty`` if it has none.
        default: ``inspect.Parameter.empty`` if it is required.
        text: what the docstring says of it.
    """

    name: str
    annotation: Any
    default: Any = inspect.Parameter.empty
    text: str = ""

    @property
    def kind(self) -> Any:
        """Its type."""
        found = self.annotation
        return found() if isinstance(found, functools.partial) else found

    @property
    def required(self) -> bool:
        """Whether it must be given."""
        return self.default is inspect.Parameter.empty


@dataclass(frozen=True, kw_only=True, slots=True)
class Signature:
    """The parameters of a class or function.

    Args:
        name: of the class or function.
        open_ended: whether it takes others too, which cannot be known.
    """

    name: str
    parameters: dict[str, Parameter] = field(default_factory=dict)
    open_ended: bool = False


@functools.cache
def signature_of(target: Callable[..., Any]) -> Signature:
    """What a class or function takes."""
    found, open_ended = parameters_of(target) or _resolved(target)
    parameters = {
        item.name: Parameter(
            name=item.name,
            annotation=item.annotation,
            default=item.default,
            text=getattr(item, "doc", None) or "",  # Python's own parameters have none
        )
        for item in found
        if _can_be_given(item)
    }
    name = getattr(target, "__name__", type(target).__name__)
    return Signature(name=name, parameters=parameters, open_ended=open_ended)


def _can_be_given(item: Any) -> bool:
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    unnamed = (*variadic, inspect.Parameter.POSITIONAL_ONLY)
    return item.kind not in unnamed and not item.name.startswith("_")


class _Complaints(logging.Handler):
    """Whether jsonargparse met something that it could not follow."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.unclear = False

    def emit(self, record: logging.LogRecord) -> None:
        # it tells so in its log alone
        self.unclear |= "AST resolver" in record.getMessage() or "failed:" in record.getMessage()


def _resolved(target: Callable[..., Any]) -> tuple[list[Any], bool]:
    """The parameters as jsonargparse finds them, and whether there may be others."""
    try:
        own = dict(inspect.signature(target).parameters)
    except (ValueError, TypeError):  # not written in Python
        own = None
    found: list[Any]
    complaints = _Complaints()
    # of no logger's tree: nobody sees what it is told
    log = logging.Logger("fulgurite.config.types.signatures", logging.DEBUG)
    log.addHandler(complaints)
    if inspect.isclass(target) or inspect.isfunction(target):
        found = get_signature_parameters(target, None, log)
    elif inspect.ismethod(target) and inspect.isclass(target.__self__):
        found = get_signature_parameters(target.__self__, target.__name__, log)
    else:
        found = list((own or {}).values())
    if own is None:
        return found, True
    if all(one.kind is not inspect.Parameter.VAR_KEYWORD for one in own.values()):
        return found, False
    # a **kwargs that jsonargparse silently left alone is closed only if nothing reads it
    followed = any(one.name not in own and _can_be_given(one) for one in found)
    return found, complaints.unclear or (not followed and _reads_more(target))


def _reads_more(target: Callable[..., Any]) -> bool:
    """Whether the code does anything with its ``**kwargs``."""
    code = target.__init__ if inspect.isclass(target) else target
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(code)))
    except (OSError, TypeError, SyntaxError):
        return True
    [function] = tree.body
    if not isinstance(function, ast.FunctionDef) or function.args.kwarg is None:
        return True
    name = function.args.kwarg.arg
    return any(isinstance(node, ast.Name) and node.id == name for node in ast.walk(function))


def names_of(target: Callable[..., Any], skip: Iterable[str] = ()) -> list[str]:
    """The arguments of a class or function that a file can give."""
    return [name for name in signature_of(target).parameters if name not in skip]


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
