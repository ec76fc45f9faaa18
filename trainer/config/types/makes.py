"""What a class or function makes, as far as that is known before it is called.

A file names code, and what it names is called. So a place looks at it first: a class must be one of
the classes that the place asks for; a function must say that it returns one, or be the user's own
and say nothing. Whose code it is decides what else it can be:

- the user's own, and packages that the file's ``imports`` lists: anything;
- of torch, Lightning and their like: classes of the kinds that a run is made of, and what computes;
- of Python's library: plain values; no file needs ``subprocess.run`` for a model;
- of another installed package: nothing.
"""

from __future__ import annotations

import builtins
import functools
import importlib.util
import inspect
import os
import sys
import sysconfig
import typing
from collections.abc import Callable, Container, Iterable
from pathlib import Path
from typing import Any

from fulgurite.config.document.problems import with_article
from fulgurite.config.types.categories import CATEGORIES, Category
from fulgurite.config.types.signatures import alternatives, class_of
from fulgurite.config.types.sources import LIBRARIES

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
        # where Python 3.13 alone has them
        *("pathlib._local.Path", "pathlib._local.PurePath", "uuid.UUID"),
    )
)
"""What a file can name of Python's library: it computes or holds values, and does nothing else."""

PLAIN_MODULES = ("math", "statistics")
"""Modules of Python's library all of whose functions are such."""

OF_RUNS = (*LIBRARIES, "torchvision")
"""What a run is made of: a file names classes of ``KINDS`` of them, and what is in ``COMPUTES``."""

KINDS = (
    *(base for category in CATEGORIES.values() for base in category.bases),
    *("torch.utils.data.Dataset", "torch.utils.data.DataLoader", "torch.utils.data.Sampler"),
    "lightning.pytorch.LightningDataModule",
)
"""The kinds of class that a run is made of."""

COMPUTES = (
    *("torch.nn", "torch._C._nn", "torch._C._linalg", "torch._C._special", "torch._C._fft"),
    *("torch.functional", "torch.distributions", "torchmetrics.functional"),
    *("torch.utils.data._utils.collate", "torch.utils.data.dataset"),
    *("torchvision.transforms", "torchvision.ops", "torchvision.models", "fulgurite.nn"),
    "fulgurite.optim",
)
"""Modules of them that hold and compute values."""

_TORCHS = ("device", "Size", "Generator", "dtype")
"""Classes of the package ``torch`` itself that a file may name."""

_ACTS = frozenset(("from_file", "set_num_threads", "set_num_interop_threads", "manual_seed"))
"""Functions of torch in C that do more than compute: read a file, or change the process."""

READS_CODE = (
    *("torch.hub", "torch.jit", "torch.package", "torch.serialization", "torch._ops"),
    *("torch.fx", "torch.export", "torch.utils.data.datapipes", "torch.distributed.nn"),
    *("torch.distributed.rpc", "torch._classes", "torch.utils.cpp_extension"),
    *("torch.utils.model_zoo", "yaml", "joblib", "cloudpickle", "dill", "numpy.ctypeslib"),
    *("numpy.f2py", "pandas.io.pickle"),
)
"""Modules of torch and others that run or compile what a file or an address holds."""

READERS_OF_CODE = frozenset(
    (
        *("numpy.load", "numpy.lib.format.read_array", "numpy.lib.npyio.NpzFile"),
        *("pandas.read_pickle", "sympy.core.sympify.sympify", "numpy.testing.measure"),
        *("numpy.testing._private.utils.measure", "numpy.testing._private.utils.rundocs"),
    )
)
"""Others that do, by the names that they say they have: their modules also read plain values."""


def refusal(
    target: Any,
    category: Category,
    packages: Container[str],
    kinds: Callable[[], tuple[type, ...]],
) -> str:
    """Why a class or function has no place in a file; nothing where it has, or nobody can know.

    Args:
        target: the class or function; what else a module holds passes if it cannot be called.
        category: what its place asks for.
        packages: those that the file lists.
        kinds: gives the classes of ``KINDS``.
    """
    known = inspect.isclass(target) or inspect.isroutine(target)
    if not (known or callable(target)):
        return ""
    home = _home(target)
    top, name = home.partition(".")[0], f"{home}.{getattr(target, '__qualname__', '')}"
    if is_pythons(home):
        plain = is_plain(name)
        return "" if plain and (category.anything or inspect.isclass(target)) else PYTHONS
    if _is_in(home, READS_CODE) or name in READERS_OF_CODE:
        return (
            "runs what a file or an address holds, and nobody can know what that is. Write a"
            " function of your own around it."
        )
    if top in OF_RUNS:
        if not known or not _is_part(target, home, kinds):
            return PARTS
    elif is_strange(top, packages):
        return strange(top)
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
PARTS = (
    "is no part of a run: of torch, Lightning and torchmetrics a file names layers, datasets,"
    " loaders, optimizers, schedulers, callbacks, loggers, metrics, plugins, and functions that"
    " compute. Write a function of your own around it."
)
_NO_BATCHES = (
    "gives no batches: expected a Dataset, a DataLoader, a LightningDataModule, something to"
    " iterate over, or a function that returns one of them."
)


def strange(package: str) -> str:
    """What to do with the code of a package that a file does not list."""
    return (
        f"is of the installed package {package}, which the file does not list. If you trust what"
        f" it says of it: imports: [{package}] at the top, or --set 'imports=[{package}]'."
    )


def is_strange(top: str, packages: Container[str]) -> bool:
    """Whether code is neither of the user's own folders, nor of a package that a file may name.

    Args:
        top: the package or module, which is not imported.
        packages: those that the file lists.
    """
    if top in OF_RUNS or top in packages:
        return False
    module = sys.modules.get(top)
    try:
        spec = module.__spec__ if module is not None else importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return False
    if spec is None:
        return False
    where = [spec.origin or "", *(spec.submodule_search_locations or ())]
    return any(part in _INSTALLED for path in where for part in Path(path).parts)


_INSTALLED = ("site-packages", "dist-packages")


def _is_part(target: Any, home: str, kinds: Callable[[], tuple[type, ...]]) -> bool:
    """Whether something of ``OF_RUNS`` is what a run is made of, or computes."""
    if home == "torch":
        if inspect.isclass(target):
            return target.__name__ in _TORCHS
        of_tensors = sys.modules["torch"]._C._VariableFunctions
        return hasattr(of_tensors, target.__name__) and target.__name__ not in _ACTS
    if target.__qualname__.startswith("_"):
        return False
    if _is_in(home, COMPUTES):
        return True
    return inspect.isclass(target) and issubclass(target, kinds())


def _is_in(module: str, modules: Iterable[str]) -> bool:
    return any(module == one or module.startswith(f"{one}.") for one in modules)


def _functions_refusal(target: Any, home: str, category: Category) -> str:
    """Why a function makes nothing that a place asks for."""
    batches, bases = category.batches, category.bases
    check = _gives_batches if batches else _is_one
    fits = functools.partial(check, batches or bases)
    said, a = _returns(target), with_article(category.title)
    if said is None:
        if home.partition(".")[0] not in OF_RUNS:
            return ""
        return f"does not say that it returns {a}. Write a function of your own around it."
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
    # a text can be iterated over too
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
    if top not in sys.stdlib_module_names or is_beside(folder, top):
        return False
    # a package of that name may have been put before Python's own on the path
    file = getattr(sys.modules.get(top), "__file__", None)
    if top not in sys.modules:
        found = importlib.util.find_spec(top)
        file = found.origin if found is not None and found.has_location else None
    return file is None or Path(file).is_relative_to(sysconfig.get_path("stdlib"))


def is_beside(folder: str | None, top: str) -> bool:
    """Whether a folder has a module of a name."""
    if folder is None:
        return False
    place = os.path.join(folder, top)  # pathlib's questions raise where a name is too long
    return os.path.exists(f"{place}.py") or os.path.isdir(place)


def is_plain(name: str) -> bool:
    """Whether a name of Python's library can stand in a file: that of an error can, too."""
    module, _, last = name.rpartition(".")
    error = getattr(builtins, last, None) if module == "builtins" else None
    is_error = inspect.isclass(error) and issubclass(error, BaseException)
    return is_error or name in PLAIN_NAMES or module in PLAIN_MODULES
