"""Which class a name in a file stands for.

A class is written in one of four forms:

    AdamW                                       its name, without arguments
    {AdamW: {lr: 1e-3}}                         its name and arguments
    {name: AdamW, lr: 1e-3}                     the same, flat
    {class_path: my.module.Net, init_args: {}}  any class or function, by its import path

Names are found in any case: first in the modules that the file lists under ``imports``, then in
Fulgurite, Lightning, torchmetrics and torch. A name with dots is an import path.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from fulgurite.config.problems import Path, Problem, nearest


@dataclass(frozen=True, kw_only=True, slots=True)
class Category:
    """A kind of class: what messages call it, its base classes, and where short names live."""

    title: str
    bases: tuple[str, ...]
    homes: tuple[str, ...] = ()
    functions: bool = False


CATEGORIES = {
    "model": Category(title="model", bases=("torch.nn.Module",), functions=True),
    "data": Category(title="data", bases=(), functions=True),
    "optimizer": Category(
        title="optimizer",
        bases=("torch.optim.Optimizer",),
        homes=("fulgurite.optim", "torch.optim"),
    ),
    "scheduler": Category(
        title="scheduler",
        bases=("torch.optim.lr_scheduler.LRScheduler",),
        homes=(
            "fulgurite.optim.lr_scheduler",
            "fulgurite.optim.weight_decay_scheduler",
            "torch.optim.lr_scheduler",
        ),
    ),
    "callback": Category(
        title="callback",
        bases=("lightning.pytorch.Callback",),
        homes=("fulgurite.callbacks", "lightning.pytorch.callbacks"),
    ),
    "logger": Category(
        title="logger",
        bases=("lightning.pytorch.loggers.Logger",),
        homes=("lightning.pytorch.loggers",),
    ),
}


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
    if isinstance(value, str):
        return Named(path=path, name=value, name_path=path, arguments={}, arguments_path=path)
    if not isinstance(value, Mapping) or not value:
        return Problem(path, f"expected a {title}, as {{Name: {{arguments}}}}; got {value!r}.")
    for word, inner in (("class_path", "init_args"), (key, None), ("name", None)):
        if word not in value:
            continue
        name, rest = value[word], {k: v for k, v in value.items() if k != word}
        if not isinstance(name, str):
            return Problem((*path, word), f"expected the name of a {title}; got {name!r}.")
        arguments_path = path
        if inner is not None:
            extra = [other for other in rest if other != inner]
            if extra:
                return Problem(
                    (*path, extra[0]),
                    f"stands beside class_path, which takes {inner}: {{...}} only."
                    + nearest(extra[0], [inner]),
                )
            rest, arguments_path = rest.get(inner) or {}, (*path, inner)
        return _with_arguments(name, (*path, word), rest, path, arguments_path, title)
    if len(value) > 1:
        return Problem(
            path,
            f"expected one {title}, as {{Name: {{arguments}}}}; got {len(value)} keys:"
            f" {', '.join(map(str, value))}.",
        )
    [(name, arguments)] = value.items()
    at = (*path, name)
    return _with_arguments(str(name), at, arguments, path, at, title)


def _with_arguments(
    name: str, name_path: Path, arguments: Any, path: Path, arguments_path: Path, title: str
) -> Named | Problem:
    if arguments is not None and not isinstance(arguments, Mapping):
        return Problem(
            arguments_path,
            f"expected the arguments of {name}, as {{key: value}}; got {arguments!r}.",
        )
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
        imports: whether classes of the user's are imported, or only named.
    """

    modules: tuple[ModuleType, ...] = ()
    imports: bool = True
    _short: dict[str, dict[str, tuple[str, Any]]] = field(default_factory=dict)

    def find(self, category: str, name: str) -> Any:
        """The class or function of a name; None where user classes are only named.

        Raises:
            LookupError: there is none, or it is of another kind; the text says which names there
                are like it.
        """
        kind = CATEGORIES[category]
        if "." in name:
            found = self._imported(name)
        else:
            known = self.short_names(category)
            if name.lower() not in known:
                if not self.imports and not kind.homes:
                    return None
                raise LookupError(self._unknown(category, name))
            found = known[name.lower()][1]
        if found is not None and not _fits(found, kind):
            bases = " or ".join(base.rpartition(".")[2] for base in kind.bases)
            raise LookupError(f"{name} is not a {kind.title}: expected a subclass of {bases}.")
        return found

    def short_names(self, category: str) -> dict[str, tuple[str, Any]]:
        """Lower-case name -> the name as it is, and the class."""
        if category not in self._short:
            kind = CATEGORIES[category]
            homes = [*self.modules, *(importlib.import_module(home) for home in kind.homes)]
            found: dict[str, tuple[str, Any]] = {}
            for home in homes:
                for name, value in vars(home).items():
                    if not name.startswith("_") and _fits(value, kind):
                        found.setdefault(name.lower(), (name, value))
            self._short[category] = found
        return self._short[category]

    def _imported(self, name: str) -> Any:
        if not self.imports and name.partition(".")[0] not in _LIBRARIES:
            return None
        return imported(name)

    def _unknown(self, category: str, name: str) -> str:
        kind = CATEGORIES[category]
        names = [shown for shown, _ in self.short_names(category).values()]
        return (
            f"no {kind.title} is named {name!r}.{nearest(name, names)} One of your own is named by"
            " the path it is imported from (my.module.Name), or its module listed under imports:."
        )


_LIBRARIES = ("fulgurite", "lightning", "torch", "torchmetrics")


def imported(name: str) -> Any:
    """What an import path stands for.

    Raises:
        LookupError: it cannot be imported; the text says why.
    """
    module, _, attribute = name.rpartition(".")
    try:
        home = importlib.import_module(module)
    except ImportError as error:
        raise LookupError(f"{name} cannot be imported: {error}.") from error
    except ValueError:
        raise LookupError(f"{name!r} is no import path (my.module.Name).") from None
    if not hasattr(home, attribute):
        near = nearest(attribute, [other for other in vars(home) if not other.startswith("_")])
        raise LookupError(f"module {module} has no {attribute!r}.{near}")
    return getattr(home, attribute)


def _fits(value: Any, kind: Category) -> bool:
    if inspect.isclass(value):
        bases = tuple(imported(base) for base in kind.bases)
        return not bases or (issubclass(value, bases) and value not in bases)
    return kind.functions and inspect.isfunction(value)
