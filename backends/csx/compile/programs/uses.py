"""Where a compiled program works on which of its inputs: at calls that say so before they begin.

What is on disk has no such calls: they are put into a program that is loaded, where there is a
budget of memory for state (``backends/csx/streaming``).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from fulgurite.backends.csx.compile.programs.steps import (
    Alias,
    Extern,
    Item,
    Kernel,
    Name,
    Program,
    Step,
    names_in,
)
from fulgurite.backends.csx.streaming.residency import Uses

BEGIN = "begin_call"
"""The function that a program calls with a call's number; it is among its names."""


def with_uses(
    program: Program, streamed: Collection[int], written: frozenset[int]
) -> tuple[Program, Uses]:
    """A program with a ``Kernel`` named ``BEGIN`` before each call that works on inputs.

    Args:
        program: the program.
        streamed: positions of the inputs that count.
        written: positions of those that it writes.
    """
    over: dict[Name, frozenset[int]] = {
        name: frozenset({i} if i in streamed else ()) for i, name in enumerate(program.inputs)
    }
    nothing = frozenset[int]()
    steps: list[Step] = []
    calls: list[tuple[int, ...]] = []
    for step in program.steps:
        if isinstance(step, (Alias, Item)):
            over[step.name] = nothing.union(*(over.get(n, nothing) for n in names_in(step.of)))
        elif isinstance(step, (Kernel, Extern)):
            used = nothing.union(*(over.get(name, nothing) for name in _read(step)))
            if used:
                steps.append(Kernel(kernel=BEGIN, args=(Name(str(len(calls))),)))
                calls.append(tuple(sorted(used)))
            if isinstance(step, Extern) and step.result is not None:
                over[step.result] = nothing
        elif step.name in over and not isinstance(step, Alias):
            over.pop(step.name)  # Alloc, Free
        steps.append(step)
    return replace(program, steps=tuple(steps)), Uses(tuple(calls), written)


def _read(step: Kernel | Extern) -> list[Name]:
    operands = step.args if isinstance(step, Kernel) else (step.args, step.kwargs)
    return list(names_in(operands))
