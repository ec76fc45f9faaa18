"""What a class or function takes, as jsonargparse reads it from the code.

jsonargparse follows ``**kwargs`` through calls and base classes. Where it cannot (they are kept, or
handed to something that it does not find), any further argument passes as it is.
"""

from __future__ import annotations

import ast
import functools
import inspect
import logging
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from fulgurite.config.types.sources import parameters_of

try:  # private: the public parser hides which arguments are open
    from jsonargparse._parameter_resolvers import get_signature_parameters
except ImportError as error:
    from fulgurite.backends.supported import UnsupportedVersion

    raise UnsupportedVersion("jsonargparse", f"lacks what parameter files need: {error}") from None


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
        self.unclear |= "AST resolver" in record.getMessage() or "failed:" in record.getMessage()


def _resolved(target: Callable[..., Any]) -> tuple[list[Any], bool]:
    """The parameters as jsonargparse finds them, and whether there may be others."""
    try:
        own = dict(inspect.signature(target).parameters)
    except (ValueError, TypeError):  # not written in Python
        own = None
    found: list[Any]
    complaints = _Complaints()
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
