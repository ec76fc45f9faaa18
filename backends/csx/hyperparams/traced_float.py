"""A number of a param group, traced: a float whose arithmetic also happens on a tensor.

Where Python looks at its value (``if momentum != 0``, ``range(k)``, ``round(lr, 4)``), what it saw
is recorded as a *guard*.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from fulgurite.backends.csx.diagnostics.trace_errors import UnsupportedState
from fulgurite.backends.csx.diagnostics.user_lines import user_line
from fulgurite.backends.step_context import step_context

Numbers = list[float]  # all numbers of all groups, in the order of their slots


@dataclass(frozen=True, slots=True)
class NumberGuard:
    """What traced Python saw of a number: ``evaluate(numbers)`` must give ``result``.

    ``is_rare``: it is a scheduler's own, which changes where another scheduler begins.
    """

    text: str
    evaluate: Callable[[Numbers], Any]
    result: Any
    is_rare: bool = False

    @property
    def is_of_phase(self) -> bool:
        """Whether another number begins another phase, whose program is another."""
        return self.is_rare or isinstance(self.result, bool)

    def broken(self, numbers: Numbers) -> str | None:
        """What no longer holds for these numbers; None if it does."""
        now = self.evaluate(numbers)
        # of two NaN, which Python calls unequal, the guard holds
        if now == self.result or (now != now and self.result != self.result):
            return None
        was, now = (int(one) if _is_whole(one) else one for one in (self.result, now))
        return f"{self.text} was {was} when traced, and now is {now}"


def _is_whole(value: Any) -> bool:
    return isinstance(value, float) and value.is_integer()


EXACT = 2**53
"""Whole numbers up to this one are exact in float64, which they are in a program."""


def check_exact(value: Any, text: str) -> None:
    """Verify that a program has a number exactly.

    Raises:
        UnsupportedState: it is whole, and too large.
    """
    if type(value) is int and abs(value) >= EXACT:
        raise UnsupportedState(
            f"{text} is {value}: a program has whole numbers up to 2**53.",
            line=user_line(),
            remedy="smaller ones, or integer tensors (int64); or a host hook such as"
            " on_train_batch_end, where Python computes",
        )


FEW = 4
"""The largest divisor whose remainders have a program each, where Python takes them."""


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
    guards: list[NumberGuard]
    compute: Callable[[Numbers], float]
    text: str
    may_grow: bool = False  # a number that steps may make larger and larger
    is_one_of_few: bool = False  # a remainder by a small number
    is_of_run: ClassVar[bool] = False  # a counter of the run: what Python sees is asked every step

    def __new__(
        cls,
        value: float,
        tensor: Tensor,
        guards: list[NumberGuard],
        compute: Callable[[Numbers], float],
        text: str,
    ) -> Self:
        """Make one."""
        self = super().__new__(cls, value)
        whole = isinstance(value, int)
        self.value, self.tensor, self.guards = value, as_number(tensor, whole), guards
        self.compute, self.text = compute, text
        return self

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return int if isinstance(self.value, int) else TracedNumber

    def observe(self, text: str, look: Callable[[float], Any]) -> Any:
        """What ``look`` sees of the value, recorded as a guard; ``text`` has {} for the number."""
        compute = self.compute
        result = look(self.value)
        text = text.format(self.text)
        self.guards.append(NumberGuard(text, lambda numbers: look(compute(numbers)), result))
        return result

    def plain(self, reader: str = "Python") -> float:
        """The value as Python's own number, which the program keeps: a guard."""
        kind = int if isinstance(self.value, int) else float
        return kind(self.observe(f"{{}}, read by {reader},", float))

    def apply(
        self, text: str, on_tensor: Callable[[Tensor], Any], on_value: Callable[[float], float]
    ) -> TracedNumber:
        """A function of this number."""
        compute = self.compute
        return self.derived(
            on_value(self.value),
            on_tensor(self.tensor),
            lambda numbers: on_value(compute(numbers)),
            text.format(self.text),
        )

    def derived(
        self, value: float, tensor: Any, compute: Callable[[Numbers], float], text: str
    ) -> TracedNumber:
        """What follows from this number."""
        return TracedNumber(value, tensor, self.guards, compute, text)

    def __index__(self) -> int:
        if self.value != int(self.value):
            raise TypeError(f"{self.text} is {self.value}, which is no integer")
        return int(self.plain("range() or []"))

    def __float__(self) -> float:
        return float(self.plain("float()"))

    def __int__(self) -> int:
        return int(self.observe("int({})", int))

    def __bool__(self) -> bool:
        return bool(self.observe("bool({})", bool))

    def __trunc__(self) -> int:
        return int(self)

    def __floor__(self) -> int:
        return int(self.observe("floor({})", math.floor))

    def __ceil__(self) -> int:
        return int(self.observe("ceil({})", math.ceil))

    def __round__(self, digits: Any = None) -> Any:
        return self.observe(f"round({{}}, {digits})", lambda value: round(value, digits))

    @property
    def real(self) -> TracedNumber:
        """The number itself; float's own would be a plain number that nobody sees."""
        return self

    def conjugate(self) -> TracedNumber:
        """The number itself."""
        return self

    def __pos__(self) -> TracedNumber:
        return self

    def as_integer_ratio(self) -> tuple[int, int]:
        """The value as a fraction, which is seen."""
        return self.plain("as_integer_ratio()").as_integer_ratio()

    def hex(self) -> str:
        """The value in hexadecimal digits, which is seen."""
        return float(self.plain("hex()")).hex()

    def __neg__(self) -> TracedNumber:
        return self.apply("-{}", operator.neg, operator.neg)

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


def as_number(tensor: Tensor, whole: bool = False) -> Tensor:
    """Mark a float64 scalar of a trace as what eagerly is a Python float, or an int.

    By a private attribute: the others that a step sets on a tensor of its state are refused.
    """
    tensor._whole = whole  # type: ignore[attr-defined]
    return tensor


def constant_number(value: float) -> TracedNumber:
    """A number that is always the same, or a flag, as a traced one."""
    constant = torch.full((), float(value), dtype=torch.float64)
    return TracedNumber(value, constant, [], lambda _: value, repr(value))


def number_where(skipped: Tensor, was: Any, now: Any) -> Any:
    """``now``, or where ``skipped`` what it was; the same where it is no other number."""
    if now is was or not (isinstance(now, (int, float)) and isinstance(was, (int, float))):
        return now
    before, after = (
        one if isinstance(one, TracedNumber) else constant_number(one) for one in (was, now)
    )
    number = torch.where(skipped, before.tensor, after.tensor)
    text = f"{after.text} or {before.text}"
    return TracedNumber(after.value, number, after.guards, after.compute, text)


def is_whole(number: Any) -> bool:
    """Whether a traced number, or a scalar computed from one, eagerly is an int."""
    found: bool = tensor_or_value(number)._whole
    return found


def kind_of(number: Any) -> type[float]:
    """Python's type of what a number stands for, or a scalar computed from one."""
    if not isinstance(number, TracedNumber):
        return int if is_whole(number) else float
    if type(number.value) is bool:
        return bool
    return int if isinstance(number.value, int) else float


def is_traced(value: object) -> bool:
    """Whether a value is a ``TracedNumber``, or a scalar computed from one."""
    return isinstance(value, TracedNumber) or (
        isinstance(value, FakeTensor) and hasattr(value, "_whole")
    )


def plain(value: Any, reader: str = "Python") -> Any:
    """A traced number as Python's own number, with a guard; any other value unchanged."""
    return value.plain(reader) if isinstance(value, TracedNumber) else value


def _arithmetic(name: str, sign: str, operation: Callable[[Any, Any], Any]) -> None:
    def combine(self: TracedNumber, other: Any, swapped: bool) -> Any:
        if isinstance(other, Tensor):
            if name == "truediv" and not swapped and not is_traced(other):
                return other.reciprocal() * self.tensor  # as torch has 2.0 / tensor
            pair = (other, self.tensor) if swapped else (self.tensor, other)
            return operation(*pair)
        if _is_foreign(other):
            return NotImplemented
        left, right = (other, self) if swapped else (self, other)
        left_compute, right_compute = computation(left), computation(right)

        def compute(numbers: Numbers) -> Any:
            return operation(left_compute(numbers), right_compute(numbers))

        value = operation(_value(left), _value(right))
        text = f"({_text(left)} {sign} {_text(right)})"
        first = _first_of_run(self, other)
        grows = self.may_grow or (isinstance(other, TracedNumber) and other.may_grow)
        if grows and type(value) is int and name in _GROWING:
            check_exact(value, text)
            guard = NumberGuard(f"{text} < 2**53", lambda n: abs(compute(n)) < EXACT, True)
            first.guards.append(guard)
        check_exact(_value(other), _text(other))
        tensor = operation(tensor_or_value(left), tensor_or_value(right))
        made = first.derived(value, tensor, compute, text)
        made.may_grow = grows
        if is_traced(other):
            made.is_one_of_few = False
        elif name == "mod" and type(other) is int and not swapped and 0 < other <= FEW:
            made.is_one_of_few |= is_whole(self)
        return made

    def forward(self: TracedNumber, other: Any, *modulus: Any) -> Any:  # pow() takes one
        found = combine(self, other, False)
        return found % modulus[0] if modulus else found

    setattr(TracedNumber, f"__{name}__", forward)
    setattr(TracedNumber, f"__r{name}__", lambda self, other: combine(self, other, True))


def _comparison(name: str, sign: str, operation: Callable[[Any, Any], Any]) -> None:
    def compare(self: TracedNumber, other: Any) -> Any:
        if isinstance(other, Tensor):
            # with a tensor it is an operation of the program, and Python sees nothing
            return operation(self.tensor, other)
        if _is_foreign(other):
            return NotImplemented
        other_compute = computation(other)
        compute, result = self.compute, operation(self.value, _value(other))
        _first_of_run(self, other).guards.append(
            NumberGuard(
                f"{self.text} {sign} {_text(other)}",
                lambda numbers: operation(compute(numbers), other_compute(numbers)),
                result,
            )
        )
        return result

    setattr(TracedNumber, f"__{name}__", compare)


def _is_foreign(value: Any) -> bool:
    """Whether a value is no number, or a stand-in, which says itself what it is with a number."""
    return not isinstance(value, Real) or isinstance(value, (torch.SymInt, torch.SymFloat))


def _first_of_run(number: TracedNumber, other: Any) -> TracedNumber:
    """What comes of both is a counter of the run where one of them is."""
    return other if isinstance(other, TracedNumber) and other.is_of_run else number


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


def tensor_of_its_own(value: Any) -> Any:
    """A scalar for a place that a number is put into, which shares no memory with another place."""
    if not isinstance(value, TracedNumber):
        return value
    return as_number(value.tensor.clone(), is_whole(value))


def _text(value: Any) -> str:
    return value.text if isinstance(value, TracedNumber) else repr(value)


def _on_whole(operation: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """An operation on bits, of numbers that are whole; the tensors of a trace are float64."""

    def apply(left: Any, right: Any) -> Any:
        if not isinstance(left, Tensor) and not isinstance(right, Tensor):
            return operation(*(int(n) if n == int(n) else n for n in (left, right)))
        with step_context.get().schedules.in_double():
            pair = (n.to(torch.int64) if isinstance(n, Tensor) else n for n in (left, right))
            return operation(*pair).to(torch.float64)

    return apply


_GROWING = {"mul", "pow", "lshift"}
_SIGNS = {"add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "mod": "%"}
for _name, _sign in {**_SIGNS, "pow": "**"}.items():
    _arithmetic(_name, _sign, getattr(operator, _name))
_BITS = {"and_": "&", "or_": "|", "xor": "^", "lshift": "<<", "rshift": ">>"}
for _name, _sign in _BITS.items():
    _arithmetic(_name.rstrip("_"), _sign, _on_whole(getattr(operator, _name)))
for _name, _sign in {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}.items():
    _comparison(_name, _sign, getattr(operator, _name))
