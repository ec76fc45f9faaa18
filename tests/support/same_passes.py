"""Each pass beside the graph before it, on random inputs: what both give and write is the same.

Programs, compiled or not, begin with the same passes: the self-check cannot see what they do.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fulgurite.backends.csx.graph.graph import Graph, Input, Kind, Role
from fulgurite.backends.csx.graph.update import FORMULAS, UPDATE, Formula

ROUNDS = {"to_cbfloat16"}  # other numbers are what it is for
TOLERANCE = 1e-4  # of the largest element of each tensor: passes may round otherwise
NARROW = 1e-2  # where 16-bit numbers are in between
NOISE = 1e-6  # of gradients that are zero but for it


class PassChanged(AssertionError):
    """A pass made a graph that computes something else."""


def compare(name: str, before: Graph, after: Graph) -> None:
    """For ``passes.observing_passes``.

    Raises:
        PassChanged: the graph gives or writes other values, dtypes or shapes.
    """
    if name in ROUNDS:
        return
    given = {key(item): random_input(item) for item in (*before.inputs, *after.inputs)}
    for k in unused_numbers(before):
        given[Kind.NUMBERS, 0][k] = 0.0
    for milder in (as_it_is, small, positive_definite):
        given = {at: milder(x) for at, x in given.items()}
        try:
            right = run(before, given)
            break
        except (IndexError, RuntimeError):  # an index that is none, a probability, a root
            if milder is positive_definite:
                raise
    found = run(after, given)
    tolerance = NARROW if is_narrow(before) else TOLERANCE
    moved: dict[str, Tensor] = {}
    unread = {item.name for item in before.inputs if item.kind is Kind.GRADIENT and not item.kept}
    for what in right if name != "prune" else right.keys() - (unread - found.keys()):
        difference = apart(found[what], right[what], tolerance) if what in found else "is gone"
        if difference and what in found:  # a gradient that is zero but for rounding, and large
            moved = moved or run(before, {at: nudged(x) for at, x in given.items()})
            if moves_so_far(found[what], right[what], moved[what]):
                continue
        if difference:
            raise PassChanged(f"{name}: {what} {difference}")


def unused_numbers(graph: Graph) -> Iterator[int]:
    """Numbers that updates do not use: they were zero when the step was traced."""
    for update in graph.module.graph.find_nodes(op="call_function", target=UPDATE):
        formula: Formula = update.meta[FORMULAS][0]
        numbers: Any = update.args[2]
        operands = [*formula.graph.find_nodes(op="placeholder")]
        for number, operand in zip(numbers, operands[len(operands) - len(numbers) :], strict=True):
            if not operand.users:
                while number.target is not torch.ops.aten.select.int:  # made float32
                    [number] = number.all_input_nodes
                yield number.args[2]  # of select(numbers, 0, k)


def key(item: Input) -> tuple[Kind, int]:
    """What an input is known by in the graphs of a step."""
    return item.kind, item.index


def random_input(item: Input) -> Tensor:
    """Numbers next to one, of both signs where a model may have both; integers of 0 and 1."""
    example = item.example
    generator = torch.Generator().manual_seed(item.index)
    x = torch.rand(example.shape, generator=generator) + 0.2
    if item.role in (Role.PARAMETER, Role.BATCH):
        x *= torch.randint(0, 2, example.shape, generator=generator) * 2 - 1
    if item.kind is Kind.NUMBERS:
        x *= 0.1
    if item.zero:
        x.zero_()
    if not (example.dtype.is_floating_point or example.dtype.is_complex):
        x = torch.randint(0, 2, example.shape, generator=generator)
    made = torch.empty_strided(example.size(), example.stride(), dtype=example.dtype)
    return made.copy_(x)


def as_it_is(x: Tensor) -> Tensor:
    return x


def small(x: Tensor) -> Tensor:
    """Integers are 0, and what becomes one is; numbers are probabilities."""
    return x.abs() / 2 if x.is_floating_point() else torch.zeros_like(x)


def positive_definite(x: Tensor) -> Tensor:
    """Square matrices have a Cholesky root."""
    square = x.is_floating_point() and x.ndim > 1 and x.shape[-1] == x.shape[-2]
    return x + x.shape[-1] * torch.eye(x.shape[-1]) if square else x


def run(graph: Graph, given: dict[tuple[Kind, int], Tensor]) -> dict[str, Tensor]:
    """What a graph gives and what is in its state then, by name."""
    inputs = [given[key(item)].clone() for item in graph.inputs]
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(1)
        outputs: Any = graph.module(*inputs)
        drawn = torch.get_rng_state()
    named = {f"result {i}": one for i, one in enumerate(outputs) if isinstance(one, Tensor)}
    written = graph.written()
    named |= {graph.inputs[i].name: inputs[i] for i in sorted(written)}
    return {**named, "the random state": drawn}


def nudged(x: Tensor) -> Tensor:
    """Numbers that are others by about their rounding."""
    return torch.nextafter(x, 2 * x) if x.dtype in (torch.float32, torch.float64) else x


def moves_so_far(found: Tensor, right: Tensor, moved: Tensor) -> bool:
    """Whether a tensor is as far from what is right as rounding alone moves it, or 8 times that."""
    if (found.dtype, found.shape) != (right.dtype, right.shape) or not right.is_floating_point():
        return False
    return bool((found - right).abs().max() <= 8 * (moved - right).abs().max())


def is_narrow(graph: Graph) -> bool:
    """Whether a graph has values of 16 bits."""
    values = (node.meta.get("val") for node in graph.operations())
    return any(isinstance(v, Tensor) and v.is_floating_point() and v.itemsize == 2 for v in values)


def apart(found: Tensor, right: Tensor, tolerance: float = TOLERANCE) -> str:
    """How a value differs, in words; empty where it does not."""
    if (found.dtype, found.shape) != (right.dtype, right.shape):
        return f"is {found.dtype}{list(found.shape)}, not {right.dtype}{list(right.shape)}"
    if not (right.dtype.is_floating_point or right.dtype.is_complex):
        return "" if torch.equal(found, right) else "differs"
    size = right.abs().nan_to_num(0.0, 0.0, 0.0)
    most = NOISE + tolerance * (size + float(size.max()) if size.numel() else size)
    same = (found == right) | (found.isnan() & right.isnan()) | ((found - right).abs() <= most)
    return "" if bool(same.all()) else f"differs by {float((found - right).abs().max()):.3g}"
