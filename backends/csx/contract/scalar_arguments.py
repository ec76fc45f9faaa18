"""Find which argument of a torch function must be a Python number, and was given a tensor.

``F.leaky_relu(x, t)`` reads the value of ``t``, which has none while the step is traced. Some such
calls reach the function mode, some are noticed inside of torch, and some raise before any mode
sees them: then the traceback and the user's source tell. ``scalar_remedies`` has what to write.
"""

from __future__ import annotations

import ast
import inspect
import linecache
import re
from collections.abc import Callable, Iterator
from types import FrameType, FunctionType, TracebackType
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree

from fulgurite.backends.csx.diagnostics.user_lines import is_library, top_package

_UNKNOWN = object()


class Misplaced(NamedTuple):
    """A tensor in the place of a Python number."""

    function: str
    argument: str
    tensor: Any  # or the text of an expression


def place_in_call(
    function: Any, args: Any, kwargs: Any, is_scalar: Callable[[Any], bool]
) -> Misplaced | None:
    """Which argument of a call must be a Python number, and is a tensor without dimensions.

    ``function`` may be the name of one of torch's, where no more is known.
    """
    found: list[tuple[bool, Misplaced]] = []
    for key, given in (*enumerate(args), *kwargs.items()):
        leaves = [given.start, given.stop] if type(given) is slice else pytree.tree_leaves(given)
        for leaf in filter(is_scalar, leaves):
            argument, takes_tensors = _argument(function, key, len(args))
            if argument:
                found.append((takes_tensors, Misplaced(_name(function), argument, leaf)))
    found.sort(key=lambda one: one[0])
    return found[0][1] if found else None


def _argument(function: Any, key: int | str, count: int) -> tuple[str, bool]:
    """The name of an argument, and whether it may be a tensor; no name if it always is one."""
    if isinstance(function, FunctionType):
        parameters = list(inspect.signature(function).parameters.values())
        by_name = {one.name: one for one in parameters}
        last = len(parameters) - 1
        one = by_name.get(key) if isinstance(key, str) else parameters[min(key, last)]
        if one is None:
            return str(key), False
        return one.name, "Tensor" in str(one.annotation)
    found = list(_schema_arguments(_name(function), key, count))
    names = [one.name for one in found if "Tensor" not in str(one.type)]
    return (names[0] if names else ""), len(names) < len(found)


def _schema_arguments(name: str, key: int | str, count: int) -> Iterator[Any]:
    """What the overloads that take ``count`` arguments have in one place.

    Where none takes so many, all count: sizes may be given one by one, as in ``zeros(2, 3)``.
    """
    lists: list[list[Any]] = []
    for form in (name, f"{name}_", f"linalg_{name}", f"special_{name}", f"_{name}"):
        for schema in torch._C._jit_get_schemas_for_operator(f"aten::{form}"):
            if isinstance(key, str):
                yield from (one for one in schema.arguments if one.name == key)
            elif not schema.overload_name.endswith("out"):
                lists.append([one for one in schema.arguments if not one.kwarg_only])
    enough = [one for one in lists if len(one) >= count] or lists
    yield from (one[min(int(key), len(one) - 1)] for one in enough if one)


def _name(function: Any) -> str:
    name = function if isinstance(function, str) else getattr(function, "__name__", str(function))
    return str(name).lstrip("_")


def place_in_frames(
    frames: Iterator[FrameType], is_scalar: Callable[[Any], bool]
) -> Misplaced | None:
    """The same among the parameters of torch's own Python functions, the outermost first."""
    for frame in frames:
        code = frame.f_code
        for argument in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
            value = frame.f_locals.get(argument)
            if is_scalar(value):
                made = code.co_name == "__init__"  # a module
                kind = type(frame.f_locals.get("self")).__name__
                return Misplaced(kind if made else _name(code.co_name), argument, value)
    return None


def place_of_error(error: TypeError, is_scalar: Callable[[Any], bool]) -> Misplaced | None:
    """The same where torch refused the tensor by itself: what the traceback tells.

    torch looks at ``alpha=`` before any mode does; then the tensor is called what the user's line
    calls it.
    """
    if "FakeTensor" not in str(error):
        return None
    innermost, libraries = None, list[FrameType]()
    traceback = error.__traceback__
    while traceback is not None:
        if is_library(traceback.tb_frame):
            libraries.append(traceback.tb_frame)
        else:
            innermost, libraries = traceback, []
        traceback = traceback.tb_next
    torchs = (frame for frame in libraries if top_package(frame) == "torch")
    place = place_in_frames(torchs, is_scalar)
    if place is None and innermost is not None and not libraries:
        place = _place_in_source(innermost, str(error), is_scalar)
    said = re.match(r"(\w+)\(\): argument '(\w+)'.* must be \w+, not FakeTensor", str(error))
    if place is None and said is not None:
        place = Misplaced(said[1], said[2], "A tensor")
    return place


def _place_in_source(
    traceback: TracebackType, text: str, is_scalar: Callable[[Any], bool]
) -> Misplaced | None:
    """The same by the expression that the user's frame was in."""
    call = _expression(traceback)
    if not isinstance(call, ast.Call) or any(isinstance(a, ast.Starred) for a in call.args):
        return None
    frame = traceback.tb_frame
    names = {**frame.f_globals, **frame.f_locals}

    def value(node: ast.expr) -> Any:
        """The text of an expression that may be such a tensor; in lists those of its items."""
        if isinstance(node, (ast.Tuple, ast.List)):
            return [value(item) for item in node.elts]
        known = _resolved(ast.unparse(node), names)
        may_be = any(isinstance(one, ast.Name) for one in ast.walk(node))
        return ast.unparse(node) if is_scalar(known) or (may_be and known is _UNKNOWN) else None

    path, _, name = ast.unparse(call.func).rpartition(".")
    if not path and name not in names:  # Python's own
        return None
    is_method = bool(path) and not inspect.ismodule(_resolved(path, names))
    args = [*[None] * is_method, *map(value, call.args)]
    kwargs = {one.arg: value(one.value) for one in call.keywords if one.arg is not None}
    said = re.search(r"argument '(\w+)' \(position (\d+)\)", text)
    if said is not None:
        place = int(said[2]) - 1 + is_method
        expression = kwargs.get(said[1]) or (args[place] if place < len(args) else None)
        return Misplaced(name, said[1], f"`{expression}`" if expression else "A tensor")
    found = place_in_call(name, args, kwargs, lambda leaf: isinstance(leaf, str))
    return None if found is None else found._replace(tensor=f"`{found.tensor}`")


def _resolved(path: str, names: dict[str, Any]) -> Any:
    """What dotted names stand for, found without running code; _UNKNOWN where it is not."""
    first, *rest = path.split(".")
    found = names.get(first, _UNKNOWN)
    for name in rest:
        own = getattr(found, "__dict__", {})
        kept = (own, *(own.get(key, {}) for key in ("_parameters", "_buffers", "_modules")))
        found = next((one[name] for one in kept if name in one), _UNKNOWN)
    return found


def _expression(traceback: TracebackType) -> ast.expr | None:
    """The expression that a frame was in when the error came."""
    code = traceback.tb_frame.f_code
    positions = list(code.co_positions())[traceback.tb_lasti // 2]
    first, last, start, end = positions
    if first is None or last is None or start is None or end is None:
        return None
    lines = [linecache.getline(code.co_filename, i).encode() for i in range(first, last + 1)]
    lines[-1] = lines[-1][:end]
    lines[0] = lines[0][start:]
    try:
        return ast.parse(b"(" + b"".join(lines) + b")", mode="eval").body
    except SyntaxError:
        return None
