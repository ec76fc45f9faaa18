"""Traced tensors: what they are called, who kept one, and what becomes of such a one.

In messages state goes by the place that holds it (``self.head.weight``), the batch by its path
(``batch[0]``), the rest by what made it: ``The result of layer_norm, model.py:41``.

What a module holds gets the value of every step (``capture/side_effects``). A global, a closure, an
object that no module holds would keep a fake of the trace, which has no value. Such a tensor
becomes a ``ValuelessTensor``, which knows where it was made, and raises when somebody uses it.

The user is told of it before a program is compiled. The holder (``the global LOSSES of model.py``)
is found by the garbage collector's references, backwards, a few steps: 20 ms each in a process with
torch and Lightning. Whether the next step reads such a tensor is seen by tracing the step once
more. Both only where something leaked.
"""

from __future__ import annotations

import gc
import os
import time
import warnings
import weakref
from collections.abc import Callable, Iterable
from types import CellType, CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor
from torch._C import DisableTorchFunction
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.weak import WeakIdKeyDictionary

from fulgurite.backends.csx.contract.rules import KEEP, misuse
from fulgurite.backends.csx.diagnostics.muted import muted
from fulgurite.backends.csx.diagnostics.trace_errors import LeakedTensor
from fulgurite.backends.csx.diagnostics.user_lines import (
    UserLine,
    belongs_to_library,
    line_of,
    user_line,
    user_modules,
)
from fulgurite.backends.csx.graph.recorder import Nodes
from fulgurite.backends.csx.state import StateInput, brief, owner_of, swap


class Names:
    """The names of one trace's tensors.

    Args:
        state: the state.

    Attributes:
        tracker: which node of the graph each tensor is.
        made_by: the torch function that each tensor came from.
    """

    def __init__(self, state: Iterable[StateInput]) -> None:
        self._given = {
            id(held.tensor): held.places[0].name for item in state for held in item.tensors
        }
        self.tracker = Nodes()
        self.made_by: Any = WeakIdKeyDictionary()

    def give(self, names: dict[int, str]) -> None:
        """Add names, by the tensors' identity."""
        self._given |= names

    def __call__(self, tensor: Tensor) -> str:
        """The name of a tensor, for the begin of a sentence."""
        given = self._given.get(id(tensor))
        if given is not None:
            return given
        func, line = self.made_by.get(tensor), self._line(tensor)
        if func is None or line is None:
            return f"A tensor computed in the step ({brief(tensor)})"
        return f"The result of {function_name(func)}, {line.place} ({brief(tensor)})"

    def origin(self, tensor: Tensor) -> tuple[str, UserLine | None]:
        """The name of a tensor, and the user's line that made it."""
        return self(tensor), self._line(tensor)

    def _line(self, tensor: Tensor) -> UserLine | None:
        found = self.tracker.get(tensor)
        return None if found is None else line_of(found)


def in_sentence(name: str) -> str:
    """The name of a tensor, for the middle of a sentence."""
    return name.replace("A tensor", "a tensor", 1).replace("The result", "the result", 1)


def function_name(func: Any) -> str:
    """The name of a torch function without underscores: ``add``, ``indexing``."""
    name: str = getattr(func, "__name__", str(func)).strip("_")
    return "indexing" if name == "getitem" else name


_ORIGIN, _CONSTANT = "_fulgurite_origin", "_fulgurite_constant"
_RESULT = "The result of the step"


class ValuelessTensor(Tensor):
    """A tensor of a trace that is over; every use of it is an error."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Raise LeakedTensor, which says where the tensor came from."""
        found: list[ValuelessTensor] = []
        _collect((args, kwargs), found)
        name, line = vars(found[0]).get(_ORIGIN, ("A tensor of the step", None))
        use = user_line()
        if name == _RESULT:
            raise misuse("not_run", use, tensor=name)
        where = f" at {use.place}" if use is not None else ""
        error = misuse("leaked", line, tensor=name, where=where)
        assert isinstance(error, LeakedTensor)
        error.used_at = use
        error.is_constant = all(vars(one).get(_CONSTANT, False) for one in found)
        raise error


def valueless(example: Tensor) -> ValuelessTensor:
    """A result of a step that was built and not run."""
    empty = torch.empty_strided(example.shape, example.stride(), dtype=example.dtype, device="meta")
    result: ValuelessTensor = Tensor._make_subclass(ValuelessTensor, empty)
    vars(result)[_ORIGIN] = (_RESULT, None)
    return result


def _collect(value: Any, found: list[ValuelessTensor]) -> None:
    """Find leaked tensors among arguments, without asking them anything."""
    if type(value) is ValuelessTensor:
        found.append(value)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _collect(item, found)
    elif isinstance(value, dict):
        _collect(list(value.values()), found)


class CreatedTensors:
    """The tensors that a trace made, by weak references."""

    def __init__(self) -> None:
        self._tensors: list[weakref.ref[Tensor]] = []

    def add(self, tensor: Tensor) -> None:
        """Remember a tensor."""
        self._tensors.append(weakref.ref(tensor))

    def living(self) -> list[weakref.ref[Tensor]]:
        """Those that somebody still holds."""
        return [reference for reference in self._tensors if reference() is not None]

    def invalidate_living(
        self,
        origin: Callable[[Tensor], tuple[str, UserLine | None]],
        is_constant: Callable[[Tensor], bool],
    ) -> list[weakref.ref[Tensor]]:
        """Make those that still live errors when used: whoever holds them is the user.

        ``origin`` gives the name of a tensor and the user's line that made it.
        """
        spoiled: list[weakref.ref[Tensor]] = []
        for reference in self._tensors:
            tensor = reference()
            if tensor is not None and isinstance(tensor, FakeTensor):
                made, constant = origin(tensor), is_constant(tensor)
                # the object itself: the user's references lead to it, and cannot all be found
                tensor.__class__ = ValuelessTensor  # type: ignore[assignment]
                vars(tensor)[_ORIGIN], vars(tensor)[_CONSTANT] = made, constant
                spoiled.append(reference)
        self._tensors.clear()
        return spoiled


def origin_of(leaked: Tensor) -> tuple[str, UserLine | None]:
    """The name of a leaked tensor, and the user's line that made it."""
    found: tuple[str, UserLine | None] = vars(leaked)[_ORIGIN]
    return found


_DEPTH, _WIDTH, _SECONDS = 20, 100, 2.0  # of this thread's own time: a busy machine finds no less
_OPAQUE = (ModuleType, MethodType, CodeType)
_ASKED = 3  # leaked tensors: the graph of one keeps many more


def report_leaks(leaked: list[weakref.ref[Tensor]], trace: Callable[[], object]) -> None:
    """Raise if the next step reads a tensor that leaked, warn if somebody else holds one.

    Args:
        leaked: by ``CreatedTensors.invalidate_living``.
        trace: traces the step again, and puts back what that changed.

    Raises:
        LeakedTensor: the step keeps state where no program finds it.
    """
    if leaked:
        gc.collect()  # a cycle is nobody's
    for reference in [one for one in leaked if one() is not None][:_ASKED]:
        tensor = reference()
        holder = None if tensor is None else holder_of(tensor)
        if tensor is None or holder is None:
            continue
        name, line = origin_of(tensor)
        with DisableTorchFunction():
            shape = list(tensor.shape)
        error = _raised_by(trace, tensor)
        if error is not None:
            found = {"tensor": name, "holder": holder, "shape": str(shape)}
            raise misuse("leaked_state", error.used_at or line, **found)
        if line is not None:
            text = f"{name} is kept in {holder}, where no step leaves a value. Use {KEEP}."
            warnings.warn_explicit(text, UserWarning, line.file, line.line)
        return


def fill_constants(
    living: list[weakref.ref[Tensor]], value_of: Callable[[Tensor], Tensor | None]
) -> bool:
    """Give their values to traced tensors that follow from constants alone and that the user keeps.

    A table in a ``functools.lru_cache`` or a global dict is made once, eagerly too. Says whether
    there was any: the next step finds it, so the step is to be traced again, with it there.
    """
    constants = [one for one in living if value_of(one()) is not None]  # type: ignore[arg-type]
    if constants:
        gc.collect()  # or a cycle that nobody reaches would be taken for somebody who keeps one
    kept = [t for one in constants if (t := one()) is not None and is_held(t)]
    for tensor in kept:
        value = value_of(tensor)
        assert value is not None
        swap(tensor, value.detach().clone())
    return bool(kept)


def _raised_by(trace: Callable[[], object], leaked: Tensor) -> LeakedTensor | None:
    """What a second trace of the step says of a leaked tensor; it leaves all as it was."""
    # no module holds them, so ``trace`` does not know that it appends to them once more
    lists = [(one, one[:]) for one in gc.get_referrers(leaked) if type(one) is list]
    try:
        with muted("stdout"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trace()
    except LeakedTensor as error:
        return error
    except Exception:  # whatever else it is: the first trace was right
        return None
    finally:
        for one, content in lists:
            one[:] = content
    return None


def is_held(value: object) -> bool:
    """Whether the user keeps a value: also where the search gave up before it could deny that."""
    return holder_of(value, unknown="") is not None


def holder_of(value: object, unknown: str | None = None) -> str | None:
    """The user's name of what holds a value; None where nothing of theirs is found to.

    The search is short: where it ends before all holders were seen, the answer is ``unknown``.
    """
    until = time.thread_time() + _SECONDS
    modules = {id(vars(module)): module for module in user_modules()}
    level: dict[int, tuple[Any, Any]] = {id(value): (value, None)}  # with what each holds
    seen: set[int] = set()
    for _ in range(_DEPTH):
        if len(level) > _WIDTH or time.thread_time() > until:
            return unknown
        below, level = level, {}
        held = [one for one, _ in below.values()]
        # what this search holds itself names nobody
        seen |= {*below, *map(id, (held, below, modules, seen, *below.values()))}
        for referrer in gc.get_referrers(*held):
            # a frame holds a value while it runs, and with an exception that was caught
            if id(referrer) in seen or isinstance(referrer, (FrameType, *_OPAQUE)):
                continue
            one, content = next(below[id(r)] for r in gc.get_referents(referrer) if id(r) in below)
            name = _named(referrer, one, content, modules)
            if name is not None:
                return name
            level[id(referrer)] = referrer, one
    return unknown if level else None


def _named(referrer: Any, held: Any, content: Any, modules: dict[int, ModuleType]) -> str | None:
    """What a holder is called, if it has a name: a global, a closure's variable, an attribute."""
    module = modules.get(id(referrer))
    if module is not None:
        file = os.path.basename(getattr(module, "__file__", None) or module.__name__)
        return f"the global {_key(vars(module), held)} of {file}"
    if isinstance(referrer, CellType):
        return _variable(referrer)
    if isinstance(referrer, (type, FunctionType)):
        what = "class" if isinstance(referrer, type) else "function"
        return None if belongs_to_library(referrer) else f"the {what} {referrer.__name__}"
    own = getattr(referrer, "__dict__", None)
    if not isinstance(own, dict) or owner_of(type(referrer)).is_library:
        return None
    key = _key(own, content if own is held else held)
    return f"the attribute {key} of a {type(referrer).__name__}"


def _key(container: dict[Any, Any], held: Any) -> str:
    return next((str(key) for key, value in container.items() if value is held), "a value")


def _variable(cell: CellType) -> str | None:
    """The name of a closure's variable, by the user's function that has it."""
    for closure in gc.get_referrers(cell):
        for function in gc.get_referrers(closure) if isinstance(closure, tuple) else ():
            own = isinstance(function, FunctionType) and not belongs_to_library(function)
            if own and function.__closure__ is closure:
                names = zip(function.__code__.co_freevars, function.__closure__, strict=True)
                name = next(name for name, one in names if one is cell)
                return f"the variable {name} of {function.__qualname__}()"
    return None
