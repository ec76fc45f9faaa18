"""The programs of parts, linked to one: a part's steps stand wherever it is called.

So a part costs no call when the program runs, and what is allocated once is chosen over the whole
program (``static_memory``). Kernels get names that are theirs in all programs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from fulgurite.backends.csx.compile.programs.parts import Call, Division
from fulgurite.backends.csx.compile.programs.steps import (
    Alias,
    Extern,
    Free,
    Generated,
    Kernel,
    KernelSource,
    Name,
    Operand,
    Program,
    Step,
    View,
    given_by,
    renamed,
)


@dataclass(frozen=True, slots=True)
class Linked:
    """A program with its kernels and constants, by the names that it has for them."""

    program: Program
    kernels: tuple[KernelSource, ...]
    constants: Mapping[str, Tensor]


def linked(
    parts: Sequence[Generated],
    division: Division | None,
    operations: Sequence[tuple[int, ...]],
    name_of: Callable[[str], str],
) -> Linked:
    """One program of those of all parts.

    Args:
        parts: those of the division; one, where there is no division.
        division: in which order they are called.
        operations: of each part, as the whole graph numbers them; -1 for what it does not have.
        name_of: the name of a kernel among those of all programs, by its source.
    """
    programs = [_with_names(part, i, name_of) for i, part in enumerate(parts)]
    sources = {name_of(one): one for part in parts for one in part.sources.values()}
    if division is None:
        [program] = programs
        program = replace(program, steps=tuple(_numbered(program.steps, operations[0])))
    else:
        inputs, outputs = map(_value, division.inputs), tuple(map(_value, division.outputs))
        program = Program(tuple(inputs), tuple(_steps(programs, division)), outputs)
    return Linked(
        program,
        tuple(KernelSource(name, source) for name, source in sources.items()),
        {f"{name}_of_{i}": x for i, part in enumerate(parts) for name, x in part.constants.items()},
    )


def _with_names(part: Generated, i: int, name_of: Callable[[str], str]) -> Program:
    """A part's program by the names of the whole one for kernels and constants."""
    # the compiler numbers the constants of each part from 0
    names = {Name(name): Name(f"{name}_of_{i}") for name in part.constants}
    program: Program = renamed(part.program, names)
    steps = (
        replace(step, kernel=name_of(part.sources[step.kernel]))
        if isinstance(step, Kernel)
        else step
        for step in program.steps
    )
    return replace(program, steps=tuple(steps))


def _numbered(steps: Sequence[Step], operations: tuple[int, ...]) -> Iterator[Step]:
    """Steps that say what they compute by the numbers of the whole graph."""
    for step in steps:
        if isinstance(step, (Kernel, Extern)):
            at = {operations[i] for i in step.at} - {-1}
            yield replace(step, at=tuple(sorted(at)))
        else:
            yield step


def _steps(programs: Sequence[Program], division: Division) -> Iterator[Step]:
    """The steps of all calls: a value is let go of where it is read last."""
    last = {number: i for i, call in enumerate(division.calls) for number in call.reads}
    # what the program returns outlives all calls
    last |= dict.fromkeys(division.outputs, len(division.calls))
    for i, call in enumerate(division.calls):
        over = {_value(number) for number in call.reads if last[number] == i}
        if isinstance(call, Call):
            body, gone = _inlined(programs[call.part], call, i, over)
            yield from body
            over -= gone
        else:
            yield Alias(_value(call.gives[0]), View(_value(call.reads[0]), call.layout))
        # nobody reads it here: equal parts give what any of them has to
        over |= {_value(number) for number in call.gives if number not in last}
        yield from map(Free, sorted(over))


def _inlined(
    program: Program, call: Call, number: int, over: Collection[Name]
) -> tuple[list[Step], set[Name]]:
    """The steps of a call, and which of the values in ``over`` they let go of."""
    values = dict(zip(program.inputs, map(_value, call.reads), strict=True))
    own = [name for name in map(given_by, program.steps) if name is not None]
    # a part may be called many times, and its calls have memory of their own each
    names = {name: Name(f"{name}_{number}") for name in own}
    names.update(values)
    gone: set[Name] = set()
    steps: list[Step] = []
    for step in _numbered(program.steps, call.operations):
        if isinstance(step, Free) and step.name in values:
            if values[step.name] not in over:
                continue  # others read it later
            gone.add(values[step.name])
        steps.append(renamed(step, names))
    memory = _memory_of(program.steps)
    for given, output in zip(call.gives, program.outputs, strict=True):
        assert output is not None
        result = renamed(output, names)
        if memory(output) in values:  # which may be overwritten before others read it
            steps.append(Extern(function="torch.clone", args=(result,), result=_value(given)))
        else:
            steps.append(Alias(_value(given), result))
    freed = {step.name for step in program.steps if isinstance(step, Free)}
    # else what is returned would live as long as the step
    steps += [Free(names[name]) for name in own if name not in freed]
    return steps, gone


def _memory_of(steps: Sequence[Step]) -> Callable[[Operand], Name]:
    """A function that says whose memory an operand is: the name that it was first under."""
    behind = {step.name: step.of for step in steps if isinstance(step, Alias)}

    def first(operand: Operand) -> Name:
        while True:
            name = operand.of if isinstance(operand, View) else operand
            if name not in behind:
                return name
            operand = behind[name]

    return first


def _value(number: int) -> Name:
    return Name(f"v{number}")
