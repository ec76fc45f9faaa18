"""Numbers, strings and objects of the batch: passed on from each batch, or read once, and constant.

While a step is traced, it finds proxies for the numbers, strings and objects of its batch and for
``batch_idx``. A proxy that it puts into its result, an attribute, a list or a closure says where
each call finds the value. One that it reads notes that: the program keeps the first batch's value,
and another one is an error, or the user was warned. Objects can only be passed on. Code that
refuses a proxy makes the step be traced once more, with the values themselves, which then count as
read (``retry_with_values``).

Every operation on a proxy notes that the value was read, and works on the value; but arithmetic,
comparisons and torch's functions work on what stands for a counter of the run in the program
(``hyperparams/run_numbers``). A proxy is no int,
float or str: one that was could be read unseen by code written in C, and the value be frozen in
silence. To torch's own functions it is a ``SymInt`` or ``SymFloat``, which they take for numbers,
and show to the function mode of the trace. Checked against torch 2.13.
"""

from __future__ import annotations

import contextlib
import functools
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

from fulgurite.backends.csx.contract.leaks import ValuelessTensor, is_held
from fulgurite.backends.csx.diagnostics.trace_errors import TraceError
from fulgurite.backends.csx.diagnostics.user_lines import UserLine, raised_at
from fulgurite.backends.csx.hyperparams.run_numbers import RunNumber
from fulgurite.backends.csx.hyperparams.traced_float import TracedNumber

PassThrough = int | str | tuple[Any, ...]
"""Where a call finds a value: the number of a leaf of its batch, the name of an argument, or the
path to a container in the batch."""


class ValueProxy:
    """The base of all proxies; what they stand for is not among their attributes."""

    __slots__ = ()


class ProxyTarget:
    """What a proxy stands for, whom to tell that it was read, and where each call finds it.

    ``number`` makes what stands for a counter of the run; of other proxies it is None.
    """

    __slots__ = ("note", "number", "source", "value")

    def __init__(
        self,
        value: Any,
        note: Callable[[], object],
        source: PassThrough,
        number: Callable[[], RunNumber] | None = None,
    ) -> None:
        self.value, self.note, self.source, self.number = value, note, source, number


def target_of_proxy(value: Any) -> ProxyTarget:
    """What a proxy stands for, unnoticed."""
    held: ProxyTarget = object.__getattribute__(value, "_fulgurite_target")
    return held


def is_proxy(value: Any) -> bool:
    """Whether a value is a proxy."""
    return issubclass(type(value), ValueProxy)


def source_of(value: Any) -> PassThrough:
    """Where each call finds what a proxy stands for."""
    return target_of_proxy(value).source


def unwrap_proxy(value: Any) -> Any:
    """The number or string that a proxy stands for, noted as read; any other value itself."""
    if not is_proxy(value) or type(value) is ValueProxyObject:
        return value
    held = target_of_proxy(value)
    held.note()
    return held.value


class ValueProxyObject(ValueProxy):
    """A proxy for an object, which can be passed on, and not used."""

    def __getattribute__(self, name: str) -> Any:
        held = target_of_proxy(self)
        kind, refused = held.value
        if name == "__class__":
            held.note()
            return kind
        return refused()


def refuse(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
    """Raise for the use of an object."""
    target_of_proxy(self).value[1]()
    raise AssertionError


SPECIAL_METHODS = """
    len iter next getitem setitem contains call bool eq ne lt le gt ge hash str repr format fspath
    int float index array add radd sub rsub mul rmul truediv rtruediv neg pow matmul rmatmul enter
    exit setattr reduce_ex copy deepcopy reversed
"""
for _use in SPECIAL_METHODS.split():
    setattr(ValueProxyObject, f"__{_use}__", refuse)


def _forward(
    function: Callable[..., Any], swapped: bool = False, take: Callable[[Any], Any] = unwrap_proxy
) -> Callable[..., Any]:
    def method(self: Any, *others: Any) -> Any:
        values = [take(self), *map(take, others)]
        return function(*(reversed(values) if swapped else values))

    return method


def _attribute(name: str) -> property:
    return property(lambda self: getattr(unwrap_proxy(self), name))


def _same(self: Any, memo: Any = None) -> Any:
    """A copy of a constant is the constant."""
    return self


_ARITHMETIC = (operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv)
_INTEGER = (operator.mod, operator.pow, divmod)
_BITS = (operator.lshift, operator.rshift, operator.xor)
_COMPARISON = (operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge)
_UNARY = (operator.neg, operator.pos, operator.abs, round, math.trunc, math.floor, math.ceil)
_READ = (bool, str, repr, format, hash)


def _proxy(of: type, base: type, both: Iterable[Any], alone: Iterable[Any]) -> type[Any]:
    """The class of proxies for one of Python's types, which torch takes for a ``base``.

    ``both`` are functions of two operands, in either order, ``alone`` those of it alone.
    """
    body: dict[str, Any] = {name: _attribute(name) for name in dir(of) if name[0] != "_"}
    for function in both:
        name = function.__name__.rstrip("_")
        body[f"__{name}__"] = _forward(function)
        body[f"__r{name}__"] = _forward(function, swapped=True)
    for function in (*_COMPARISON, *_READ, *alone):
        body[f"__{function.__name__}__"] = _forward(function)
    body |= {
        "__class__": property(lambda self: of),  # isinstance(x, int) is no read of the value
        "__init__": object.__init__,  # SymInt's takes a node of torch's symbolic shapes
        "__copy__": _same,
        "__deepcopy__": _same,
        "__reduce_ex__": lambda self, protocol: (of, (unwrap_proxy(self),)),
        "__array__": lambda self, dtype=None, copy=None: np.asarray(unwrap_proxy(self), dtype),
    }
    return type(f"_ValueProxy{of.__name__.title()}", (ValueProxy, base), body)


_NUMERIC = (*_ARITHMETIC, *_INTEGER)
_LOGIC = (operator.and_, operator.or_)
_INT = (int, float, complex, operator.index, operator.invert, *_UNARY)
_STR = (len, iter, operator.getitem, operator.contains)
PROXIES: dict[type, Any] = {
    int: _proxy(int, torch.SymInt, (*_NUMERIC, *_BITS, *_LOGIC), _INT),
    float: _proxy(float, torch.SymFloat, _NUMERIC, (int, float, complex, *_UNARY)),
    str: _proxy(str, object, (operator.add, operator.mul, operator.mod), _STR),
}
PROXIES[str].__fspath__ = _forward(str)
PROXIES[str].__int__ = _forward(int)
PROXIES[str].__float__ = _forward(float)


def operand(value: Any) -> Any:
    """What stands for a proxy where a number is computed with; any other value itself."""
    number = target_of_proxy(value).number if is_proxy(value) else None
    return unwrap_proxy(value) if number is None else number()


def _hash(self: Any) -> int:
    # a key of a dict, where each value would be another answer: kept
    target_of_proxy(self).number = None
    return hash(unwrap_proxy(self))


def _counter_proxy() -> type[Any]:
    """The class of proxies for counters of the run."""
    body: dict[str, Any] = {"__hash__": _hash}
    for function in (*_ARITHMETIC, *_INTEGER, *_BITS, operator.and_, operator.or_):
        name = function.__name__.rstrip("_")
        body[f"__{name}__"] = _forward(function, take=operand)
        body[f"__r{name}__"] = _forward(function, swapped=True, take=operand)
    for alone in (*_COMPARISON, bool, operator.neg, operator.abs):
        body[f"__{alone.__name__}__"] = _forward(alone, take=operand)
    body["__pow__"] = _forward(pow, take=operand)  # which may have a modulus
    return type("_ValueProxyInt", (PROXIES[int],), body)


_COUNTER: Any = _counter_proxy()


T = TypeVar("T")
BATCH = "batch"
"""The kind of the proxies for what a batch holds; of others it is what the step asked for."""

_living: list[weakref.ref[ValueProxy]] = []  # proxies of the trace that runs
_kinds_without_proxy: frozenset[str] = frozenset()  # kinds of proxies that this trace does without
_refused_at: UserLine | None = None  # where an earlier trace failed for want of the values


def make_proxy(value: Any, note: Callable[[], object], source: PassThrough) -> Any:
    """A proxy for a number or a string, which calls ``note`` when it is read.

    Of another value there is no proxy: ``note`` is called at once, and the value returned.
    """
    made, held = PROXIES.get(type(value)), ProxyTarget(value, note, source)
    if made is None or _kind_of(held) in _kinds_without_proxy:
        note()
        return value
    return _new_proxy(_of_kind(made, _kind_of(held)), held)


def make_counter(
    value: int, note: Callable[..., object], source: str, number: Callable[[], RunNumber]
) -> Any:
    """A proxy for a counter of the run: as ``make_proxy``, with what it is in the program."""
    if source in _kinds_without_proxy:
        note()
        return value
    return _new_proxy(_of_kind(_COUNTER, source), ProxyTarget(value, note, source, number))


def make_object_proxy(
    kind: type, refuse: Callable[[], object], note: Any, source: PassThrough
) -> Any:
    """A proxy for an object that can only be passed on.

    It calls ``refuse``, which raises, when it is used, and ``note`` when its type is asked for.
    """
    return _new_proxy(ValueProxyObject, ProxyTarget((kind, refuse), note, source))


def make_container_proxy(path: tuple[Any, ...]) -> Any:
    """A proxy for a container in the batch, by the path to it."""
    return make_object_proxy(dict, lambda: None, lambda: None, path)


def _kind_of(held: ProxyTarget) -> str:
    return held.source if isinstance(held.source, str) else BATCH


@functools.cache
def _of_kind(made: Any, kind: str) -> type[Any]:
    """A class of its own for each kind, named so: errors of code written in C name the class."""
    return made if kind == BATCH else type(f"{made.__name__}_{kind}", (made,), {})


def _new_proxy(kind: type[Any], held: ProxyTarget) -> Any:
    made = object.__new__(kind)
    object.__setattr__(made, "_fulgurite_target", held)
    _living.append(weakref.ref(made))
    return made


def operands(value: Any) -> Any:
    """``operand`` for what a list, tuple, dict or slice holds: a copy if it holds proxies."""
    kind = type(value)
    if kind is list or kind is tuple or kind is torch.Size:
        items = [operands(item) for item in value]
        return value if all(map(is_, items, value)) else kind(items)
    if kind is dict:
        items = [operands(item) for item in value.values()]
        same = all(map(is_, items, value.values()))
        return value if same else dict(zip(value, items, strict=True))
    if kind is slice:
        return slice(*map(operand, (value.start, value.stop, value.step)))
    return operand(value)


# -- when the trace is over ------------------------------------------------------------------------


def replace_proxies(line: UserLine | None) -> None:
    """Put values where proxies still are when the trace is over: whoever holds one is the user.

    Such a value is that of the first batch for ever, so it counts as read, on ``line``; an object
    is refused.
    """
    if any(reference() is not None for reference in _living):
        gc.collect()
    alive = [one for reference in _living if (one := reference()) is not None]
    _living.clear()
    # not those that only frames hold, which live on with an exception that was caught
    alive = [one for one in alive if is_held(one)]
    if not alive:
        return
    with _values_of(frozenset(_kind_of(target_of_proxy(one)) for one in alive), line):
        for holder in gc.get_referrers(*alive):
            if holder is not alive:
                _fill(holder)
        for one in alive:
            unwrap_proxy(one) if type(one) is not ValueProxyObject else refuse(one)


def _fill(holder: Any) -> None:
    """Replace the proxies in a container of Python's."""
    if isinstance(holder, dict):
        if any(map(is_proxy, holder)):
            items = [(unwrap_proxy(key), value) for key, value in holder.items()]
            holder.clear()
            holder.update(items)
        for key, value in holder.items():
            holder[key] = unwrap_proxy(value)
    elif isinstance(holder, list):
        holder[:] = map(unwrap_proxy, holder)
    elif isinstance(holder, set):
        items = list(map(unwrap_proxy, holder))
        holder.clear()
        holder.update(items)
    elif isinstance(holder, CellType):
        holder.cell_contents = unwrap_proxy(holder.cell_contents)


# -- code that refuses proxies ---------------------------------------------------------------------


def names_proxy(error: BaseException) -> str | None:
    """The kind of proxy that a message names; None where it names none."""
    found = re.search(r"\b_?ValueProxy(?:Int|Float|Str|Object)(?:_(\w+))?", str(error))
    return None if found is None else found[1] or BATCH


def refused_at(kind: str) -> UserLine | None:
    """The user's line that gave such a proxy to code which takes only values, if one did."""
    return _refused_at if kind in _kinds_without_proxy else None


def retry_with_values(
    trace: Callable[[], T], undo_afterwards: Callable[[], contextlib.AbstractContextManager[None]]
) -> T:
    """Trace; where it fails because of a proxy, again with the values, which count as read.

    ``undo_afterwards`` makes a context that undoes what a failed trace did.
    """
    refused, line = frozenset[str](), None
    while True:
        try:
            with undo_afterwards(), _values_of(refused, line):
                return trace()
        except TraceError:  # the contract's own, with a proxy as with the value
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
    global _kinds_without_proxy, _refused_at
    before = _kinds_without_proxy, _refused_at
    _kinds_without_proxy, _refused_at = kinds, line
    try:
        yield
    finally:
        _kinds_without_proxy, _refused_at = before


def _is_libraries(error: Exception) -> bool:
    """Whether Lightning or this package's upper rooms raised it, for a reason of their own."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    name = "" if traceback is None else traceback.tb_frame.f_globals.get("__name__", "")
    upper = name.startswith("fulgurite.") and not name.startswith("fulgurite.backends.")
    return upper or name.startswith("lightning.")


def _to_blame(error: Exception) -> frozenset[str]:
    """The kinds of proxies that an error may come from: of the batch first.

    A TypeError need not name what it refuses ("Object of type int is not JSON serializable").
    Other errors are the user's own, or of code that says in its way that it was given no string.
    """
    alive = [one for reference in _living if (one := reference()) is not None]
    named = names_proxy(error)
    if named is not None:
        return frozenset({named})
    if _is_libraries(error):
        return frozenset()
    if not isinstance(error, TypeError) and not any(type(one) is PROXIES[str] for one in alive):
        return frozenset()
    kinds = {_kind_of(target_of_proxy(one)) for one in alive}
    return frozenset({BATCH} & kinds or kinds)


def holds_tensors(value: Any) -> bool:
    """Whether a value is a tensor, or a list, tuple or dict with one in it."""
    return any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(value))


def holds_traced(value: Any) -> bool:
    """Whether a value is of the trace alone, or a list, tuple or dict with such a one in it.

    That is a traced tensor or number, or a proxy for a number or string of the batch.
    """
    kinds = (FakeTensor, ValuelessTensor, TracedNumber)
    leaves = pytree.tree_leaves(value) if isinstance(value, (list, tuple, dict, deque)) else [value]
    return any(is_proxy(leaf) or isinstance(leaf, kinds) for leaf in leaves)
