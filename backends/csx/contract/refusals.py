"""Find the rule that a call of the step's broke, and make the error that its user reads.

``function_mode`` asks here when a call needs a value, or fails, while the step is traced. Calls
that no function mode sees are replaced by functions that raise (``refused_calls``), and what
Python or torch themselves say is explained (``explained``).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from fulgurite.backends.csx.contract.callers import line_of_torchmetrics, torch_frames
from fulgurite.backends.csx.contract.rules import (
    INITIALIZED,
    METRIC,
    POINTER,
    RULES,
    choice,
    misuse,
)
from fulgurite.backends.csx.contract.scalar_arguments import (
    Misplaced,
    place_in_call,
    place_in_frames,
    place_of_error,
)
from fulgurite.backends.csx.contract.scalar_remedies import MULTIPLIED_OUT, SIZED
from fulgurite.backends.csx.contract.tensor_names import Names, function_name, in_sentence
from fulgurite.backends.csx.contract.watched import names_proxy
from fulgurite.backends.csx.diagnostics.errors import (
    ConditionalOnTensor,
    TraceError,
    UnsupportedState,
)
from fulgurite.backends.csx.diagnostics.user_lines import UserLine, raised_at
from fulgurite.backends.csx.hyperparams.traced_float import is_traced
from fulgurite.backends.patches import Patch, patches_of
from fulgurite.backends.torch_versions import CHECKED


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
        if frames and frames[0].f_code is torch.testing.assert_close.__code__:
            rule, done = "condition", "compared by torch.testing.assert_close"
            tensor = frames[0].f_locals["actual"]
        elif (place := place_in_frames(iter(frames), self._is_scalar)) is not None:
            return self._scalar(place)
        line, metric = self._line(), line_of_torchmetrics()
        if not remedy and RULES[rule].error is ConditionalOnTensor and line is not None:
            remedy = choice(line.source, *(frame.f_code.co_name for frame in frames))
        if metric is not None:
            done, remedy = f"{done} inside torchmetrics ({metric})", METRIC
        return misuse(rule, line, remedy=remedy, tensor=self._names(tensor), done=done)

    def written_value_read(self, tensor: Tensor, rule: str, done: str) -> TraceError:
        """Python asked for the value of a buffer that the step writes, or of what comes of it."""
        points = not tensor.is_floating_point() and tensor.dtype is not torch.bool
        name = self._names(tensor)
        pointer = POINTER.format(tensor=name if name.startswith("self.") else "self.ptr")
        return self.value_read(tensor, rule, done, pointer if points else INITIALIZED)

    def dynamic_shape(self, func: Any, args: Any) -> TraceError:
        """The result of a function has as many elements as the values of its arguments say."""
        chosen_by = args[1:] if len(args) > 1 and func is not torch.where else args
        return self._shape(function_name(func), chosen_by)

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
        """The same where torch, which looks at numbers before any mode does, raised ``error``."""
        place = place_of_error(error, lambda value: isinstance(value, Tensor) and not value.dim())
        return None if place is None else self._scalar(place, raised_at(error))

    def _scalar(self, place: Misplaced, line: UserLine | None = None) -> TraceError:
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
            if all(fn(one) is one for one in held):
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
def explained() -> Iterator[None]:
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
