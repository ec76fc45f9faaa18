"""A class's arguments against its signature.

jsonargparse reads the signature and judges each value; here its first complaint is taken down, the
argument left out, and it is asked again, until all complaints are known.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from jsonargparse import ArgumentError, ArgumentParser

from fulgurite.config.problems import Path, Problem, nearest

_REQUIRED = re.compile(r"the following arguments are required: (.*)")
_KEY = re.compile(r"Parser key \"([^\"]+)\":\s*(.*)", re.DOTALL)
_UNKNOWN = re.compile(r"Option '([^']+)' is not accepted")


@dataclass(frozen=True, kw_only=True)
class Call:
    """A class or function with checked arguments, to be called later.

    Args:
        path: where it stands.
        name: as the file has it.
        target: the class or function; None where it is only named.
        arguments: those that were given, of the type that the signature asks for.
        nested: arguments that are calls themselves, or lists of them.
    """

    path: Path
    name: str
    target: Callable[..., Any] | None
    arguments: dict[str, Any]
    skip: frozenset[str] = frozenset()
    nested: dict[str, Any] = field(default_factory=dict)

    def __call__(self, *first: Any, **more: Any) -> Any:
        """Call it, with arguments that a file cannot have in front."""
        assert self.target is not None
        return self.target(*first, **self.made(), **more)

    def made(self) -> dict[str, Any]:
        """The arguments that were given, classes among them instantiated."""
        assert self.target is not None
        known, other = _split(self.target, self.skip, self.arguments)
        made = parser_of(self.target, self.skip).instantiate(_parsed(self.target, self.skip, known))
        return {**{name: made[name] for name in known}, **other}


def parser_of(target: Callable[..., Any], skip: frozenset[str] = frozenset()) -> ArgumentParser:
    """A parser of a signature, without the parameters ``skip``."""
    return _parser(target, skip)


@functools.cache
def _parser(target: Callable[..., Any], skip: frozenset[str]) -> ArgumentParser:
    parser = ArgumentParser(exit_on_error=False)
    add = parser.add_class_arguments if inspect.isclass(target) else parser.add_function_arguments
    add(target, None, skip=set(skip), fail_untyped=False)
    return parser


def names_of(target: Callable[..., Any], skip: frozenset[str] = frozenset()) -> list[str]:
    """The arguments that a file can give."""
    names = (action.dest for action in _parser(target, skip)._actions)
    return [name for name in names if name != "help" and not name.endswith(".help")]


def takes_any(target: Callable[..., Any]) -> bool:
    """Whether the signature ends in ``**arguments`` of its own."""
    parameters = inspect.signature(target).parameters.values()
    return any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)


def _split(
    target: Callable[..., Any], skip: frozenset[str], given: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    names = names_of(target, skip)
    known = {key: value for key, value in given.items() if key in names}
    return known, {key: value for key, value in given.items() if key not in names}


def _parsed(target: Callable[..., Any], skip: frozenset[str], given: dict[str, Any]) -> Any:
    return _parser(target, skip).parse_object(given)


def check_arguments(
    target: Callable[..., Any], given: dict[str, Any], path: Path, skip: Iterable[str] = ()
) -> list[Problem]:
    """All that is wrong with the arguments of a class or function."""
    left_out = frozenset(skip)
    known, other = _split(target, left_out, given)
    problems = [] if takes_any(target) else [_unknown(target, left_out, k, path) for k in other]
    while True:
        try:
            _parsed(target, left_out, known)
        except ArgumentError as error:
            found, key = _problem(str(error), path)
            problems += found
            if key is None:
                return problems
            del known[key]
        else:
            return problems


def _unknown(target: Callable[..., Any], skip: frozenset[str], key: str, path: Path) -> Problem:
    names = names_of(target, skip)
    takes = f"It takes {', '.join(names)}." if names else "It takes no arguments."
    text = f"{target.__name__} has no argument {key!r}.{nearest(key, names)} {takes}"
    return Problem((*path, key), text)


def _problem(text: str, path: Path) -> tuple[list[Problem], str | None]:
    """What jsonargparse complains about, and which argument to leave out next time."""
    required = _REQUIRED.search(text)
    if required:
        return [Problem(path, f"{required[1]}: required, and not given.")], None
    at = _KEY.search(text)
    if at is None:
        raise AssertionError(f"unknown complaint of jsonargparse: {text}")
    keys = at[1].split(".")
    return [Problem((*path, *keys), _readable(at[2]))], keys[0]


def _readable(complaint: str) -> str:
    return " ".join(re.sub(r"<class '(?:[a-z_]+\.)*([A-Za-z_]+)'>", r"\1", complaint).split())
