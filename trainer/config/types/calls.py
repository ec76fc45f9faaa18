"""What a checked file holds in place of objects: calls, to be made when it is built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from fulgurite.config.document.problems import Path


@dataclass(frozen=True, kw_only=True)
class Call:
    """A class or function with checked arguments, to be called later.

    Args:
        path: where it stands.
        name: as the file has it.
        target: the class or function; None where it is only named.
        arguments: those that were given, of the type that the signature asks for; where it asks
            for objects, Calls.
        skip: parameters that a file cannot give.
        nested: arguments that are calls to be made with more than a file has, or lists of them.
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
        """The arguments that were given, objects among them made."""
        return {name: made(value) for name, value in self.arguments.items()}


@dataclass(frozen=True)
class Later:
    """An object that jsonargparse describes, to be made later."""

    parser: ArgumentParser
    parsed: Namespace

    def __call__(self) -> Any:
        """Make it."""
        return self.parser.instantiate(self.parsed).value


def made(value: Any) -> Any:
    """A value with each Call in it made; lists and mappings are new ones each time."""
    if isinstance(value, (Call, Later)):
        return value()
    if isinstance(value, (list, tuple)):
        return type(value)(made(item) for item in value)
    if isinstance(value, dict):
        return {key: made(item) for key, item in value.items()}
    return value
