"""The numbers of an optimizer's param groups, traced.

Inside a trace ``group["lr"]`` is a ``TracedNumber``: a float whose arithmetic also happens on a
tensor that is an input of the program. So schedulers on the host may change any of them between
steps. Comparisons (``if momentum != 0``) use the value; each is recorded as a guard, and a program
holds only as long as all its guards would come out the same.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fulgurite.backends.csx.errors import StateChanged
from fulgurite.backends.csx.graph import Graph, Kind


@dataclass(frozen=True, slots=True)
class NumberSlot:
    """One number of one param group: ``group[key]``, or ``group[key][index]`` in a tuple."""

    optimizer: int
    group: int
    key: str
    index: int | None

    def read(self, optimizers: list[Optimizer]) -> float:
        """Its value now."""
        value = optimizers[self.optimizer].param_groups[self.group][self.key]
        if self.index is not None and isinstance(value, tuple):
            value = value[self.index]
        if not is_number(value):
            raise StateChanged(
                f"{self} was a number when the program was built, and now is {value!r}.",
                remedy="keep it a number",
            )
        return float(value)

    def __str__(self) -> str:
        part = "" if self.index is None else f"[{self.index}]"
        return f"optimizers[{self.optimizer}].param_groups[{self.group}]['{self.key}']{part}"


@dataclass(frozen=True, slots=True)
class Guard:
    """A comparison that the traced Python made: ``evaluate(numbers)`` must give ``result``."""

    text: str
    evaluate: Callable[[list[float]], bool]
    result: bool


def is_number(value: object) -> bool:
    """Whether a param group's value is traced: a float or an int, not a bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def group_options(optimizers: list[Optimizer]) -> list[Any]:
    """Everything in the param groups that is neither number nor tensor, in a fixed order."""
    return [
        value
        for optimizer in optimizers
        for group in optimizer.param_groups
        for value in group.values()
        if value is None or isinstance(value, (bool, str))
    ]


def number_slots(optimizers: list[Optimizer]) -> list[NumberSlot]:
    """All numbers of all groups, in a fixed order."""
    slots = []
    for o, optimizer in enumerate(optimizers):
        for g, group in enumerate(optimizer.param_groups):
            for key, value in group.items():
                if key == "params":
                    continue
                if is_number(value):
                    slots.append(NumberSlot(o, g, key, None))
                elif isinstance(value, tuple) and value and all(map(is_number, value)):
                    slots += [NumberSlot(o, g, key, i) for i in range(len(value))]
    return slots


class TracedNumber(float):
    """A float that knows the tensor it stands for, and how to compute itself from the numbers."""

    tensor: Tensor
    guards: list[Guard]
    compute: Callable[[list[float]], float]
    text: str

    def __new__(
        cls,
        value: float,
        tensor: Tensor,
        guards: list[Guard],
        compute: Callable[[list[float]], float],
        text: str,
    ) -> TracedNumber:
        """Make one; ``compute`` maps the numbers of all groups to this value."""
        self = super().__new__(cls, value)
        self.tensor, self.guards, self.compute, self.text = tensor, guards, compute, text
        return self

    def _guard(self, text: str, evaluate: Callable[[float], bool]) -> bool:
        result, compute = bool(evaluate(float(self))), self.compute
        self.guards.append(Guard(text, lambda numbers: bool(evaluate(compute(numbers))), result))
        return result

    def __index__(self) -> int:
        value = float(self)
        if value != int(value):
            raise TypeError(f"{self.text} is {value}, which is no integer")
        self._guard(f"{self.text} == {int(value)}", lambda v: v == value)
        return int(value)

    def __int__(self) -> int:
        value = int(float(self))
        self._guard(f"int({self.text}) == {value}", lambda v: int(v) == value)
        return value

    def __bool__(self) -> bool:
        return self._guard(f"bool({self.text})", bool)

    def __neg__(self) -> TracedNumber:
        compute = self.compute
        return TracedNumber(
            -float(self),
            -self.tensor,
            self.guards,
            lambda numbers: -compute(numbers),
            f"-{self.text}",
        )

    def __abs__(self) -> TracedNumber:
        return -self if self < 0 else self

    def __hash__(self) -> int:
        return float.__hash__(self)

    def __reduce__(self) -> tuple[type, tuple[float]]:
        return float, (float(self),)

    def __deepcopy__(self, memo: dict[int, Any]) -> float:
        return float(self)


def _arithmetic(name: str, sign: str, operation: Callable[[Any, Any], Any]) -> None:
    def combine(self: TracedNumber, other: Any, swapped: bool) -> Any:
        if isinstance(other, Tensor):
            pair = (other, self.tensor) if swapped else (self.tensor, other)
            return operation(*pair)
        if not isinstance(other, (int, float)):
            return NotImplemented
        left, right = (other, self) if swapped else (self, other)
        left_compute, right_compute = computation(left), computation(right)
        return TracedNumber(
            operation(float(left), float(right)),
            operation(_tensor_or_float(left), _tensor_or_float(right)),
            self.guards,
            lambda numbers: float(operation(left_compute(numbers), right_compute(numbers))),
            f"({_text(left)} {sign} {_text(right)})",
        )

    setattr(TracedNumber, f"__{name}__", lambda self, other: combine(self, other, False))
    setattr(TracedNumber, f"__r{name}__", lambda self, other: combine(self, other, True))


def _comparison(name: str, sign: str, operation: Callable[[float, float], bool]) -> None:
    def compare(self: TracedNumber, other: Any) -> Any:
        if isinstance(other, Tensor):
            return operation(self.tensor, other)  # type: ignore[arg-type]
        if not isinstance(other, (int, float)):
            return NotImplemented
        other_compute, result = computation(other), operation(float(self), float(other))
        compute = self.compute
        self.guards.append(
            Guard(
                f"{self.text} {sign} {_text(other)}",
                lambda numbers: operation(compute(numbers), other_compute(numbers)),
                result,
            )
        )
        return result

    setattr(TracedNumber, f"__{name}__", compare)


def computation(value: float) -> Callable[[list[float]], float]:
    """How a value follows from the numbers of all groups."""
    if isinstance(value, TracedNumber):
        return value.compute
    constant = float(value)
    return lambda numbers: constant


def _tensor_or_float(value: float) -> Tensor | float:
    return value.tensor if isinstance(value, TracedNumber) else float(value)


def _text(value: float) -> str:
    return value.text if isinstance(value, TracedNumber) else repr(value)


_SIGNS = {"add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "mod": "%"}
for _name, _sign in {**_SIGNS, "pow": "**"}.items():
    _arithmetic(_name, _sign, getattr(operator, _name))
for _name, _sign in {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}.items():
    _comparison(_name, _sign, getattr(operator, _name))


def tensors_of(args: Any) -> Any:
    """``args`` of a torch function with every traced number replaced by its tensor."""
    if isinstance(args, TracedNumber):
        return args.tensor
    if type(args) in (list, tuple):
        return type(args)(tensors_of(item) for item in args)
    if type(args) is dict:
        return {key: tensors_of(value) for key, value in args.items()}
    return args


def install(
    slots: Sequence[NumberSlot], vector: Tensor, optimizers: list[Optimizer]
) -> list[Guard]:
    """Put traced numbers into the param groups; returns the list that guards are recorded in."""
    guards: list[Guard] = []
    for i, slot in enumerate(slots):
        value = slot.read(optimizers)
        number = TracedNumber(value, vector[i], guards, _nth(i), str(slot))
        group = optimizers[slot.optimizer].param_groups[slot.group]
        if slot.index is None:
            group[slot.key] = number
        else:
            items = list(group[slot.key])
            items[slot.index] = number
            group[slot.key] = tuple(items)
    return guards


def read_numbers(slots: Sequence[NumberSlot], optimizers: list[Optimizer]) -> list[float]:
    """The values now, in the order of ``slots``."""
    return [slot.read(optimizers) for slot in slots]


def as_vector(numbers: list[float]) -> Tensor:
    """The program's input: float64 [number of slots]."""
    return torch.tensor(numbers, dtype=torch.float64)


def _nth(i: int) -> Callable[[list[float]], float]:
    return lambda numbers: numbers[i]


def _is_still(i: int, value: float) -> Callable[[list[float]], bool]:
    return lambda numbers: numbers[i] == value


def unused_guards(
    slots: Sequence[NumberSlot], used: frozenset[int], now: list[float]
) -> list[Guard]:
    """Guards for numbers that no operation uses: they may have been read where nothing sees it.

    ``math.sqrt(group["lr"])`` takes a float's value without asking it.
    """
    return [
        Guard(f"{slot} == {now[i]}", _is_still(i, now[i]), True)
        for i, slot in enumerate(slots)
        if i not in used
    ]


def used_numbers(graph: Graph) -> set[int]:
    """Positions of the numbers that operations use."""
    used = set()
    for entry, node in zip(graph.inputs, graph.placeholders(), strict=True):
        if entry.kind is Kind.NUMBERS:
            used = {user.args[2] for user in node.users if len(user.args) > 2}
    return used  # type: ignore[return-value]  # select(numbers, dim, index)
