"""What the user's code sees while it is traced: one function mode in front of every torch call.

It is the single place where misuse is noticed, with the user's frame still on the stack; which
functions are misuse, and what to write instead, is in ``rules``. It also gives the numbers of
param groups to functions (torch_functions.py), and turns the few functions whose ordinary form is
not static into their static forms. Checked against torch 2.13.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch._C import DisableTorchFunction
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from fulgurite.backends.csx.contract.dtype_rules import OneNarrowType
from fulgurite.backends.csx.contract.indices import at, without_known_masks, without_scalars
from fulgurite.backends.csx.contract.lists import note_lists
from fulgurite.backends.csx.contract.overrides import STATIC_TWINS
from fulgurite.backends.csx.contract.rules import (
    DEVICE,
    MASKS,
    OF_VALUES,
    READ_LATER,
    WINDOW,
    Misuse,
    asked_device,
    check_generator,
    choice,
    refuse_dtype,
)
from fulgurite.backends.csx.contract.scalar_arguments import (
    SIZED,
    Place,
    place_in_call,
    place_in_frames,
    place_of_error,
    refused_scalar,
)
from fulgurite.backends.csx.contract.tensor_names import Names, function_name
from fulgurite.backends.csx.contract.watched import all_unwatched
from fulgurite.backends.csx.diagnostics.errors import (
    ConditionalOnTensor,
    DynamicShape,
    HostRead,
    TraceError,
    UnsupportedDevice,
    UnsupportedState,
)
from fulgurite.backends.csx.diagnostics.user_lines import (
    UserLine,
    is_library,
    raised_at,
    run_backward,
    top_package,
)
from fulgurite.backends.csx.graph.dtypes import STAND_IN, wide
from fulgurite.backends.csx.hyperparams.torch_functions import call_with_numbers
from fulgurite.backends.csx.hyperparams.torch_optim import host_value
from fulgurite.backends.csx.hyperparams.traced_float import is_traced
from fulgurite.backends.csx.state.storage import brief

_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_GRADIENT = Tensor.grad.__get__  # type: ignore[union-attr]
_KNOWN_OF_FAKES = frozenset(
    getattr(Tensor, name).__get__
    for name in ("dtype", "is_leaf", "is_sparse", "layout", "ndim", "requires_grad", "shape")
)
"""What a tensor knows without its value: two of five calls in a trace of an MLP."""


class Contract(TorchFunctionMode):
    """Hold traced code to the static-graph contract.

    Args:
        line: the user's line that runs now.
        names: what tensors are called; it is told what makes each.
        known: the value of a traced tensor that follows from constants alone, or None.
        move: ``tensor.data = value``.
        narrow: which 16-bit type the step may use.

    Attributes:
        refused: the first error; code that catches it must not make it unseen.
    """

    def __init__(
        self,
        line: Callable[[], UserLine | None],
        names: Names,
        known: Callable[[Tensor], Tensor | None],
        move: Callable[[Tensor, Tensor], None],
        narrow: OneNarrowType,
    ) -> None:
        super().__init__()
        self._line, self._names, self._known, self._move = line, names, known, move
        self._narrow = narrow
        self.refused: TraceError | None = None
        self._busy = False  # torch takes the mode away while it handles a call
        self._allows_double = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _KNOWN_OF_FAKES:
            return func(*args)
        busy, self._busy = self._busy, True
        try:
            return self._call(func, all_unwatched(args), all_unwatched(kwargs or {}))
        except TraceError as error:
            self.refused = self.refused or error
            raise
        finally:
            self._busy = busy

    def in_backward(self) -> tuple[Any, str, Any]:
        """A change (see ``patches``) that keeps the mode while a backward pass runs.

        ``backward()`` is a torch function itself, and calls hooks and functions of the user's.
        """
        run = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

        def watched(*args: Any, **kwargs: Any) -> Any:
            if not self._busy:
                return run_backward(run, *args, **kwargs)
            self._busy = False
            try:
                with self:
                    return run_backward(run, *args, **kwargs)
            finally:
                self._busy = True

        return torch.autograd, "_engine_run_backward", watched

    def _call(self, func: Any, args: Any, kwargs: Any) -> Any:
        note_lists((*args, *kwargs.values()))
        if func is Tensor.item and _inside_torch_optim():
            return host_value(args[0])
        misuse = OF_VALUES.get(func)
        if misuse is not None:
            values = [self._value(arg) if isinstance(arg, Tensor) else arg for arg in args]
            if not any(value is None for value in values):
                with DisableTorchFunction(), _disable_current_modes():
                    return func(*values, **kwargs)
            self._refuse(args[0], misuse)
        if func is Tensor.cpu or (func is Tensor.to and "cpu" in args[1:]):
            self._refuse_move(args[0], func)
        if func == _SET_DATA:  # a method-wrapper: equal, never the same
            return self._set_data(*args)
        if func is Tensor.__getitem__ or func is Tensor.__setitem__:
            split = without_scalars(*args[:2])
            if split is not None:
                return at(split.places, split.rest_of(args[0]), *args[2:])
        if func is Tensor.__getitem__:
            args = (args[0], without_known_masks(args[1], self._value))
        if kwargs or func in (Tensor.to, Tensor.cuda):
            self._check_device(func, args, kwargs)
            check_generator(kwargs, self._line)
        literal = self._narrow.literal(func, args, kwargs)
        if literal is not None:
            result = self._call(func, *literal)
            return None if result is None else result.to(STAND_IN)
        static = STATIC_TWINS.get(func)
        if static is not None:
            override = self._run(static, func, args, kwargs)
            if override is not NotImplemented:
                return override
        run = functools.partial(call_with_numbers, func)
        result = self._run(run, func, args, kwargs)
        if isinstance(result, Tensor):
            self._note(func, result)
        elif type(result) in (tuple, list):
            for one in result:
                if isinstance(one, Tensor):
                    self._note(func, one)
        return result

    @contextlib.contextmanager
    def in_double(self) -> Iterator[None]:
        """Allow float64 while the block runs: it computes numbers of param groups."""
        before, self._allows_double = self._allows_double, True
        try:
            yield
        finally:
            self._allows_double = before

    def _run(self, run: Callable[[Any, Any], Any], func: Any, args: Any, kwargs: Any) -> Any:
        """Call ``run`` for a function; what the fakes cannot do is said as the user's misuse."""
        try:
            return run(args, kwargs)
        except DynamicOutputShapeException:
            self._refuse_shape(func, args)
        except DataDependentOutputException:
            self._refuse_value(func, args, kwargs)
        except TypeError as error:
            place = None
            if "FakeTensor" in str(error):
                place = place_in_call(func, args, kwargs, self._is_scalar)
            if place is None:
                raise
            raise self._refused_scalar(place) from None

    def refused_by_torch(self, error: TypeError) -> TraceError | None:
        """What an error of torch's own, which looks at numbers before any mode does, is here."""
        place = place_of_error(error, lambda value: isinstance(value, Tensor) and not value.dim())
        return None if place is None else self._refused_scalar(place, raised_at(error))

    def _refused_scalar(self, place: Place, line: UserLine | None = None) -> TraceError:
        given = place.tensor
        name = given if isinstance(given, str) else self._names(given)
        return refused_scalar(place, name, line or self._line())

    def _is_scalar(self, value: Any) -> bool:
        """Whether a value is a tensor without dimensions that the step computed from data."""
        if not isinstance(value, FakeTensor) or value.dim() or is_traced(value):
            return False
        return self._value(value) is None

    def _note(self, func: Any, result: Tensor) -> None:
        """Remember where a tensor came from; refuse what the backend does not have."""
        self._names.made_by[result] = func
        if result.device.type != "meta":  # on which stand-ins of our own are
            self._narrow.check(f"The result of {function_name(func)}()", result.dtype, self._line)
        allowed = self._allows_double or is_traced(result)
        if wide(result.dtype) and not allowed and not _counts_in_double():
            refuse_dtype(f"The result of {function_name(func)}()", result.dtype, self._line())
        if result.layout is not torch.strided:
            what = "A gradient" if func == _GRADIENT else f"The result of {function_name(func)}()"
            raise DynamicShape(
                f"{what} is sparse: how many elements it has depends on values.",
                line=self._line(),
                remedy="dense tensors; in an embedding sparse=False",
            )

    def _check_device(self, func: Any, args: Any, kwargs: Any) -> None:
        """Refuse a device that the program does not run on; fakes use "meta" by themselves."""
        asked = asked_device(func, args, kwargs)
        if asked not in ("cpu", None) and not (asked == "meta" and _is_library(_caller())):
            raise UnsupportedDevice(
                f"The step asked for device {asked!r}. A program's tensors all are where the"
                " program runs, which the step sees as 'cpu'.",
                line=self._line(),
                remedy=DEVICE,
            )

    def _value(self, tensor: Tensor) -> Tensor | None:
        """The value of a tensor that has one while tracing: a constant's."""
        return self._known(tensor) if isinstance(tensor, FakeTensor) else tensor

    def _describe_first(self, args: Any) -> str:
        parts = [
            part
            for leaf in pytree.tree_leaves(args)
            for part in ([leaf.start, leaf.stop, leaf.step] if type(leaf) is slice else [leaf])
        ]
        tensors = [part for part in parts if isinstance(part, Tensor)]
        return self._names.within(tensors[0]) if tensors else "a tensor"

    def _refuse(self, tensor: Tensor, misuse: Misuse) -> None:
        error, done, remedy = misuse
        line = self._line()
        place = place_in_frames(_torchs_frames(), self._is_scalar)
        if place is not None:
            raise self._refused_scalar(place)
        if error is ConditionalOnTensor and line is not None:
            remedy = choice(line.source)
        metric = _inside_torchmetrics()
        if metric is not None:
            done += f" inside torchmetrics ({metric})"
            remedy = (
                "metric.update(...) in the step, and self.log() the metric: its compute() then runs"
                " on the host, at the end of the epoch"
            )
        raise error(
            f"{self._names(tensor)} was {done}, but it has no value while the step is traced.",
            line=line,
            remedy=remedy,
        )

    def _refuse_shape(self, func: Any, args: Any) -> None:
        chosen_by = args[1:] if len(args) > 1 and func is not torch.where else args
        raise DynamicShape(
            f"The shape of the result of {function_name(func)}() depends on the values of"
            f" {self._describe_first(chosen_by)}; a static program has fixed shapes.",
            line=self._line(),
            remedy=SIZED.get(function_name(func), MASKS),
        ) from None

    def _refuse_value(self, func: Any, args: Any, kwargs: Any) -> None:
        """A function asked for a value by itself: as a size, a bound of a slice, or to check it."""
        name = function_name(func)
        place = place_in_call(func, args, kwargs, self._is_scalar)
        if func in (Tensor.__getitem__, Tensor.__setitem__):
            raise DynamicShape(
                f"The shape of a slice depends on the values of {self._describe_first(args[1:])}; a"
                " static program has fixed shapes.",
                line=self._line(),
                remedy=WINDOW,
            ) from None
        if place is not None:
            raise self._refused_scalar(place) from None
        if name in SIZED:
            raise DynamicShape(
                f"The shape of the result of {name}() depends on the values of"
                f" {self._describe_first(args)}; a static program has fixed shapes.",
                line=self._line(),
                remedy=SIZED[name],
            ) from None
        raise HostRead(
            f"{name}() needs the value of {self._describe_first(args)} on the host.",
            line=self._line(),
            remedy=READ_LATER,
        ) from None

    def _set_data(self, tensor: Tensor, value: Tensor) -> None:
        """``p.data = value``, of the same shape and dtype."""
        if (tensor.shape, tensor.dtype) != (value.shape, value.dtype):
            raise UnsupportedState(
                f"The step gave {self._names(tensor)} other .data, {brief(value)} for"
                f" {brief(tensor)}.",
                line=self._line(),
                remedy="keep its shape and dtype",
            )
        self._move(tensor, value)

    def _refuse_move(self, tensor: Tensor, func: Any) -> None:
        """`.cpu()` is a host read where the user wrote it; libraries call it as a no-op."""
        if not _is_library(_caller()) and isinstance(tensor, FakeTensor):
            done = "read by .cpu()" if func is Tensor.cpu else 'read by .to("cpu")'
            self._refuse(tensor, Misuse(HostRead, done, READ_LATER))


def _inside_torchmetrics() -> str | None:
    """File and line of torchmetrics' code, if that is what asked."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and top_package(frame) in ("torch", "fulgurite"):
        frame = frame.f_back
    if frame is None or top_package(frame) != "torchmetrics":
        return None
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def _inside_torch_optim() -> bool:
    """Whether one of torch's optimizers asked: it reads numbers that a program can compute."""
    caller = _caller()
    return caller is not None and caller.f_globals.get("__name__", "").startswith("torch.optim.")


def _counts_in_double() -> bool:
    """Whether code asked that may use float64: optimizers and metrics, for a few scalars."""
    frame = _caller()
    while frame is not None and top_package(frame) in ("torch", "contextlib", "functools"):
        if frame.f_globals["__name__"].startswith(("torch.optim", "torch.amp")):
            return True
        frame = frame.f_back
    return frame is None or top_package(frame) in ("fulgurite", "torchmetrics", "lightning")


def _caller() -> FrameType | None:
    """The frame that called the torch function which runs now."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and top_package(frame) == "fulgurite":
        frame = frame.f_back
    while frame is not None and frame.f_code.co_name == "__torch_function__":
        frame = frame.f_back
    return frame


def _torchs_frames() -> Iterator[FrameType]:
    """The frames of torch's that the user's line led to, the outermost first."""
    frames: list[FrameType] = []
    frame = _caller()
    while frame is not None and top_package(frame) == "torch":
        if frame.f_globals["__name__"] not in ("torch._tensor", "torch.overrides"):
            frames.append(frame)
        frame = frame.f_back
    return reversed(frames)


def _is_library(caller: FrameType | None) -> bool:
    return caller is None or is_library(caller)
