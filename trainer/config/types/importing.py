"""Import paths: what they stand for, and why they stand for nothing."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from types import ModuleType
from typing import Any

from fulgurite.config.document.problems import nearest, shown


def exists(module: str) -> bool:
    """Whether there is a module of a name; packages around it are imported."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def imported(name: str) -> Any:
    """What an import path stands for: a class, a function, or one within a class.

    Raises:
        LookupError: it cannot be imported; the text says why.
    """
    parts = name.split(".")
    if len(parts) < 2 or not all(part.isidentifier() for part in parts):
        raise LookupError(f"{shown(name)} is no import path (my.module.Name).")
    home, rest = _module_of(parts)
    for i, part in enumerate(rest):
        if not hasattr(home, part):
            where = ".".join(parts[: len(parts) - len(rest) + i])
            near = nearest(part, [other for other in vars(home) if not other.startswith("_")])
            raise LookupError(f"{where} has no {part!r}.{near}")
        home = getattr(home, part)
    return home


def _module_of(parts: list[str]) -> tuple[Any, list[str]]:
    """The longest part of an import path that is a module, and what is left."""
    for end in range(len(parts) - 1, 0, -1):
        module = ".".join(parts[:end])
        try:
            return module_of(module), parts[end:]
        except ModuleNotFoundError as error:
            above = end > 1 and error.name is not None and f"{module}.".startswith(f"{error.name}.")
            if not above:
                raise LookupError(f"{'.'.join(parts)} cannot be imported: {error}.") from error
        except ImportError as error:
            raise LookupError(f"{'.'.join(parts)} cannot be imported: {error}.") from error
    raise AssertionError


def module_of(name: str) -> ModuleType:
    """Import a module; what its own code raises becomes an ImportError that says so.

    Raises:
        ImportError: it cannot be imported.
    """
    try:
        return importlib.import_module(name)
    except ImportError:
        raise
    except Exception as error:  # a module of the user's may raise anything
        line = inspect.trace()[-1]
        at = "" if isinstance(error, SyntaxError) else f" ({line.filename}:{line.lineno})"
        raise ImportError(f"{type(error).__name__}: {error}{at}") from error
