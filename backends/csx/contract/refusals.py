"""Find the rule that a call of the step's broke, and make the error that its user reads.

``function_mode`` asks here when a call needs a value, or fails, while the step is traced. Calls
that no function mode sees are replaced by functions that raise (``refused_calls``), and what
Python or torch themselves say is explained (``explaining_errors``). What is a misuse in the user's
code may be harmless in a library's, which knows what it does: so it is asked who called.

``F.leaky_relu(x, t)`` reads the value of ``t``, which has none while the step is traced. Some such
calls reach the function mode, some are noticed inside of torch, and some raise before any mode
sees them: then the traceback and the user's source tell which argument it was.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import linecache
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from types import FrameType, FunctionType, TracebackType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from fulgurite.backends.csx.contract.leaks import Names, function_name, in_sentence
from fulgurite.backends.csx.contract.proxies import names_proxy
from fulgurite.backends.csx.contract.rules import (
    INITIALIZED,
    METRIC_REMEDY,
    MULTIPLIED_OUT,
    POINTER,
    RULES,
    SIZED,
    in_package,
    misuse,
)
from fulgurite.backends.csx.diagnostics.conditions import asks, choice
from fulgurite.backends.csx.diagnostics.trace_errors import (
    ConditionalOnTensor,
    TraceError,
    UnsupportedState,
)
from fulgurite.backends.csx.diagnostics.user_lines import (
    UserLine,
    is_library,
    raised_at,
    top_package,
)
from fulgurite.backends.csx.hyperparams.traced_float import is_traced
from fulgurite.backends.patches import Patch, patches_of
from fulgurite.backends.torch_versions import CHECKED


def _caller() -> FrameType | None:
    """The frame that called the torch function which runs now."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and top_package(frame) == "fulgurite":
        frame = frame.f_back
    while frame is not None and frame.f_code.co_name == "__torch_function__":
        frame = frame.f_back
    return frame


def called_by_library() -> bool:
    """Whether library code made the torch call that runs now; also if the caller is unknown."""
    caller = _caller()
    return caller is None or is_library(caller)


def called_by_torch_optim() -> bool:
    """Whether one of torch's optimizers called: it reads numbers that a program can compute."""
    caller = _caller()
    return caller is not None and caller.f_globals.get("__name__", "").startswith("torch.optim.")


def may_use_double() -> bool:
    """Whether the code that called may use float64: optimizers and metrics, for a few scalars."""
    frame = _caller()
    while frame is not None and top_package(frame) in ("torch", "contextlib", "functools"):
        if frame.f_globals["__name__"].startswith(("torch.optim", "torch.amp")):
            return True
        frame = frame.f_back
    return frame is None or top_package(frame) in ("fulgurite", "torchmetrics", "lightning")


def line_of_torchmetrics() -> str | None:
    """File and line of torchmetrics' code, if that is what called."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and top_package(frame) in ("torch", "fulgurite"):
        frame = frame.f_back
    if frame is None or top_package(frame) != "torchmetrics":
        return None
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def torch_frames() -> Iterator[FrameType]:
    """The frames of torch's that the user's line led to, the outermost first."""
    frames: list[FrameType] = []
    frame = _caller()
    while frame is not None and top_package(frame) == "torch":
        if frame.f_globals["__name__"] not in ("torch._tensor", "torch.overrides"):
            frames.append(frame)
        frame = frame.f_back
    return reversed(frames)


_UNKNOWN = object()


class MisplacedTensor(NamedTuple):
    """A tensor in the place of a Python number."""

    function: str
    argument: str
    tensor: Any  # or the text of an expression


def place_in_call(
    function: Any, args: Any, kwargs: Any, is_scalar: Callable[[Any], bool]
) -> MisplacedTensor | None:
    """Which argument of a call must be a Python number, and is a tensor without dimensions.

    ``function`` may be the name of one of torch's, where no more is known.
    """
    found: list[tuple[bool, MisplacedTensor]] = []
    for key, given in (*enumerate(args), *kwargs.items()):
        leaves = [given.start, given.stop] if type(given) is slice else pytree.tree_leaves(given)
        for leaf in filter(is_scalar, leaves):
            argument, takes_tensors = _argument(function, key, len(args))
            if argument:
                found.append((takes_tensors, MisplacedTensor(_name(function), argument, leaf)))
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
) -> MisplacedTensor | None:
    """Which parameter of torch's own Python functions is a tensor that must be a Python number.

    ``frames`` are those of the functions that run, the outermost first: the one that was called.
    """
    for frame in frames:
        code = frame.f_code
        for argument in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
            value = frame.f_locals.get(argument)
            if is_scalar(value):
                made = code.co_name == "__init__"  # a module
                kind = type(frame.f_locals.get("self")).__name__
                return MisplacedTensor(kind if made else _name(code.co_name), argument, value)
    return None


def place_of_error(error: TypeError, is_scalar: Callable[[Any], bool]) -> MisplacedTensor | None:
    """Which tensor is in the place of a number, from the traceback of an error of torch's own.

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
        place = MisplacedTensor(said[1], said[2], "A tensor")
    return place


def _place_in_source(
    traceback: TracebackType, text: str, is_scalar: Callable[[Any], bool]
) -> MisplacedTensor | None:
    """Which tensor is in the place of a number, from the source of the user's expression."""
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
        return MisplacedTensor(name, said[1], f"`{expression}`" if expression else "A tensor")
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


class Refusals:
    """The errors for calls of one trace; its arguments are those of ``function_mode.Contract``."""

    def __init__(
        self,
        line: Callable[[], UserLine | None],
        names: Names,
        known: Callable[[Tensor], Tensor | None],
    ) -> None:
        self._line, self._names, self._known = line, names, known

    def value_read(self, tensor: Tensor, rule: str, done: str, remedy: str = "") -> TraceError:
        """Python asked for the value of a tensor, which has none: ``done`` says how."""
        frames = list(torch_frames())
        # it compares deep inside of torch, and is one condition to whoever wrote it
        if frames and frames[0].f_code is torch.testing.assert_close.__code__:
            rule, done = "condition", "compared by torch.testing.assert_close"
            tensor = frames[0].f_locals["actual"]
        elif (place := place_in_frames(iter(frames), self._is_scalar)) is not None:
            return self._scalar(place)
        line, metric = self._line(), line_of_torchmetrics()
        is_condition = RULES[rule].error is ConditionalOnTensor
        if not remedy and line is not None and (is_condition or asks(line)):
            names = [frame.f_code.co_name for frame in frames]
            remedy = choice(line, names) or RULES["condition"].remedy
        if metric is not None:
            done, remedy = f"{done} inside torchmetrics ({metric})", METRIC_REMEDY
        return misuse(rule, line, remedy=remedy, tensor=self._names(tensor), done=done)

    def written_value_read(self, tensor: Tensor, rule: str, done: str) -> TraceError:
        """Python asked for the value of a buffer that the step writes, or of what comes of it."""
        points = not tensor.is_floating_point() and tensor.dtype is not torch.bool
        name = self._names(tensor)
        pointer = POINTER.format(tensor=name if name.startswith("self.") else "self.ptr")
        return self.value_read(tensor, rule, done, pointer if points else INITIALIZED)

    def dynamic_shape(self, func: Any, args: Any) -> TraceError:
        """The result of a function has as many elements as the values of its arguments say."""
        name = function_name(func)
        first = 3 if name == "ctc_loss" else 1  # the lengths of its targets
        chosen_by = args[first:] if len(args) > first and func is not torch.where else args
        return self._shape(name, chosen_by)

    def value_needed(self, func: Any, args: Any, kwargs: Any) -> TraceError:
        """A function needs a value itself: as a size, as a bound of a slice, or to check it."""
        if func in (Tensor.__getitem__, Tensor.__setitem__):
            return misuse("slice", self._line(), tensor=self._first_tensor(args[1:]))
        place, name = place_in_call(func, args, kwargs, self._is_scalar), function_name(func)
        if place is not None:
            return self._scalar(place)
        if name in SIZED:
            return self._shape(name, args)
        return misuse("value", self._line(), function=name, tensor=self._first_tensor(args))

    def scalar_argument(
        self, error: TypeError, func: Any, args: Any, kwargs: Any
    ) -> TraceError | None:
        """A function raised ``error``: for a tensor in the place of a number? None if not so."""
        place = None
        if "FakeTensor" in str(error):
            place = place_in_call(func, args, kwargs, self._is_scalar)
        return None if place is None else self._scalar(place)

    def scalar_argument_seen_by_torch(self, error: TypeError) -> TraceError | None:
        """Torch refused a tensor in a number's place before any mode saw it; None if not so."""
        place = place_of_error(error, lambda value: isinstance(value, Tensor) and not value.dim())
        return None if place is None else self._scalar(place, raised_at(error))

    def _scalar(self, place: MisplacedTensor, line: UserLine | None = None) -> TraceError:
        """A tensor is in the place of a Python number, or of one that makes a shape."""
        tensor = place.tensor if isinstance(place.tensor, str) else self._names(place.tensor)
        name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", place.function).lower().strip("_")
        keys = (f"{name}.{place.argument}", name)  # as of a function, where it is a class
        size = next((SIZED[key] for key in keys if key in SIZED), None)
        form = next((MULTIPLIED_OUT[key] for key in keys if key in MULTIPLIED_OUT), None)
        rule, remedy = "scalar_argument", ""
        if size is not None and keys[0] not in MULTIPLIED_OUT:
            rule, remedy, tensor = "shape", size, in_sentence(tensor)
        elif form is not None:
            remedy = f"the same in tensor operations, with {place.argument} = t:\n      {form}"
        found = {"tensor": tensor, "argument": place.argument, "function": place.function}
        return misuse(rule, line or self._line(), remedy=remedy, **found)

    def _shape(self, function: str, args: Any) -> TraceError:
        tensor, remedy = self._first_tensor(args), SIZED.get(function, "")
        return misuse("shape", self._line(), remedy=remedy, function=function, tensor=tensor)

    def _is_scalar(self, value: Any) -> bool:
        """Whether a value is a tensor without dimensions that the step computed from data."""
        if not isinstance(value, FakeTensor) or value.dim() or is_traced(value):
            return False
        return self._known(value) is None

    def _first_tensor(self, args: Any) -> str:
        """The name of the first tensor among arguments, for the middle of a sentence."""
        parts = [
            part
            for leaf in pytree.tree_leaves(args)
            for part in ([leaf.start, leaf.stop, leaf.step] if type(leaf) is slice else [leaf])
        ]
        tensors = [part for part in parts if isinstance(part, Tensor)]
        return in_sentence(self._names(tensors[0])) if tensors else "a tensor"


def refused_calls(line: Callable[[], UserLine | None]) -> Iterator[Patch]:
    """Patches that make errors of functions which the function mode misses."""

    def refusal(rule: str, name: str) -> Callable[..., Any]:
        def refuse(*args: Any, **kwargs: Any) -> Any:
            raise misuse(rule, line(), function=name)

        return refuse

    why = "a nested tensor's shape depends on values"
    names = ("nested_tensor", "as_nested_tensor", "nested_tensor_from_jagged", "narrow")
    nested = {name: refusal("nested", name) for name in names}
    yield from patches_of(torch.nested, nested, why=why, checked=CHECKED)
    why = "every step would draw the same numbers, or the call would be forgotten"
    seeds = {name: refusal("seed", name) for name in ("manual_seed", "seed", "set_rng_state")}
    for home in (torch, torch.random):  # which hold different objects by some of these names
        yield from patches_of(home, seeds, why=why, checked=CHECKED)
    why = "processes would exchange what is traced, or the message would be forgotten"
    messages = {name: refusal("message", name) for name in _MESSAGES if hasattr(dist, name)}
    yield from patches_of(dist, messages, why=why, checked=CHECKED)
    why = "torch exchanges fakes even where self.net.to(self.device) converts nothing, and fails"
    yield from patches_of(nn.Module, {"_apply": _converter(line)}, why=why, checked=CHECKED)


_MESSAGES = (
    *("all_reduce", "reduce", "broadcast", "all_gather", "all_gather_into_tensor", "gather"),
    *("reduce_scatter", "send", "recv", "barrier", "all_gather_object", "broadcast_object_list"),
)
"""Functions of torch.distributed; torch built without it has none of them."""


def _converter(line: Callable[[], UserLine | None]) -> Callable[..., Any]:
    """``nn.Module._apply`` that does nothing where nothing is to be converted."""
    apply: Callable[..., Any] = nn.Module._apply

    def convert(module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        held = (*module.parameters(recurse), *module.buffers(recurse))
        with torch.no_grad():
            if all(fn(one) is one for one in held):  # self.net.to(self.device), on the device
                return module
        try:
            return apply(module, fn, recurse)
        except RuntimeError as error:
            if "Couldn't swap" not in str(error):
                raise
        raise UnsupportedState(
            f"The step converted the parameters of a {type(module).__name__}.",
            line=line(),
            remedy="convert a module in __init__() or configure_model(), and in the step tensors:"
            " x.to(dtype)",
        )

    return convert


@contextlib.contextmanager
def explaining_errors() -> Iterator[None]:
    """Say of Python's own errors in a trace what they mean; note the user's line on others."""
    try:
        yield
    except TraceError:
        raise
    except TypeError as error:
        if names_proxy(error) is None:
            _note_line(error)
            raise
        raise misuse("object", raised_at(error)) from None
    except Exception as error:
        _note_line(error)
        raise


def _note_line(error: Exception) -> None:
    """Note where the user's code was; between it and the error lie a hundred lines of torch's.

    The error says what it would say of eager tensors.
    """
    if any("FakeTensor" in str(arg) for arg in error.args):
        named = [
            re.sub(r"(torch\._subclasses\.fake_tensor\.)?FakeTensor", "Tensor", str(arg))
            for arg in error.args
        ]
        error.args = tuple(named)
    line = raised_at(error)
    if line is not None:
        error.add_note(f"  while the step was traced, at {line}\n      {line.source}")
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if frames and (remedy := in_package(frames[-1])):
        error.add_note(f"  Remedy: {remedy}")
