"""The versions that this package was tested with, and what of them it needs that is private.

``private_names.json`` lists those names; ``tests/tools/document_private_names.py`` makes it from
the code. Where one is gone, to import this package's rooms is an error that names it and the
version that lacks it: nothing is trained half. What only the compiler's side needs is not asked for
here; without it programs run operation by operation (``failures_reported`` in
``csx/compile/inductor/toolchain``).
"""

from __future__ import annotations

import builtins
import functools
import importlib
import importlib.metadata
import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import torch

TESTED = {
    "torch": ">=2.11,<2.16",
    "lightning": ">=2.6.4,<2.7",
    "torchmetrics": ">=1.9,<2",
    "jsonargparse": ">=4.53,<4.54",
}
"""The versions that are allowed, as in pyproject.toml; of torch 2.11 and 2.12 at most a
part of it (``torch_versions.CHECKED``)."""

Names = Mapping[str, Mapping[str, str]]
"""Private names by the module or class that has them, each with the file that needs it."""

REQUIRED: Names = json.loads(
    Path(__file__).with_name("private_names.json").read_text(encoding="utf-8")
)


class UnsupportedVersion(ImportError):
    """A version of torch, Lightning or another package lacks a name that this package needs.

    Args:
        package: which.
        lacks: what it lacks, and what needs that: ``has no torch._C._x, which ... needs``.
    """

    def __init__(self, package: str, lacks: str) -> None:
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            version = "(of a version that is not known)"
        tested = f"{package}{TESTED[package]}"
        super().__init__(
            f"{package} {version} {lacks}. Fulgurite was tested with {tested}.\n"
            f"  Remedy: pip install '{tested}'"
        )


UnsupportedVersion.__module__ = "fulgurite.errors"


def refuse_missing(required: Names) -> None:
    """See that every name is there.

    Raises:
        UnsupportedVersion: some are not.
    """
    missing: dict[str, dict[str, str]] = {}
    for path, names in required.items():
        owner = _resolved(path)
        for name, file in names.items():
            if owner is None or not has(owner, name):
                missing.setdefault(path.partition(".")[0], {})[f"{path}.{name}"] = file
    for package, gone in missing.items():
        (first, file), *others = gone.items()
        also = f"; nor {', '.join(name for name, _ in others)}" if others else ""
        raise UnsupportedVersion(package, f"has no {first}, which {file} needs{also}")


def refuse_if_gone(owner: Any, name: str) -> None:
    """See that what is to be replaced is there; Python's own too, where a module uses that.

    Raises:
        UnsupportedVersion: an owner of another package's has no such attribute.
    """
    if has(owner, name) or (isinstance(owner, ModuleType) and hasattr(builtins, name)):
        return
    # a class of the user's is derived from one of the package's, whose name it is
    kind = owner if isinstance(owner, type) else type(owner)
    modules = [one.__module__ for one in kind.__mro__]
    if isinstance(owner, ModuleType):
        modules = [owner.__name__]
    for module in modules:
        package = module.partition(".")[0]
        if package in TESTED:
            what = module if isinstance(owner, ModuleType) else f"{module}.{kind.__qualname__}"
            raise UnsupportedVersion(package, f"has no {what}.{name}, which is to be replaced")


def _resolved(path: str) -> Any:
    """A module, or what is in one; None where there is none.

    Raises:
        ImportError: it is there, and cannot be imported: no fault of its version.
    """
    name, *rest = path.split(".")
    found: Any = importlib.import_module(name)
    for part in rest:
        name = f"{name}.{part}"
        if not isinstance(found, ModuleType) or has(found, part):
            found = getattr(found, part, None)
            continue
        try:
            found = importlib.import_module(name)  # torch.optim deletes the names of its modules
        except ModuleNotFoundError as error:
            if not f"{name}.".startswith(f"{error.name}."):  # torch.ops.aten is no module to import
                raise
            return None
    return found


def has(owner: Any, name: str) -> bool:
    """Whether an owner has an attribute.

    Of a class also what its own code gives to its objects.
    """
    if not isinstance(owner, type):
        try:
            return hasattr(owner, name)
        except ModuleNotFoundError:  # torch imports some of its modules where they are asked for
            return False
    kinds = owner.__mro__
    return any(name in vars(kind) for kind in kinds) or any(name in _set_by(kind) for kind in kinds)


@functools.cache
def _set_by(kind: type) -> frozenset[str]:
    """The attributes that a class annotates, and those that its methods name."""
    found = set(_annotated(kind))
    for value in vars(kind).values():
        for function in (value, getattr(value, "fget", None), getattr(value, "__func__", None)):
            code = getattr(function, "__code__", None)
            if isinstance(code, CodeType):
                found.update(_named_in(code))
    return frozenset(found)


def _annotated(kind: type) -> Mapping[str, Any]:
    # since Python 3.14 a class has its annotations only when they are asked for (PEP 649)
    if sys.version_info >= (3, 14):
        from annotationlib import Format, get_annotations

        return get_annotations(kind, format=Format.FORWARDREF)
    annotations: Mapping[str, Any] = vars(kind).get("__annotations__", {})
    return annotations


def _named_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, str):  # getattr(self, "_name")
            yield constant
        elif isinstance(constant, CodeType):
            yield from _named_in(constant)


def newer_than_tested() -> str | None:
    """A line about a torch that is newer than the tested versions; None if this one is not."""
    limit = TESTED["torch"].rpartition("<")[2]
    if _numbers(str(torch.__version__)) < _numbers(limit):
        return None
    return (
        f"CSX: torch {torch.__version__} is newer than what Fulgurite was tested with"
        f" (torch{TESTED['torch']}). Each compiled program's first step is compared with its"
        " operations one by one, as ever; it is used if they agree."
    )


def _numbers(version: str) -> tuple[int, ...]:
    """The first two numbers of a version; a nightly build has those of the release to come."""
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


refuse_missing(REQUIRED)
