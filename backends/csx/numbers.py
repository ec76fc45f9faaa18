"""The numbers of an optimizer's param groups, traced.

Inside a trace ``group["lr"]`` is a ``TracedNumber``: a float whose arithmetic also happens on a
tensor that is an input of the program. So schedulers on the host may change any of them between
steps. Where Python looks at the value (``if momentum != 0``, ``range(k)``, ``round(lr, 4)``), what
it saw is recorded as a guard, and a program holds only as long as all its guards would come out the
same.
"""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import Optimizer, Rprop

from fulgurite.backends.csx.errors import StateChanged

Numbers = list[float]  # all numbers of all groups, in the order of their slots


@dataclass(frozen=True, slots=True)
class NumberSlot:
    """One number of one param group: ``group[key]``, or ``group[key][index]`` in a sequence."""

    optimizer: int
    group: int
    key: str
    index: int | None

    def read(self, optimizers: list[Optimizer]) -> float:
        """Its value now."""
        value = self.value(optimizers)
        if type(value) is float:
            return value
        if not is_number(value):
            raise StateChanged(
                f"{self} was a number when the program was built, and now is {value!r}.",
                remedy="keep it a number",
            )
        return float(value)

    def value(self, optimizers: list[Optimizer]) -> Any:
        """What is in its place now; None where there is no place."""
        value: Any = optimizers[self.optimizer].param_groups[self.group].get(self.key)
        if self.index is None:
            return value
        inside = isinstance(value, (list, tuple)) and self.index < len(value)
        return value[self.index] if inside else None

    def __str__(self) -> str:
        part = "" if self.index is None else f"[{self.index}]"
        return f"optimizers[{self.optimizer}].param_groups[{self.group}]['{self.key}']{part}"


@dataclass(frozen=True, slots=True)
class Guard:
    """What traced Python saw of a number: ``evaluate(numbers)`` must give ``result``."""

    text: str
    evaluate: Callable[[Numbers], Any]
    result: Any

    def broken(self, numbers: Numbers) -> str | None:
        """What no longer holds for these numbers; None if it does."""
        now = self.evaluate(numbers)
        if now == self.result or (now != now and self.result != self.result):
            return None
        return f"{self.text} was {self.result} when traced, and now is {now}"


def is_number(value: object) -> bool:
    """Whether a param group's value is traced: a real number, not a bool."""
    return isinstance(value, Real) and not isinstance(value, bool)


_NAMES = ("params", "param_names")
_SIMPLE = frozenset({bool, str, type(None)})
_NUMBERS = frozenset({float, int})


def group_options(optimizers: list[Optimizer]) -> list[Any]:
    """Everything in the param groups that is neither number nor tensor, in a fixed order.

    Every step asks for it, so what groups mostly hold comes first.
    """
    options: list[Any] = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for key, value in group.items():
                kind = type(value)
                if kind in _SIMPLE:
                    options.append(value)
                elif kind is tuple and _NUMBERS.issuperset(map(type, value)):
                    options.append(len(value))
                elif kind not in _NUMBERS and key not in _NAMES and not is_number(value):
                    options.append(_option(value))
    return options


def are_fixed(groups: list[dict[str, Any]]) -> bool:
    """Whether nothing in these groups can change but by becoming another object."""
    return all(
        type(value) in _SIMPLE
        or type(value) in _NUMBERS
        or isinstance(value, Tensor)
        or (type(value) is tuple and _NUMBERS.issuperset(map(type, value)))
        for group in groups
        for key, value in group.items()
        if key not in _NAMES
    )


def _option(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [type(value), *(None if is_number(item) else _frozen(item) for item in value)]
    return _frozen(value)


def _frozen(value: Any) -> Any:
    """A value that tells by ``==`` later whether it has changed."""
    if isinstance(value, Tensor):
        return Tensor
    if isinstance(value, (list, tuple)):
        return [type(value), *map(_frozen, value)]
    if isinstance(value, dict):
        return {key: _frozen(item) for key, item in value.items()}
    return copy.copy(value) if isinstance(value, set) else value


def number_slots(optimizers: list[Optimizer]) -> list[NumberSlot]:
    """All numbers of all groups, alone or in a list or tuple, in a fixed order."""
    return [
        NumberSlot(o, g, key, index)
        for o, optimizer in enumerate(optimizers)
        for g, group in enumerate(optimizer.param_groups)
        for key, value in group.items()
        if key not in _NAMES
        for index, item in _items(value)
        if is_number(item)
    ]


def _items(value: Any) -> Any:
    return enumerate(value) if isinstance(value, (list, tuple)) else [(None, value)]


class TracedNumber(float):
    """A float that knows the tensor it stands for, and how to compute itself from the numbers.

    Args:
        value: its value now; of an int, ``isinstance(number, int)`` holds too.
        tensor: the same in the program, float64 [].
        guards: receives what Python sees of it.
        compute: maps the numbers of all groups to this value.
        text: how it was made, for messages.
    """

    value: float
    tensor: Tensor
    guards: list[Guard]
    compute: Callable[[Numbers], float]
    text: str

    def __new__(
        cls,
        value: float,
        tensor: Tensor,
        guards: list[Guard],
        compute: Callable[[Numbers], float],
        text: str,
    ) -> TracedNumber:
        """Make one."""
        self = super().__new__(cls, value)
        self.value, self.tensor, self.guards = value, as_number(tensor), guards
        self.compute, self.text = compute, text
        return self

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return int if isinstance(self.value, int) else TracedNumber

    def seen(self, text: str, look: Callable[[float], Any]) -> Any:
        """What ``look`` sees of the value, recorded as a guard; ``text`` has {} for the number."""
        compute = self.compute
        result = look(self.value)
        text = text.format(self.text)
        self.guards.append(Guard(text, lambda numbers: look(compute(numbers)), result))
        return result

    def plain(self, reader: str = "Python") -> float:
        """The value as Python's own number, which the program keeps: a guard."""
        kind = int if isinstance(self.value, int) else float
        return kind(self.seen(f"{{}}, read by {reader},", float))

    def apply(
        self, text: str, on_tensor: Callable[[Tensor], Any], on_value: Callable[[float], float]
    ) -> TracedNumber:
        """A function of this number."""
        compute = self.compute
        return TracedNumber(
            on_value(self.value),
            on_tensor(self.tensor),
            self.guards,
            lambda numbers: on_value(compute(numbers)),
            text.format(self.text),
        )

    def __index__(self) -> int:
        if self.value != int(self.value):
            raise TypeError(f"{self.text} is {self.value}, which is no integer")
        return int(self.plain("int()"))

    def __float__(self) -> float:
        return float(self.plain("float()"))

    def __int__(self) -> int:
        return int(self.seen("int({})", int))

    def __bool__(self) -> bool:
        return bool(self.seen("bool({})", bool))

    def __trunc__(self) -> int:
        return int(self)

    def __floor__(self) -> int:
        return int(self.seen("floor({})", math.floor))

    def __ceil__(self) -> int:
        return int(self.seen("ceil({})", math.ceil))

    def __round__(self, digits: Any = None) -> Any:
        return self.seen(f"round({{}}, {digits})", lambda value: round(value, digits))

    def __neg__(self) -> TracedNumber:
        return self.apply("-{}", operator.neg, operator.neg)

    def __pos__(self) -> TracedNumber:
        return self

    def __abs__(self) -> TracedNumber:
        return self.apply("abs({})", torch.abs, abs)

    def __divmod__(self, other: Any) -> Any:
        return self // other, self % other

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        """numpy's functions take the value, so it is seen."""
        values = [plain(item, f"numpy.{ufunc.__name__}") for item in inputs]
        return getattr(ufunc, method)(*values, **options)

    def __hash__(self) -> int:
        return hash(self.value)

    def __repr__(self) -> str:
        return repr(self.value)

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return format(self.value, spec)

    def __reduce__(self) -> tuple[type, tuple[float]]:
        return type(self.value), (self.value,)

    def __deepcopy__(self, memo: dict[int, Any]) -> float:
        return self.value


def as_number(tensor: Tensor) -> Tensor:
    """Mark a float64 scalar of a trace as what eagerly is a Python float."""
    tensor.is_number = True  # type: ignore[attr-defined]
    return tensor


def is_traced(value: object) -> bool:
    """Whether a value is a ``TracedNumber``, or a scalar computed from one."""
    return isinstance(value, TracedNumber) or (
        isinstance(value, FakeTensor) and hasattr(value, "is_number")
    )


def plain(value: Any, reader: str = "Python") -> Any:
    """A traced number as Python's own number, with a guard; any other value unchanged."""
    return value.plain(reader) if isinstance(value, TracedNumber) else value


def _arithmetic(name: str, sign: str, operation: Callable[[Any, Any], Any]) -> None:
    def combine(self: TracedNumber, other: Any, swapped: bool) -> Any:
        if isinstance(other, Tensor):
            pair = (other, self.tensor) if swapped else (self.tensor, other)
            return operation(*pair)
        if not isinstance(other, Real):
            return NotImplemented
        left, right = (other, self) if swapped else (self, other)
        left_compute, right_compute = computation(left), computation(right)
        return TracedNumber(
            operation(_value(left), _value(right)),
            operation(tensor_or_value(left), tensor_or_value(right)),
            self.guards,
            lambda numbers: operation(left_compute(numbers), right_compute(numbers)),
            f"({_text(left)} {sign} {_text(right)})",
        )

    setattr(TracedNumber, f"__{name}__", lambda self, other: combine(self, other, False))
    setattr(TracedNumber, f"__r{name}__", lambda self, other: combine(self, other, True))


def _comparison(name: str, sign: str, operation: Callable[[Any, Any], Any]) -> None:
    def compare(self: TracedNumber, other: Any) -> Any:
        if isinstance(other, Tensor):
            return operation(self.tensor, other)
        if not isinstance(other, Real):
            return NotImplemented
        other_compute = computation(other)
        compute, result = self.compute, operation(self.value, _value(other))
        self.guards.append(
            Guard(
                f"{self.text} {sign} {_text(other)}",
                lambda numbers: operation(compute(numbers), other_compute(numbers)),
                result,
            )
        )
        return result

    setattr(TracedNumber, f"__{name}__", compare)


def computation(value: Any) -> Callable[[Numbers], float]:
    """How a value follows from the numbers of all groups."""
    if isinstance(value, TracedNumber):
        return value.compute
    constant: float = value
    return lambda numbers: constant


def _value(value: Any) -> float:
    found: float = value.value if isinstance(value, TracedNumber) else value
    return found


def tensor_or_value(value: Any) -> Any:
    """The tensor that a traced number stands for; any other value unchanged."""
    return value.tensor if isinstance(value, TracedNumber) else value


def _text(value: Any) -> str:
    return value.text if isinstance(value, TracedNumber) else repr(value)


_SIGNS = {"add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "mod": "%"}
for _name, _sign in {**_SIGNS, "pow": "**"}.items():
    _arithmetic(_name, _sign, getattr(operator, _name))
for _name, _sign in {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}.items():
    _comparison(_name, _sign, getattr(operator, _name))


def install(
    slots: Sequence[NumberSlot], vector: Tensor, optimizers: list[Optimizer]
) -> list[Guard]:
    """Put traced numbers into the param groups; returns the list that guards are recorded in."""
    guards: list[Guard] = []
    for i, slot in enumerate(slots):
        value = slot.value(optimizers)
        value = int(value) if isinstance(value, int) else float(value)
        number = TracedNumber(value, vector[i], guards, operator.itemgetter(i), str(slot))
        group = optimizers[slot.optimizer].param_groups[slot.group]
        if slot.index is None:
            group[slot.key] = number
        else:
            before = group[slot.key]
            items = [*before[: slot.index], number, *before[slot.index + 1 :]]
            group[slot.key] = items if isinstance(before, list) else tuple(items)
    return guards


def read_numbers(slots: Sequence[NumberSlot], optimizers: list[Optimizer]) -> Numbers:
    """The values now, in the order of ``slots``."""
    return [slot.read(optimizers) for slot in slots]


def as_vector(numbers: Numbers) -> Tensor:
    """The program's input: float64 [number of slots]."""
    return torch.tensor(numbers, dtype=torch.float64)


def unused_guards(
    slots: Sequence[NumberSlot],
    used: frozenset[int],
    now: Numbers,
    optimizers: list[Optimizer],
) -> list[Guard]:
    """Guards for numbers that no operation uses: they may have been read where nothing sees it.

    A C function that takes a float takes its value without asking it. (Rprop reads ``lr`` only for
    the birth of its state.)
    """
    return [
        Guard(str(slot), operator.itemgetter(i), now[i])
        for i, slot in enumerate(slots)
        if i not in used
        and not (slot.key == "lr" and isinstance(optimizers[slot.optimizer], Rprop))
    ]
