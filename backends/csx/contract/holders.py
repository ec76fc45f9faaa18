"""Leaked tensors are told of before a program is compiled: who holds them, and who will read them.

The holder (``the global LOSSES of model.py``) is found by the garbage collector's references,
backwards, a few steps: 20 ms each in a process with torch and Lightning. Whether the next step
reads such a tensor is seen by tracing the step once more. Both only where something leaked.
"""

from __future__ import annotations

import gc
import os
import time
import warnings
import weakref
from collections.abc import Callable
from types import CellType, CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor
from torch._C import DisableTorchFunction

from fulgurite.backends.csx.contract.leaks import origin_of
from fulgurite.backends.csx.contract.rules import KEEP, misuse
from fulgurite.backends.csx.diagnostics.errors import LeakedTensor
from fulgurite.backends.csx.diagnostics.muted import muted
from fulgurite.backends.csx.diagnostics.user_lines import belongs_to_library, user_modules
from fulgurite.backends.csx.state.fake_swap import swap
from fulgurite.backends.csx.state.python_objects import owner_of

_DEPTH, _SECONDS = 5, 1.0  # of this thread's own time: a busy machine finds no less
_OPAQUE = (ModuleType, MethodType, CodeType)
_ASKED = 3  # leaked tensors: the graph of one keeps many more


def tell_of_leaks(leaked: list[weakref.ref[Tensor]], trace: Callable[[], object]) -> None:
    """Raise where the next step reads a tensor that leaked, or warn; nothing if nobody holds one.

    Args:
        leaked: by ``Created.spoil_the_living``.
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
        gc.collect()
    kept = [t for one in constants if (t := one()) is not None and holder_of(t) is not None]
    for tensor in kept:
        value = value_of(tensor)
        assert value is not None
        swap(tensor, value.detach().clone())
    return bool(kept)


def _raised_by(trace: Callable[[], object], leaked: Tensor) -> LeakedTensor | None:
    """What a second trace of the step says of a leaked tensor; it leaves all as it was."""
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


def holder_of(value: object) -> str | None:
    """The user's name of what holds a value; None where nothing of theirs is found to."""
    until = time.thread_time() + _SECONDS
    modules = {id(vars(module)): module for module in user_modules()}
    level: list[tuple[Any, Any]] = [(value, None)]  # with what each holds
    seen = {id(value)}
    for _ in range(_DEPTH):
        above: list[tuple[Any, Any]] = []
        seen |= {id(one) for one in (level, above, modules, seen, *level)}
        for held, content in level:
            for referrer in gc.get_referrers(held):
                if id(referrer) in seen or isinstance(referrer, (FrameType, *_OPAQUE)):
                    continue
                seen.add(id(referrer))
                name = _named(referrer, held, content, modules)
                if name is not None:
                    return name
                pair = (referrer, held)
                seen.add(id(pair))
                above.append(pair)
            if time.thread_time() > until:
                return None
        level = above
    return None


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
