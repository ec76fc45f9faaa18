"""A compiled graph that gave other numbers, narrowed down to the kernels that are wrong.

Its generated kernels are halved: the operations of the one half run by the library's kernels, the
rest compiled, from the inputs with which it was wrong. The half that makes it right is halved next,
down to a kernel, and the operations of that one in the same way. In the end nearly all of the graph
is compiled, and right from those inputs; the self-check asks once more.

What it is that was found is marked at the program that is wrong, so that the next run does not
search again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from fulgurite.backends.csx.compile.checking.differences import Comparison, Start
from fulgurite.backends.csx.compile.fabric import Call
from fulgurite.backends.csx.compile.programs.kernels import Kernels, Maker
from fulgurite.backends.csx.graph.graph import Graph

START = "inputs.pt"
"""The file of a report that has the inputs with which a program was wrong."""
WRONG = "wrong"
_MOST = 1 / 2  # of the kernels: where more have to be the library's, little is compiled
_Suspects = Sequence[tuple[int, ...]]


def wrong_operations(
    graph: Graph,
    kernels: Kernels,
    report: Path,
    reference: Call,
    compiled: Callable[[frozenset[int]], Call],
) -> frozenset[int]:
    """Find operations whose generated kernels make a graph wrong.

    Args:
        graph: the graph.
        kernels: what it was compiled into.
        report: the folder of a report on it.
        reference: its operations one by one.
        compiled: the graph compiled, without generated kernels for some operations, by their
            positions in ``graph.operations()``.

    Returns:
        Their positions; none where the graph is not wrong from these inputs in this process, or
        not because of a few kernels.
    """
    start = Start(**torch.load(report / START, weights_only=True))
    compared = Comparison(graph)
    right = compared.run(reference, start)

    def is_right(suspects: Sequence[tuple[int, ...]]) -> bool:
        call = compiled(_together(suspects))
        return compared.difference(compared.run(call, start), right, start) is None

    generated = [
        one.operations
        for one in kernels.calls
        # a fused region stays what it is: its user asked for one kernel, and has no other
        if one.maker is Maker.GENERATED and not one.region and one.operations
    ]
    # right with all of them, it was something of that run; wrong without any, it is none of them
    if not generated or is_right(()) or not is_right(generated):
        return frozenset()
    wrong = _halved(generated, is_right)
    if len(wrong) > max(1, len(generated) * _MOST):
        return frozenset()
    return _together(_halved([(i,) for i in sorted(_together(wrong))], is_right))


def _halved(suspects: _Suspects, is_right: Callable[[_Suspects], bool]) -> _Suspects:
    """The fewest suspects without which it is right, as far as halving finds them."""
    while len(suspects) > 1:
        middle = len(suspects) // 2
        half = next(filter(is_right, (suspects[:middle], suspects[middle:])), None)
        if half is None:  # both have one
            break
        suspects = half
    return suspects


def _together(suspects: _Suspects) -> frozenset[int]:
    return frozenset(i for operations in suspects for i in operations)


def mark_of(operations: frozenset[int]) -> str:
    """The mark of a program of which these operations are wrong."""
    return f"{WRONG}\n{json.dumps(sorted(operations))}"


def wrong_in(mark: str | None) -> frozenset[int]:
    """The operations that a mark calls wrong; none where it has no list of them."""
    kind, _, listed = (mark or "").partition("\n")
    return frozenset(json.loads(listed)) if kind == WRONG and listed else frozenset()
