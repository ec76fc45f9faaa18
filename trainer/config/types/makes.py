"""What a class or function makes, as far as that is known before it is called.

A file names code, and what it names is called. So a place looks at it first: a class must be one of
the classes that the place asks for; a function must say that it returns one, or be somebody's own
and say nothing. Of Python's own library only plain values can be made: no file needs
``subprocess.run`` for a model.
"""

from __future__ import annotations

import builtins
import importlib.util
import inspect
import sys
import sysconfig
import typing
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from fulgurite.config.document.problems import with_article
from fulgurite.config.types.annotations import alternatives, class_of
from fulgurite.config.types.categories import Category

PLAIN_NAMES = frozenset(
    (
        *("builtins.bytes", "builtins.complex", "builtins.dict", "builtins.float", "builtins.int"),
        *("builtins.frozenset", "builtins.list", "builtins.range", "builtins.set"),
        *("builtins.slice", "builtins.str", "builtins.tuple", "builtins.abs", "builtins.all"),
        *("builtins.any", "builtins.len", "builtins.max", "builtins.min", "builtins.round"),
        *("builtins.sorted", "builtins.sum", "decimal.Decimal", "fractions.Fraction"),
        *("collections.Counter", "collections.OrderedDict", "collections.deque"),
        *("datetime.date", "datetime.datetime", "datetime.time", "datetime.timedelta"),
        *("pathlib.Path", "pathlib.PurePath", "random.Random", "types.SimpleNamespace"),
        "uuid.UUID",
    )
)
"""What a file can name of Python's library: it computes or holds values, and does nothing else."""

PLAIN_MODULES = ("math", "statistics")
"""Modules of Python's library all of whose functions are such."""

READS_CODE = (
    *("torch.hub", "torch.jit", "torch.package", "torch.serialization", "torch._ops"),
    *("torch._classes", "torch.utils.cpp_extension", "torch.utils.model_zoo"),
    *("joblib", "cloudpickle", "dill", "numpy.ctypeslib", "numpy.f2py", "pandas.io.pickle"),
)
"""Modules of torch and others that run or compile what a file or an address holds."""

READERS_OF_CODE = frozenset(
    (
        *("numpy.load", "numpy.lib.format.read_array", "numpy.lib.npyio.NpzFile"),
        "pandas.read_pickle",
    )
)
"""Others that do, by the names that they say they have: their modules also read plain values."""

_LIBRARIES = ("torch", "lightning", "torchmetrics")
"""Libraries whose functions have to say what they return."""


def refusal(target: Any, category: Category) -> str:
    """Why a class or function has no place in a file; nothing where it has, or nobody can know.

    Args:
        target: the class or function; what else a module holds passes.
        category: what its place asks for.
    """
    if not (inspect.isclass(target) or inspect.isroutine(target)):
        return ""
    home = _home(target)
    if is_pythons(home):
        plain = is_plain(f"{home}.{target.__qualname__}")
        return "" if plain and (category.anything or inspect.isclass(target)) else PYTHONS
    reads = home.startswith(READS_CODE) and (category.anything or not inspect.isclass(target))
    if reads or f"{home}.{target.__qualname__}" in READERS_OF_CODE:
        return (
            "runs what a file or an address holds, and nobody can know what that is. Write a"
            " function of your own around it."
        )
    if category.anything:
        return ""
    if inspect.isclass(target):
        wrong = category.batches and not _gives_batches(category.batches, target)
        return _NO_BATCHES if wrong else ""
    return _functions_refusal(target, home, category)


PYTHONS = (
    "is of Python's own library, of which a file names plain values alone (pathlib.Path,"
    " datetime.timedelta), and where a value is asked for. Write a function of your own around it."
)
_NO_BATCHES = (
    "gives no batches: expected a Dataset, a DataLoader, a LightningDataModule, something to"
    " iterate over, or a function that returns one of them."
)


def _functions_refusal(target: Any, home: str, category: Category) -> str:
    """Why a function makes nothing that a place asks for."""
    batches, bases = category.batches, category.bases
    fits = partial(_gives_batches, batches) if batches else partial(_is_one, bases)
    said, a = _returns(target), with_article(category.title)
    if said is None:
        silent = "return" not in getattr(target, "__annotations__", {})
        wrong = silent and home.partition(".")[0] in _LIBRARIES
        return f"does not say that it returns {a}." if wrong else ""
    if any(map(fits, said)):
        return ""
    told = " or ".join(getattr(one, "__name__", str(one)) for one in said)
    return f"returns {told}, which is not {a}."


def _returns(function: Callable[..., Any]) -> tuple[type, ...] | None:
    """The classes that a function says it returns; None where it does not say, or says anything."""
    try:
        kind = typing.get_type_hints(function).get("return", Any)
    except Exception:  # annotations are code, which may raise anything
        return None
    classes = tuple(map(class_of, alternatives(kind)))
    known = all(inspect.isclass(one) and one not in (object, Any) for one in classes)
    return classes if known else None


def _is_one(bases: Iterable[type], made: type) -> bool:
    """Whether something of a class is, or may be, one of some others."""
    return any(issubclass(made, base) or issubclass(base, made) for base in bases)


def _gives_batches(bases: tuple[type, ...], made: type) -> bool:
    if issubclass(made, (str, bytes)):
        return False
    known = issubclass(made, bases)
    some = ("__iter__", "__getitem__", "create_dataloader")
    return (
        known or getattr(made, "_is_protocol", False) or any(hasattr(made, name) for name in some)
    )


def _home(target: Any) -> str:
    """The module that a class or function was written in."""
    owner = getattr(target, "__self__", None)
    if not target.__module__ and owner is not None:  # a method of a built-in class
        return str((owner if inspect.isclass(owner) else type(owner)).__module__)
    return target.__module__ or "builtins"


def is_pythons(module: str, folder: str | None = None) -> bool:
    """Whether a module is of Python's own library; it is not imported.

    Args:
        module: its name.
        folder: one whose modules may have the same names, and come first.
    """
    top = module.partition(".")[0]
    if top not in sys.stdlib_module_names or _is_beside(folder, top):
        return False
    file = getattr(sys.modules.get(top), "__file__", None)
    if top not in sys.modules:
        found = importlib.util.find_spec(top)
        file = found.origin if found is not None and found.has_location else None
    return file is None or Path(file).is_relative_to(sysconfig.get_path("stdlib"))


def _is_beside(folder: str | None, top: str) -> bool:
    return folder is not None and (Path(folder, f"{top}.py").exists() or Path(folder, top).is_dir())


def is_plain(name: str) -> bool:
    """Whether a name of Python's library can stand in a file: that of an error can, too."""
    module, _, last = name.rpartition(".")
    error = getattr(builtins, last, None) if module == "builtins" else None
    is_error = inspect.isclass(error) and issubclass(error, BaseException)
    return is_error or name in PLAIN_NAMES or module in PLAIN_MODULES
