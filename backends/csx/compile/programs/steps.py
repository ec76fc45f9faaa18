"""A compiled program as data: its steps, in the order in which they run.

A *name* stands for a tensor. An *operand* of a step is a name, or a ``View``: what a name stands
for, seen with another layout. Memory is there from an ``Alloc``, an ``Extern`` with a result or an
input, for as long as a name stands for it: an ``Alias`` is one more name, a ``Free`` one less. A
``Kernel`` and an ``Extern`` compute; all other steps only say what names stand for.

What is known of a program (static memory, parts linked to one, what is alive when, who computes
what) comes from passes over its steps. ``source_of`` writes them as Python, which runs fastest.
"""

from __future__ import annotations

import importlib
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from math import isfinite
from typing import Any, TypeVar

import torch
from torch import Tensor

_Kind = TypeVar("_Kind")
Layout = tuple[tuple[int, ...], tuple[int, ...], int]
"""Shape, strides, and the offset that comes on top of the operand's own, in elements."""


class UnknownProgram(RuntimeError):
    """The compiler made a program of steps that are not known (checked against torch 2.13)."""

    def __init__(self, what: str) -> None:
        super().__init__(f"the compiler made a program with a step that is not known: {what[:200]}")


class Name(str):
    """A name that stands for a tensor, or for the several results of a call."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class View:
    """An operand: what a name stands for, with another layout, or read as another dtype."""

    of: Name
    layout: Layout | None
    dtype: torch.dtype | None = None


Operand = Name | View
HasKernel = Callable[[Any], bool]


@dataclass(frozen=True, slots=True)
class Alloc:
    """A name for new memory."""

    name: Name
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """The bytes of its memory."""
        # of no elements: the last one would lie before the first
        if 0 in self.shape:
            return 0
        last = sum((n - 1) * step for n, step in zip(self.shape, self.strides, strict=True))
        return (1 + last) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Free:
    """A name that no step needs any more."""

    name: Name


@dataclass(frozen=True, slots=True)
class Alias:
    """One more name for memory that is there."""

    name: Name
    of: Operand


@dataclass(frozen=True, slots=True)
class Item:
    """A name for one of the results of a call; ``path`` leads to it, key by key."""

    name: Name
    of: Name
    path: tuple[int | str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """A call of a kernel that was generated.

    Args:
        kernel: its name.
        args: what it reads and writes.
        at: what it computes, as positions among the operations of its graph.
        region: the fused region, as text.
        template: it was chosen among others, and this is the template.
    """

    kernel: str
    args: tuple[Operand, ...]
    at: tuple[int, ...] = ()
    region: str = ""
    template: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Extern:
    """A call of a function of torch's.

    Args:
        function: where it is, from ``torch`` on: ``torch.mm``, ``torch.ops.aten.sin.default``.
        args, kwargs: operands and constants, also in lists and tuples.
        result: a name for what it returns, where that is used.
        kernel: the operation that it is: ``aten.mm.default``; empty for what the program does for
            itself.
        at, region: as of ``Kernel``.
    """

    function: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()
    result: Name | None = None
    kernel: str = ""
    at: tuple[int, ...] = ()
    region: str = ""


Step = Alloc | Free | Alias | Item | Kernel | Extern


@dataclass(frozen=True, slots=True)
class Program:
    """Steps, and the names that inputs have before them and outputs after them.

    ``once`` are steps that run when the program is loaded; what they name is there in every run.
    """

    inputs: tuple[Name, ...]
    steps: tuple[Step, ...]
    outputs: tuple[Operand | None, ...]
    once: tuple[Step, ...] = ()


@dataclass(frozen=True, slots=True)
class Generated:
    """What the compiler makes of a part: its program, kernels in C++ by name, and constants."""

    program: Program
    sources: dict[str, str]
    constants: dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class KernelSource:
    """A kernel as the compiler writes it: a C++ function ``kernel`` of pointers, with includes."""

    name: str
    source: str


@dataclass(frozen=True, slots=True)
class Target:
    """What a program is compiled for.

    Args:
        device: its type, by torch's name.
        allocate: the function of shape, strides and dtype that allocates there, from ``torch`` on.
        has_kernel: whether torch has a kernel there for an operation, as a node's target names it.
    """

    device: str
    allocate: str
    has_kernel: HasKernel


def computes(step: Step) -> bool:
    """Whether a step computes what the graph says, and not what the program needs for itself."""
    return isinstance(step, Kernel) or (isinstance(step, Extern) and bool(step.kernel))


def calls(steps: Iterable[Step]) -> Iterator[Kernel | Extern]:
    """The steps that compute what the graph says."""
    return (one for one in steps if isinstance(one, (Kernel, Extern)) and computes(one))


def given_by(step: Step) -> Name | None:
    """The name that a step gives to something."""
    if isinstance(step, Extern):
        return step.result
    return None if isinstance(step, (Kernel, Free)) else step.name


def names_in(value: Any) -> Iterator[Name]:
    """Every name in an operand, a step, or what holds them."""
    return _every(Name, value)


def views_in(value: Any) -> Iterator[View]:
    """Every view in a step, or in what holds operands."""
    return _every(View, value)


def _every(kind: type[_Kind], value: Any) -> Iterator[_Kind]:
    if isinstance(value, kind):
        yield value
    elif is_dataclass(value):
        for field in fields(value):
            yield from _every(kind, getattr(value, field.name))
    elif isinstance(value, (tuple, list)):
        for one in value:
            yield from _every(kind, one)


def replaced(value: Any, change: Callable[[Operand], Any]) -> Any:
    """The same operand, step or collection, with other operands; of a view as a whole."""
    if isinstance(value, (Name, View)):
        return change(value)
    if is_dataclass(value) and not isinstance(value, type):
        new = {one.name: replaced(getattr(value, one.name), change) for one in fields(value)}
        return replace(value, **new)
    if isinstance(value, (tuple, list)):
        return type(value)(replaced(one, change) for one in value)
    if isinstance(value, dict):
        return {key: replaced(one, change) for key, one in value.items()}
    return value


def renamed(value: Any, names: Mapping[Name, Name]) -> Any:
    """The same with other names."""

    def change(operand: Operand) -> Operand:
        if isinstance(operand, View):
            return replace(operand, of=names.get(operand.of, operand.of))
        return names.get(operand, operand)

    return replaced(value, change)


_CLASSES = {one.__name__: one for one in (View, Alloc, Free, Alias, Item, Kernel, Extern, Program)}


def plain(value: Any) -> Any:
    """A program, a step or an operand as what JSON has."""
    # a Name is a str too, and would come back as a constant
    if isinstance(value, Name):
        return {"Name": str(value)}
    if is_dataclass(value):
        return {type(value).__name__: [plain(getattr(value, f.name)) for f in fields(value)]}
    # JSON has lists alone; a View with a list in it could be no key of a dict (static_memory)
    if isinstance(value, tuple):
        return {"tuple": [*map(plain, value)]}
    if isinstance(value, list):
        return [*map(plain, value)]
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        return {"torch": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise UnknownProgram(f"{value!r} of {type(value)}")


def typed(value: Any) -> Any:
    """What ``plain`` was given."""
    if isinstance(value, list):
        return [*map(typed, value)]
    if not isinstance(value, dict):
        return value
    [(kind, inner)] = value.items()
    if kind in _CLASSES:
        one: Any = _CLASSES[kind]
        names = (field.name for field in fields(one))
        return one(**dict(zip(names, map(typed, inner), strict=True)))
    if kind == "torch":
        return getattr(torch, inner)
    if kind == "complex":
        return complex(*inner)
    if kind == "tuple":
        return tuple(map(typed, inner))
    return Name(inner) if kind == "Name" else torch.device(inner)


def source_of(program: Program, allocate: str) -> str:
    """Python that defines ``call(args)``, given the program's kernels and constants by name.

    Args:
        program: the program.
        allocate: where the fabric's function of shape, strides and dtype is, from ``torch`` on.
    """
    functions = _Functions({"empty_strided": allocate, "reinterpret_tensor": _REINTERPRET})
    once = [_python(step, functions) for step in program.once]
    body = [f"{_names(program.inputs)} = args"] if program.inputs else []
    # as in the compiler's own Python: else the caller's list would hold what a Free lets go of
    body += ["args.clear()", *(_python(step, functions) for step in program.steps)]
    body.append(f"return [{', '.join(map(_text, program.outputs))}]")
    lines = [*functions.lines(), *once, "", "def call(args):", *(f"    {one}" for one in body)]
    return "\n".join(lines) + "\n"


_REINTERPRET = "torch._C._dynamo.guards._reinterpret_tensor"
_COMPILERS = "torch._inductor.select_algorithm"  # its own products: importing it takes 1.2 s of CPU
_PRIMS = "torch.ops.prims."  # some are defined when the compiler is imported
_WITH_PRIMS = "torch._inductor.inductor_prims"
_REPLACED = "torch.ops._c10d_functional.wait_tensor.default"  # where waiting is timed


def function_of(name: str) -> Callable[..., Any]:
    """A function of torch's, by where it is from ``torch`` on."""
    if name.startswith((_COMPILERS, _PRIMS)):
        importlib.import_module(_COMPILERS if name.startswith(_COMPILERS) else _WITH_PRIMS)
    found: Callable[..., Any] = operator.attrgetter(name.removeprefix("torch."))(torch)
    return found


class _Functions:
    """Functions of torch's under names of the program's: looked up once, not at each call, but for
    the one that another stands in for during a run."""

    def __init__(self, found: dict[str, str]) -> None:
        self._found = found

    def name(self, function: str) -> str:
        """The name of a function: ``mm`` of ``torch.ops.aten.mm.default``."""
        if function == _REPLACED:
            return function
        parts = function.split(".")
        # of ``torch.ops.aten.mm.default`` the operation: its overload says nothing by itself
        base = parts[3] if function.startswith("torch.ops.") else parts[-1]
        name, count = base, 1
        while self._found.setdefault(name, function) != function:
            count += 1
            name = f"{base}_{count}"
        return name

    def lines(self) -> Iterator[str]:
        """The statements that look them up."""
        yield "import torch"
        found = self._found.values()
        if any(one.startswith(_COMPILERS) for one in found):
            yield f"import {_COMPILERS}"
        if any(one.startswith(_PRIMS) for one in found):
            yield f"import {_WITH_PRIMS}"
        for name, function in self._found.items():
            yield f"{name} = {function}"


def _python(step: Step, functions: _Functions) -> str:
    match step:
        case Alloc(name, shape, strides, dtype):
            return f"{name} = empty_strided({shape!r}, {strides!r}, {dtype!r})"
        case Free(name):
            return f"del {name}"
        case Alias(name, of):
            return f"{name} = {_text(of)}"
        case Item(name, of, path):
            return f"{name} = {of}{''.join(f'[{key!r}]' for key in path)}"
        case Kernel():
            return f"{step.kernel}({', '.join(map(_text, step.args))})"
    args = [*map(_text, step.args), *(f"{key}={_text(one)}" for key, one in step.kwargs)]
    result = "" if step.result is None else f"{step.result} = "
    return f"{result}{functions.name(step.function)}({', '.join(args)})"


def _text(value: Any) -> str:
    """An operand or a constant as Python."""
    match value:
        case Name():
            return str(value)
        case View(of, layout, dtype):
            text = of if layout is None else f"reinterpret_tensor({of}, {str(layout)[1:-1]})"
            return text if dtype is None else f"torch.ops.aten.view.dtype({text}, {dtype!r})"
        case tuple():
            return f"({_names(map(_text, value))})"
        case list():
            return f"[{', '.join(map(_text, value))}]"
        case torch.device():
            return f"torch.device({str(value)!r})"
        # repr gives ``inf`` and ``nan``, which Python knows no constants of
        case float() if not isfinite(value):
            return f"float({str(value)!r})"
    return repr(value)


def _names(texts: Iterable[str]) -> str:
    """Names, each with a comma after it: of one, too, it is a tuple."""
    return "".join(f"{one}, " for one in texts)
