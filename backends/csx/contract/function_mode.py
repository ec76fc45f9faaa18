"""What the user's code sees while it is traced: one function mode in front of every torch call.

It notices the misuse of a tensor while the user's frame is still on the stack; which functions are
misuse, and what to write instead, is in ``rules``, and ``refusals`` finds the words. It also gives
the numbers of param groups to functions (``number_functions``), and replaces the few functions
whose ordinary form is not static by static ones (``overrides``). Checked against torch 2.13.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
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

from fulgurite.backends.csx.contract.attributes import note_lists
from fulgurite.backends.csx.contract.dtype_rules import OneNarrowType
from fulgurite.backends.csx.contract.frozen_values import FrozenBuffers
from fulgurite.backends.csx.contract.leaks import Names, function_name
from fulgurite.backends.csx.contract.overrides import (
    KNOWN_FORMS,
    STATIC_FORMS,
    ValueOf,
    at,
    without_known_masks,
    without_scalars,
)
from fulgurite.backends.csx.contract.proxies import operands
from fulgurite.backends.csx.contract.refusals import (
    Refusals,
    called_by_library,
    called_by_torch_optim,
    may_use_double,
)
from fulgurite.backends.csx.contract.rules import BREAKING_CALLS, MASKS, READ_LATER, misuse
from fulgurite.backends.csx.diagnostics.trace_errors import DynamicShape, TraceError
from fulgurite.backends.csx.diagnostics.user_lines import UserLine, raised_at, run_backward
from fulgurite.backends.csx.graph.dtypes import STAND_IN, wide
from fulgurite.backends.csx.hyperparams.number_functions import call_with_numbers
from fulgurite.backends.csx.hyperparams.torch_optim import host_value
from fulgurite.backends.csx.hyperparams.traced_float import is_traced, tensor_or_value
from fulgurite.backends.csx.state import brief
from fulgurite.backends.patches import Patch, patches_of
from fulgurite.backends.torch_versions import CHECKED

_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_GRADIENT = Tensor.grad.__get__  # type: ignore[union-attr]
_READS = frozenset(
    (Tensor.__bool__, Tensor.item, Tensor.__int__, Tensor.__float__, Tensor.__index__)
)
"""Calls that may read a buffer which the step does not write."""
_OF_VALUES = DynamicOutputShapeException, DataDependentOutputException
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
        look: is told whose ``.grad`` is read.
        narrow: which 16-bit type the step may use.
        fixed: the values of buffers.
        allows_double: whether the step may use float64: its model is in it.

    Attributes:
        refused: the first error; code that catches it must not make it unseen.
        refusals: makes them.
    """

    def __init__(
        self,
        line: Callable[[], UserLine | None],
        names: Names,
        known: Callable[[Tensor], Tensor | None],
        move: Callable[[Tensor, Tensor], None],
        look: Callable[[Tensor], None],
        narrow: OneNarrowType,
        frozen_buffers: FrozenBuffers,
        allows_double: bool,
    ) -> None:
        super().__init__()
        self._line, self._names, self._known, self._move = line, names, known, move
        self._look = look
        self._narrow, self._frozen_buffers, self.refusals = (
            narrow,
            frozen_buffers,
            Refusals(line, names, known),
        )
        self.refused: TraceError | None = None
        self._busy = False  # torch takes the mode away while it handles a call
        self._allows_double = allows_double

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _KNOWN_OF_FAKES:
            return func(*args)
        busy, self._busy = self._busy, True
        try:
            return self._call(func, operands(args), operands(kwargs or {}))
        except TraceError as error:
            self.refused = self.refused or error
            raise
        finally:
            self._busy = busy

    def in_backward(self) -> Iterator[Patch]:
        """A patch that keeps the mode while a backward pass runs."""
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

        why = "torch takes the mode away in backward(), which calls the user's hooks and functions"
        engine = {"_engine_run_backward": watched}
        return patches_of(torch.autograd, engine, why=why, checked=CHECKED)

    def _call(self, func: Any, args: Any, kwargs: Any) -> Any:
        note_lists((*args, *kwargs.values()))
        # torch's optimizers read their step count so: as a traced number it needs no value
        if func is Tensor.item and called_by_torch_optim():
            return host_value(args[0])
        broken = BREAKING_CALLS.get(func)
        if broken is not None:
            values = [self._value(arg) if isinstance(arg, Tensor) else arg for arg in args]
            if values[0] is None and func in _READS:
                values[0] = self._frozen_buffers.read(
                    args[0], lambda: self.refusals.written_value_read(args[0], *broken)
                )
            if not any(value is None for value in values):
                # constants, and buffers that the step does not write: Python may look at them
                with DisableTorchFunction(), _disable_current_modes():
                    return func(*values, **kwargs)
            raise self.refusals.value_read(args[0], *broken)
        if (how := _reads_as_cpu(func, args)) is not None:
            left_out = f"leave {how.removeprefix('read by ')} out"
            remedy = READ_LATER.replace("leave it a tensor", left_out)
            raise self.refusals.value_read(args[0], "read", how, remedy)
        if func == _SET_DATA:  # a method-wrapper: equal, never the same
            return self._set_data(*args)
        if func == _GRADIENT:
            self._look(args[0])
        if func is Tensor.__getitem__ or func is Tensor.__setitem__:
            split = without_scalars(*args[:2])
            if split is not None:
                return at(split.places, split.rest_of(args[0]), *args[2:])
        if func is Tensor.__getitem__:
            refusal = functools.partial(self.refusals.dynamic_shape, func, args)
            args = (args[0], without_known_masks(args[1], self._looking(refusal)))
        if kwargs or func in (Tensor.to, Tensor.cuda):
            _check_options(self._line, func, args, kwargs)
        literal = self._narrow.literal(func, args, kwargs)
        if literal is not None:
            result = self._call(func, *literal)
            return None if result is None else result.to(STAND_IN)
        static = STATIC_FORMS.get(func)
        if static is not None:
            given = pytree.tree_map(tensor_or_value, (args, kwargs))  # C would take their values
            override = self._run(static, func, *given)
            if override is not NotImplemented:
                return override
        run = functools.partial(call_with_numbers, func)
        result = self._run(run, func, args, kwargs)
        self._note_all(func, result, args)
        return result

    def run_below(self, run: Callable[[Any, Any], Any], func: Any, args: Any, kwargs: Any) -> Any:
        """Call ``run`` for an operation that autograd asks for: one call, whatever runs inside."""
        try:
            with DisableTorchFunction():
                result = self._run(run, func, args, kwargs)
                self._note_all(func, result, args)
        except TraceError as error:
            self.refused = self.refused or error
            raise
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
        except (*_OF_VALUES, RuntimeError) as error:
            if not isinstance(error, _OF_VALUES) and func not in KNOWN_FORMS:
                raise
            refusal = functools.partial(self.refusals.dynamic_shape, func, args)
            known = _of_known(self._looking(refusal), func, args, kwargs)
            if known is not None:
                return known
            if not isinstance(error, DataDependentOutputException):
                raise refusal() from None
            raise self.refusals.value_needed(func, args, kwargs) from None
        except TypeError as error:
            refused = self.refusals.scalar_argument(error, func, args, kwargs)
            if refused is None:
                raise
            raise refused from None

    def _note_all(self, func: Any, result: Any, args: Any) -> None:
        for one in result if type(result) in (tuple, list) else (result,):
            if isinstance(one, Tensor):
                self._note(func, one, args)

    def _note(self, func: Any, result: Tensor, args: Any) -> None:
        """Remember where a tensor came from; refuse what the backend does not have."""
        self._names.made_by[result] = func
        what = f"The result of {function_name(func)}()"
        if result.device.type != "meta":  # on which stand-ins of our own are
            self._narrow.check(what, result.dtype, self._line)
        allowed = self._allows_double or is_traced(result)
        if wide(result.dtype) and not (allowed or _only_moves(func, args) or may_use_double()):
            dtype = str(result.dtype).removeprefix("torch.")
            raise misuse("double", self._line(), what=what, dtype=dtype)
        if result.layout is not torch.strided:
            what = "A gradient" if func == _GRADIENT else what
            raise misuse("sparse", self._line(), what=what)

    def _value(self, tensor: Tensor) -> Tensor | None:
        """The value of a tensor that has one while tracing: a constant's."""
        return self._known(tensor) if isinstance(tensor, FakeTensor) else tensor

    def _looking(self, refusal: Callable[[], TraceError]) -> ValueOf:
        """Gives values that Python may look at: of constants, and of buffers that nobody writes."""

        def value_of(tensor: Tensor) -> Tensor | None:
            value = self._value(tensor)
            return self._frozen_buffers.read(tensor, refusal) if value is None else value

        return value_of

    def _set_data(self, tensor: Tensor, value: Tensor) -> None:
        """``p.data = value``, of the same shape and dtype."""
        if (tensor.shape, tensor.dtype) != (value.shape, value.dtype):
            named = {"tensor": self._names(tensor), "now": brief(value), "before": brief(tensor)}
            raise misuse("data", self._line(), **named)
        self._move(tensor, value)


Line = Callable[[], UserLine | None]


@contextlib.contextmanager
def raising_refusals(contract: Contract, line_now: Line) -> Iterator[None]:
    """Say as the user's misuse why a trace ended, and raise what code in between has caught.

    Args:
        contract: what the trace is held to.
        line_now: the user's line to blame where none is in the error's traceback.
    """
    try:
        yield
        if contract.refused is not None:
            raise contract.refused
    except TypeError as error:  # torch looks at numbers before any mode does
        refused = contract.refusals.scalar_argument_seen_by_torch(error)
        if refused is None:
            raise
        raise refused from None
    except _OF_VALUES as error:
        raise DynamicShape(
            f"{error.func} has a result whose shape depends on values.",
            line=raised_at(error) or line_now(),  # the step is off the stack by now
            remedy=MASKS,
        ) from None


def _of_known(value_of: ValueOf, func: Any, args: Any, kwargs: Any) -> Any:
    """What a function gives of known values, as literals of the step; None where one is not."""
    places = KNOWN_FORMS.get(func)
    if places is not None:
        return places(value_of, args, kwargs)
    tensors = [one for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
    if any(value_of(one) is None for one in tensors):
        return None
    args, kwargs = pytree.tree_map_only(Tensor, value_of, (args, kwargs))
    with DisableTorchFunction(), _disable_current_modes(), torch.no_grad():
        result = func(*args, **kwargs)
    return pytree.tree_map_only(Tensor, torch.ops.aten.lift_fresh.default, result)


def _reads_as_cpu(func: Any, args: Any) -> str | None:
    """How a value is read that is moved to the CPU; libraries call that as a no-op."""
    moves = func is Tensor.cpu or (func is Tensor.to and "cpu" in args[1:])
    if not moves or called_by_library() or not isinstance(args[0], FakeTensor):
        return None
    return "read by .cpu()" if func is Tensor.cpu else 'read by .to("cpu")'


def _check_options(line: Line, func: Any, args: Any, kwargs: Any) -> None:
    """Refuse another device than the program's, and another generator than torch's own."""
    device = _asked_device(func, args, kwargs)
    fakes_own = device == "meta" and called_by_library()
    if device not in ("cpu", None) and not fakes_own:
        raise misuse("device", line(), device=device)
    if kwargs.get("generator") not in (None, torch.default_generator):
        raise misuse("generator", line())


def _only_moves(func: Any, args: Any) -> bool:
    """Whether a function puts wide numbers elsewhere, and computes nothing."""
    return getattr(func, "__name__", "").strip("_") in _MOVES and any(
        isinstance(leaf, Tensor) and wide(leaf.dtype) for leaf in pytree.tree_leaves(args)
    )


_MOVES = frozenset(
    {
        *("cat", "concat", "concatenate", "stack", "hstack", "vstack"),
        *("dstack", "column_stack", "row_stack", "pad_sequence"),
        *("view", "view_as", "reshape", "reshape_as", "flatten", "unflatten"),
        *("ravel", "squeeze", "unsqueeze"),
        *("transpose", "swapaxes", "swapdims", "movedim", "moveaxis", "permute"),
        *("t", "get", "getitem"),
        *("expand", "expand_as", "broadcast_to", "repeat", "tile", "clone"),
        *("detach", "contiguous", "to", "type"),
        *("chunk", "split", "tensor_split", "unbind", "narrow", "select"),
        *("index_select", "gather", "take"),
        *("take_along_dim", "flip", "fliplr", "flipud", "roll", "rot90"),
        "as_strided",
    }
)


def _asked_device(func: Any, args: Any, kwargs: Any) -> str | None:
    """The kind of device that a call names, "cuda"; None where it names none."""
    asked = kwargs.get("device")
    if func is Tensor.cuda:
        asked = "cuda"
    elif asked is None and func is Tensor.to:
        asked = next((arg for arg in args[1:] if isinstance(arg, (str, torch.device))), None)
    return None if asked is None else torch.device(asked).type
