"""Stand-ins for what a batch holds besides tensors, and for ``batch_idx``, while a step is traced.

They tell when they are read. What the step only passes on (into its result, an attribute, a list, a
closure) is taken from each batch; what it reads is a constant of the program. Other objects than
numbers and strings can only be passed on.

A stand-in is no int, float or str: one that was could be read unseen by code written in C, and the
value be frozen in silence. Code that therefore refuses it makes the step be traced once more, with
the values themselves, which then count as read (``values_where_refused``). torch's own functions
take numbers that are ``SymInt`` or ``SymFloat``, and show them to the function mode of the trace,
which gives them the values. Checked against torch 2.13.
"""

from __future__ import annotations

import contextlib
import gc
import math
import operator
import re
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from operator import is_
from types import CellType
from typing import Any, NoReturn, TypeVar

import numpy as np
import torch
import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import FakeTensor

from fulgurite.backends.csx.contract.holders import holder_of
from fulgurite.backends.csx.contract.leaks import Leaked
from fulgurite.backends.csx.diagnostics.errors import TraceError
from fulgurite.backends.csx.diagnostics.user_lines import UserLine, raised_at
from fulgurite.backends.csx.hyperparams.traced_float import TracedNumber

T = TypeVar("T")
Source = int | str | tuple[Any, ...]
"""Where a call finds a value: the number of a leaf of its batch, the name of an argument, or the
path to a container in the batch."""
BATCH, INDEX, EPOCH = "batch", "batch_idx", "epoch"
"""Kinds of stand-ins: for what a batch holds, and for arguments of these names."""

_living: list[weakref.ref[Watched]] = []  # stand-ins of the trace that runs
_given: frozenset[str] = frozenset()  # kinds of stand-ins that this trace does without
_refused_at: UserLine | None = None  # where an earlier trace failed for want of the values


class Watched:
    """The base of all stand-ins; what they stand for is not among their attributes."""

    __slots__ = ()


class _Held:
    """What a stand-in stands for."""

    __slots__ = ("kind", "note", "source", "value")

    def __init__(self, value: Any, note: Callable[[], object], source: Source) -> None:
        self.value, self.note, self.source = value, note, source
        self.kind = source if isinstance(source, str) else BATCH


def _held(value: Any) -> _Held:
    held: _Held = object.__getattribute__(value, "_fulgurite_held")
    return held


def is_watched(value: Any) -> bool:
    """Whether a value is a stand-in."""
    return issubclass(type(value), Watched)


def source_of(value: Any) -> Source:
    """Where each call finds what a stand-in stands for."""
    return _held(value).source


def watch(value: Any, note: Callable[[], object], source: Source) -> Any:
    """A stand-in for a number or a string that calls ``note`` when it is read; else ``value``.

    Args:
        value: what it stands for.
        note: called at once where there is no stand-in.
        source: where each call finds the value.
    """
    made, held = _STAND_INS.get(type(value)), _Held(value, note, source)
    if made is None or held.kind in _given:
        note()
        return value
    return _made(_of_kind(made, held.kind), held)


def watch_object(kind: type, refuse: Callable[[], object], note: Any, source: Source) -> Any:
    """A stand-in for an object that can only be passed on.

    Args:
        kind: the object's type.
        refuse: called when it is used; it raises.
        note: called when its type is asked for.
        source: where each call finds it.
    """
    return _made(WatchedObject, _Held((kind, refuse), note, source))


def watch_container(path: tuple[Any, ...]) -> Any:
    """A stand-in for a container in the batch, by the path to it."""
    return watch_object(dict, lambda: None, lambda: None, path)


def _made(kind: type[Any], held: _Held) -> Any:
    made = object.__new__(kind)
    object.__setattr__(made, "_fulgurite_held", held)
    _living.append(weakref.ref(made))
    return made


def unwatched(value: Any) -> Any:
    """What a stand-in for a number or string stands for, noted as read; else ``value``."""
    if not is_watched(value) or type(value) is WatchedObject:
        return value
    held = _held(value)
    held.note()
    return held.value


def all_unwatched(value: Any) -> Any:
    """The same for what lists, tuples, dicts and slices hold; copies of those with stand-ins."""
    kind = type(value)
    if kind is list or kind is tuple or kind is torch.Size:
        items = [all_unwatched(item) for item in value]
        return value if all(map(is_, items, value)) else kind(items)
    if kind is dict:
        items = [all_unwatched(item) for item in value.values()]
        same = all(map(is_, items, value.values()))
        return value if same else dict(zip(value, items, strict=True))
    if kind is slice:
        return slice(*map(unwatched, (value.start, value.stop, value.step)))
    return unwatched(value)


# -- numbers and strings ---------------------------------------------------------------------------


def _forward(function: Callable[..., Any], swapped: bool = False) -> Callable[..., Any]:
    def method(self: Any, *others: Any) -> Any:
        values = [unwatched(self), *map(unwatched, others)]
        return function(*(reversed(values) if swapped else values))

    return method


def _attribute(name: str) -> property:
    return property(lambda self: getattr(unwatched(self), name))


def _same(self: Any, memo: Any = None) -> Any:
    """A copy of a constant is the constant."""
    return self


_ARITHMETIC = (operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv)
_INTEGER = (operator.mod, operator.pow, divmod)
_BITS = (operator.lshift, operator.rshift, operator.xor)
_COMPARISON = (operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge)
_UNARY = (operator.neg, operator.pos, operator.abs, round, math.trunc, math.floor, math.ceil)
_READ = (bool, str, repr, format, hash)


def _stand_in(of: type, base: type, both: Iterable[Any], alone: Iterable[Any]) -> type[Any]:
    """The class of stand-ins for one of Python's types.

    Args:
        of: the type.
        base: what torch takes them for.
        both: functions of two operands, in either order.
        alone: functions whose first argument it is.
    """
    body: dict[str, Any] = {name: _attribute(name) for name in dir(of) if name[0] != "_"}
    for function in both:
        name = function.__name__.rstrip("_")
        body[f"__{name}__"] = _forward(function)
        body[f"__r{name}__"] = _forward(function, swapped=True)
    for function in (*_COMPARISON, *_READ, *alone):
        body[f"__{function.__name__}__"] = _forward(function)
    body |= {
        "__class__": property(lambda self: of),
        "__init__": object.__init__,
        "__copy__": _same,
        "__deepcopy__": _same,
        "__reduce_ex__": lambda self, protocol: (of, (unwatched(self),)),
        "__array__": lambda self, dtype=None, copy=None: np.asarray(unwatched(self), dtype),
    }
    return type(f"_Watched{of.__name__.title()}", (Watched, base), body)


_NUMERIC = (*_ARITHMETIC, *_INTEGER)
_LOGIC = (operator.and_, operator.or_)
_INT = (int, float, complex, operator.index, operator.invert, *_UNARY)
_STR = (len, iter, operator.getitem, operator.contains)
_STAND_INS: dict[type, type[Any]] = {
    int: _stand_in(int, torch.SymInt, (*_NUMERIC, *_BITS, *_LOGIC), _INT),
    float: _stand_in(float, torch.SymFloat, _NUMERIC, (int, float, complex, *_UNARY)),
    str: _stand_in(str, object, (operator.add, operator.mul, operator.mod), _STR),
}
_STAND_INS[str].__fspath__ = _forward(str)
_STAND_INS[str].__int__ = _forward(int)
_STAND_INS[str].__float__ = _forward(float)
_KINDS = {(made, BATCH): made for made in _STAND_INS.values()}


def _of_kind(made: type[Any], kind: str) -> type[Any]:
    """A class of its own for each kind, named so: errors of code written in C name the class."""
    if (made, kind) not in _KINDS:
        _KINDS[made, kind] = type(f"{made.__name__}_{kind}", (made,), {})
    return _KINDS[made, kind]


# -- other objects ---------------------------------------------------------------------------------


class WatchedObject(Watched):
    """Stands for an object that can be passed on, and not used."""

    def __getattribute__(self, name: str) -> Any:
        held = _held(self)
        kind, refuse = held.value
        if name == "__class__":
            held.note()
            return kind
        return refuse()


def _refuse(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
    _held(self).value[1]()
    raise AssertionError


_USES = (
    *("len", "iter", "next", "getitem", "setitem", "contains", "call", "bool", "eq", "ne", "lt"),
    *("le", "gt", "ge", "hash", "str", "repr", "format", "fspath", "int", "float", "index"),
    *("array", "add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "neg", "pow"),
    *("matmul", "rmatmul", "enter", "exit", "setattr", "reduce_ex", "copy", "deepcopy", "reversed"),
)
for _use in _USES:
    setattr(WatchedObject, f"__{_use}__", _refuse)


# -- when the trace is over ------------------------------------------------------------------------


def settle(line: UserLine | None) -> None:
    """Put values where stand-ins still are: whoever holds one after the trace is the user.

    Such a value is that of the first batch for ever, so it counts as read; an object is refused.

    Args:
        line: the user's, that is to blame.
    """
    if any(reference() is not None for reference in _living):
        gc.collect()
    alive = [one for reference in _living if (one := reference()) is not None]
    _living.clear()
    # not those that only frames hold, which live on with an exception that was caught
    alive = [one for one in alive if holder_of(one) is not None]
    if not alive:
        return
    with _values_of(frozenset(_held(one).kind for one in alive), line):
        for holder in gc.get_referrers(*alive):
            if holder is not alive:
                _fill(holder)
        for one in alive:
            unwatched(one) if type(one) is not WatchedObject else _refuse(one)


def _fill(holder: Any) -> None:
    """Replace the stand-ins in a container of Python's."""
    if isinstance(holder, dict):
        if any(map(is_watched, holder)):
            items = [(unwatched(key), value) for key, value in holder.items()]
            holder.clear()
            holder.update(items)
        for key, value in holder.items():
            holder[key] = unwatched(value)
    elif isinstance(holder, list):
        holder[:] = map(unwatched, holder)
    elif isinstance(holder, set):
        items = list(map(unwatched, holder))
        holder.clear()
        holder.update(items)
    elif isinstance(holder, CellType):
        holder.cell_contents = unwatched(holder.cell_contents)


# -- code that refuses stand-ins -------------------------------------------------------------------


def names_stand_in(error: BaseException) -> str | None:
    """The kind of stand-in that a message names; None where it names none."""
    found = re.search(r"\b_?Watched(?:Int|Float|Str|Object)(?:_(\w+))?", str(error))
    return None if found is None else found[1] or BATCH


def refused_at(kind: str) -> UserLine | None:
    """The user's line that gave such a stand-in to code which takes only values, if one did."""
    return _refused_at if kind in _given else None


def values_where_refused(
    trace: Callable[[], T], undone: Callable[[], contextlib.AbstractContextManager[None]]
) -> T:
    """Trace; where it fails because of a stand-in, again with the values, which count as read.

    Args:
        trace: traces.
        undone: makes a context that undoes what a failed trace did.
    """
    refused, line = frozenset[str](), None
    while True:
        try:
            with undone(), _values_of(refused, line):
                return trace()
        except TraceError:
            raise
        except Exception as error:
            more = _to_blame(error) - refused
            if not more:
                raise
            refused, line = refused | more, raised_at(error)
        finally:
            _living.clear()


@contextlib.contextmanager
def _values_of(kinds: frozenset[str], line: UserLine | None) -> Iterator[None]:
    global _given, _refused_at
    before = _given, _refused_at
    _given, _refused_at = kinds, line
    try:
        yield
    finally:
        _given, _refused_at = before


def _is_libraries(error: Exception) -> bool:
    """Whether Lightning or this package's upper rooms raised it, for a reason of their own."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    name = "" if traceback is None else traceback.tb_frame.f_globals.get("__name__", "")
    upper = name.startswith("fulgurite.") and not name.startswith("fulgurite.backends.")
    return upper or name.startswith("lightning.")


def _to_blame(error: Exception) -> frozenset[str]:
    """The kinds of stand-ins that an error may come from: of the batch first.

    A TypeError need not name what it refuses ("Object of type int is not JSON serializable").
    Other errors are the user's own, or of code that says in its way that it was given no string.
    """
    alive = [one for reference in _living if (one := reference()) is not None]
    named = names_stand_in(error)
    if named is not None:
        return frozenset({named})
    if _is_libraries(error):
        return frozenset()
    if not isinstance(error, TypeError) and not any(type(one) is _STAND_INS[str] for one in alive):
        return frozenset()
    kinds = {_held(one).kind for one in alive}
    return frozenset({BATCH} & kinds or kinds)


def holds_traced(value: Any) -> bool:
    """Whether a value is of the trace alone, or a list, tuple or dict with such a one in it.

    That is a traced tensor, or a stand-in for a number or string of the batch.
    """
    if is_watched(value) or isinstance(value, (FakeTensor, Leaked, TracedNumber)):
        return True
    if isinstance(value, (list, tuple, dict, deque)):
        leaves = pytree.tree_leaves(value)
        return any(is_watched(leaf) or isinstance(leaf, (FakeTensor, Leaked)) for leaf in leaves)
    return False
