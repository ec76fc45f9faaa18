"""Compare two runs of a graph: which results differ, and at which operation that began."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from fulgurite.backends.csx.compile.checking.sensitivity import Noisy
from fulgurite.backends.csx.compile.fabric import Call
from fulgurite.backends.csx.diagnostics.user_lines import UserLine, line_of
from fulgurite.backends.csx.graph.collectives import alone, has_collectives
from fulgurite.backends.csx.graph.graph import Graph
from fulgurite.backends.csx.graph.op_schema import is_random, is_view, operation_name, written_nodes
from fulgurite.backends.csx.streaming.residency import residency

TOLERANCES = {torch.float64: 1e-7, torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}
"""Allowed error of an element, relative to |element| + 0.1 * the largest one of its tensor."""
_FACTOR = 8  # times what the graph itself moved by
_DRAWS, _PATIENCE = 32, 16  # runs with other rounding; how many in a row that explain nothing more


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor that a graph returns or writes: what to call it, and the operation that made it."""

    name: str
    maker: fx.Node
    position: int  # of the maker in the graph


@dataclass(frozen=True, slots=True)
class Start:
    """What every run begins with."""

    inputs: list[Tensor]
    random_state: Tensor


@dataclass(frozen=True, slots=True)
class Trial:
    """One run from copies of the written inputs."""

    inputs: list[Tensor]
    outputs: list[Tensor]
    values: list[Tensor]
    random_state: Tensor
    shared: list[tuple[int, ...]]  # for each output: which inputs and outputs are its memory, too


@dataclass(frozen=True, slots=True)
class Difference:
    """The first thing that a compiled graph got wrong: what, at which line, and in which way."""

    what: str
    line: UserLine | None
    how: str = "gave other numbers than its operations one by one"


class Comparison:
    """What a graph gives, to be compared.

    Args:
        graph: the graph; its operations are looked at where something differs.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph, self._written = graph, sorted(graph.written())
        self.is_shared = has_collectives(graph)  # with other processes

    @functools.cached_property
    def values(self) -> list[Value]:
        """The results and the written inputs, in the order of ``Trial.values``."""
        return list(_values(self._graph, self._written))

    def run(self, call: Call, start: Start, *, together: bool = False) -> Trial:
        """Run something in the graph's place from a start; ``together`` with other processes."""
        copies = list(start.inputs)
        for i in self._written:
            copies[i] = residency.copy_of(copies[i])
        torch.set_rng_state(start.random_state)
        # the others compare for themselves, and not always the same step
        with alone() if self.is_shared and not together else contextlib.nullcontext():
            outputs = list(call(list(copies)))
        values = [*outputs, *(copies[i] for i in self._written)]
        return Trial(copies, outputs, values, torch.get_rng_state(), _shared(outputs, copies))

    def difference(self, tried: Trial, right: Trial, start: Start) -> Difference | None:
        for k, (a, b) in enumerate(zip(tried.values, right.values, strict=True)):
            if (a.dtype, a.shape) != (b.dtype, b.shape):
                value = self.values[k]
                return Difference(
                    f"{value.name} is {_layout(a)}, not {_layout(b)}", line_of(value.maker)
                )
        other_draws = not torch.equal(tried.random_state, right.random_state)
        if other_draws and self._draws_by_rounding(start):
            return None  # nothing after it can be compared
        for k, (ours, theirs) in enumerate(zip(tried.shared, right.shared, strict=True)):
            more = set(ours) - set(theirs)
            if more and not more <= {*self._one_value(k, len(start.inputs))}:
                value = self.values[k]
                return Difference(f"{value.name} is memory of another value", line_of(value.maker))
        apart = {
            k: slack
            for k, (a, b) in enumerate(zip(tried.values, right.values, strict=True))
            if (slack := _Slack(a, b)).left
        }
        # asked last, and only where something is apart: each answer is another run of the graph
        apart = self._unexplained(apart, start)
        if apart:
            # what was computed first is where it began; the others may follow from it
            first = min(apart, key=lambda k: self.values[k].position)
            value = self.values[first]
            others = f", and {len(apart) - 1} others" if len(apart) > 1 else ""
            what = f"{value.name} is {apart[first].words()}{others}"
            return Difference(what, line_of(value.maker))
        if other_draws:
            draws = [node for node in self._graph.operations() if is_random(node.target)]
            line = line_of(draws[0]) if draws else None
            return Difference("another number of random numbers was drawn", line)
        return None

    def _draws_by_rounding(self, start: Start) -> bool:
        """Whether how many numbers a graph draws depends on rounding, as RReLU's do on signs."""
        unmoved = self.run(lambda given: self._graph.module(*given), start).random_state
        noisy = (Noisy(self._graph.module, seed, scale=2 ** (seed // 8)) for seed in range(_DRAWS))
        moved = (self.run(_run_by(one), start).random_state for one in noisy)
        return any(not torch.equal(one, unmoved) for one in moved)

    def _one_value(self, k: int, inputs: int) -> Iterator[int]:
        """Results before one that are copies or views of the same value, as ``_shared`` counts.

        The step's own code had them in the same memory; the graph copies them, which nobody needs.
        """
        returned: Any = self._graph.module.graph.output_node().args[0]
        own = _seen_in(returned[k])
        return (inputs + i for i in range(k) if _seen_in(returned[i]) is own)

    def _unexplained(self, apart: dict[int, _Slack], start: Start) -> dict[int, _Slack]:
        """Those of the values apart that the graph's own rounding does not explain.

        How far that moves a value is seen in the operations after all passes: beside what they
        themselves give, for ``right`` is of the step as it was traced, which passes may change.
        """
        waited = 0
        unmoved = self.run(lambda given: self._graph.module(*given), start) if apart else None
        for seed in range(_DRAWS):
            if unmoved is None or not apart or waited == _PATIENCE:
                break
            count = sum(slack.left for slack in apart.values())
            noisy = Noisy(self._graph.module, seed, scale=2 ** (seed // 8))
            moved = self.run(_run_by(noisy), start)
            for k, slack in apart.items():
                slack.widen(moved.values[k], unmoved.values[k])
            apart = {k: slack for k, slack in apart.items() if slack.left}
            waited = 0 if sum(slack.left for slack in apart.values()) < count else waited + 1
        return apart


def _run_by(noisy: Noisy) -> Call:
    return lambda given: noisy.run(*given)


class _Slack:
    """Elements of a value that are apart, and how far rounding moves each."""

    def __init__(self, tried: Tensor, right: Tensor) -> None:
        self._tried, self._right = tried, right
        residency.use(tried, right)
        self._apart: Tensor | None = None
        self._moved: Tensor | None = None
        if not (tried.dtype == right.dtype and torch.equal(tried, right)):
            self._a, self._b = _numbers(tried), _numbers(right)
            self._allowed = _allowed(right.dtype, self._b)
            self._compare()

    @property
    def left(self) -> int:
        """How many elements are apart."""
        return 0 if self._apart is None else int(self._apart.sum())

    def widen(self, moved: Tensor, unmoved: Tensor) -> None:
        """Take in what another rounding made of the value."""
        a, b = _numbers(moved), _numbers(unmoved)
        moves = (a - b).abs().nan_to_num(nan=torch.inf)  # finite here and not there
        # infinity less infinity is NaN, though nothing moved
        moves = moves.masked_fill(~b.isfinite() & (a == b), 0.0)
        moves = moves.masked_fill(b.isnan() & a.isnan(), 0.0)
        self._moved = moves if self._moved is None else torch.maximum(self._moved, moves)
        self._compare()

    def words(self) -> str:
        """The first element apart: ``nan instead of 0.42 at [3, 1] (7 of 64 elements)``."""
        assert self._apart is not None
        place = self._apart.nonzero()[0].tolist()
        got, wanted = (t[tuple(place)].item() for t in (self._a, self._b))
        at = f" at {place}" if place else ""
        count = f" ({self.left} of {self._apart.numel()} elements)" if place else ""
        return f"{got:.7g} instead of {wanted:.7g}{at}{count}"

    def _compare(self) -> None:
        allowed = self._allowed
        if self._moved is not None:
            allowed = allowed + _FACTOR * self._moved
        same = (self._a == self._b) | (self._a.isnan() & self._b.isnan())
        error = (self._a - self._b).abs().nan_to_num(nan=torch.inf)
        self._apart = ~same & ((error > allowed) | (error.isinf() & ~allowed.isinf()))


def _numbers(x: Tensor) -> Tensor:
    return torch.view_as_real(x).double() if x.is_complex() else x.double()


def _shared(outputs: list[Tensor], inputs: list[Tensor]) -> list[tuple[int, ...]]:
    """For each output the positions of inputs, and of outputs before it, whose memory it has.

    Parts of one storage that lie beside each other, as pieces of what was reduced together, share
    nothing.
    """
    spans = [_span(t) for t in (*inputs, *outputs)]
    first = len(inputs)
    return [
        tuple(i for i, one in enumerate(spans[:k]) if one[0] < spans[k][1] and spans[k][0] < one[1])
        for k in range(first, len(spans))
    ]


def _span(x: Tensor) -> tuple[int, int]:
    """The addresses of a tensor's first byte, and of the first after its last."""
    if not x.numel():
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()


def _layout(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}"


def is_equal(a: Tensor, b: Tensor) -> bool:
    """Whether all bits are: NaN equals NaN."""
    return torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all())


def _allowed(dtype: torch.dtype, right: Tensor) -> Tensor:
    """How far each element may be apart: nothing for integers and booleans."""
    tolerance = TOLERANCES.get(dtype, 1e-4 if dtype.is_complex else 0.0)
    size = right.abs().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    return tolerance * (size + 0.1 * size.max())


def _values(graph: Graph, written: list[int]) -> Iterator[Value]:
    """What a graph returns and writes, in the order of ``Trial.values``."""
    positions = {node: i for i, node in enumerate(graph.module.graph.nodes)}
    returned: Any = graph.module.graph.output_node().args[0]
    for node in returned:
        maker = _origin(node)
        yield Value("what the step returns", maker, positions[maker])
    placeholders = graph.placeholders()
    for i in written:
        state = placeholders[i]
        last = [state, *(user for user in state.users if state in written_nodes(user))][-1]
        copied = last.args[1] if last.target is torch.ops.aten.copy_.default else last
        assert isinstance(copied, fx.Node)
        maker = _origin(copied)
        yield Value(graph.inputs[i].name, maker, positions[maker])


def _seen_in(node: fx.Node) -> fx.Node:
    """The operation whose result a value looks at, or is a copy of a look at."""
    while is_view(node.target) or operation_name(node.target) == "clone":
        [node] = node.all_input_nodes
    return node


def _origin(node: fx.Node) -> fx.Node:
    """The operation that computed a value: Lightning copies a loss, and divides it by a number."""
    while operation_name(node.target) in ("clone", "detach", "alias", "_to_copy", "div"):
        if len(node.all_input_nodes) != 1:
            break
        [node] = node.all_input_nodes
    return node
