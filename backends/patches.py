"""What a trace changes in modules, classes and objects of others, and puts back.

The changes hold for the whole process while they last: one trace at a time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

MISSING: Any = object()
"""What is in a place where there is nothing."""


@contextlib.contextmanager
def patched(changes: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Let attributes have other values while the block runs, whatever ends it.

    Args:
        changes: (owner, name, value) each; an attribute that the owner itself does not have is gone
            again afterwards.
    """
    before: list[tuple[Any, str, Any]] = []
    try:
        for owner, name, value in changes:
            before.append((owner, name, vars(owner).get(name, MISSING)))
            _put(owner, name, value)
        yield
    finally:
        for owner, name, value in reversed(before):
            _put(owner, name, value)


def _put(owner: Any, name: str, value: Any) -> None:
    """Set an attribute, or delete it; past an object's own ``__setattr__``."""
    if isinstance(owner, type):
        if value is MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, value)
    elif value is MISSING:
        vars(owner).pop(name, None)
    else:
        vars(owner)[name] = value
