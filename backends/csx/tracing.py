"""What the user's code sees while it is traced: one function mode in front of every torch call.

It is the single place where misuse is noticed, with the user's frame still on the stack: reading a
value, branching on one, printing one, shapes that follow from values. It also gives the numbers of
param groups to functions (scalars.py), and turns the few functions whose ordinary form is not
static into their static twins. Checked against torch 2.13.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
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

from fulgurite.backends.csx.errors import (
    ConditionalOnTensor,
    DynamicShape,
    HostRead,
    TensorPrinted,
    TraceError,
    UnsupportedState,
)
from fulgurite.backends.csx.formulas import host_value, without_mkldnn
from fulgurite.backends.csx.lines import UserLine, is_library, top_package
from fulgurite.backends.csx.scalars import call_with_numbers
from fulgurite.backends.csx.state import brief

WHERE = "compute both sides and choose with torch.where(condition, a, b)"
READ_LATER = (
    "return it from the step or self.log() it, and read it in on_train_batch_end (or the hook of"
    " your stage), which runs on the host after every step"
)
MASKS = "keep the shape and use a mask: torch.where(mask, x, 0), or a sum weighted by the mask"

# torch function -> (error, what was done, remedy)
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_MISUSES: dict[Any, tuple[type[TraceError], str, str]] = {
    Tensor.__bool__: (ConditionalOnTensor, "used as a Python condition", WHERE),
    Tensor.__contains__: (ConditionalOnTensor, "searched by Python's `in`", WHERE),
    Tensor.item: (HostRead, "read by .item()", READ_LATER),
    Tensor.tolist: (HostRead, "read by .tolist()", READ_LATER),
    Tensor.numpy: (HostRead, "read by .numpy()", READ_LATER),
    Tensor.__array__: (HostRead, "turned into a numpy array", READ_LATER),
    Tensor.__float__: (HostRead, "read by float()", READ_LATER),
    Tensor.__int__: (HostRead, "read by int()", READ_LATER),
    Tensor.__complex__: (HostRead, "read by complex()", READ_LATER),
    Tensor.__index__: (HostRead, "used as a Python index", READ_LATER),
    Tensor.__repr__: (TensorPrinted, "printed or formatted", READ_LATER),
    Tensor.__format__: (TensorPrinted, "printed or formatted", READ_LATER),
    torch.equal: (ConditionalOnTensor, "compared by torch.equal", WHERE),
    torch.allclose: (ConditionalOnTensor, "compared by torch.allclose", WHERE),
    Tensor.equal: (ConditionalOnTensor, "compared by .equal()", WHERE),
    Tensor.allclose: (ConditionalOnTensor, "compared by .allclose()", WHERE),
}


class Contract(TorchFunctionMode):
    """Hold traced code to the static-graph contract.

    Args:
        line: the user's line that runs now.
        describe: the name of a tensor, as the user knows it.
        known: the value of a traced tensor that follows from constants alone, or None.
        move: ``tensor.data = value``.
    """

    def __init__(
        self,
        line: Callable[[], UserLine | None],
        describe: Callable[[Tensor], str],
        known: Callable[[Tensor], Tensor | None],
        move: Callable[[Tensor, Tensor], None],
    ) -> None:
        super().__init__()
        self._line, self._describe, self._known, self._move = line, describe, known, move

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.item and _inside_torch_optim():
            return host_value(args[0])
        misuse = _MISUSES.get(func)
        if misuse is not None:
            values = [self._value(arg) if isinstance(arg, Tensor) else arg for arg in args]
            if not any(value is None for value in values):
                with DisableTorchFunction(), _disable_current_modes():
                    return func(*values, **kwargs)
            self._refuse(args[0], *misuse)
        if func is Tensor.cpu or (func is Tensor.to and "cpu" in args[1:]):
            self._refuse_move(args[0], func)
        if func == _SET_DATA:  # a method-wrapper: equal, never the same
            return self._set_data(*args)
        if func is Tensor.__getitem__:
            args = (args[0], self._without_known_masks(args[1]))
        static = _STATIC_TWINS.get(func)
        if static is not None:
            twin = static(args, kwargs)
            if twin is not NotImplemented:
                return twin
        try:
            return call_with_numbers(func, args, kwargs)
        except DynamicOutputShapeException:
            raise DynamicShape(
                f"The shape of the result of {_name(func)} depends on the values of"
                f" {self._describe_first(args)}; a static program has fixed shapes.",
                line=self._line(),
                remedy=MASKS,
            ) from None
        except DataDependentOutputException:
            raise HostRead(
                f"{_name(func)} needs the value of {self._describe_first(args)} on the host.",
                line=self._line(),
                remedy=READ_LATER,
            ) from None

    def _value(self, tensor: Tensor) -> Tensor | None:
        """The value of a tensor that has one while tracing: a constant's."""
        return self._known(tensor) if isinstance(tensor, FakeTensor) else tensor

    def _describe_first(self, args: Any) -> str:
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        name = self._describe(tensors[0]) if tensors else "a tensor"
        return name.replace("A tensor", "a tensor", 1)  # within a sentence

    def _without_known_masks(self, index: Any) -> Any:
        """An index with the places that its masks choose, where these follow from constants."""
        items: list[Any] = []
        for item in index if isinstance(index, tuple) else (index,):
            mask = isinstance(item, Tensor) and item.dtype == torch.bool and item.ndim > 0
            value = self._value(item) if mask else None
            if value is None:
                items.append(item)
            else:
                with DisableTorchFunction(), _disable_current_modes():
                    items += value.nonzero(as_tuple=True)
        return tuple(items) if isinstance(index, tuple) or len(items) > 1 else items[0]

    def _refuse(self, tensor: Tensor, error: type[TraceError], done: str, remedy: str) -> None:
        metric = _inside_torchmetrics()
        if metric is not None:
            done += f" inside torchmetrics ({metric})"
            remedy = (
                "metric.update(...) in the step, and self.log() the metric: its compute() then runs"
                " on the host, at the end of the epoch"
            )
        raise error(
            f"{self._describe(tensor)} was {done}, but it has no value while the step is traced.",
            line=self._line(),
            remedy=remedy,
        )

    def _set_data(self, tensor: Tensor, value: Tensor) -> None:
        """``p.data = value``, of the same shape and dtype."""
        if (tensor.shape, tensor.dtype) != (value.shape, value.dtype):
            raise UnsupportedState(
                f"The step gave {self._describe(tensor)} other .data, {brief(value)} for"
                f" {brief(tensor)}.",
                line=self._line(),
                remedy="keep its shape and dtype",
            )
        self._move(tensor, value)

    def _refuse_move(self, tensor: Tensor, func: Any) -> None:
        """`.cpu()` is a host read where the user wrote it; libraries call it as a no-op."""
        caller = _caller()
        if caller is not None and not is_library(caller) and isinstance(tensor, FakeTensor):
            done = "read by .cpu()" if func is Tensor.cpu else 'read by .to("cpu")'
            self._refuse(tensor, HostRead, done, READ_LATER)


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


def _caller() -> FrameType | None:
    """The frame that called the torch function which runs now."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_name == "__torch_function__":
        frame = frame.f_back
    return frame


def _name(func: Any) -> str:
    name = getattr(func, "__name__", str(func))
    return "indexing with a mask" if name == "__getitem__" else f"{name}()"


def _static_bincount(args: Any, kwargs: Any) -> Any:
    """``bincount(x, minlength=n)`` of values below n: the one form whose shape is known.

    On CPU torch makes its result longer where a value needs it, which no static program can.
    torchmetrics' confusion matrices and macro averages rest on it. A value of n or more is an error
    of the index check when the program runs.
    """
    names = ("input", "weights", "minlength")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    size = given.get("minlength", 0)
    if not size:
        return NotImplemented
    x, weights = given["input"], given.get("weights")
    ones = torch.ones_like(x, dtype=torch.int64) if weights is None else weights
    return torch.zeros(size, dtype=ones.dtype).scatter_add(0, x.to(torch.int64), ones)


def _stacked(args: Any, kwargs: Any) -> Any:
    """``torch.tensor([t1, t2])``, which eagerly reads values: here it stacks traced tensors.

    Lightning's ``grad_norm`` rests on it.
    """

    def built(data: Any) -> Tensor:
        if isinstance(data, (list, tuple)):
            return torch.stack([built(item) for item in data])
        return data.detach() if isinstance(data, Tensor) else torch.tensor(data)

    data = args[0] if args else kwargs["data"]
    is_sequence = isinstance(data, (list, tuple))
    if not is_sequence or not any(isinstance(x, Tensor) for x in pytree.tree_leaves(data)):
        return NotImplemented
    options = {key: kwargs[key] for key in ("dtype", "device") if kwargs.get(key) is not None}
    return built(data).to(**options).requires_grad_(kwargs.get("requires_grad", False))


def _plain_lstm(args: Any, kwargs: Any) -> Any:
    with without_mkldnn():
        return torch.lstm(*args, **kwargs)


_STATIC_TWINS: dict[Any, Callable[[Any, Any], Any]] = {
    torch.bincount: _static_bincount,
    Tensor.bincount: _static_bincount,
    torch.tensor: _stacked,
    torch.lstm: _plain_lstm,
}
