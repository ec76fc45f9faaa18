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

_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


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
    name = getattr(target, "__name__", type(target).__name__)
    read = parameters_of(target)
    found, unclear = _resolved(target) if read is None else read
    parameters = {
        item.name: Parameter(
            name=item.name,
            annotation=item.annotation,
            default=item.default,
            text=getattr(item, "doc", None) or "",  # Python's own parameters have none
        )
        for item in found
        if item.kind not in (*_VARIADIC, inspect.Parameter.POSITIONAL_ONLY)
        and not item.name.startswith("_")
    }
    if read is not None:
        return Signature(name=name, parameters=parameters, open_ended=unclear)
    own = _own(target)
    if own is None:
        return Signature(name=name, parameters=parameters, open_ended=True)
    any_more = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in own.values())
    more_found = parameters.keys() - own.keys()
    open_ended = any_more and (unclear or (not more_found and _reads_more(target)))
    return Signature(name=name, parameters=parameters, open_ended=open_ended)


def _own(target: Callable[..., Any]) -> dict[str, inspect.Parameter] | None:
    """The parameters as Python has them; None of what is not written in Python."""
    try:
        return dict(inspect.signature(target).parameters)
    except (ValueError, TypeError):
        return None


class _Complaints(logging.Handler):
    """Whether jsonargparse met something that it could not follow."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.unclear = False

    def emit(self, record: logging.LogRecord) -> None:
        self.unclear |= "AST resolver" in record.getMessage() or "failed:" in record.getMessage()


def _resolved(target: Callable[..., Any]) -> tuple[list[Any], bool]:
    found: list[Any]
    complaints = _Complaints()
    log = logging.Logger("fulgurite.config.types.signatures", logging.DEBUG)
    log.addHandler(complaints)
    if inspect.isclass(target) or inspect.isfunction(target):
        found = get_signature_parameters(target, None, log)
    elif inspect.ismethod(target) and inspect.isclass(target.__self__):
        found = get_signature_parameters(target.__self__, target.__name__, log)
    else:
        found = list((_own(target) or {}).values())
    return found, complaints.unclear


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
