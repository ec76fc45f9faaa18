"""What a class or function takes, as its source says; the rest of ``signatures`` asks Python.

``**kwargs`` are followed to the constructor of a base class. Elsewhere they are open.
"""

from __future__ import annotations

import ast
import inspect
from functools import partial
from typing import Any

from fulgurite.config.types.sources import Module, Source, is_dataclass


def parameters_of(target: Any) -> tuple[list[inspect.Parameter], bool] | None:
    """The parameters of what was read, and whether it takes others too; None of anything else."""
    source = vars(target).get("__source__") if hasattr(target, "__dict__") else None
    if not isinstance(source, Source):
        return None
    if isinstance(source.node, ast.FunctionDef):
        return _of_function(source, source.node, ())
    return _of_class(target.__mro__)


def _of_class(classes: tuple[type, ...]) -> tuple[list[inspect.Parameter], bool]:
    """The parameters of the first constructor of some classes."""
    open_ended = False
    for i, kind in enumerate(classes):
        source = vars(kind).get("__source__")
        if not isinstance(source, Source):
            continue
        if is_dataclass(source.node):
            return _of_fields(classes[i:]), False
        methods = {one.name: one for one in source.node.body if isinstance(one, ast.FunctionDef)}
        for name in ("__init__", "__new__"):
            if name in methods:
                found, more = _of_function(source, methods[name], classes[i + 1 :])
                return found[1:], more
        open_ended |= not source.whole
    return [], open_ended


def _of_fields(classes: tuple[type, ...]) -> list[inspect.Parameter]:
    """The fields of a dataclass."""
    found: dict[str, inspect.Parameter] = {}
    for kind in reversed(classes):
        source = vars(kind).get("__source__")
        if not isinstance(source, Source):
            continue
        for node in source.node.body:
            match node:
                case ast.AnnAssign(target=ast.Name(id=name), annotation=noted, value=value):
                    if "ClassVar" not in ast.unparse(noted):
                        found[name] = _parameter(
                            source.module, name, noted, value, inspect.Parameter.KEYWORD_ONLY
                        )
    return list(found.values())


def _parameter(
    module: Module, name: str, noted: ast.expr | None, default: ast.expr | None, kind: Any
) -> inspect.Parameter:
    """A parameter; a default that is not written out is ``...``."""
    value: Any = inspect.Parameter.empty
    if isinstance(default, ast.Constant):
        value = default.value
    elif default is not None:
        value = ...
    # a type is looked for when a value is: it may be in a large file
    annotation = inspect.Parameter.empty if noted is None else partial(module.annotated, noted)
    return inspect.Parameter(name, kind, default=value, annotation=annotation)


def _of_function(
    source: Source, node: ast.FunctionDef, after: tuple[type, ...]
) -> tuple[list[inspect.Parameter], bool]:
    """The parameters of a function, with those of the constructor that gets its ``**kwargs``.

    Args:
        after: the classes whose constructor ``super().__init__`` calls, one of them.
    """
    args, found = node.args, list[inspect.Parameter]()
    positional = [*args.posonlyargs, *args.args]
    defaults = [*[None] * (len(positional) - len(args.defaults)), *args.defaults]
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    for several, values, kind in (
        (positional, defaults, kinds[0]),
        (args.kwonlyargs, args.kw_defaults, kinds[1]),
    ):
        for one, value in zip(several, values, strict=True):
            found.append(_parameter(source.module, one.arg, one.annotation, value, kind))
    if args.kwarg is None:
        return found, False
    more, open_ended = _of_kwargs(node, args.kwarg.arg, after)
    known = {one.name for one in found}
    return [*found, *(one for one in more if one.name not in known)], open_ended


def _of_kwargs(
    node: ast.FunctionDef, kwargs: str, after: tuple[type, ...]
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
    if len(names) != len(calls) or {ast.unparse(one.func) for one in calls} != {"super().__init__"}:
        return [], True
    found, open_ended = _of_class(after)
    given = {one.arg for call in calls for one in call.keywords}
    passed = len(calls[0].args)
    return [one for one in found[passed:] if one.name not in given], open_ended
