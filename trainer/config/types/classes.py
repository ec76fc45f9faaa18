"""Which class a name in a file stands for, or an import path, and why it stands for none.

A class is written in one of four forms:

    AdamW                                       its name, without arguments
    {AdamW: {lr: 1e-3}}                         its name and arguments
    {name: AdamW, lr: 1e-3}                     the same, flat
    {class_path: my.module.Net, init_args: {}}  any class or function, by its import path

A name with dots is an import path. One without is found in any case; where several homes have it,
the first counts: the modules that the file lists under ``imports``, in their order, then the homes
of its category (``CATEGORIES``), ours before others'. Base classes, abstract and private ones are
no choices.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import pkgutil
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

from fulgurite.config.document.problems import (
    Path,
    Problem,
    choices,
    missing,
    nearest,
    shown,
    with_article,
)
from fulgurite.config.types.categories import CATEGORIES as CATEGORIES
from fulgurite.config.types.categories import Category as Category
from fulgurite.config.types.makes import (
    KINDS,
    PYTHONS,
    is_beside,
    is_plain,
    is_pythons,
    is_strange,
    refusal,
    strange,
)
from fulgurite.config.types.sources import LIBRARIES, Module, read


@dataclass(frozen=True, kw_only=True, slots=True)
class Named:
    """A class as a file names it, whatever the form.

    Args:
        path: where it stands; ``arguments_path``: where its arguments do.
        removed: it was written ``{Name: null}``.
    """

    path: Path
    name: str
    name_path: Path
    arguments: dict[str, Any]
    arguments_path: Path
    removed: bool = False


def named(value: Any, path: Path, title: str, key: str = "name") -> Named | Problem:
    """Read one of the four forms, or say what is wrong with it."""
    if isinstance(value, str) and value:
        return Named(path=path, name=value, name_path=path, arguments={}, arguments_path=path)
    if not isinstance(value, Mapping) or not value:
        text = f"expected {with_article(title)}, as {{Name: {{arguments}}}}; got {shown(value)}."
        return Problem(path, text)
    for word in ("class_path", key, "name"):
        if word in value:
            return _flat(value, word, path, title)
    first = next(iter(value.values()))
    if key != "name" and (len(value) > 1 or not isinstance(first, (Mapping, type(None)))):
        return missing(key, map(str, value), path)
    if len(value) > 1:
        return Problem(path, _two_names(value, title))
    [(name, arguments)] = value.items()
    at = (*path, name)
    return _with_arguments(name, at, arguments, path, at, title)


def _two_names(value: Mapping[Any, Any], title: str) -> str:
    keys = [str(key) for key in value]
    text = f"expected one {title}, as {{Name: {{arguments}}}}; got {len(keys)} keys:"
    text = f"{text} {', '.join(keys[:8])}."
    if not isinstance(next(iter(value.values())), (Mapping, type(None))):
        return f"name: required beside these keys, and not given: {', '.join(keys[:8])}."
    if next(iter(value.values())) is None:
        text += f" Indent {', '.join(keys[1:8])} deeper, as the arguments of {keys[0]}."
    return text


def _flat(value: Mapping[Any, Any], word: str, path: Path, title: str) -> Named | Problem:
    """A form that has the name under a key: ``class_path``, ``name`` or ``data_processor``."""
    name, rest = value[word], {k: v for k, v in value.items() if k != word}
    if word != "class_path":
        return _with_arguments(name, (*path, word), rest, path, path, title)
    for other in rest:
        if other != "init_args":
            near = nearest(other, ["init_args"])
            text = f"stands beside class_path, which takes init_args: {{...}} only.{near}"
            return Problem((*path, other), text)
    arguments = {} if rest.get("init_args") is None else rest["init_args"]
    return _with_arguments(name, (*path, word), arguments, path, (*path, "init_args"), title)


def _with_arguments(
    name: Any, name_path: Path, arguments: Any, path: Path, arguments_path: Path, title: str
) -> Named | Problem:
    if not isinstance(name, str) or not name:
        return Problem(name_path, f"expected the name of {with_article(title)}; got {shown(name)}.")
    if arguments is not None and not isinstance(arguments, Mapping):
        text = f"expected the arguments of {name}, as {{key: value}}; got {shown(arguments)}."
        return Problem(arguments_path, text)
    return Named(
        path=path,
        name=name,
        name_path=name_path,
        arguments=dict(arguments or {}),
        arguments_path=arguments_path,
        removed=arguments is None,
    )


@dataclass(kw_only=True)
class Classes:
    """Finds classes by name.

    Args:
        modules: those that the file lists under ``imports``.
        imports: whether classes are imported; else the user's are only named, and those of
            libraries read from their source.
        packages: the first parts of what the file lists there. With ``imports=False``, a short
            name that nobody knows may be one of theirs.
        folder: where the file lies; its modules can be named.
    """

    modules: tuple[ModuleType, ...] = ()
    imports: bool = True
    packages: frozenset[str] = frozenset()
    folder: str | None = None
    _short: dict[tuple[Category, str | None], dict[str, Any]] = field(default_factory=dict)

    def library(self, path: str) -> Any:
        """A class, function or table of a library; with ``imports=False``, as its source says.

        Raises:
            ImportError: the source is not there.
        """
        found = imported(path) if self.imports else read(path)
        if found is Any:
            raise ImportError(f"no source of {path} is installed; check without --no-imports.")
        return found

    def category(self, name: str) -> Category:
        """One of ``CATEGORIES``, with its classes."""
        found = CATEGORIES[name]
        bases, no_choices, batches = (
            tuple(map(self.library, paths))
            for paths in (found.bases, found.no_choices, found.batches)
        )
        return replace(found, bases=bases, no_choices=no_choices, batches=batches)

    def category_of(self, types: tuple[type, ...]) -> Category:
        """The category of a parameter that takes instances of some classes."""
        homes, no_choices = dict[str, None](), dict[type, None]()
        title = " or ".join(kind.__name__ for kind in types)
        for category in map(self.category, CATEGORIES):
            bases = category.bases
            if category.homes and all(issubclass(kind, bases) for kind in types):
                title = category.title if set(types) & set(bases) else title
                homes |= dict.fromkeys(category.homes)
                no_choices |= dict.fromkeys(category.no_choices)
        homes |= dict.fromkeys(kind.__module__ for kind in types if kind is not object)
        return Category(
            title=title,
            bases=types,
            homes=(*homes,),
            no_choices=(*no_choices,),
            base_is_choice=True,
        )

    def find(self, category: Category | str, name: str) -> Any:
        """The class or function of a name; None where user classes are only named.

        Args:
            category: one, or its key in ``CATEGORIES``.
            name: as the file has it.

        Raises:
            LookupError: there is none, or it is of another kind; the text says which names there
                are like it.
        """
        found = self.imported(name) if "." in name else None
        if "." in name and found is None:
            return None
        if isinstance(category, str):
            category = self.category(category)
        if found is None:
            known = self.short_names(category, like=name.lower())
            exact = name if name in known else next(iter(known), None)
            if exact is None:
                # it may be of a module under `imports`, which nobody has looked into
                if not self.imports and (self.packages or not category.homes):
                    return None
                raise LookupError(self._unknown(category, name))
            found = known[exact]
        why = self.refusal(found, category)
        if why:
            raise LookupError(f"{name} {why}")
        if not _fits(found, category):
            bases = " or ".join(base.__name__ for base in category.bases)
            a = "a module, not" if inspect.ismodule(found) else "not"
            wanted = f": expected a subclass of {bases}" if bases else ""
            raise LookupError(f"{name} is {a} {with_article(category.title)}{wanted}.")
        return found

    def short_names(self, category: Category, like: str | None = None) -> dict[str, Any]:
        """The classes that can be named without a path; those of earlier homes first.

        Args:
            like: look only for those of a name, which is in lower case.
        """
        key = (category, like)
        if key not in self._short:
            home_of = importlib.import_module if self.imports else read
            homes = [*self.modules, *map(home_of, category.homes)]
            found: dict[str, Any] = {}
            for home in homes:
                for name in _names(home):
                    if like is not None and name.lower() != like:
                        continue
                    value = getattr(home, name, None)
                    # torchmetrics' deprecated classes have public names for private ones
                    names = (name, getattr(value, "__name__", "_"))
                    private = any(other.startswith("_") for other in names)
                    if not private and _fits(value, category) and not self.refusal(value, category):
                        found.setdefault(name, value)
            self._short[key] = found
        return self._short[key]

    def imported(self, name: str) -> Any:
        """What an import path stands for; None where it is the user's and only named.

        Raises:
            LookupError: it cannot be imported; the text says why.
        """
        wrong = self.not_allowed(name)
        if wrong:
            raise LookupError(wrong)
        try:
            if self.imports:
                return imported(name)
            found = read(name) if name.partition(".")[0] in LIBRARIES else Any
            return None if found is Any else found
        except LookupError as error:
            raise LookupError(f"{error}{self.missing(name)}") from None

    def refusal(self, target: Any, category: Category) -> str:
        """Why a class or function has no place in the file, if it has none (``makes``)."""
        return refusal(target, category, self.packages, lambda: self._kinds)

    @functools.cached_property
    def _kinds(self) -> tuple[type, ...]:
        return tuple(map(self.library, KINDS))

    def not_allowed(self, name: str) -> str:
        """Why an import path has no place in a file; nothing is imported."""
        if is_pythons(name, self.folder):
            return "" if is_plain(name) else f"{name} {PYTHONS}"
        top = name.partition(".")[0]
        own = is_beside(self.folder, top) or not is_strange(top, self.packages)
        return "" if own else f"{name} {strange(top)}"

    def missing(self, name: str) -> str:
        """Where modules are looked for, if the first part of a name is none at all."""
        top = name.partition(".")[0]
        if self.folder is None or top in sys.modules or _exists(top):
            return ""
        beside = [module.name for module in pkgutil.iter_modules([self.folder])]
        return f"{nearest(top, beside)} It is looked for beside the file, and where Python does."

    def _unknown(self, category: Category, name: str) -> str:
        names = list(self.short_names(category))
        return (
            f"no {category.title} is named {shown(name)}.{choices(name, names)} One of your own is"
            " named by the path it is imported from (my.module.Name), or its module is listed under"
            " imports:."
        )


def _names(home: Any) -> Iterable[str]:
    return home.names() if isinstance(home, Module) else getattr(home, "__all__", vars(home))


def _fits(value: Any, category: Category) -> bool:
    if not inspect.isclass(value):
        return category.functions and inspect.isroutine(value)
    is_base = value in category.bases and not category.base_is_choice
    if inspect.isabstract(value) or is_base or value in category.no_choices:
        return False
    return not category.bases or issubclass(value, category.bases)


def _exists(module: str) -> bool:
    """Whether there is a module of a name, which is not imported."""
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
            # this part of the path is no module: a shorter one may be. Else what it imports is
            # missing
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
