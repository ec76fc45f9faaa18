"""Attributes of modules, classes and objects that have another value for the time of a block.

``patched`` sets them and puts them back. A *patch* (monkeypatching) replaces a part of somebody
else's code, and says why; ``csx/capture/patch_table`` lists those of a trace. The changes hold for
the whole process while they last: one trace at a time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

MISSING: Any = object()
"""What is in a place where there is nothing."""

Change = tuple[Any, str, Any]
"""Owner, name of the attribute, and the value that it gets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """An attribute of somebody else's code, and what stands there instead for a while.

    Args:
        owner: the module, class or object that has the attribute.
        name: the attribute.
        replacement: what stands there.
        why: what would happen without it, or what it gives.
        checked: the package whose code it was checked with, and the version.
        upstream: the issue at the owner's authors', if it works around a bug of theirs.
    """

    owner: Any
    name: str
    replacement: Any
    why: str
    checked: str
    upstream: str = ""


def patches_of(
    owner: Any, replacements: Mapping[str, Any], *, why: str, checked: str, upstream: str = ""
) -> Iterator[Patch]:
    """A patch of each of an owner's attributes that is named, for one reason."""
    same: Any = {"owner": owner, "why": why, "checked": checked, "upstream": upstream}
    for name, replacement in replacements.items():
        yield Patch(name=name, replacement=replacement, **same)


@contextlib.contextmanager
def applied(patches: Iterable[Patch], importers: Iterable[dict[str, Any]] = ()) -> Iterator[None]:
    """Keep patches in place while the block runs, whatever ends it.

    Args:
        patches: all of them are made before the first is put in place.
        importers: global names of modules that may have imported a patched function by its name.
    """
    patches = tuple(patches)
    changes = [(patch.owner, patch.name, patch.replacement) for patch in patches]
    with patched([*changes, *rebind_everywhere(patches, importers)]):
        yield


def rebind_everywhere(
    patches: Iterable[Patch], importers: Iterable[dict[str, Any]]
) -> Iterator[Change]:
    """Changes by which patches of functions reach those who imported them by name.

    ``from math import sqrt`` is a name of the importer's own: a patch of ``math`` misses it.
    """
    functions: dict[int, Any] = {}
    for patch in patches:
        if isinstance(patch.owner, ModuleType):
            original = vars(patch.owner).get(patch.name)
            if callable(original):
                functions[id(original)] = patch.replacement
    for names in {id(names): names for names in importers}.values():
        for name, value in names.items():
            if id(value) in functions:
                yield _Namespace(names), name, functions[id(value)]


class _Namespace:
    """Global names as attributes; the module that has them may be in no list of modules."""

    def __init__(self, names: dict[str, Any]) -> None:
        self.__dict__ = names


@contextlib.contextmanager
def patched(changes: Iterable[Change]) -> Iterator[None]:
    """Let attributes have other values while the block runs, whatever ends it.

    Args:
        changes: an attribute that the owner itself does not have is gone again afterwards.
    """
    before: list[Change] = []
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
