"""Classes and functions of libraries as their source describes them: read, not imported.

Torch and Lightning take seconds to import. Where a file is only checked, the source says enough:
which classes a class derives from, and what its constructor takes. A class becomes an empty one of
the same name, bases and methods, a function one that cannot be called. What a library makes while
it is imported, or in C, is not known: ``Any``.
"""

from __future__ import annotations

import ast
import builtins
import functools
import importlib
import inspect
import sys
import typing
from abc import ABCMeta, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from importlib.machinery import ModuleSpec
from importlib.util import resolve_name
from pathlib import Path
from types import ModuleType
from typing import Any

from fulgurite.config.document.problems import nearest

LIBRARIES = ("fulgurite", "lightning", "torch", "torchmetrics")
"""What is read: what the user did not write, and what takes long to import."""

_TYPES = (
    *(ast.Name, ast.Attribute, ast.Subscript, ast.BinOp, ast.BitOr, ast.Tuple, ast.List),
    *(ast.Dict, ast.Constant, ast.expr_context),
)
"""What annotations, their aliases and tables of names are written with; no calls."""

_GLOBALS = {"__builtins__": {"__import__": __import__}}
"""Those of an expression. Typing's own types are written in C since Python 3.12, and import typing
by this function where one is subscripted or joined by ``|``. The expression calls nothing."""

_CLASS_HOOKS = ("__init_subclass__", "__subclasshook__", "__class_getitem__")
_UNKNOWN: dict[str, Any] = {"__getattr__": None}


class Described(ABCMeta):
    """The type of a class that was read."""


def read(path: str) -> Any:
    """What an import path stands for, as its source says; Any where that does not tell.

    Raises:
        LookupError: it is not there; the text says what is like it.
    """
    parts = path.split(".")
    found: Any = _module(parts[0])
    for i, part in enumerate(parts[1:], start=1):
        if not isinstance(found, Module):
            return Any
        try:
            found = found.get(part)
        except AttributeError:
            near = nearest(part, [name for name in found.names() if not name.startswith("_")])
            raise LookupError(f"{'.'.join(parts[:i])} has no {part!r}.{near}") from None
    return found


@functools.cache
def _spec(name: str) -> ModuleSpec | None:
    """Where a module lies. ``importlib.util.find_spec`` would import the packages around it."""
    parent, _, _ = name.rpartition(".")
    around = _spec(parent) if parent else None
    if parent and (around is None or around.submodule_search_locations is None):
        return None
    path = around.submodule_search_locations if around is not None else None
    found = (finder.find_spec(name, path) for finder in sys.meta_path)
    return next((spec for spec in found if spec is not None), None)


@functools.cache
def _module(name: str) -> Any:
    """A module that is read; Any, of one in C."""
    spec = _spec(name)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return Any
    return Module(name, Path(spec.origin))


class Module(ModuleType):
    """A module that is read when something of it is asked for, and what it has, by name."""

    def __init__(self, name: str, file: Path) -> None:
        super().__init__(name)
        self._name, self._file, self._is_package = name, file, file.stem == "__init__"
        self._values: dict[str, Any] = {}

    def get(self, name: str) -> Any:
        """A submodule, class, function, type or table; Any, of what else there is or may be.

        Raises:
            AttributeError: there is no such name.
        """
        if name not in self._values:
            self._values[name] = Any  # what refers to itself
            try:
                self._values[name] = self._read(name)
            except AttributeError:
                del self._values[name]
                raise
        return self._values[name]

    __getattr__ = get

    def names(self) -> list[str]:
        """The names that it exports, or that it has."""
        exported = self.get("__all__") if "__all__" in self._defined else None
        return exported if isinstance(exported, list) else list(self._defined)

    def annotated(self, node: ast.expr) -> Any:
        """The type that an annotation means."""
        return self.evaluated(_Unquoted().visit(node))

    def evaluated(self, node: ast.expr) -> Any:
        """A type or a table of the module; Any, of another expression."""
        if not all(isinstance(part, _TYPES) for part in ast.walk(node)):
            return Any
        # of names, attributes and subscripts alone: no function of the library is called
        code = compile(ast.Expression(node), str(self._file), "eval")
        try:
            return eval(code, _GLOBALS, _Names(self))
        except (TypeError, AttributeError):  # of a name that is not known
            return Any

    def _read(self, name: str) -> Any:
        # before what the package itself has under that name: paths lead through modules
        if self._is_package and _spec(f"{self._name}.{name}") is not None:
            return _module(f"{self._name}.{name}")
        if name not in self._defined:
            if "__getattr__" in self._defined:
                return Any
            raise AttributeError(name)
        found = self._defined[name]
        match found:
            case tuple():
                return _imported(*found)
            case ast.ClassDef():
                return self._class(found)
            case ast.FunctionDef():
                return self._function(found)
        return self.evaluated(found) if isinstance(found, ast.expr) else Any

    @functools.cached_property
    def _defined(self) -> dict[str, Any]:
        """Name -> its definition, the expression that it is, or where it is imported from.

        ``__getattr__`` is there where it has names that the source does not show.
        """
        package = self._name if self._is_package else self._name.rpartition(".")[0]
        text = self._file.read_text(encoding="utf-8")
        found: dict[str, Any] = dict(_UNKNOWN if "globals()" in text else {})
        for node in _statements(ast.parse(text).body):
            match node:
                # the first definition of a name counts: that under `if` or `try`, not what stands
                # in for a missing library under `else` or `except`
                case ast.ImportFrom():
                    source = resolve_name(f"{'.' * node.level}{node.module or ''}", package)
                    for alias in node.names:
                        name = alias.asname or alias.name
                        of = _exported(source) if name == "*" else {name: (source, alias.name)}
                        found |= {key: one for key, one in of.items() if key not in found}
                case ast.Import():
                    for alias in node.names:
                        top = alias.name.partition(".")[0]
                        source = alias.name if alias.asname else top
                        found.setdefault(alias.asname or top, (source, None))
                case ast.ClassDef() | ast.FunctionDef():
                    found.setdefault(node.name, node)
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    found.setdefault(name, value)
                case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                    found.setdefault(name, value)
                case ast.AugAssign(target=ast.Name(id="__all__"), value=ast.List(elts=more)):
                    found["__all__"].elts.extend(more)
        return found

    def _class(self, node: ast.ClassDef) -> Any:
        """A class of the same name, bases and methods; Any, of an Enum and its like."""
        body: dict[str, Any] = {"__module__": self._name, "__qualname__": node.name}
        body["__class_getitem__"] = classmethod(lambda made, _: made)  # Dataset[int]
        bases: list[type] = []
        whole = True
        for base in map(self.evaluated, node.bases):
            kind = typing.get_origin(base) or base
            # others, an Enum's, do things when a class is derived from them
            if isinstance(kind, type) and type(kind) in (Described, type, ABCMeta):
                bases += [kind] if kind not in (typing.Generic, object) else []
            elif kind is typing.Protocol:
                body["_is_protocol"] = True
            elif kind is Any:
                whole = False
            else:
                return Any
        if is_dataclass(node):
            body["__dataclass_fields__"] = {}  # which makes it one to dataclasses.is_dataclass
        for item in node.body:
            if isinstance(item, ast.FunctionDef) and item.name not in _CLASS_HOOKS:
                body[item.name] = _not_run(item)
        body["__source__"] = Source(self, node, whole)
        try:
            return Described(node.name, tuple(bases), body)
        except TypeError:  # bases that go together only with another one, which is not known
            return Any

    def _function(self, node: ast.FunctionDef) -> Any:
        """A function of the same name and result; Any, of a decorated one."""
        if node.decorator_list:
            return Any
        made = _not_run(node)
        made.__name__ = made.__qualname__ = node.name
        made.__module__ = self._name
        returns = node.returns
        made.__annotations__ = {} if returns is None else {"return": self.annotated(returns)}
        made.__source__ = Source(self, node)
        return made


@dataclass(frozen=True, slots=True)
class Source:
    """Where a class or function was read.

    Args:
        whole: whether all its bases are known.
    """

    module: Module
    node: Any
    whole: bool = True


class _Names(dict[str, Any]):
    """What the names in an expression of a module stand for."""

    def __init__(self, module: Module) -> None:
        super().__init__()
        self._module = module

    def __missing__(self, name: str) -> Any:
        found = getattr(self._module, name, Any)
        return getattr(builtins, name, Any) if found is Any else found


class _Unquoted(ast.NodeTransformer):
    """Types in quotes without them; what a Literal holds stays."""

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        named = node.value.attr if isinstance(node.value, ast.Attribute) else node.value
        is_literal = "Literal" in (named, getattr(named, "id", None))
        return node if is_literal else typing.cast(ast.expr, self.generic_visit(node))

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        try:
            quoted = ast.parse(node.value, mode="eval") if isinstance(node.value, str) else None
        except SyntaxError:
            return node
        return node if quoted is None else quoted.body


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a module, those under ``if`` and ``try`` among them."""
    for node in body:
        yield node
        if isinstance(node, (ast.If, ast.Try)):
            yield from _statements([*node.body, *node.orelse])


def _exported(source: str) -> dict[str, Any]:
    """What ``from source import *`` gives."""
    module = _module(source) if source.partition(".")[0] in LIBRARIES else Any
    if not isinstance(module, Module):
        return _UNKNOWN
    return {name: (source, name) for name in module.names() if not name.startswith("_")}


def _imported(source: str, name: str | None) -> Any:
    """What an import gives: of a library it is read, of Python's own types it is the type."""
    top = source.partition(".")[0]
    if top in LIBRARIES:
        found = _module(source)
        return getattr(found, name, Any) if name and isinstance(found, Module) else found
    if source == "typing_extensions":
        return getattr(typing, name or "", Any)
    if top not in sys.stdlib_module_names:
        return Any
    try:
        module = importlib.import_module(source)
    except ImportError:  # of another system's Python
        return Any
    return module if name is None else getattr(module, name, Any)


def _decorators(node: ast.ClassDef | ast.FunctionDef) -> list[str]:
    """The last parts of the decorators' names."""
    return [ast.unparse(one).partition("(")[0].rpartition(".")[2] for one in node.decorator_list]


def is_dataclass(node: ast.ClassDef) -> bool:
    """Whether a class is declared to be one."""
    return "dataclass" in _decorators(node)


def _not_run(node: ast.FunctionDef) -> Any:
    def method(*_: Any, **__: Any) -> None:
        raise NotImplementedError(f"{node.name} was read, not imported")

    return abstractmethod(method) if "abstractmethod" in _decorators(node) else method


def parameters_of(target: Any) -> tuple[list[inspect.Parameter], bool] | None:
    """The parameters of what was read, and whether it takes others too; None of anything else.

    ``**kwargs`` are followed to the constructor of a base class. Elsewhere they are open.
    """
    source = vars(target).get("__source__") if hasattr(target, "__dict__") else None
    if not isinstance(source, Source):
        return None
    if isinstance(source.node, ast.FunctionDef):
        return _of_function(source, source.node, [])
    return _of_class(
        [vars(kind)["__source__"] for kind in target.__mro__ if type(kind) is Described]
    )


def _of_class(classes: list[Source]) -> tuple[list[inspect.Parameter], bool]:
    """The parameters of the first constructor of some classes."""
    open_ended = False
    for i, source in enumerate(classes):
        # its constructor is made of its fields, and stands nowhere
        if is_dataclass(source.node):
            return _of_fields(classes[i:]), False
        methods = {one.name: one for one in source.node.body if isinstance(one, ast.FunctionDef)}
        for name in ("__init__", "__new__"):
            if name in methods:
                found, more = _of_function(source, methods[name], classes[i + 1 :])
                # without ``self``
                return found[1:], more
        open_ended |= not source.whole
    return [], open_ended


def _of_fields(classes: list[Source]) -> list[inspect.Parameter]:
    """The fields of a dataclass."""
    found: dict[str, inspect.Parameter] = {}
    for source in reversed(classes):
        for node in source.node.body:
            match node:
                case ast.AnnAssign(target=ast.Name(id=name), annotation=noted, value=value):
                    if "ClassVar" not in ast.unparse(noted):
                        found[name] = _parameter(source.module, name, noted, value)
    return list(found.values())


def _parameter(
    module: Module, name: str, noted: ast.expr | None, default: ast.expr | None
) -> inspect.Parameter:
    """A parameter; a default that is not written out is ``...``."""
    value: Any = inspect.Parameter.empty if default is None else ...
    if isinstance(default, ast.Constant):
        value = default.value
    # a type is looked for when a value is: it may be in a large file
    annotation = inspect.Parameter.empty if noted is None else partial(module.annotated, noted)
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=value, annotation=annotation)


def _of_function(
    source: Source, node: ast.FunctionDef, after: list[Source]
) -> tuple[list[inspect.Parameter], bool]:
    """The parameters of a function, with those of the constructor that gets its ``**kwargs``.

    Args:
        after: the classes whose constructor ``super().__init__`` calls, one of them.
    """
    args = node.args
    every = [*args.posonlyargs, *args.args, *args.kwonlyargs]
    defaults = [*args.defaults, *args.kw_defaults]
    # as ast has them: ``defaults`` of the last ones by position, ``kw_defaults`` of each keyword
    required = [None] * (len(every) - len(defaults))
    found = [
        _parameter(source.module, one.arg, one.annotation, default)
        for one, default in zip(every, [*required, *defaults], strict=True)
    ]
    if args.kwarg is None:
        return found, False
    more, open_ended = _of_kwargs(node, args.kwarg.arg, after)
    known = {one.name for one in found}
    return [*found, *(one for one in more if one.name not in known)], open_ended


def _of_kwargs(
    node: ast.FunctionDef, kwargs: str, after: list[Source]
) -> tuple[list[inspect.Parameter], bool]:
    """What a constructor takes by its ``**kwargs``, if it only hands them to that of its base."""
    names = [one for one in ast.walk(node) if isinstance(one, ast.Name) and one.id == kwargs]
    calls = [
        one
        for one in ast.walk(node)
        if isinstance(one, ast.Call)
        and any(k.arg is None and ast.unparse(k.value) == kwargs for k in one.keywords)
    ]
    if not names:
        return [], False
    # read, or handed elsewhere too: what may be in them is not known
    if len(names) != len(calls) or {ast.unparse(one.func) for one in calls} != {"super().__init__"}:
        return [], True
    found, open_ended = _of_class(after)
    given = {one.arg for call in calls for one in call.keywords}
    passed = len(calls[0].args)
    return [one for one in found[passed:] if one.name not in given], open_ended
